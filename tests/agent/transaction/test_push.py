"""push: what it does to the tree, what it refuses, and what it says."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from support import edit, everything, perform, perform_push, threshold

ARGS = "THRESHOLD = {}\n\n\ndef threshold():\n    return THRESHOLD\n"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_push_is_a_release(near):
    """The first push makes release 1 and tells files, hashes, modules, steps and the stack."""
    result = perform_push(near, "a/v1", threshold(5))
    assert result["exit"] == 0, result
    assert ("pushed", 1, 0, ["a/v1"]) == tuple(result[key] for key in ("status", "release", "previous", "patches"))
    expected = [{"path": "srt/args.py", "before": sha(ARGS.format(0)), "after": sha(ARGS.format(5))}]
    assert expected == result["files"]
    assert ["fakesgl.srt.args"] == result["verified"]
    assert ["preflight", "stage", "run", "compile", "swap", "import", "commit"] == list(result["steps"])
    assert ARGS.format(5) == (near.package / "srt/args.py").read_text()
    history = perform(near, "history")
    assert [(0, [], False), (1, ["a/v1"], True)] == [
        (entry["release"], entry["patches"], entry["current"]) for entry in history["releases"]
    ]
    assert ["pushed"] == [entry["status"] for entry in perform(near, "audit")["entries"]]
    assert 0o700 == (near.root / "state dir").stat().st_mode & 0o777


def test_the_same_patch_again_writes_nothing(near):
    """Unchanged: no file of the package, no release, no journal is written."""
    perform_push(near, "a/v1", threshold(5))
    state = near.root / "state dir"
    before = {path: path.stat().st_mtime_ns for path in [*near.package.rglob("*"), *(state / "releases").rglob("*")]}
    result = perform_push(near, "a/v1", threshold(5))
    assert ("unchanged", 1, [], []) == tuple(result[key] for key in ("status", "release", "files", "verified"))
    after = {path: path.stat().st_mtime_ns for path in [*near.package.rglob("*"), *(state / "releases").rglob("*")]}
    assert before == after


def test_the_same_name_with_other_content_is_another_release(near):
    """A reference whose script was edited replaces itself."""
    perform_push(near, "a/v1", threshold(5))
    result = perform_push(near, "a/v1", threshold(6))
    assert ("pushed", 2, ["a/v1"]) == tuple(result[key] for key in ("status", "release", "patches"))
    assert ARGS.format(6) == (near.package / "srt/args.py").read_text()


def test_a_version_replaces_its_series_in_place(near):
    """What lies above is applied anew on the new version; what lies below is kept."""
    append = "p = root / 'srt/args.py'\np.write_text(p.read_text() + '{} = ' + str(p.read_text().count('=')) + '\\n')\n"
    perform_push(near, "low/v1", edit(["srt/args.py"], append.format("LOW")))
    perform_push(near, "mid/v1", edit(["srt/args.py"], append.format("MID")))
    perform_push(near, "top/v1", edit(["srt/args.py"], append.format("TOP")))
    result = perform_push(near, "mid/v2", edit(["srt/args.py"], append.format("X = 1\\nMID2")))
    assert ["low/v1", "mid/v2", "top/v1"] == result["patches"]
    assert ARGS.format(0) + "LOW = 1\nX = 1\nMID2 = 2\nTOP = 4\n" == (near.package / "srt/args.py").read_text()


def test_required_series_must_lie_below(near):
    """`requires` is checked against what lies below the place the patch takes."""
    needy = threshold(5).replace("# ///\nimport", '# requires = ["base"]\n# ///\nimport')
    result = perform_push(near, "a/v1", needy)
    assert (2, "requires") == (result["exit"], result["error"]["kind"])
    assert "deployctl push --patch base/VERSION" in result["error"]["hint"]
    perform_push(near, "base/v1", edit(["srt/worker.py"], "(root / 'srt/worker.py').write_text('W = 1\\n')\n"))
    assert "pushed" == perform_push(near, "a/v1", needy)["status"]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ('package = "fakesgl"', 'package = "othersgl"', "other-package"),
        ('package = "fakesgl"', 'package = "fakesgl"\n# versions = ">=2"', "version"),
    ],
)
def test_a_patch_that_does_not_fit_is_a_usage_error(near, old, new, kind):
    """Another package or another version: exit 2, nothing is stored on the host."""
    result = perform_push(near, "a/v1", threshold(5).replace(old, new))
    assert (2, kind, "failed") == (result["exit"], result["error"]["kind"], result["status"])
    assert not (near.root / "state dir/current.json").exists()


def test_a_package_that_was_edited_before_the_first_push_is_refused_or_adopted(near):
    """Files that differ from the wheel's RECORD are listed; --adopt makes them part of the base."""
    (near.package / "srt/args.py").write_text("MINE = 1\n")
    (near.package / "srt/new file.py").write_text("")
    result = perform_push(near, "a/v1", threshold(5))
    assert (9, "drift", "drift") == (result["exit"], result["error"]["kind"], result["status"])
    assert ["srt/args.py", "srt/new file.py"] == [entry["path"] for entry in result["drift"]]
    assert "--adopt" in result["error"]["hint"]
    change = edit(["srt/worker.py"], "(root / 'srt/worker.py').write_text('W = 1\\n')\n")
    assert "pushed" == perform_push(near, "a/v1", change, adopt=True)["status"]
    perform(near, "rollback", to="base")
    assert "MINE = 1\n" == (near.package / "srt/args.py").read_text()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("print('about to fail')\nsys.exit(3)\n", "script-failed", ["exit status 3", "about to fail"]),
        ("os.kill(os.getpid(), 9)\n", "script-failed", ["SIGKILL"]),
        ("(root / 'srt/worker.py').write_text('')\n", "undeclared", ["outside its targets: srt/worker.py"]),
        ("(root / 'srt/args.py').unlink(); (root / 'x.py').write_text('')\n", "undeclared", ["x.py"]),
        ("(root / 'srt/args.py').write_text('def f(:\\n')\n", "compile", ["srt/args.py:1", "def f(:"]),
        ("import time\ntime.sleep(60)\n", "timeout", ["did not end within 0.2 s"]),
        ("LIVE.write_text('REACHED = 1\\n')\n", "undeclared", ["changed the live tree: srt/args.py"]),
        ("(root / 'srt/args.py').write_text('raise ValueError(7)\\n')\n", "import", ["ValueError: 7"]),
    ],
)
def test_a_patch_that_fails_leaves_the_tree_as_it_was(near, body, kind, words):
    """Whatever goes wrong, in the script or after it: exit 1 with the cause, and nothing has changed."""
    before = everything(near.package)
    head = f"LIVE = pathlib.Path({str(near.package)!r}) / 'srt/args.py'\n"
    script = edit(["srt/args.py"], head + body)
    if kind == "timeout":
        script = script.replace("# ///\nimport", '# timeout = "0.2s"\n# ///\nimport')
    result = perform_push(near, "a/v1", script)
    assert (1, kind) == (result["exit"], result["error"]["kind"]), result
    for word in words:
        assert word in result["error"]["message"]
    assert before == everything(near.package)
    live_was_touched = kind == "import" or "live tree" in words[0]
    assert ("restored" if live_was_touched else "failed") == result["status"]
    assert 0 == result["release"]
    assert not (near.root / "state dir/journal.json").exists()
    assert not (near.root / "state dir/staging").exists()
    assert [] == [entry["release"] for entry in perform(near, "history")["releases"] if entry["release"]]
    assert "pushed" == perform_push(near, "a/v1", threshold(5))["status"]


