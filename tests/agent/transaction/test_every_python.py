"""Transactions under every Python that may serve."""

import os
from pathlib import Path

import pytest
from support import Box, edit, everything, threshold


def pythons() -> list:
    """Every CPython from 3.8 on that pyenv has here; the one that runs the tests where it has none."""
    import sys

    root = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser()) / "versions"
    found = [path for path in root.glob("3.*/bin/python") if int(path.parts[-3].split(".")[1]) >= 8]
    return [pytest.param(str(path), id=path.parts[-3]) for path in sorted(found)] or [sys.executable]


@pytest.mark.parametrize("interpreter", pythons())
def test_the_whole_story(tmp_path, interpreter):
    """Staged, live, replaced below, refused, forced, rolled back and killed, with names of any kind."""
    box = Box(tmp_path, interpreter)
    before = everything(box.package)
    added = edit(["ů/"], "(root / 'ů').mkdir()\n(root / 'ů/a b.py').write_text('A = 1')\n")
    live = f"p = {str(box.package / 'srt/worker.py')!r}\nopen(p, 'a').write('L = 1\\n')\n"
    assert "pushed" == box.push("a/v1", threshold(5))["status"]
    assert "pushed" == box.push("n/v1", added, transaction="t2")["status"]
    assert "pushed" == box.push("l/v1", live, transaction="t3")["status"]
    assert ["a/v2", "n/v1", "l/v1"] == box.push("a/v2", threshold(6), transaction="t4")["patches"]
    assert "planned" == box.push("a/v3", threshold(7), transaction="t5", dry_run=True)["status"]
    assert (
        "import" == box.push("b/v1", edit(["version.py"], "(root / 'version.py').write_text('1/0')\n"))["error"]["kind"]
    )
    (box.package / "srt/args.py").write_text("BY = 'hand'\n")
    assert "drift" == box.push("a/v3", threshold(7), transaction="t6")["status"]
    assert "pushed" == box.push("a/v3", threshold(7), transaction="t7", force=True)["status"]
    assert ["fakesgl.srt.args"] == box.ask("rollback", transaction="t8")["verified"][:1]
    assert "rolled_back" == box.ask("rollback", to="base", transaction="t9")["status"]
    assert before == everything(box.package)
    assert ("committed", "not-committed") == tuple(
        box.ask("outcome", transaction=name)["outcome"] for name in ("t4", "t6")
    )
