"""Scripts without targets run on the live tree, and are transactions all the same."""

import os

import pytest
from support import edit, everything, perform, perform_push, threshold

from deployctl.agent import processes
from deployctl.errors import LinkLost

ARGS = "THRESHOLD = {}\n\n\ndef threshold():\n    return THRESHOLD\n"


def live(near, body: str) -> str:
    return f"import os, pathlib, sys\nroot = pathlib.Path({str(near.package)!r})\n" + body


def test_a_live_script_is_recorded_by_content(near):
    """What it changed, added and removed is found, verified, and taken back by a rollback."""
    before = everything(near.package)
    body = (
        "assert os.getcwd() == sys.argv[1] == os.environ['DEPLOYCTL_PACKAGE_DIR'] == str(root)\n"
        "(root / 'srt/args.py').write_text('THRESHOLD = 9\\n')\n(root / 'srt/data.json').unlink()\n"
        "(root / 'srt/kernels').mkdir()\n(root / 'srt/kernels/k.py').write_text('K = 1\\n')\n"
    )
    result = perform_push(near, "a/v1", live(near, body))
    assert "pushed" == result["status"], result
    assert ["srt/args.py", "srt/data.json", "srt/kernels/k.py"] == [entry["path"] for entry in result["files"]]
    assert ["fakesgl.srt.args", "fakesgl.srt.kernels.k"] == result["verified"]
    assert perform(near, "history")["release"] == 1
    assert "rolled_back" == perform(near, "rollback", transaction="back")["status"]
    assert before == everything(near.package)


def test_a_live_script_keeps_mode_owner_and_links(near):
    """Whatever way it writes its files: a rename over them loses all three, and they come back."""
    worker, linked, real = (near.package / "srt/worker.py", near.package / "srt/linked.py", near.root / "real.py")
    real.write_text("L = 1\n")
    linked.symlink_to(real)
    worker.chmod(0o640)
    os.chown(worker, 4321, 1234)
    body = (
        "for name, text in (('worker', 'W = 1\\n'), ('linked', 'L = 2\\n')):\n"
        "    t = root / 'srt/t'\n    t.write_text(text)\n    t.chmod(0o600)\n    os.replace(t, root / f'srt/{name}.py')\n"
        "os.chmod(root / 'srt/args.py', 0o600)\n"
    )
    assert "pushed" == perform_push(near, "a/v1", live(near, body), adopt=True)["status"]
    status = worker.stat()
    assert (0o640, 4321, 1234, "W = 1\n") == (
        status.st_mode & 0o777,
        status.st_uid,
        status.st_gid,
        worker.read_text(),
    )
    assert linked.is_symlink()
    assert "L = 2\n" == real.read_text()
    assert 0o644 == (near.package / "srt/args.py").stat().st_mode & 0o777


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(3)\n",
        "(root / 'srt/args.py').write_text('def f(:\\n')\n",
        "(root / 'srt/args.py').write_text('raise ValueError\\n')\n",
        "import shutil\nshutil.rmtree(root / 'srt')\n(root / 'srt').write_text('a file now')\nsys.exit(1)\n",
        "import shutil\nshutil.rmtree(root / 'srt')\n(root / 'srt').symlink_to('/')\nsys.exit(1)\n",
        "(root / 'srt/args.py').unlink()\n(root / 'srt/args.py').mkdir()\nsys.exit(1)\n",
        "(root / 'srt/args.py').unlink()\n(root / 'srt/args.py/x').mkdir(parents=True)\n(root / 'srt/args.py/x/new.py').write_text('')\nsys.exit(1)\n",
        "(root / 'srt/linked.py').unlink()\n(root / 'srt/args.py').chmod(0)\nsys.exit(1)\n",
        "t = root / 't'\nt.write_text('L = 3\\n')\nos.replace(t, root / 'srt/linked.py')\nsys.exit(1)\n",
        "(root / 'srt/linked.py').write_text('L = 4\\n')\nsys.exit(1)\n",
        "for p in list(root.rglob('*.py')):\n    p.write_text('X = 1\\n')\nsys.exit(1)\n",
        "os.rename(root / 'srt', root / 'other')\nsys.exit(1)\n",
        "(root / 'srt/empty').rmdir()\n(root / 'more/and/more').mkdir(parents=True)\nsys.exit(1)\n",
    ],
)
def test_whatever_a_failing_live_script_did_is_undone(near, body):
    """Contents, modes, links and folders are as before; nothing of the script's is taken for somebody's edit."""
    real = near.root / "real.py"
    real.write_text("L = 1\n")
    (near.package / "srt/linked.py").symlink_to(real)
    (near.package / "srt/empty").mkdir()
    before = everything(near.package)
    outside = real.read_text()
    result = perform_push(near, "a/v1", live(near, body), adopt=True)
    assert (1, "restored") == (result["exit"], result["status"]), result
    assert before == everything(near.package)
    assert outside == real.read_text()
    assert not (near.root / "state dir/displaced").exists()
    assert not (near.root / "state dir/journal.json").exists()


