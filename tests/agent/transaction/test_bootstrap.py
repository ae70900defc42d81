"""The agent's start: modules from memory, nothing of the host in their place, and the compiled forms that are kept."""

import importlib
import io
import json
import os
import sys
import types
import zlib
from pathlib import Path

import pytest
from test_disks import fill, mounted

# A main that tells what it was given; its helper proves that modules import each other.
SOURCES = {
    "__init__": "",
    "main": "from .helper import WORD\n\ndef serve(header, request, stdin, full_path, sources):\n"
    "    SEEN.append((header, request, stdin.read(), full_path, sorted(sources), WORD, list(sys.path)))\n    return 7\n"
    "import sys\nSEEN = sys.seen_by_test\n",
    "helper": "WORD = 'from helper'\n",
    "keeper": "this is no Python\n",
}


@pytest.fixture
def boot(tmp_path, monkeypatch):
    """Run the bootstrap in this process with `sources`; returns what its `serve` was given."""

    def run(sources=SOURCES, state=None):
        bundle = zlib.compress(json.dumps(sources).encode())
        request = zlib.compress(
            json.dumps({"op": "x", "host": {"state_dir": str(state or tmp_path / "none")}}).encode()
        )
        header = json.dumps({"nonce": "n", "bundle": len(bundle), "request": len(request)}).encode()
        stdin = types.SimpleNamespace(buffer=io.BytesIO(header + b"\n" + bundle + request + b"the rest"))
        seen: list = []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            patch.setattr(sys, "seen_by_test", seen, raising=False)
            patch.setattr(sys, "meta_path", list(sys.meta_path))
            before = list(sys.path)
            try:
                with pytest.raises(SystemExit) as ended:
                    importlib.import_module("deployctl.agent.bootstrap")
            finally:
                sys.path[:] = before
                for name in [name for name in sys.modules if name.partition(".")[0] == "deployctl_agent"]:
                    del sys.modules[name]
        assert 7 == ended.value.code
        [given] = seen
        return given

    return run


def cached(state: Path) -> list[Path]:
    return sorted((state / "cache").iterdir()) if (state / "cache").exists() else []


def test_modules_come_from_memory(boot):
    """serve gets the header, the request, the rest of stdin, the whole path, and every source; its own path is
    narrowed to the standard library."""
    header, request, rest, full_path, sources, word, narrow = boot()
    assert ("n", "x", b"the rest", sorted(SOURCES), "from helper") == (
        header["nonce"],
        request["op"],
        rest,
        sources,
        word,
    )
    assert set(narrow) < set(full_path)
    assert not [entry for entry in narrow if "site-packages" in entry]
    assert os.path.dirname(os.__file__) in narrow


def test_a_module_that_was_not_sent_is_missing(boot):
    """It is not looked for anywhere else."""
    with pytest.raises(ImportError, match="nothing_like_it"):
        boot({**SOURCES, "main": "from . import nothing_like_it\n"})


def test_sources_can_be_shown(boot):
    """Tracebacks show the agent's lines."""
    main = SOURCES["main"].replace("WORD, list", "__loader__.get_source(__name__), list")
    assert main == boot({**SOURCES, "main": main})[5]


def test_nothing_is_kept_where_there_is_no_state(boot, tmp_path):
    """A host that was never pushed to stays untouched."""
    boot(state=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_compiled_modules_are_kept_and_used(boot, tmp_path):
    """The second start reads what the first has written, under the hash of the sources and the interpreter's tag."""
    boot(state=tmp_path)
    [kept] = cached(tmp_path)
    assert kept.name.endswith("-" + sys.implementation.cache_tag)
    assert 0o700 == (tmp_path / "cache").stat().st_mode & 0o777
    about = kept.stat()
    assert "from helper" == boot(state=tmp_path)[5]
    assert (about.st_ino, about.st_mtime_ns) == (kept.stat().st_ino, kept.stat().st_mtime_ns)
    assert "other" == boot({**SOURCES, "helper": "WORD = 'other'\n"}, tmp_path)[5]
    assert 2 == len(cached(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"", lambda whole: whole[:-40] + bytes(40), lambda whole: whole[:50], lambda whole: b"x" * 99],
)
def test_damaged_compiled_modules_are_made_anew(boot, tmp_path, damage):
    """Cut short or with zeros in them, as a power cut leaves files: compiled again, never run."""
    boot(state=tmp_path)
    [kept] = cached(tmp_path)
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert "from helper" == boot(state=tmp_path)[5]
    assert whole == kept.read_bytes()


def test_another_users_cache_is_not_run(boot, tmp_path):
    """What lies in a folder that somebody else owns is neither read nor added to the path of execution."""
    boot(state=tmp_path)
    [kept] = cached(tmp_path)
    os.chown(tmp_path / "cache", 65534, 65534)
    kept.write_bytes(b"theirs")
    assert "from helper" == boot(state=tmp_path)[5]
    assert b"theirs" == kept.read_bytes()


def test_old_versions_go(boot, tmp_path):
    """A few dozen compiled versions are kept, not all there ever were."""
    (tmp_path / "cache").mkdir()
    for number in range(60):
        (tmp_path / "cache" / f"agent-{number}").write_text("")
    boot(state=tmp_path)
    assert 41 == len(cached(tmp_path))
    assert "from helper" == boot(state=tmp_path)[5]


def test_a_full_disk_is_no_obstacle(boot, tmp_path):
    """The modules are compiled and run; nothing half-written stays."""
    with mounted(tmp_path / "state", "size=64k") as state:
        (state / "cache").mkdir()
        fill(state / "filler")
        assert "from helper" == boot(state=state)[5]
        assert [] == cached(state)
        (state / "cache").rmdir()
        (state / "cache").write_text("")
        assert "from helper" == boot(state=state)[5]


def test_a_files_name_shadows_no_module_of_the_agent(box):
    """`json.py` in the home, on PYTHONPATH and beside the package's own modules: the real agent starts all the same."""
    trap = box.root / "trap"
    trap.mkdir()
    for folder in (box.home, trap, box.package.parent):
        for name in ("json", "zlib", "tempfile", "hashlib"):
            (folder / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    box.env["PYTHONPATH"] = str(trap)
    assert "ok" == box.ask("ping")["status"]
    assert "ok" == box.ask("history")["status"]
