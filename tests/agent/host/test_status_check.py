"""What scripts ask: `status --check` and doctor are not content with a host that a push would refuse."""

import json
import shutil

import pytest
from support import Box, edit, perform, threshold

from deployctl.agent import objects
from deployctl.agent.state import State
from deployctl.errors import LinkLost


@pytest.fixture
def pushed(tmp_path):
    """A box at release 1."""
    box = Box(tmp_path)
    assert "pushed" == box.push("a/v1", threshold(5))["status"]
    assert 0 == box.ask("status", check=True)["exit"]
    return box


def checks(box) -> dict:
    return {check["name"]: check for check in box.ask("doctor")["checks"]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("current.json", ""),
        ("current.json", '{"release": "x", "base": 1, "move": 1, "recent": [], "at": 1}'),
        ("bases/1.json", None),
        ("bases/1.json", "{}"),
        ("releases/1.json", None),
        ("journal.json", "{}"),
    ],
)
def test_a_state_that_nothing_can_work_with(pushed, name, content):
    """As a push on it: exit 8, with the file and the way out; doctor says the same."""
    path = pushed.root / "state dir" / name
    path.unlink() if content is None else path.write_text(content)
    result = pushed.ask("status", check=True)
    assert (8, "state-damaged") == (result["exit"], result["error"]["kind"]), result
    assert name in result["error"]["message"] or name.startswith("releases/")
    assert "mv '" in result["error"]["hint"]
    assert 0 == pushed.ask("status")["exit"]
    assert 8 == pushed.push("a/v2", threshold(6))["exit"]
    if name != "journal.json":
        assert 1 == pushed.ask("doctor")["exit"]


def test_an_interrupted_push_that_cannot_be_put_back(pushed):
    """Killed with one file swapped, and the contents to put back are gone: exit 8, not somebody's edit."""
    script = edit(["version.py"], "(root / 'version.py').write_text('__version__ = 1')\n")
    before = pushed.tree()
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            pushed.push("k/v1", script, transaction=f"k-{at}", crash_at=at)
        if before["version.py"] != pushed.tree()["version.py"]:
            break
        pushed.ask("history")
    sha = json.loads((pushed.root / "state dir/bases/1.json").read_text())["files"]["version.py"][0]
    path = objects.path_of(State(str(pushed.root / "state dir")), sha)
    shutil.move(path, pushed.root / "kept")
    result = pushed.ask("status", check=True)
    assert (8, "needs-recovery") == (result["exit"], result["error"]["kind"]), result
    shutil.move(pushed.root / "kept", path)
    assert 0 == pushed.ask("status", check=True)["exit"]
    assert before == pushed.tree()


def test_another_copy_that_would_be_imported(pushed):
    """The tree is as pushed, but it is not what would serve: exit 9 that names both, a failed check of doctor's."""
    shutil.copytree(pushed.package, pushed.home / "fakesgl")
    result = pushed.ask("status", check=True)
    assert (9, "other-package") == (result["exit"], result["error"]["kind"])
    for place in (pushed.package, pushed.home / "fakesgl"):
        assert str(place) in result["error"]["message"]
        assert str(place) in checks(pushed)["package"]["detail"]
    assert checks(pushed)["package"]["ok"] is False
    assert [result["error"]["message"]] == pushed.ask("status")["problems"]
    (pushed.home / "fakesgl").rename(pushed.home / "hidden")
    assert 0 == pushed.ask("status", check=True)["exit"]
    assert checks(pushed)["package"]["ok"] is True


def test_nothing_was_pushed(tmp_path):
    """There is nothing to compare with, in this process or over the wire."""
    box = Box(tmp_path)
    assert 0 == perform(box, "status", check=True)["exit"]
    assert 0 == box.ask("status", check=True)["exit"]
