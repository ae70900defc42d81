"""Damaged, missing and unreadable state files: exit 8 with the way out, and nothing of the package is touched."""

import json
import os
import shutil
import stat

import pytest
from support import FILES, edit, everything, make_context, perform, perform_push, threshold

from deployctl.agent import objects, releases, site
from deployctl.agent.failure import Failure


@pytest.fixture
def pushed(near):
    """A box at release 2."""
    perform_push(near, "a/v1", threshold(5))
    perform_push(near, "b/v1", edit(["srt/worker.py"], "(root / 'srt/worker.py').write_text('W = 1\\n')\n"))
    near.state = near.root / "state dir"
    return near


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'"x"', b"null"])
@pytest.mark.parametrize("name", ["current.json", "bases/1.json", "releases/2.json", "journal.json"])
def test_a_damaged_file_is_named(pushed, name, content):
    """Torn, empty, of another kind, or without what it must hold: never a traceback, never a guess."""
    before = everything(pushed.package)
    (pushed.state / name).write_bytes(content)
    for result in (perform_push(pushed, "a/v2", threshold(6)), perform(pushed, "rollback", transaction="x")):
        assert (8, "state-damaged") == (result["exit"], result["error"]["kind"]), result
        assert name in result["error"]["message"]
        assert "mv '" in result["error"]["hint"]
    assert before == everything(pushed.package)


def an_open_journal(pushed) -> str:
    """The journal of a push that is at work."""
    found = []

    def look(_, event):
        if event["event"] == "step" and (event["name"], event["state"]) == ("import", "start"):
            found.append((pushed.state / "journal.json").read_text())

    pushed.on_event = look
    perform_push(pushed, "a/v3", threshold(9))
    pushed.on_event = None
    perform(pushed, "rollback", to=2, transaction="y")
    return found[0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for name, places in (
            ("current.json", ("release", "base", "move", "recent", "at", "recent.0", "recent.0.1")),
            (
                "bases/1.json",
                ("files", "files.srt/args.py", "files.srt/args.py.1", "folders", "folders.0", "package_dir"),
            ),
            (
                "releases/2.json",
                ("patches", "patches.0", "patches.0.ref", "patches.1.result", "files", "base", "parent"),
            ),
            ("journal.json", ("move", "folders", "folders.srt", "particulars", "package_dir")),
            ("hold.json", ("since", "operator")),
        )
        for place in places
    ],
)
@pytest.mark.parametrize("wrong", ["z", [7], {"a": None}, True])
def test_well_formed_but_of_another_kind(pushed, name, place, wrong):
    """JSON that holds something else where a number, a list or a name should be: named with the place, never a
    traceback, and nothing of the package is touched."""
    if name == "journal.json":
        (pushed.state / name).write_text(an_open_journal(pushed))
    elif name == "hold.json":
        perform(pushed, "lock", action="acquire", message="mine")
    before = everything(pushed.package)
    whole = json.loads((pushed.state / name).read_text())
    inner, parts = whole, place.split(".", 1) if place.startswith("files.") else place.split(".")
    if place.endswith(".py.1"):
        parts = ["files", "srt/args.py", "1"]
    for part in parts[:-1]:
        inner = inner[int(part) if isinstance(inner, list) else part]
    key = int(parts[-1]) if isinstance(inner, list) else parts[-1]
    if isinstance(inner[key], str) and isinstance(wrong, str):
        wrong = 7
    inner[key] = wrong
    (pushed.state / name).write_text(json.dumps(whole))
    for result in (perform_push(pushed, "a/v2", threshold(6)), perform(pushed, "rollback", transaction="x")):
        assert (8, "state-damaged") == (result["exit"], result["error"]["kind"]), result
        assert name in result["error"]["message"]
        assert f": {place}" in result["error"]["message"]
        assert ("rm '" if name == "hold.json" else "mv '") in result["error"]["hint"]
    assert before == everything(pushed.package)


@pytest.mark.parametrize("name", ["bases/1.json", "releases/2.json"])
def test_a_missing_file_is_named(pushed, name):
    """What current.json names is not there."""
    (pushed.state / name).unlink()
    for result in (perform_push(pushed, "a/v2", threshold(6)), perform(pushed, "history")):
        assert (8, "state-damaged") == (result["exit"], result["error"]["kind"]), result
        assert "missing" in result["error"]["message"]


