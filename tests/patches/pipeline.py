"""An installed engine and deployctl's own agent on it."""

import ast
import os
from pathlib import Path

from deployctl.domain import patch as patches
from deployctl.remote.client import Exchange, Request
from deployctl.transport.local import LocalTransport

PROJECT = Path(__file__).resolve().parents[2]


class Engine:
    """One installation; its state lies below `root`.

    Args:
        root: A folder of the test's own.
        python: The host's interpreter.
        package: The folder of the engine that this interpreter finds.
        env: More environment variables.
    """

    def __init__(self, root: Path, python: Path, package: Path, env: dict[str, str] | None = None) -> None:
        self.package = package
        self._python = python
        (root / "home").mkdir()
        self._env = {"HOME": str(root / "home"), "PATH": os.environ["PATH"], **(env or {})}
        self._host = {"name": "w", "package": "sglang", "state_dir": str(root / "state"), "log_dir": str(root / "logs")}

    def ask(self, operation: str, blobs: dict[str, bytes] | None = None, **args) -> dict:
        request = Request(
            operation=operation, python=str(self._python), host=self._host, args=args, blobs=blobs or {}, run_id="r"
        )
        with LocalTransport(self._env) as transport, Exchange(transport, request) as exchange:
            for _ in exchange.events():
                pass
            return exchange.result

    def push(self, version: str, *, imports: bool = False) -> dict:
        """Push dynamic_spec/`version`. Importing needs torch and takes half a minute: left out unless `imports`."""
        loaded = patches.load(f"dynamic_spec/{version}", PROJECT)
        described = loaded.as_request()
        if not imports:
            described["metadata"]["verify"] = []
        return self.ask("push", {"patch": loaded.content}, patch=described, transaction=version)

    def rollback(self) -> dict:
        return self.ask("rollback", to="base", transaction="back")

    def files(self) -> dict[str, bytes]:
        """{path: content} of the engine's sources."""
        return {str(path.relative_to(self.package)): path.read_bytes() for path in self.package.rglob("*.py")}


def fields_of(text: str) -> list[str]:
    """Annotated names in the classes of a module."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [node.target.id for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]


def texts_of(text: str) -> list[object]:
    """All constants in a module's syntax tree."""
    return [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
