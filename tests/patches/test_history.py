"""The three attempts that failed, applied to the wheels they are for through deployctl's own push pipeline.

The import check is left out here: it needs torch. `make test-engine` does it on 0.5.12.
"""

import ast
import subprocess
import sys

import pytest
from pipeline import PROJECT, Engine, fields_of, texts_of

SUPPORTED = ("0.5.9", "0.5.10", "0.5.11", "0.5.12")
VERSIONS = ("v1", "v2", "v3")
COUNTERS = {"0.5.9": "num_accepted_tokens", "0.5.10": "num_accepted_tokens"}
COUNTERS |= {"0.5.11": "num_accepted_drafts", "0.5.12": "num_correct_drafts"}


@pytest.mark.parametrize("engine_version", SUPPORTED)
def test_each_attempt_on_each_version(tmp_path, installed, engine_version):
    """Applied, parsed, field and option found in the syntax tree, replaced by the next, and back to the wheel's bytes."""
    engine = Engine(tmp_path, *installed(engine_version))
    before = engine.files()
    for version in VERSIONS:
        result = engine.push(version)
        assert result["status"] == "pushed", result["error"]
        assert [f["path"] for f in result["files"]] == ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
        assert result["known_bad"]
        arguments = (engine.package / "srt/server_args.py").read_text()
        assert fields_of(arguments).count("speculative_disable_batch_threshold") == 1
        assert texts_of(arguments).count("--speculative-disable-batch-threshold") == 1
        worker = (engine.package / "srt/speculative/eagle_worker.py").read_text()
        ast.parse(worker)
        assert worker.count(f"# >>> dynamic_spec/{version}") == 1
        assert f"{COUNTERS[engine_version]}=0," in worker.split("# >>>")[1]
    assert engine.push("v3")["status"] == "unchanged"
    assert engine.rollback()["status"] == "rolled_back"
    assert engine.files() == before


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
