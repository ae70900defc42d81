"""A stand-in for sgl-kernel where there is no GPU: everything can be named, nothing can be called."""


class Missing:
    """Whatever the engine imports from here; calling it says what is missing."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(self._name + "." + name)

    def __call__(self, *args, **kwargs):
        raise RuntimeError(self._name + ": no GPU kernels on this machine")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing("sgl_kernel." + name)
