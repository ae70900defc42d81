"""Runs first on the host: reads the agent's modules from stdin and imports them from memory.

The client starts `python -c STUB`; the stub reads one line with a length and executes that many bytes: this file.
What follows on stdin is a header line (JSON), the compressed modules, the request (JSON), the blobs, and then control
lines for as long as the command runs. Nothing is written to the host's disk.

The interpreter is started as the server would be started (no -I, no -S), because it must find the package where the
server finds it; what must not happen is that a `json.py` in the current directory or on PYTHONPATH shadows the
standard library of the agent, hence the narrowed `sys.path` while the agent loads.
"""

import sys


def _narrow_path():
    """Keep only the standard library on sys.path while the agent's own imports run; returns the full path."""
    import os  # noqa: PLC0415 - already loaded by site; nothing may be imported before the path is narrowed

    full = list(sys.path)
    home = os.path.dirname(os.path.abspath(os.__file__))
    sys.path[:] = [
        entry
        for entry in full
        if entry
        and (os.path.abspath(entry).startswith(home) or entry.endswith(".zip"))
        and "site-packages" not in entry
        and "dist-packages" not in entry
    ]
    return full


def _boot():
    stdin = sys.stdin.buffer
    full_path = _narrow_path()
    import importlib.abc  # noqa: PLC0415
    import importlib.util  # noqa: PLC0415
    import json  # noqa: PLC0415
    import zlib  # noqa: PLC0415

    header = json.loads(stdin.readline().decode("utf-8"))
    sources = json.loads(zlib.decompress(stdin.read(header["bundle"])).decode("utf-8"))
    request = json.loads(zlib.decompress(stdin.read(header["request"])).decode("utf-8"))

    class MemoryImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        """Imports the package `deployctl_agent` from the sources that were sent."""

        def find_spec(self, name, path=None, target=None):  # noqa: ARG002
            package, _, module = name.partition(".")
            if package != "deployctl_agent" or (module or "__init__") not in sources:
                return None
            return importlib.util.spec_from_loader(name, self, is_package=not module)

        def create_module(self, spec):  # noqa: ARG002
            return None

        def exec_module(self, module):
            name = module.__name__.partition(".")[2] or "__init__"
            exec(compile(sources[name], "<deployctl agent>/%s.py" % name, "exec"), module.__dict__)  # noqa: S102

        def get_source(self, name):
            return sources.get(name.partition(".")[2] or "__init__")

    sys.meta_path.insert(0, MemoryImporter())
    import deployctl_agent.main  # noqa: PLC0415

    return deployctl_agent.main.serve(header, request, stdin, full_path, sources)


sys.exit(_boot())
