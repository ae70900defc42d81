"""The patched engines' own code, without a GPU: each check in logic/ is a test on each engine it is for."""

import ast
from pathlib import Path

import pytest

LOGIC = Path(__file__).parent / "logic"
ALWAYS = ("bookkeeping", "workers", "building", "command_line", "lengths")
MODULES = {
    ("0.5.9", "v4"): (*ALWAYS, "at_once"),
    ("0.5.10", "v4"): (*ALWAYS, "at_once"),
    ("0.5.11", "v4"): (*ALWAYS, "at_once"),
    ("0.5.12", "v4"): (*ALWAYS, "cheap_verify", "upkeep"),
    ("0.5.14", "v5"): ("adaptive",),
    ("0.5.18", "v5"): ("adaptive",),
    ("0.5.23", "v5"): ("adaptive",),
}


def _names(module: str) -> list[str]:
    tree = ast.parse((LOGIC / f"{module}.py").read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return ["import", *(name for name in functions if name.startswith("check_"))]


@pytest.mark.parametrize(
    ("engine", "patch", "check"),
    [
        (engine, patch, f"{module}.{name}")
        for (engine, patch), modules in MODULES.items()
        for module in modules
        for name in _names(module)
    ],
)
def test_logic(checks, engine, patch, check):
    """See the check's own text."""
    found = checks(engine, patch, MODULES[engine, patch])
    assert check in found, found
    assert found[check] is None, found[check]