@pytest.mark.parametrize("ending", ["", "sys.exit(1)\n"])
def test_somebody_saves_a_file_while_a_staged_script_runs(near, ending):
    """Who it was cannot be known: the script is not blamed alone, the tree is put back, and the first thing that is
    said tells where a copy of the file lies."""
    body = f"edited = pathlib.Path({str(near.package)!r}) / 'srt/worker.py'\nedited.write_text('BY = 1\\n')\n"
    before = everything(near.package)
    result = perform_push(near, "a/v1", edit(["srt/args.py"], body + ending))
    assert (1, "restored") == (result["exit"], result["status"]), result
    copy = near.root / "state dir/displaced/tx1/srt/worker.py"
    assert "BY = 1\n" == copy.read_text()
    assert f"copied to {copy.parents[1]} before it was put back" in result["error"]["message"]
    assert ending or "it or somebody else changed the live tree: srt/worker.py" in result["error"]["message"]
    assert str(copy.parents[1]) == result["displaced"]
    assert before == everything(near.package)


def test_diffs_are_strict_and_declared(near):
    """A diff changes, adds and removes files; one that touches a file outside its targets is refused."""
    diff = (
        '--- a/srt/data.json\n+++ b/srt/data.json\n@@ -1 +1 @@\n-{"a": 1}\n+{"a": 2}\n'
        "--- /dev/null\n+++ b/srt/add.py\n@@ -0,0 +1 @@\n+A = 1\n"
        '--- a/version.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-__version__ = "1.2.3"\n'
    )
    before = everything(near.package)
    patch, blobs = near.patch("a/v1", diff)
    patch["metadata"]["targets"] = ["srt/data.json"]
    refused = perform(near, "push", blobs, patch=patch, transaction="x")
    assert "srt/add.py" in refused["error"]["message"]
    assert before == everything(near.package)
    result = perform_push(near, "a/v1", diff)
    assert "pushed" == result["status"], result
    assert "A = 1\n" == (near.package / "srt/add.py").read_text()
    assert not (near.package / "version.py").exists()
    perform(near, "rollback")
    assert before == everything(near.package)


