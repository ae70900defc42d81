"""What was pushed is what must serve: another copy of the package that would be imported instead stops the launch."""

import shutil

import pytest
from support import threshold


def launch(box, **changes) -> dict:
    args = {
        "profile": "p",
        "argv": ["{python}", "-m", "fakesgl.version"],
        "env": {},
        "cwd": "~",
        "engine": "openai",
        "log_tag": "t",
        "ready": {"url": "http://127.0.0.1:9/health", "timeout_s": 20},
        "smoke_spec": None,
        "clean": "none",
        "wait": False,
        **changes,
    }
    return box.ask("launch", **args)


@pytest.mark.parametrize("place", ["home", "cwd", "PYTHONPATH"])
def test_a_copy_in_front_of_the_pushed_package(box, place):
    """In the home, the working directory or on the profile's own path: refused with both places named, nothing starts;
    once it is out of the way the launch goes on, and before the first push nothing is compared."""
    box.host["python"] = str(box.python)
    aside = box.home if place == "home" else box.root / "aside"
    aside.mkdir(exist_ok=True)
    changes = {"cwd": {"cwd": str(aside)}, "PYTHONPATH": {"env": {"PYTHONPATH": f"/nowhere:{aside}"}}}.get(place, {})
    assert "pushed" == box.push("a/v1", threshold(5))["status"]
    shutil.copytree(box.package, aside / "fakesgl")
    result = launch(box, **changes)
    assert (2, "other-package") == (result["exit"], result["error"]["kind"]), result
    for place_named in (box.package, aside / "fakesgl"):
        assert str(place_named) in result["error"]["message"]
    assert [] == box.ask("history")["attempts"]
    (aside / "fakesgl").rename(aside / "hidden")
    assert 1 == launch(box, **changes)["attempt"]


def test_another_interpreter_is_another_matter(box):
    """A profile whose program is not the host's interpreter, or runs something else, is not compared."""
    box.host["python"] = str(box.python)
    assert "pushed" == box.push("a/v1", threshold(5))["status"]
    shutil.copytree(box.package, box.home / "fakesgl")
    for number, argv in enumerate(
        (["/bin/sh", "-c", "true"], ["{python}", "-c", "0"], ["{python}", "-m", "json.tool"])
    ):
        assert number + 1 == launch(box, argv=argv)["attempt"]


def test_nothing_was_pushed(box):
    """Without a release there is nothing that another copy could hide."""
    box.host["python"] = str(box.python)
    shutil.copytree(box.package, box.home / "fakesgl")
    assert 1 == launch(box)["attempt"]
