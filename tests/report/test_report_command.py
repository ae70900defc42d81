"""`deployctl report` as it is typed, over a real sshd: what it asks, writes, refuses and says."""

import json
import os
import stat

import pytest
from rig import Rig
from sshd_rig import free_port

from deployctl.render.report import MARK

DEAD = "  dead: {{address: 127.0.0.1, port: %d}}\n  again: {{address: localhost, port: {port}}}"


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """A host with a crash under a patch and a server that was measured and stopped; beside it one that does not answer."""
    with Rig(tmp_path_factory.mktemp("report"), load_s=0.2, more_hosts=DEAD % free_port()) as rig:
        assert rig.run("push", "--patch", "v1").returncode == 0
        threshold = ("--", "--speculative-disable-batch-threshold", "5")
        assert rig.run("launch", "-t", "t1_v1", "--burst", "8", *threshold).returncode == 6
        assert rig.run("rollback").returncode == 0
        assert rig.run("launch", "-t", "t2_base").returncode == 0
        bench = ("--sweep", "1,4", "--max-tokens", "8", "--requests-per-level", "8")
        assert rig.run("bench", *bench).returncode == 0
        assert rig.run("stop").returncode == 0
        yield rig


@pytest.fixture
def page(rig):
    """Where a report goes that is named by nobody."""
    path = rig.work / "report.html"
    path.unlink(missing_ok=True)
    return path


def data(path):
    """What a report holds."""
    text = path.read_text()
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_one_file_that_holds_everything(rig, page):
    """The host's attempts with crash, phases and patch; the file and its size are told."""
    done = rig.run("report")
    assert (0, "") == (done.returncode, done.stderr), done.stderr
    assert MARK in page.read_text()[:300]
    told = data(page)
    assert [("t1_v1", "bad"), ("t2_base", "good")] == [(one["name"], one["kind"]) for one in told["attempts"]]
    assert "dynamic_spec/v1" == told["crashes"][0]["patched"]["patch"]
    (load,) = told["loads"]
    assert ("coding", [1, 4], ["t2_base"]) == (load["name"], load["levels"], [line["name"] for line in load["series"]])
    assert load["headline"][0].startswith("t2_base: ")
    assert all(level["good"] and level["tok"] > 0 for level in load["series"][0]["levels"].values())
    assert [["dynamic_spec/v1"]] == [release["patches"] for release in told["releases"]]
    assert {"init", "weights"} <= {phase["name"] for phase in told["attempts"][1]["phases"]}
    assert "ok  2 attempts, 1 crash, 1 bench, 1 release" == done.stdout.splitlines()[0]
    assert "report.html" in done.stdout.splitlines()[-1]
    assert os.path.getsize(page) < 400_000
    assert [] == [name for name in os.listdir(rig.work) if name.startswith(".report")]


def test_json_is_one_object(rig, page):
    """With the file, its bytes, and for each host how much of it the report shows."""
    value = rig.json("report", "-o", "other.html")
    other = rig.work / "other.html"
    assert (True, "report", str(other)) == (value["ok"], value["command"], value["file"])
    assert other.stat().st_size == value["bytes"]
    host = value["hosts"]["10.1.230.174"]
    assert ("ok", 2, 1, 1, 1, []) == tuple(
        host[key] for key in ("status", "attempts", "crashes", "benches", "releases", "problems")
    )
    assert not page.exists()


def test_a_host_that_does_not_answer_is_named(rig, page):
    """Exit 3 and its name in the report; the other host's attempts are told all the same."""
    done = rig.run("report", "--host", "dead,again")
    assert 3 == done.returncode
    told = data(page)
    assert ["again"] == [host["name"] for host in told["hosts"]]
    assert [("dead", "unreachable", 3)] == [(one["host"], one["status"], one["exit"]) for one in told["failures"]]
    assert 2 == len(told["attempts"])
    assert ["dead | unreachable", "again | ok  2 attempts, 1 crash, 1 bench, 1 release"] == done.stdout.splitlines()[:2]
    assert "without dead" in done.stdout.splitlines()[2]
    assert done.stderr.startswith("dead | error: ")
    value = rig.json("report", "--host", "dead,again")
    assert (False, "unreachable", "ok") == (
        value["ok"],
        *(value["hosts"][name]["status"] for name in ("dead", "again")),
    )