def test_verify_says_what_is_imported(near):
    """`verify` names the modules of a patch; --import adds; without it the changed files' modules are taken."""
    both = ["srt/args.py", "srt/worker.py"]
    body = "for n in ('args', 'worker'):\n    p = root / f'srt/{n}.py'\n    p.write_text(p.read_text() + 'X = 1\\n')\n"
    assert ["fakesgl.srt.args", "fakesgl.srt.worker"] == perform_push(near, "a/v1", edit(both, body))["verified"]
    chosen = edit(both, body + "#\n").replace("# ///\nimport", '# verify = ["fakesgl.srt.worker"]\n# ///\nimport')
    assert ["fakesgl.srt.worker"] == perform_push(near, "a/v2", chosen)["verified"]
    none = edit(both, body + "##\n").replace("# ///\nimport", "# verify = []\n# ///\nimport")
    result = perform_push(near, "a/v3", none, imports=["json", "fakesgl.version"])
    assert ["json", "fakesgl.version"] == result["verified"]
    failed = perform_push(near, "a/v4", edit(both, body), imports=["nothing.of.that.name"])
    assert ("restored", "import") == (failed["status"], failed["error"]["kind"])


def test_a_patch_with_a_verify_list_does_not_speak_for_another(near):
    """A stack where one patch names its modules and another does not: the other's files are still imported."""
    quiet = edit(["version.py"], "p = root / 'version.py'\np.write_text(p.read_text() + 'Y = 1\\n')\n")
    quiet = quiet.replace("# ///\nimport", "# verify = []\n# ///\nimport")
    perform_push(near, "a/v1", quiet)
    perform_push(near, "b/v1", threshold(5))
    back = perform(near, "rollback", to="base", transaction="back")
    assert ["fakesgl.srt.args"] == back["verified"]


def test_a_dry_run_on_a_new_host_leaves_nothing(near):
    """The plan and the diff, and not even a state directory."""
    before = everything(near.package)
    result = perform_push(near, "a/v1", threshold(5), dry_run=True)
    assert ("planned", 0, 0) == (result["status"], result["exit"], result["release"]), result
    assert "-THRESHOLD = 0\n+THRESHOLD = 5\n" in result["diff"]
    assert ["srt/args.py"] == [entry["path"] for entry in result["files"]]
    assert before == everything(near.package)
    assert not (near.root / "state dir").exists()
    assert (2, "nothing-to-roll-back") == (
        perform(near, "rollback", dry_run=True)["exit"],
        perform(near, "rollback", dry_run=True)["error"]["kind"],
    )