def test_a_live_script_below_a_replaced_patch_runs_again(near):
    """Its recorded text is applied anew on the new version below it, on the live tree."""
    perform_push(near, "a/v1", threshold(5))
    body = "p = root / 'srt/worker.py'\np.write_text('T = ' + (root / 'srt/args.py').read_text().split()[2] + '\\n')\n"
    perform_push(near, "b/v1", live(near, body))
    assert "T = 5\n" == (near.package / "srt/worker.py").read_text()
    result = perform_push(near, "a/v2", threshold(6))
    assert ["a/v2", "b/v1"] == result["patches"]
    assert "T = 6\n" == (near.package / "srt/worker.py").read_text()
    planned = perform_push(near, "a/v3", threshold(7), dry_run=True)
    assert ["b/v1 runs on the live tree: a dry run cannot show what it does"] == planned["warnings"]


def test_two_live_scripts_and_the_second_fails(near):
    """The tree goes back to before the first, particulars included."""
    (near.package / "srt/args.py").chmod(0o640)
    first = live(near, "(root / 'srt/args.py').unlink()\n")
    second = live(near, "(root / 'srt/worker.py').write_text('S = 1\\n')\nos._exit(FAIL)\n")
    perform_push(near, "low/v1", threshold(5))
    perform_push(near, "a/v1", first)
    perform_push(near, "b/v1", second.replace("FAIL", "int(not (root / 'version.py').exists())"))
    before = everything(near.package)
    gone = edit(["version.py"], "(root / 'version.py').unlink()\n")
    result = perform_push(near, "low/v2", gone)
    assert ("restored", "script-failed") == (result["status"], result["error"]["kind"]), result
    assert before == everything(near.package)


def test_a_live_script_may_finish_within_the_second(near):
    """Its files get a later second than before, so that bytecode compiled a moment ago cannot fit."""
    module = near.package / "srt/args.py"
    seconds = [int(module.stat().st_mtime)]
    for number in (1, 2, 3):
        body = f"p = root / 'srt/args.py'\ns = p.stat()\np.write_text({ARGS.format(number)!r})\n"
        body += "os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))\n"
        assert "pushed" == perform_push(near, "a/v1", live(near, body))["status"]
        assert ARGS.format(number) == module.read_text()
        seconds.append(int(module.stat().st_mtime))
    assert sorted(set(seconds)) == seconds


def test_what_a_script_leaves_running_is_ended(near):
    """A process that has left its group and would write after the commit: staged or live, it is gone by then."""
    pid = near.root / "pid"
    late = f"import time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\nwhile True:\n    time.sleep(0.05)\n"
    body = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import os\\n' + {late!r}], "
        f"start_new_session=True)\nwhile not (os.path.exists({str(pid)!r}) and open({str(pid)!r}).read()):\n    time.sleep(0.01)\n"
    )
    for reference, script in (
        ("a/v1", live(near, body + "(root / 'version.py').write_text('')\n")),
        ("b/v1", edit(["srt/data.json"], body + "(root / 'srt/data.json').write_text('{}')\n")),
    ):
        assert "pushed" == perform_push(near, reference, script)["status"]
        assert None is processes.start_time(int(pid.read_text())), "it lives"
        pid.unlink()