def test_without_any_answer_an_earlier_report_stays(rig, page):
    """A report of nothing does not take the place of one that says something."""
    assert 0 == rig.run("report").returncode
    before = page.read_bytes()
    done = rig.run("report", "--host", "dead")
    assert 3 == done.returncode
    assert before == page.read_bytes()
    value = rig.json("report", "--host", "dead", "-o", "new.html")
    assert (False, None) == (value["ok"], value.get("file"))
    assert not (rig.work / "new.html").exists()


def test_some_attempts(rig, page):
    """By number, range, tag and host, with the releases that these ran; what means nothing is exit 2 with what there is."""
    for words, names in (
        ("2", ["t2_base"]),
        ("1-9", ["t1_v1", "t2_base"]),
        ("t1_v1", ["t1_v1"]),
        ("10.1.230.174:1,t2_base", ["t1_v1", "t2_base"]),
    ):
        assert 0 == rig.run("report", "--attempts", words).returncode
        assert names == [one["name"] for one in data(page)["attempts"]]
    assert 0 == rig.run("report", "--attempts", "2").returncode
    assert [] == data(page)["releases"]
    page.unlink()
    done = rig.run("report", "--attempts", "1,7")
    assert (2, False) == (done.returncode, page.exists())
    assert "there is no attempt 7" in done.stderr
    assert "1 (t1_v1), 2 (t2_base)" in done.stderr
    # The host that did not answer may know it.
    assert 3 == rig.run("report", "--attempts", "1,7", "--host", "dead,again").returncode
    assert ["t1_v1"] == [one["name"] for one in data(page)["attempts"]]


@pytest.mark.parametrize("words", ["", "3,,5", "9-5", ":3", "gpu-1:"])
def test_attempts_that_cannot_be_meant(rig, words):
    """Exit 2 before any host is asked."""
    done = rig.run("report", "--host", "dead", "--attempts", words)
    assert 2 == done.returncode
    assert "hint: " in done.stderr


def test_another_file_is_not_replaced(rig, page):
    """Exit 2, before any host is asked; --force replaces it, and a report replaces a report."""
    page.write_text("my notes\n")
    done = rig.run("report", "--host", "dead")
    assert (2, "my notes\n") == (done.returncode, page.read_text())
    assert "--force" in done.stderr
    assert 0 == rig.run("report", "--force").returncode
    assert 0 == rig.run("report").returncode
    assert 2 == len(data(page)["attempts"])


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("-", "names a file"),
        ("", "is a folder"),
        (".", "is a folder"),
        ("no/where/r.html", "mkdir -p"),
        ("/dev/null", "regular"),
    ],
)
def test_places_that_are_none(rig, output, said):
    """Exit 2 with the way out, before any host is asked."""
    done = rig.run("report", "--host", "dead", "-o", output)
    assert 2 == done.returncode
    assert said in done.stderr


def test_a_link_is_kept_and_modes_are_the_users(rig, page):
    """What a link leads to is replaced; a new file has the umask's mode, an old one keeps its own."""
    real = rig.work / "shared.html"
    page.symlink_to(real)
    assert 0 == rig.run("report").returncode
    assert page.is_symlink()
    mask = os.umask(0)
    os.umask(mask)
    assert 0o666 & ~mask == stat.S_IMODE(real.stat().st_mode)
    real.chmod(0o604)
    assert 0 == rig.run("report").returncode
    assert 0o604 == stat.S_IMODE(real.stat().st_mode)


def test_it_opens_in_the_browser(rig, page):
    """--open hands the file to the browser that the system names; without one it says where the file is."""
    seen = rig.work / "seen"
    browser = rig.work / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.new && mv {seen}.new {seen}\n')
    browser.chmod(0o755)
    done = rig.run("report", "--open", env={**rig.environment, "BROWSER": f"{browser} %s"})
    assert 0 == done.returncode, done.stderr
    assert page.resolve().as_uri() == seen.read_text().strip()
