"""Transactions under every Python that may serve."""

import os
import subprocess
from pathlib import Path

import pytest
from support import Box, edit, everything, threshold

from deployctl.errors import LinkLost


def pythons() -> list:
    """Every CPython 3.8 to 3.14 that pyenv or PATH has here, one of each version."""
    root = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser()) / "versions"
    places = [root.glob(f"3.{minor}.*/bin/python3") for minor in range(8, 15)]
    places += [[Path(folder) / "python3"] for folder in os.environ["PATH"].split(":") if "pyenv" not in folder]
    places += [
        [Path(folder) / f"python3.{minor}"] for folder in os.environ["PATH"].split(":") for minor in range(8, 15)
    ]
    found = {}
    for path in [path for place in places for path in place if path.exists()]:
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.split()
        if said[:1] == ["Python"] and (3, 8) <= tuple(map(int, said[1].split(".")[:2])) <= (3, 14):
            found.setdefault(said[1], str(path))
    return [pytest.param(path, id=version) for version, path in found.items()]


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
    old, new = before, None
    for at in range(1, 60):
        try:
            result = box.push("k/v1", threshold(9), transaction=f"k{at}", crash_at=at)
        except LinkLost:
            committed = box.ask("outcome", transaction=f"k{at}")["outcome"] == "committed"
            new = everything(box.package) if committed else new
            assert (everything(box.package) != old) == committed
            box.ask("rollback", to="base", transaction=f"r{at}")
        else:
            assert (True, new) == (at > 6, everything(box.package)), result
            break
    assert ("committed", "not-committed") == tuple(
        box.ask("outcome", transaction=name)["outcome"] for name in ("t4", "t6")
    )
