"""A stand-in for SGLang's GPU kernels on a machine without a GPU: everything can be named, nothing can be called.

SGLang 0.5.12 imports names of `sgl_kernel` in many modules that its CPU path then never uses. Every attribute of this
package and of any of its submodules exists; calling one raises RuntimeError naming it.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Missing:
    """A kernel, type or constant that would be here with a GPU."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(self._name + "." + name)

    def __call__(self, *args, **kwargs):
        """Say what is missing."""
        raise RuntimeError(self._name + " was called, but this machine has no GPU kernels (stub of sgl_kernel)")

    def __repr__(self):
        return "<missing GPU kernel " + self._name + ">"


def _attribute_of(module):
    def attribute(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(module + "." + name)

    return attribute


class _Submodules(MetaPathFinder, Loader):
    """Makes any `sgl_kernel.<name>` importable, as a module whose attributes are all missing kernels."""

    def find_spec(self, fullname, path=None, target=None):
        """A spec for submodules of this package, None for everything else."""
        if fullname.startswith(__name__ + "."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        """The import system's own kind of module."""

    def exec_module(self, module):
        """Give the module its missing attributes."""
        module.__getattr__ = _attribute_of(module.__name__)


sys.meta_path.append(_Submodules())
__getattr__ = _attribute_of(__name__)