def test_a_dry_run_changes_nothing(near):
    """No release, no audit line, the tree untouched; live scripts are named because they are not run."""
    perform_push(near, "a/v1", threshold(5))
    before, audit = everything(near.package), perform(near, "audit")["entries"]
    result = perform_push(
        near, "b/v1", edit(["srt/worker.py"], "(root / 'srt/worker.py').write_text('')\n"), dry_run=True
    )
    assert "planned" == result["status"], result
    assert "+++ b/srt/worker.py\n" in result["diff"], "emptied is not removed"
    live = perform_push(near, "c/v1", f"open({str(near.package / 'srt/args.py')!r}, 'w').write('')\n", dry_run=True)
    assert ["c/v1 runs on the live tree: a dry run cannot show what it does"] == live["warnings"]
    failed = perform_push(near, "d/v1", edit(["srt/args.py"], "sys.exit(1)\n"), dry_run=True)
    assert "failed" == failed["status"]
    back = perform(near, "rollback", dry_run=True)
    assert "-THRESHOLD = 5\n+THRESHOLD = 0\n" in back["diff"]
    assert before == everything(near.package)
    assert audit == perform(near, "audit")["entries"]
    assert 1 == perform(near, "history")["release"]


def test_names_of_any_kind(near):
    """Spaces, other alphabets and bytes that are no text: pushed, tracked and rolled back under their right names."""
    script = edit(
        ["Šablony/"],
        "d = root / 'Šablony'\nd.mkdir()\n(d / 'my mod.py').write_text('M = 1\\n')\n"
        "open(os.fsencode(str(d)) + b'/raw\\xff.txt', 'wb').write(b'r')\n",
    )
    before = everything(near.package)
    patch, blobs = near.patch("ů v/1 final", script, filename="apply patch ů.py")
    result = perform(near, "push", blobs, patch=patch, transaction="names")
    assert "pushed" == result["status"], result
    assert ["Šablony/my mod.py", "Šablony/raw\udcff.txt"] == [entry["path"] for entry in result["files"]]
    assert b"r" == Path(os.fsdecode(os.fsencode(near.package / "Šablony") + b"/raw\xff.txt")).read_bytes()
    assert "rolled_back" == perform(near, "rollback", transaction="back")["status"]
    assert before == everything(near.package)


def test_mode_owner_links_and_attributes_stay(near):
    """A staged push keeps what a file is besides its content; a hard link elsewhere keeps the old content."""
    args, worker = near.package / "srt/args.py", near.package / "srt/worker.py"
    real = near.root / "real worker.py"
    worker.rename(real)
    worker.symlink_to(real)
    args.chmod(0o640)
    os.chown(args, 4321, 1234)
    os.setxattr(args, "user.note", b"kept")
    cache = near.root / "cache.py"
    os.link(args, cache)
    body = "for n in ('args', 'worker'):\n    p = root / f'srt/{n}.py'\n    p.write_text(p.read_text() + 'X = 1\\n')\n"
    assert "pushed" == perform_push(near, "a/v1", edit(["srt/args.py", "srt/worker.py"], body))["status"]
    status = args.stat()
    assert (0o640, 4321, 1234) == (status.st_mode & 0o777, status.st_uid, status.st_gid)
    assert b"kept" == os.getxattr(args, "user.note")
    assert ARGS.format(0) == cache.read_text()
    assert worker.is_symlink()
    assert real.read_text().endswith("X = 1\n")


def test_new_files_can_be_read_by_the_server(near):
    """A strict umask of the operator does not end in files that only root can read; folders follow their parent."""
    os.chown(near.package / "srt", 4321, 1234)
    script = edit(
        ["srt/deep/"], "(root / 'srt/deep/er').mkdir(parents=True)\n(root / 'srt/deep/er/n.py').write_text('')\n"
    )
    before = os.umask(0o077)
    try:
        assert "pushed" == perform_push(near, "a/v1", script)["status"]
        assert 0o077 == os.umask(0o077)
    finally:
        os.umask(before)
    made = [near.package / "srt/deep", near.package / "srt/deep/er", near.package / "srt/deep/er/n.py"]
    assert [0o755, 0o755, 0o644] == [path.stat().st_mode & 0o777 for path in made]
    assert [(4321, 1234)] * 3 == [(path.stat().st_uid, path.stat().st_gid) for path in made]


