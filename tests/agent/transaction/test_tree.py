"""The tree as hashes, its stat cache, and the writing of its files."""

import os
import random
import time

import pytest

from deployctl.agent import objects, staging, state, tree, writer
from deployctl.agent.failure import Failure


@pytest.fixture
def folder(tmp_path):
    """A small tree with everything that does not belong to it."""
    root = tmp_path / "package"
    for name in ("a.py", "sub/b.py", "sub/deep/c.txt", "__pycache__/a.cpython-311.pyc", ".git/config", "old.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".deployctl-x").write_text("")
    (root / "dangling").symlink_to("nowhere")
    (root / "linked.py").symlink_to("a.py")
    (root / "out").symlink_to("/etc")
    os.mkfifo(root / "pipe")
    return root


def test_what_belongs_to_a_tree(folder):
    """Regular files and links to them; no bytecode, no version control, no pipes, no folders behind links."""
    entries, index = tree.scan(str(folder))
    assert ["a.py", "linked.py", "sub/b.py", "sub/deep/c.txt"] == sorted(entries)
    assert ["sub", "sub/deep"] == sorted(index["folders"])
    odd: list = []
    assert 4 == len(list(tree.walk(str(folder), None, odd)))
    assert {"dangling", "linked.py", "old.pyc", "out", "pipe", "__pycache__", ".git"} == set(odd)


def test_the_cache_sees_every_change(folder):
    """Size, times and inode unchanged means unchanged; an edit that puts size and time back is seen by its ctime, and
    one within the clock's granularity because fresh entries are not trusted."""
    path = folder / "a.py"
    _, index = tree.scan(str(folder))
    for number in range(200):
        text = f"{number:04}"
        before = path.stat()
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        entries, index = tree.scan(str(folder), index)
        assert objects.digest(text.encode()) == entries["a.py"].sha


def test_the_cache_is_used(folder, monkeypatch):
    """Old entries are not hashed again."""
    _, index = tree.scan(str(folder))
    index["at"] = time.time_ns() + 10**9
    monkeypatch.setattr(tree, "hash_file", lambda path: pytest.fail(f"hashed {path}"))
    assert 4 == len(tree.scan(str(folder), index)[0])


def test_files_that_go_while_they_are_read(folder, monkeypatch):
    """Removed between the listing and the reading: not there. Unreadable for another reason: named."""
    real = tree.hash_file

    def vanish(path):
        os.unlink(path)
        return real(path)

    monkeypatch.setattr(tree, "hash_file", vanish)
    assert {} == tree.scan(str(folder / "sub"))[0]

    def broken(path):
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(tree, "hash_file", broken)
    with pytest.raises(Failure, match="cannot be read: Input/output error") as caught:
        tree.scan(str(folder))
    assert "io" == caught.value.kind


def test_folders_that_go_while_they_are_listed(folder):
    """A subfolder that is gone is empty; the package itself must be there."""
    found = tree.walk(str(folder))
    next(found)
    for path in (folder / "sub/deep/c.txt", folder / "sub/b.py"):
        path.unlink()
    (folder / "sub/deep").rmdir()
    (folder / "sub").rmdir()
    assert "sub/b.py" not in [path for path, _, _ in found]
    with pytest.raises(Failure, match="cannot be read"):
        tree.scan(str(folder / "nowhere"))


def test_a_writer_that_is_left_leaves_nothing(folder):
    """Prepared and not swapped: no temporary files, no folders made in vain."""
    with writer.Writer(str(folder), "t") as files:
        files.prepare("new/deep/x.py", b"x", 0o644)
        files.prepare("a.py", b"y", None)
    assert not (folder / "new").exists()
    assert [folder / ".deployctl-x"] == list(folder.rglob(".deployctl-*"))
    with writer.Writer(str(folder), "t") as files:
        files.prepare("new/x.py", b"x", 0o644)
        (folder / "new/other").write_text("")
    assert (folder / "new/other").exists()


def test_a_writer_swaps_and_removes(folder):
    """Contents, bytecode in every form, folders that became empty but for those that stay."""
    (folder / "sub/deep/__pycache__").mkdir()
    (folder / "sub/deep/__pycache__/gone.pyc").write_text("")
    (folder / "__pycache__/a.cpython-38.opt-1.pyc").write_text("")
    (folder / "__pycache__/ab.cpython-38.pyc").write_text("")
    (folder / "a.pyc").write_text("")
    with writer.Writer(str(folder), "t", kept_folders=["sub"]) as files:
        files.prepare("a.py", b"new", None)
        files.remove("sub/deep/c.txt")
        files.remove("sub/b.py")
        files.remove("not/there.py")
        files.swap()
    assert "new" == (folder / "a.py").read_text()
    assert ["ab.cpython-38.pyc"] == os.listdir(folder / "__pycache__")
    assert not (folder / "a.pyc").exists()
    assert [] == os.listdir(folder / "sub")


def test_a_swap_that_fails_names_the_file(folder):
    """A target that has become a folder."""
    with writer.Writer(str(folder), "t") as files:
        files.prepare("a.py", b"new", None)
        (folder / "a.py").unlink()
        (folder / "a.py").mkdir()
        with pytest.raises(Failure) as caught:
            files.swap()
    assert str(folder / "a.py") in caught.value.message
    assert [folder / ".deployctl-x"] == list(folder.rglob(".deployctl-*"))


def test_bytecode_elsewhere(folder, tmp_path, monkeypatch):
    """PYTHONPYCACHEPREFIX puts it into a tree of its own."""
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / str(folder)[1:]
    kept.mkdir(parents=True)
    (kept / "a.cpython-311.pyc").write_text("")
    writer.drop_bytecode(str(folder / "a.py"))
    writer.drop_bytecode(str(folder / "sub/deep/c.txt"))
    assert [] == os.listdir(kept)


def test_seconds_only_grow(folder):
    """Each write is a later second than the last, also over a file from the future."""
    path = folder / "a.py"
    for old in (time.time() - 100, time.time(), time.time() + 100):
        writer.set_new_second(path, old)
        assert int(path.stat().st_mtime) > int(old)


def test_putting_back_tries_twice_on_a_full_disk_only(folder):
    """Any other trouble is told at once."""
    (folder / "sub/deep/c.txt").unlink()
    (folder / "sub/deep").rmdir()
    (folder / "sub/deep").write_text("in the way")
    with writer.Writer(str(folder), "t") as files:
        with pytest.raises(Failure):
            files.put_back([("sub/deep/c.txt", lambda: b"x", 0o644)], [])
        with pytest.raises(ZeroDivisionError):
            files.put_back([("a.py", lambda: 1 // 0, None)], [])
        full = OSError(28, "No space left on device")
        failure = state.disk_failure(full, "x")
        failure.__cause__ = full
        assert not files._make_room("nowhere/at/all", failure)


def test_attributes_that_cannot_be_carried(folder, monkeypatch):
    """A file system that refuses them does not stop the write."""

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("shutil.copystat", refuse)
    with writer.Writer(str(folder), "t") as files:
        files.prepare("a.py", b"new", None)
        files.swap()
    assert "new" == (folder / "a.py").read_text()


def test_sweeping_outside_takes_only_ones_own(folder, tmp_path):
    """Beside a file that the package links to, another package's transaction may be at work."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("real.py", ".deployctl-mine-abc", ".deployctl-other-abc"):
        (outside / name).write_text("")
    (folder / "far.py").symlink_to(outside / "real.py")
    (folder / "gone.py").symlink_to(tmp_path / "nowhere" / "x")
    writer.sweep(str(folder), ["sub", "sub/deep"], "mine")
    assert [".deployctl-other-abc", "real.py"] == sorted(os.listdir(outside))


def entries_of(contents):
    return {path: tree.Entry(objects.digest(content), 0o644) for path, content in contents.items()}


def test_staged_copies_are_exact_whatever_was_there(tmp_path):
    """Many rounds of random trees and random vandalism in the kept copy: what is staged is what was asked for."""
    chance = random.Random(7)
    store = state.State(str(tmp_path / "state"))
    store.create()
    source = tmp_path / "source"
    names = ["a.py", "b/c.py", "b/d/e.py", "f/g.py", "h.py"]
    for number in range(40):
        wanted = {name: f"{name} {chance.randrange(3)}".encode() for name in names if chance.random() < 0.7}
        live = {name: content for name, content in wanted.items() if chance.random() < 0.5}
        for name in names:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).unlink(missing_ok=True)
            if name in live:
                (source / name).write_bytes(live[name])
        by_sha = {objects.digest(content): content for content in wanted.values()}
        copies = staging.Staging(store, "package")
        copies.make(store.path("staging", str(number)), str(source), entries_of(wanted), entries_of(live), by_sha.get)
        found = {
            os.path.relpath(os.path.join(folder, name), copies.path): open_bytes(folder, name)
            for folder, _, files in os.walk(copies.path)
            for name in files
        }
        assert wanted == found
        folders = {os.path.relpath(folder, copies.path) for folder, _, _ in os.walk(copies.path)} - {"."}
        assert {parent for name in wanted for parent in parents(name)} == folders
        vandalise(copies.path, chance)
        copies.read()
        copies.keep()
    assert (tmp_path / "state/mirror/package").is_dir()


def open_bytes(folder, name):
    with open(os.path.join(folder, name), "rb") as source:
        return source.read()


def parents(name):
    parts = name.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def vandalise(root, chance):
    """What a script might leave: edits, strange files, links into other places, folders, odd modes."""
    kind = chance.randrange(8)
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    some = chance.choice(files) if files else None
    if kind == 0 and some:
        os.unlink(some)
        os.symlink("/etc/hostname", some)
    elif kind == 1 and some:
        os.link(some, some + ".twin")
    elif kind == 2:
        os.makedirs(os.path.join(root, "left/over"))
    elif kind == 3 and some:
        with open(some, "ab") as out:
            out.write(b"more")
    elif kind == 4 and some:
        os.chmod(some, 0o400)
    elif kind == 5:
        os.makedirs(os.path.join(root, "__pycache__"))
    elif kind == 6:
        os.symlink("/etc", os.path.join(root, "etc"))


def test_a_copy_that_cannot_be_kept(tmp_path):
    """It costs the next push time, and nothing else."""
    store = state.State(str(tmp_path / "state"))
    store.create()
    copies = staging.Staging(store, "package")
    copies.keep()
    assert not (tmp_path / "state/mirror").exists()
    copies.make(store.path("staging/1"), str(tmp_path), entries_of({"a": b"1"}), {}, lambda _: b"1")
    (tmp_path / "state/mirror").write_text("in the way")
    copies.keep()
    assert (tmp_path / "state/mirror").is_file()


def test_a_live_file_that_changes_while_it_is_copied(tmp_path):
    """The copy would hold what nobody asked for: refused."""
    store = state.State(str(tmp_path / "state"))
    store.create()
    (tmp_path / "a").write_bytes(b"2")
    copies = staging.Staging(store, "package")
    wanted = entries_of({"a": b"1"})
    with pytest.raises(Failure, match="somebody else writes"):
        copies.make(store.path("staging/1"), str(tmp_path), wanted, wanted, None)
    (tmp_path / "state/staging/2").mkdir(parents=True)
    with pytest.raises(Failure):
        copies.make(store.path("staging/2"), str(tmp_path), wanted, wanted, None)
