"""The agent's source as it is sent: the stub that goes on the command line, and the modules an operation needs."""

import json
import re
import zlib
from functools import cache
from importlib import resources

# Free of anything that sh, bash, dash, csh, tcsh or fish treats differently inside single quotes (no ! and no \).
STUB = "import sys;exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())),'deployctl','exec'))"

_IMPORT = re.compile(r"^\s*from \. import (.+)$|^\s*from \.(\w+) import ", re.MULTILINE)
_OPERATION = re.compile(r'^    "(\w+)": "(\w+):\w+",$', re.MULTILINE)


@cache
def source_of(module: str) -> str:
    """The text of one agent module."""
    return resources.files("deployctl.agent").joinpath(f"{module}.py").read_text(encoding="utf-8")


@cache
def _imports_of(module: str) -> frozenset[str]:
    found: set[str] = set()
    for several, single in _IMPORT.findall(source_of(module)):
        names = [single] if single else several.partition("#")[0].split(",")
        found.update(name.partition(" as ")[0].strip() for name in names)
    return frozenset(found)


@cache
def operations() -> dict[str, str]:
    """Operation name → the agent module that implements it, read from the agent's own table."""
    return dict(_OPERATION.findall(source_of("main")))


def modules_for(operation: str) -> tuple[str, ...]:
    """The modules an operation needs: its own, and what they import, sorted; the package's and main's included."""
    todo = ["__init__", "main", operations()[operation]]
    needed: set[str] = set()
    while todo:
        module = todo.pop()
        if module not in needed:
            needed.add(module)
            todo.extend(_imports_of(module))
    return tuple(sorted(needed))


@cache
def bundle_for(operation: str) -> bytes:
    """The compressed sources for an operation."""
    sources = {module: source_of(module) for module in modules_for(operation)}
    return zlib.compress(json.dumps(sources).encode(), 6)