def test_the_way_out_works(pushed):
    """As the hint says: reinstall, move the state away, push."""
    (pushed.state / "current.json").write_text("{")
    for path in ("srt/args.py", "srt/worker.py"):
        (pushed.package / path).write_text(FILES[path])
    pushed.state.rename(pushed.root / "state dir.damaged")
    assert ("pushed", 1) == tuple(perform_push(pushed, "a/v2", threshold(6))[key] for key in ("status", "release"))


@pytest.mark.parametrize("content", ["{", "[]", '{"directory": "/elsewhere"}', '{"files": 3}', "deleted"])
def test_the_stat_cache_is_only_a_cache(pushed, content):
    """Damaged, another's, or gone: everything is hashed anew."""
    path = pushed.state / "index.json"
    if content == "deleted":
        path.unlink()
    else:
        path.write_text(content.replace('"files": 3', f'"directory": "{pushed.package}", "files": 3'))
    assert "pushed" == perform_push(pushed, "a/v2", threshold(6))["status"]


def test_a_stat_cache_that_cannot_be_written_costs_time_only(pushed):
    """Said as a warning."""
    (pushed.state / "index.json").unlink()
    (pushed.state / "index.json").mkdir()
    assert "pushed" == perform_push(pushed, "a/v2", threshold(6))["status"]
    assert any("stat cache" in event.get("text", "") for event in pushed.events if event["event"] == "warning")


def test_a_damaged_content_is_found_before_anything_is_swapped(pushed):
    """A stored content with other bytes, or none, is exit 8; the tree stays as it is."""
    before = everything(pushed.package)
    sha = json.loads((pushed.state / "bases/1.json").read_text())["files"]["srt/args.py"][0]
    path = pushed.state / "objects" / sha[:2] / sha
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    result = perform(pushed, "rollback", to="base", transaction="x")
    assert (8, "state-damaged") == (result["exit"], result["error"]["kind"])
    assert str(path) in result["error"]["message"]
    path.unlink()
    result = perform(pushed, "rollback", to="base", transaction="y")
    assert (8, "state-damaged") == (result["exit"], result["error"]["kind"])
    assert before == everything(pushed.package)
    context = make_context(pushed, "status")
    assert sha == objects.put(context.state, content)
    assert "rolled_back" == perform(pushed, "rollback", to="base", transaction="z")["status"]


def test_a_stored_content_that_is_damaged_is_stored_anew(pushed):
    """Same name, same size, other bytes, as a power cut may leave it: a put does not trust it."""
    state = make_context(pushed, "status").state
    sha = objects.put(state, b"abc", durable=False)
    path = objects.path_of(state, sha)
    with open(path, "wb") as out:
        out.write(b"abd")
    objects.put(state, b"abc")
    assert b"abc" == objects.read(state, sha)


def test_contents_lie_once(pushed):
    """Equal files are one object."""
    state = make_context(pushed, "status").state
    before = sum(1 for path in (pushed.state / "objects").rglob("*") if path.is_file())
    assert objects.put(state, b"the same") == objects.put(state, b"the same")
    assert before + 1 == sum(1 for path in (pushed.state / "objects").rglob("*") if path.is_file())


def test_objects_on_a_disk_that_refuses(pushed):
    """A file where the folder should be: the path is in the error, no temporary file stays."""
    state = make_context(pushed, "status").state
    sha = objects.digest(b"refused")
    folder = pushed.state / "objects" / sha[:2]
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    folder.write_text("")
    with pytest.raises(Failure) as caught:
        objects.put(state, b"refused")
    assert str(folder) in caught.value.message


def test_the_base_without_a_number(pushed):
    """Release 0 of no base in particular is that of the current release."""
    state = make_context(pushed, "status").state
    assert 1 == releases.load(state, 0)["base"]
    assert releases.references(releases.load(state, 2)) == ["a/v1", "b/v1"]


def test_the_audit_log_survives_a_torn_line(pushed):
    """A line torn by a power cut is left out; a log that cannot be written is a warning."""
    with open(pushed.state / "audit.jsonl", "a", encoding="utf-8") as log:
        log.write('{"at": 1, "oper')
    assert ["pushed", "pushed"] == [entry["status"] for entry in perform(pushed, "audit")["entries"]]
    assert 1 == len(perform(pushed, "audit", lines=2)["entries"])
    perform(pushed, "rollback", transaction="x")  # stands on a line of its own, behind the torn one
    with open(pushed.state / "audit.jsonl", "a", encoding="utf-8") as log:
        log.write('[1]\n"x"\n7\nnull\n')
    assert ["pushed", "pushed", "rolled_back"] == [entry["status"] for entry in perform(pushed, "audit")["entries"]]
    (pushed.state / "audit.jsonl").unlink()
    assert [] == perform(pushed, "audit")["entries"]
    (pushed.state / "audit.jsonl").mkdir()
    assert "pushed" == perform_push(pushed, "a/v2", threshold(6))["status"]
    assert any("audit" in event.get("text", "") for event in pushed.events if event["event"] == "warning")
    assert "io" == perform(pushed, "audit")["error"]["kind"]


