"""What dead servers leave in /dev/shm, told from what anybody else has there.

A server that is killed cannot remove its shared memory, and a full /dev/shm makes the next one die of a bus error
(https://github.com/sgl-project/sglang/issues/40723). Only files whose name has a form that an engine gives are looked
at: people keep models in /dev/shm too.
"""

import os
import re

from . import attempts, processes

# Names that hold their creator's pid: SGLang's multi-modal features, PyTorch's shared tensors, CUDA's own (in hex).
_WITH_PID = (
    (re.compile(r"sgl_shm_mm_(\d+)_"), 10),
    (re.compile(r"torch_(\d+)_"), 10),
    (re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\."), 16),
)
# Names that do not: they count as a server's only when it was seen to have them open.
_WITHOUT_PID = re.compile(r"(psm_|nccl-|sem\.mp-|sem\.loky-|sgl_|torch_|cuda\.shm\.)")


def _folder(context):
    return context.host.get("shm_dir") or "/dev/shm"


def in_use_by(context, pids):
    """The names in /dev/shm that processes have open or mapped, as far as they are an engine's."""
    folder = os.path.realpath(_folder(context)) + "/"
    found = set()
    for pid in pids:
        for path in _open_files(pid):
            if path.startswith(folder) and _WITHOUT_PID.match(path[len(folder) :]):
                found.add(path[len(folder) :].partition(" (deleted)")[0])
    return found


def _open_files(pid):
    paths = []
    try:
        with open("/proc/%d/maps" % pid, encoding="utf-8", errors="surrogateescape") as source:
            paths += [line.split(None, 5)[5].rstrip("\n") for line in source if "/" in line]
        for handle in os.listdir("/proc/%d/fd" % pid):
            paths.append(os.readlink("/proc/%d/fd/%s" % (pid, handle)))
    except OSError:
        pass  # ended meanwhile, or another user's
    return paths


def remove_leftovers(context, names=()):
    """Remove what dead processes of our attempts left; nobody else's.

    Args:
        context: Of the operation.
        names: What `in_use_by` told of processes of ours that were ended since.

    Returns:
        The names removed, sorted. A file that belongs to another user, that a living process has open, or that is
        older than the attempt whose pid it bears, is left.
    """
    folder = _folder(context)
    try:
        present = os.listdir(folder)
    except OSError:
        return []  # no such thing on this platform
    lifetimes = _dead_launchers(context)
    candidates = [name for name in present if name in names or _is_of(folder, name, lifetimes)]
    removed = []
    if candidates:
        used = in_use_by(context, processes.snapshot())
        for name in sorted(set(candidates) - used):
            if _remove(os.path.join(folder, name)):
                removed.append(name)
    if removed:
        context.wire.event(
            "step", name="clean", state="progress", text="removed from %s: %s" % (folder, ", ".join(removed))
        )
    return removed


def _dead_launchers(context):
    """{pid: when its attempt began} of servers of ours that are dead."""
    found = {}
    for attempt in attempts.listing(context.state):
        run = attempt["run"] or {}
        if run.get("pid") and run["boot_id"] == processes.boot_id() and not attempts.is_alive(attempt):
            found[run["pid"]] = attempt["at"]
    return found


def _is_of(folder, name, lifetimes):
    """Whether a name bears the pid of a dead server, and the file came into being after its launch."""
    for pattern, base in _WITH_PID:
        match = pattern.match(name)
        pid = int(match.group(1), base) if match else None
        if pid in lifetimes and processes.start_time(pid) is None:
            try:
                return os.lstat(os.path.join(folder, name)).st_ctime >= lifetimes[pid] - 5
            except OSError:
                return False  # gone meanwhile
    return False


def _remove(path):
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return False
        os.unlink(path)
    except OSError:
        return False  # a folder, or gone meanwhile
    return True