def test_no_old_bytecode_runs(near):
    """Same size, same second, compiled before: a fresh interpreter sees the new value, then the old one again."""
    module = near.package / "srt/args.py"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def value() -> str:
        done = subprocess.run(
            [near.python, "-c", "from fakesgl.srt import args; print(args.threshold())"],
            capture_output=True,
            text=True,
            check=True,
            env=env,
            cwd=near.home,
        )
        return done.stdout.strip()

    assert "0" == value()
    seen = [module.stat().st_mtime]
    for number in (5, 6, 7):
        perform_push(near, "a/v1", threshold(number))
        assert str(number) == value()
        seen.append(module.stat().st_mtime)
    for expected in ("6", "5", "0"):
        assert "rolled_back" == perform(near, "rollback", transaction=f"back{expected}")["status"]
        assert expected == value()
        seen.append(module.stat().st_mtime)
    assert len({int(second) for second in seen}) == len(seen), "no two contents within one second"


def test_scripts_with_crlf_run(near):
    """A script saved on Windows works as with LF; the package's files are not converted."""
    result = perform_push(near, "a/v1", threshold(5).replace("\n", "\r\n"))
    assert "pushed" == result["status"], result
    assert ARGS.format(5).encode() == (near.package / "srt/args.py").read_bytes()


def test_a_known_bad_patch_is_said_and_goes_on(near):
    """known_bad: loudly, and nothing more."""
    script = threshold(5).replace("# ///\nimport", '# known_bad = "crashes above 16"\n# ///\nimport')
    result = perform_push(near, "a/v1", script)
    assert ("pushed", ["a/v1 is known to be bad: crashes above 16"]) == (result["status"], result["known_bad"])


def test_the_output_of_scripts_is_shown(near):
    """What a script prints comes as events and in the result."""
    result = perform_push(near, "a/v1", threshold(5) + "print('patched', root)\n")
    assert "patched" in result["output"]
    assert any("patched" in event.get("text", "") for event in near.events if event["event"] == "output")


def test_what_did_not_arrive_whole_is_refused(near):
    """A patch whose content is not that of its hash is not run."""
    patch, _ = near.patch("a/v1", threshold(5))
    result = perform(near, "push", {"patch": b"torn"}, patch=patch, transaction="x")
    assert "link-lost" == result["error"]["kind"]


def test_a_transaction_id_is_a_word(near):
    """It names folders on the host."""
    result = perform_push(near, "a/v1", threshold(5), transaction="../../x")
    assert (2, "usage") == (result["exit"], result["error"]["kind"])


def test_a_script_may_use_its_place(near):
    """argv[1], the working directory and DEPLOYCTL_PACKAGE_DIR are the staged package, which has the package's name."""
    body = (
        "assert os.getcwd() == os.environ['DEPLOYCTL_PACKAGE_DIR'] == sys.argv[1], os.getcwd()\n"
        "assert root.name == 'fakesgl' and root != pathlib.Path(LIVE)\n"
        "open('srt/args.py', 'a').write('HERE = 1\\n')\n"
    )
    result = perform_push(near, "a/v1", edit(["srt/args.py"], f"LIVE = {str(near.package)!r}\n" + body))
    assert "pushed" == result["status"], result