MOVED = "import shutil\naside = root.parent / 'aside'\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (MOVED + "os.rename(root, aside)\nos.symlink(aside, root)\n", "is now a symbolic link to"),
        (MOVED + "os.rename(root, aside)\n", "is gone"),
        (
            MOVED + "shutil.move(root / 'srt', aside)\nos.symlink(aside, root / 'srt')\n",
            "srt is now a symbolic link to",
        ),
        (MOVED + "shutil.move(root / 'srt', root / 'moved')\nos.symlink('moved', root / 'srt')\n", "srt is now a symb"),
        ("(root / 'srt/empty').rmdir()\n(root / 'srt/empty').write_text('')\n", "the folder srt/empty is now a file"),
        ("(root / 'srt/args.py').unlink()\n(root / 'srt/args.py').mkdir()\n", "the file srt/args.py is now a folder"),
        ("(root / 'kernels').symlink_to('/usr')\n", "kernels is now a symbolic link to /usr"),
        ("(root / 'new').mkdir()\nos.mkfifo(root / 'new/pipe')\n", "new/pipe is no file and no folder"),
        ("(root / 'srt/worker.py').unlink()\n(root / 'srt/worker.py').symlink_to('gone.py')\n", "srt/worker.py is now"),
    ],
)
@pytest.mark.parametrize("ending", ["", "sys.exit(1)\n"])
def test_what_no_release_can_hold_is_refused(near, body, words, ending):
    """Links to folders, files in the place of folders and the reverse, pipes: no rollback could take them back. They
    are refused and undone, the package's own folder included, and the next push works."""
    (near.package / "srt/empty").mkdir()
    (near.package / "srt/old").symlink_to("/usr/share")
    perform_push(near, "low/v1", threshold(5))
    before = everything(near.package)
    result = perform_push(near, "a/v1", live(near, body + ending))
    kind = "script-failed" if ending else "not-recordable"
    assert (1, "restored", kind) == (result["exit"], result["status"], result["error"]["kind"]), result
    assert ending or words in result["error"]["message"]
    assert not near.package.is_symlink()
    assert before == everything(near.package)
    assert "unchanged" == perform_push(near, "low/v1", threshold(5))["status"]
    assert "rolled_back" == perform(near, "rollback", transaction="back")["status"]


@pytest.mark.parametrize("ending", ["", "sys.exit(1)\n"])
def test_a_live_script_does_not_reach_other_names_of_its_files(near, ending):
    """Hard links, as uv installs packages: the cache and other environments keep theirs, bytecode stays valid."""
    twins = {name: near.root / f"cache-{name}.py" for name in ("args", "worker")}
    for name, twin in twins.items():
        os.link(near.package / f"srt/{name}.py", twin)
    (near.package / "srt/worker.py").chmod(0o640)
    os.chown(near.package / "srt/worker.py", 4321, 1234)
    old = {name: (twin.read_text(), twin.stat().st_mtime_ns) for name, twin in twins.items()}
    before = everything(near.package)
    body = "for name in ('args', 'data'):\n    (root / 'srt' / name).with_suffix('.py').open('a').write('X = 1\\n')\n"
    result = perform_push(near, "a/v1", live(near, body + ending))
    assert ("restored" if ending else "pushed") == result["status"], result
    assert old == {name: (twin.read_text(), twin.stat().st_mtime_ns) for name, twin in twins.items()}
    assert old["worker"][1] == (near.package / "srt/worker.py").stat().st_mtime_ns
    if not ending:
        perform(near, "rollback", transaction="back")
    assert before == everything(near.package)
    assert [] == [path.name for path in near.package.rglob(".deployctl-*")]


@pytest.mark.parametrize("place", [".", "srt"])
def test_killed_when_a_live_script_had_put_a_link_in_the_place_of_a_folder(near, place):
    """The agent dies behind the script: the next command makes the folder again, the package's own included."""
    before = everything(near.package)
    body = MOVED + f"moved = os.path.realpath(root / {place!r})\nos.rename(moved, aside)\nos.symlink(aside, moved)\n"
    for at in range(1, 60):
        with pytest.raises(LinkLost):
            near.push("a/v1", live(near, body), transaction=f"killed-{at}", crash_at=at)
        if (near.package / place).is_symlink() or near.package.is_symlink():
            break
        near.ask("history")
    else:
        raise AssertionError("the script never ran")
    near.ask("history")
    assert not near.package.is_symlink()
    assert before == everything(near.package)
    assert "pushed" == near.push("a/v1", threshold(5), transaction="after")["status"]
