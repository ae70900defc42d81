"""The three attempts that failed, applied to the wheels they are for through deployctl's own push pipeline.

The import check is left out here: it needs torch. `make test-engine` does it on 0.5.12.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployctl.domain import patch as patches
from deployctl.remote.client import Exchange, Request
from deployctl.transport.local import LocalTransport

PROJECT = Path(__file__).resolve().parents[2]
SUPPORTED = ("0.5.9", "0.5.10", "0.5.11", "0.5.12")
VERSIONS = ("v1", "v2", "v3")
COUNTERS = {"0.5.9": "num_accepted_tokens", "0.5.10": "num_accepted_tokens"}
COUNTERS |= {"0.5.11": "num_accepted_drafts", "0.5.12": "num_correct_drafts"}


class Engine:
    """One wheel's installation and the agent on it."""

    def __init__(self, root: Path, python: Path, package: Path) -> None:
        self.package = package
        self._python = python
        (root / "home").mkdir()
        self._env = {"HOME": str(root / "home"), "PATH": os.environ["PATH"]}
        self._host = {"name": "w", "package": "sglang", "state_dir": str(root / "state"), "log_dir": str(root / "logs")}

    def ask(self, operation: str, blobs: dict[str, bytes] | None = None, **args) -> dict:
        request = Request(
            operation=operation, python=str(self._python), host=self._host, args=args, blobs=blobs or {}, run_id="r"
        )
        with LocalTransport(self._env) as transport, Exchange(transport, request) as exchange:
            for _ in exchange.events():
                pass
            return exchange.result

    def push(self, version: str) -> dict:
        loaded = patches.load(f"dynamic_spec/{version}", PROJECT)
        described = loaded.as_request()
        described["metadata"]["verify"] = []
        return self.ask("push", {"patch": loaded.content}, patch=described, transaction=version)

    def hashes(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.package)): path.read_bytes() for path in self.package.rglob("*.py")}


@pytest.mark.parametrize("engine_version", SUPPORTED)
def test_each_attempt_on_each_version(tmp_path, installed, engine_version):
    """Applied, parsed, field and option found in the syntax tree, replaced by the next, and back to the wheel's bytes."""
    engine = Engine(tmp_path, *installed(engine_version))
    before = engine.hashes()
    for version in VERSIONS:
        result = engine.push(version)
        assert result["status"] == "pushed", result["error"]
        assert [f["path"] for f in result["files"]] == ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
        assert result["known_bad"]
        arguments = ast.parse((engine.package / "srt/server_args.py").read_text())
        fields = [
            node.target.id
            for cls in arguments.body
            if isinstance(cls, ast.ClassDef) and cls.name == "ServerArgs"
            for node in cls.body
            if isinstance(node, ast.AnnAssign)
        ]
        assert fields.count("speculative_disable_batch_threshold") == 1
        options = [node.value for node in ast.walk(arguments) if isinstance(node, ast.Constant)]
        assert options.count("--speculative-disable-batch-threshold") == 1
        worker = (engine.package / "srt/speculative/eagle_worker.py").read_text()
        ast.parse(worker)
        assert worker.count(f"# >>> dynamic_spec/{version}") == 1
        assert f"{COUNTERS[engine_version]}=0," in worker.split("# >>>")[1]
    assert engine.push("v3")["status"] == "unchanged"
    assert engine.ask("rollback", to="base", transaction="back")["status"] == "rolled_back"
    assert engine.hashes() == before


@pytest.mark.parametrize("engine_version", ["0.5.13", "0.5.14"])
def test_versions_that_are_not_meant(tmp_path, installed, engine_version):
    """Refused before anything is touched: exit 2, both versions named."""
    engine = Engine(tmp_path, *installed(engine_version))
    result = engine.push("v3")
    assert (result["exit"], result["error"]["kind"]) == (2, "version")
    assert engine_version in result["error"]["message"]
    assert ">=0.5.9,<0.5.13" in result["error"]["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_by_hand(tmp_path, installed, version):
    """The script run on a folder: twice is once, another version's marks are refused, a foreign file is named."""
    _, package = installed("0.5.12")
    copy = tmp_path / "sglang"
    for name in ("srt/server_args.py", "srt/speculative/eagle_worker.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((package / name).read_bytes())

    def run(which: str) -> subprocess.CompletedProcess[str]:
        script = PROJECT / "patches" / "dynamic_spec" / f"{which}.py"
        return subprocess.run([sys.executable, str(script), str(copy)], capture_output=True, text=True, check=False)

    assert run(version).returncode == 0
    patched = (copy / "srt/server_args.py").read_bytes()
    again = run(version)
    assert (again.returncode, again.stdout.count("already patched")) == (0, 2)
    assert (copy / "srt/server_args.py").read_bytes() == patched
    other = run("v1" if version != "v1" else "v2")
    assert other.returncode == 1
    assert "roll back first" in other.stderr
    (copy / "srt/server_args.py").write_text("nothing like it\n")
    foreign = run(version)
    assert foreign.returncode == 1
    assert "the anchor" in foreign.stderr
