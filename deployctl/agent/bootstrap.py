"""Runs first on the host: reads the agent's modules from stdin and imports them from memory.

The client starts `python -c STUB`; the stub reads one line with a length and executes that many bytes: this file.
What follows on stdin is a header line (JSON), the compressed modules, the request (JSON), the blobs, and then control
lines for as long as the command runs. Nothing is written to the host's disk.

The interpreter is started as the server would be started (no -I, no -S), because it must find the package where the
server finds it; what must not happen is that a `json.py` in the current directory or on PYTHONPATH shadows the
standard library of the agent, hence the narrowed `sys.path` while the agent loads.
"""

import sys

_KEPT_VERSIONS = 40


def _narrow_path():
    """Keep only the standard library on sys.path while the agent's own imports run; returns the full path."""
    import os

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


class _Codes:
    """Compiled modules: compiling them takes longer than most operations, so the result is kept in the state directory.

    Kept under the hash of the very bytes that were sent and the interpreter's magic tag, so it can never be stale; only
    where the state directory exists already, and any trouble with it means to compile. Its own hash stands in front: a
    power cut may leave a file of the right size with zeros in it, and such bytecode would crash the interpreter.
    """

    def __init__(self, request, bundle, sources):
        import hashlib
        import os

        self._sources = sources
        self._codes = {}
        state = os.path.expanduser((request.get("host") or {}).get("state_dir") or "~/.deployctl")
        tag = sys.implementation.cache_tag or "unknown"
        self._path = os.path.join(state, "cache", "agent-%s-%s" % (hashlib.sha256(bundle).hexdigest()[:24], tag))
        try:
            ours = os.stat(os.path.dirname(self._path)).st_uid == os.geteuid()
        except OSError:
            ours = os.path.isdir(state)
        if ours:
            self._codes = self._kept() or self._keep()

    def _kept(self):
        """What was written down, or nothing."""
        import hashlib
        import marshal

        try:
            with open(self._path, "rb") as source:
                digest, compiled = source.read(32), source.read()
            if hashlib.sha256(compiled).digest() == digest:
                return marshal.loads(compiled)  # noqa: S302 - our own file in our own 0700 folder
        except (OSError, ValueError, EOFError, TypeError):
            pass  # made anew
        return {}

    def _keep(self):
        """Compile everything and write it down."""
        import hashlib
        import marshal
        import os
        import tempfile

        codes = {name: self._compile(name) for name in self._sources if name != "keeper"}
        temporary = None
        try:
            folder = os.path.dirname(self._path)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            names = os.listdir(folder)
            # Other versions': a few are kept, for operators with different versions.
            for name in names[: max(0, len(names) - _KEPT_VERSIONS)]:
                os.unlink(os.path.join(folder, name))
            handle, temporary = tempfile.mkstemp(dir=folder)
            compiled = marshal.dumps(codes)
            with os.fdopen(handle, "wb") as out:
                out.write(hashlib.sha256(compiled).digest() + compiled)
            os.replace(temporary, self._path)
            temporary = None
        except OSError:
            pass  # a full or read-only disk: the operation itself will say so where it matters
        if temporary is not None:
            os.unlink(temporary)
        return codes

    def _compile(self, name):
        return compile(self._sources[name], "<deployctl agent>/%s.py" % name, "exec")

    def of(self, name):
        """The code of a module."""
        return self._codes.get(name) or self._compile(name)


def _boot():
    stdin = sys.stdin.buffer
    full_path = _narrow_path()
    import importlib.abc
    import importlib.util
    import json
    import zlib

    header = json.loads(stdin.readline().decode("utf-8"))
    bundle = stdin.read(header["bundle"])
    sources = json.loads(zlib.decompress(bundle).decode("utf-8"))
    request = json.loads(zlib.decompress(stdin.read(header["request"])).decode("utf-8"))

    codes = _Codes(request, bundle, sources)

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
            exec(codes.of(name), module.__dict__)  # noqa: S102

        def get_source(self, name):
            return sources.get(name.partition(".")[2] or "__init__")

    sys.meta_path.insert(0, MemoryImporter())
    import deployctl_agent.main

    return deployctl_agent.main.serve(header, request, stdin, full_path, sources)


sys.exit(_boot())