def test_a_plan_can_be_applied_as_a_patch(near):
    """The diff of a dry run is a patch: added, removed, emptied and made-empty files, form feeds, no newline at the
    end; pushed as a diff it makes the same tree."""
    body = (
        "p = root / 'srt/args.py'\np.write_text(p.read_text().replace('= 0', '= 5') + 'F = 1\\f\\nG = 2')\n"
        "(root / 'srt/data.json').unlink()\n(root / 'srt/worker.py').write_text('')\n"
        "(root / 'srt/void.py').write_text('')\n(root / 'srt/fresh.py').write_text('N = 1\\n')\n"
    )
    script = edit(["srt/"], body)
    plan = perform_push(near, "a/v1", script, dry_run=True)["diff"]
    assert "pushed" == perform_push(near, "a/v1", script)["status"]
    wanted = everything(near.package)
    perform(near, "rollback", to="base")
    result = perform_push(near, "b/v1", plan)
    assert "pushed" == result["status"], result
    assert wanted == everything(near.package)


@pytest.mark.parametrize(
    ("prepare", "targets", "body", "words"),
    [
        (
            "(srt / 'x.py').symlink_to(root / 'no/x.py')",
            ["srt/x.py"],
            "(srt / 'x.py').write_text('')",
            "no/x.py, which",
        ),
        (
            "(root / 'out').mkdir()\n(root / 'out/m.py').write_text('M = 1')\n(srt / 'l').symlink_to(root / 'out')",
            ["srt/l/"],
            "(srt / 'l').mkdir()\n(srt / 'l/m.py').write_text('M = 2')",
            "srt/l is a symbolic link",
        ),
        (
            "(srt / 't').write_text('')",
            ["srt/t", "srt/t/"],
            "(srt / 't').unlink()\n(srt / 't').mkdir()\n(srt / 't/a.py').write_text('')",
            "srt/t is no folder",
        ),
        (
            "(srt / 'd').mkdir()\n(srt / 'd/a.py').write_text('')",
            ["srt/d", "srt/d/"],
            "(srt / 'd/a.py').unlink()\n(srt / 'd').rmdir()\n(srt / 'd').write_text('')",
            "srt/d cannot be written: it is a folder",
        ),
        ("os.mkfifo(srt / 'p.py')", ["srt/p.py"], "(srt / 'p.py').write_text('')", "no ordinary file"),
        (
            "(srt / 'w.py').symlink_to('worker.py')",
            ["srt/worker.py"],
            "(srt / 'worker.py').write_text('W = 2')",
            "srt/w.py and srt/worker.py are one file",
        ),
    ],
)
@pytest.mark.parametrize("below", ["nothing", "a live script"])
def test_what_stands_in_the_way_is_named(near, prepare, targets, body, words, below):
    """Links, folders and pipes where a file should go: refused before the swap; nothing outside is written, nothing
    is made of a link that a rollback could not make again. Likewise when a live script above needs the files there."""
    exec(prepare, {"os": os, "srt": near.package / "srt", "root": near.root})
    if below == "a live script":
        series = "a/v2"
        assert "pushed" == perform_push(near, "a/v1", threshold(5), adopt=True)["status"]
        assert "pushed" == perform_push(near, "l/v1", "open('version.py', 'a').write('L = 1\\n')\n")["status"]
    else:
        series = "a/v1"
    before, outside = everything(near.package), sorted(near.root.glob("[no]*/**"))
    result = perform_push(near, series, edit(targets, f"srt = root / 'srt'\n{body}\n"), adopt=True)
    assert ("failed", 1, "in-the-way") == (result["status"], result["exit"], result["error"]["kind"]), result
    assert words in result["error"]["message"]
    assert before == everything(near.package)
    assert outside == sorted(near.root.glob("[no]*/**"))


def test_files_that_are_one_by_links_change_alike(near):
    """Both declared and changed to the same content: pushed and rolled back; the link stays a link."""
    (near.package / "srt/w.py").symlink_to("worker.py")
    before = everything(near.package)
    body = "for n in 'w', 'worker':\n    (root / f'srt/{n}.py').write_text('W = 2')\n"
    assert "pushed" == perform_push(near, "a/v1", edit(["srt/w.py", "srt/worker.py"], body), adopt=True)["status"]
    assert (near.package / "srt/w.py").is_symlink()
    assert "W = 2" == (near.package / "srt/worker.py").read_text()
    assert "rolled_back" == perform(near, "rollback", transaction="x")["status"]
    assert before == everything(near.package)