def test_only_the_last_transactions_are_remembered(pushed):
    """current.json does not grow for ever."""
    state = make_context(pushed, "status").state
    for number in range(60):
        releases.point_to(state, 2, 1, f"t{number}")
    recent = releases.pointer(state)["recent"]
    assert (50, ["t59", 2], 62 + 1) == (len(recent), recent[-1], releases.pointer(state)["move"])


def test_a_file_that_changes_while_the_base_is_taken(near, monkeypatch):
    """Somebody writes during the first snapshot: refused, and half a snapshot does not stay."""
    real = site._store

    def store(context, directory, path, sha):
        if path == "version.py":
            (near.package / path).unlink()
        return real(context, directory, path, sha)

    monkeypatch.setattr(site, "_store", store)
    result = perform_push(near, "a/v1", threshold(5))
    assert (1, "changed-meanwhile") == (result["exit"], result["error"]["kind"])
    assert not (near.root / "state dir/objects").exists()


def test_long_lists_are_cut(near):
    """Drift of many files: twenty are named and the rest counted; the diff is bounded."""
    for number in range(30):
        (near.package / f"x{number:02}.py").write_text("X = 1\n" * 20)
    result = perform_push(near, "a/v1", threshold(5))
    assert "... and 10 more" in result["error"]["message"]
    for number in range(30):
        (near.package / f"x{number:02}.py").unlink()
    perform_push(near, "a/v1", threshold(5))
    for number in range(30):
        (near.package / f"x{number:02}.py").write_text("X = 1\n" * 20)
    result = perform_push(near, "a/v1", threshold(6))
    assert 201 == len(result["diff"].splitlines())
    assert result["diff"].endswith("more lines\n")


@pytest.mark.parametrize("word", ["syncfs", "sync", "nothing"])
def test_a_snapshot_is_flushed_on_every_platform(near, monkeypatch, word):
    """One call for the file system where there is one, else for all of them."""
    calls = []

    class Library:
        def __init__(self, *_, **__):
            if word == "syncfs":
                self.syncfs = lambda handle: calls.append("syncfs") or 0
            elif word == "sync":
                self.syncfs = lambda handle: -1

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("os.sync", lambda: calls.append("sync"))
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]
    assert ["syncfs" if word == "syncfs" else "sync"] == calls


def test_a_folder_that_cannot_be_synced(near, monkeypatch):
    """Some network file systems refuse: the rename is atomic all the same."""
    real = os.fsync

    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        real(handle)

    monkeypatch.setattr("os.fsync", refuse)
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


def test_a_state_that_others_could_read_is_closed(near):
    """0700, also where the folder was there before; a file in its place is named."""
    folder = near.root / "state dir"
    folder.mkdir(mode=0o755)
    perform_push(near, "a/v1", threshold(5))
    assert 0o700 == folder.stat().st_mode & 0o777
    near.host["state_dir"] = str(near.root / "file")
    (near.root / "file").write_text("")
    result = perform_push(near, "a/v1", threshold(5))
    assert (1, True) == (result["exit"], str(near.root / "file") in result["error"]["message"])


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"at": "x"}', '{"at": 9e99, "files": 3}', '{"at": 9, "files": {"srt/args.py": 3, "version.py": [1]}}'],
)
@pytest.mark.parametrize("cache", ["mirror/index.json", "index.json"])
def test_a_kept_copy_whose_cache_is_damaged(pushed, content, cache):
    """It is hashed anew, and the push is right."""
    if cache == "index.json" and content.startswith("{") and len(content) > 1:
        content = json.dumps({**json.loads(content), "directory": str(pushed.package)})
    (pushed.state / cache).write_text(content)
    result = perform_push(pushed, "a/v2", threshold(6))
    assert ("pushed", ["a/v2", "b/v1"]) == (result["status"], result["patches"])
    shutil.rmtree(pushed.state / "mirror/fakesgl")
    assert "pushed" == perform_push(pushed, "a/v3", threshold(7))["status"]
