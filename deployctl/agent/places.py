"""Where files may lie: what a rename cannot replace, and what no release can hold."""

import os

from . import tree
from .failure import Failure


def refuse_strange(patch, directory, files, folders, strange):
    """Refuse what a live script has made that no release can hold, and no rollback could take back.

    Args:
        patch: The script.
        directory: The package directory.
        files: Paths that were files before it ran.
        folders: Paths that were folders.
        strange: What was neither.

    Raises:
        Failure: A folder or file has become something else, or a link to a folder, a socket or the like is new.
    """

    def full(path):
        return os.path.join(directory, path)

    found = ["."] if os.path.realpath(directory) != directory or not os.path.isdir(directory) else []
    if not found:
        found = [path for path in folders if os.path.lexists(full(path)) and not tree.is_folder(full(path))]
        found += [path for path in files if tree.is_folder(full(path))]
        found += [path for path in tree.strange(directory) if path not in strange and path not in found]
    if found:
        raise Failure(
            "%s leaves what no release can hold: %s"
            % (patch["ref"], ", ".join(_what_it_is(directory, path) for path in found[:5])),
            kind="not-recordable",
            hint="let the script write files in the folders that are there, without links to folders",
        )


def _what_it_is(directory, path):
    full = directory if path == "." else os.path.join(directory, path)
    name = directory if path == "." else path
    if os.path.islink(full):
        return "%s is now a symbolic link to %s" % (name, os.readlink(full))
    if os.path.isfile(full):
        return "the folder %s is now a file" % name
    if os.path.isdir(full) and path != ".":
        return "the file %s is now a folder" % name
    return "%s is no file and no folder" % name if os.path.lexists(full) else "%s is gone" % name


def check_places(site, wanted, paths):
    """Refuse files that cannot lie where they should: a rename would follow a link out of the package or meet a folder.

    Args:
        site: The package; its entries are the live tree's.
        wanted: {path: Entry} of the tree that shall be.
        paths: Those that differ from the live tree.

    Raises:
        Failure: One of them (kind `in-the-way`), naming what is there.
    """
    directory, files = site.package.directory, site.index["files"]
    changing = {tuple(files[path][:4]) for path in paths if path in files}
    sharing: dict = {}
    for path, known in files.items():
        if tuple(known[:4]) in changing:
            sharing.setdefault(os.path.realpath(os.path.join(directory, path)), []).append(path)
    for group in sharing.values():
        if len({wanted[path].sha if path in wanted else None for path in group}) > 1:
            raise _in_the_way(group[0], "%s are one file by symbolic links: they can only change alike" % _and(group))
    for path in paths:
        if path not in wanted or path in site.entries:
            continue
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            full = os.path.join(directory, above)
            if os.path.islink(full):
                raise _in_the_way(path, "%s is a symbolic link: what is behind it is not the package's" % above)
            if os.path.lexists(full) and not os.path.isdir(full):
                raise _in_the_way(path, "%s is no folder" % above)
        full = os.path.join(directory, path)
        if os.path.islink(full):
            raise _in_the_way(path, "it is a symbolic link to %s, which is no file" % os.readlink(full))
        if os.path.lexists(full):
            raise _in_the_way(path, "it is a folder" if os.path.isdir(full) else "it is no ordinary file")


def _in_the_way(path, reason):
    return Failure(
        "%s cannot be written: %s" % (path, reason),
        kind="in-the-way",
        hint="change the patch, or what is there on the host; nothing has changed",
    )


def _and(paths):
    return " and ".join(sorted(paths))
