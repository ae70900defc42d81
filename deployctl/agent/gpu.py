"""Who holds the GPUs, freeing them, and proving that they are free."""

import glob
import os
import re
import shutil
import subprocess
import time

from . import attempts, audit, lock, processes
from .failure import EXIT_NOT_CLEAN, Failure

_TOOL_S = 15.0
_SETTLED_MIB = 1024
# Never ended, whoever asks: management and display.
_DAEMONS = re.compile(
    r"(^|/)(nvidia-persistenced|nv-hostengine|dcgm\S*|dcgm-exporter|nvidia-smi|Xorg|Xwayland|gnome-shell|nvidia-powerd"
    r"|nv-fabricmanager|nvidia-fabricmanager)(\s|$)"
)


class Tool:
    """Runs a program with a time limit; `problem` says why its answer is missing."""

    def __init__(self, argv):
        self.problem = None
        self.stdout = b""
        self.stderr = b""
        if shutil.which(argv[0]) is None:
            self.problem = "%s is not installed" % argv[0]
            return
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            self.problem = "%s cannot be run: %s" % (argv[0], error.strerror)
            return
        try:
            self.stdout, self.stderr = process.communicate(timeout=_limit_s())
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                pass  # stuck in the driver: it is not waited for
            self.problem = "%s gave no answer within %g s" % (argv[0], _limit_s())
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            return
        if process.returncode != 0 and argv[0] != "fuser":
            text = (self.stderr or self.stdout).decode("utf-8", "replace").strip().splitlines()
            self.problem = "%s failed (exit status %d): %s" % (argv[0], process.returncode, text[-1] if text else "")


def _limit_s():
    return float(os.environ.get("DEPLOYCTL_TOOL_LIMIT_S") or _TOOL_S)


def devices(context):
    """The GPU device files of this host."""
    return sorted(glob.glob((context.host.get("gpu") or {}).get("devices") or "/dev/nvidia[0-9]*"))


def holders(context, tools):
    """[Process] that have a GPU device open. `tools` gets a line per source used or missing."""
    paths = devices(context)
    if not paths:
        return []
    tool = Tool(["fuser"] + paths)
    if tool.problem is None:
        tools["fuser"] = "ok"
        # Process ids come on stdout, names and access letters on stderr.
        pids = {int(word) for word in re.findall(rb"\d+", tool.stdout)}
    else:
        tools["fuser"] = tool.problem + ": /proc was read instead"
        pids, blind = _holders_from_proc(paths)
        if blind:
            tools["/proc"] = "%d processes of other users could not be looked at" % blind
    return list(processes.snapshot(sorted(pids)).values()) if pids else []


def _holders_from_proc(paths):
    wanted = set()
    for path in paths:
        wanted.add(os.path.realpath(path))
    pids, blind = set(), 0
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not name.isdigit():
            continue
        try:
            for handle in os.listdir("/proc/%s/fd" % name):
                if os.readlink("/proc/%s/fd/%s" % (name, handle)) in wanted:
                    pids.add(int(name))
                    break
        except PermissionError:
            blind += 1
        except OSError:
            continue
    return pids, blind


def cards(tools):
    """[{"index", "name", "used_mib", "total_mib"}] from nvidia-smi; [] where it is missing, and `tools` says so."""
    tool = Tool(["nvidia-smi", "--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader,nounits"])
    if tool.problem is not None:
        tools["nvidia-smi"] = tool.problem
        return []
    tools["nvidia-smi"] = "ok"
    found = []
    for line in tool.stdout.decode("utf-8", "replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4 and parts[0].isdigit():
            found.append(
                {
                    "index": int(parts[0]),
                    "name": parts[1],
                    "used_mib": _number(parts[2]),
                    "total_mib": _number(parts[3]),
                }
            )
    return found


def _number(text):
    match = re.search(r"\d+", text)
    return int(match.group(0)) if match else None


def compute_pids(tools):
    """Pids that the driver lists as compute clients."""
    tool = Tool(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
    if tool.problem is not None:
        tools["nvidia-smi"] = tool.problem
        return set()
    return {int(found) for found in re.findall(r"^\s*(\d+)", tool.stdout.decode("utf-8", "replace"), re.MULTILINE)}


def report(context):
    """For status: GPUs, holders and which tools could be asked."""
    tools: dict = {}
    paths = devices(context)
    found = cards(tools) if paths or shutil.which("nvidia-smi") else []
    mine = {process.pid: value for process, value in processes.marked(lock.machine_identity(context.state) + ":")}
    described = []
    for process in holders(context, tools):
        entry = processes.describe(process)
        entry["attempt"] = int(mine[process.pid].rpartition(":")[2]) if process.pid in mine else None
        described.append(entry)
    return {"gpus": found, "holders": described, "tools": tools, "devices": paths}


def clean(context):
    """Free the GPUs; `all` also ends foreign holders and healthy servers of ours."""
    with lock.exclusive(context):
        try:
            result = clean_up(context, "all" if context.args.get("all") else None)
        except Failure as failure:
            audit.record(context, failure.as_result())
            raise
        removed = remove_shm_leftovers(context)
        result = dict(result, status="clean", shm_removed=removed)
        audit.record(context, result)
    return result


def clean_up(context, mode=None):
    """End who may be ended and verify that devices and memory are free.

    Args:
        context: Of the operation; the lock is held.
        mode: "ours" or "all"; the host's `gpu.clean` where None.

    Returns:
        {"ended", "spared", "kept", "gpus", "tools", "devices"}.

    Raises:
        Failure: exit 10: foreign holders (mode ours), survivors, or memory that does not come back.
    """
    mode = mode or (context.host.get("gpu") or {}).get("clean") or "ours"
    tools: dict = {}
    context.wire.event("step", name="clean", state="start", mode=mode)
    paths = devices(context)
    never = processes.spared()
    alive = {attempt["marker"]: attempt for attempt in attempts.live(context.state)}
    mine = {
        process.pid: (process, value) for process, value in processes.marked(lock.machine_identity(context.state) + ":")
    }
    held = holders(context, tools)
    targets, foreign, spared, kept = [], [], [], []
    for process, value in mine.values():
        if value in alive and mode != "all":
            kept.append(process)
        else:
            targets.append(process)
    for process in held:
        if process.pid in mine:
            continue
        if process.pid in never or _DAEMONS.search(process.command):
            spared.append(process)
        elif mode == "all":
            targets.append(process)
        else:
            foreign.append(process)
    result = {
        "ended": [processes.describe(process) for process in targets],
        "spared": [processes.describe(process) for process in spared],
        "kept": [
            dict(processes.describe(process), attempt=alive[mine[process.pid][1]]["attempt"])
            for process in kept
            if process.pid == (alive[mine[process.pid][1]]["run"] or {}).get("pid")
        ],
        "gpus": [],
        "tools": tools,
        "devices": paths,
    }
    if targets:
        for attempt in alive.values() if mode == "all" else ():
            attempts.mark_stopping(context.state, attempt, context.operator)
        _end(context, targets)
        for attempt in alive.values():
            if mode == "all":
                attempts.set_verdict(context.state, attempt, state=attempts.STOPPED, by=context.operator)
    if foreign:
        raise Failure(
            "%d foreign process%s hold%s GPUs: %s"
            % (
                len(foreign),
                "" if len(foreign) == 1 else "es",
                "s" if len(foreign) == 1 else "",
                "; ".join("pid %d (%s, %d s, %s)" % (p.pid, p.user, p.age_s, p.command[:100]) for p in foreign[:8]),
            ),
            kind="foreign-holders",
            hint="ask their owners, or end them too: deployctl clean --all",
            exit_code=EXIT_NOT_CLEAN,
            **dict(result, foreign=[processes.describe(process) for process in foreign]),
        )
    _verify(
        context, result, {process.pid for process in kept} | {process.pid for process in spared}, tools, bool(targets)
    )
    context.wire.event("step", name="clean", state="done", ended=len(targets), tools=tools)
    return result


def _end(context, targets):
    left = processes.end(
        targets,
        min(context.limit("term_grace_s", 30.0), 30.0),
        context.limit("kill_patience_s", 60.0),
        lambda text: context.wire.event("step", name="clean", state="progress", text=text),
    )
    if left:
        raise Failure(
            "%d process(es) on the GPUs do not end: %s"
            % (len(left), "; ".join("pid %d (state %s, %s)" % (p.pid, p.state, p.command[:80]) for p in left)),
            kind="not-stopped",
            hint="state D waits for the driver: look at dmesg",
            exit_code=EXIT_NOT_CLEAN,
        )


def _verify(context, result, allowed, tools, ended):
    """Devices without other holders, and memory back; where servers of ours stay, their cards' memory is theirs."""
    bound_s = context.limit("gpu_memory_s", 120.0)
    began = time.monotonic()
    while True:
        held = [process for process in holders(context, tools) if process.pid not in allowed]
        result["gpus"] = cards(tools)
        # The driver charges memory for a while after a process has gone; a card that others use legitimately is theirs.
        clients = compute_pids(tools) - allowed if result["gpus"] else set()
        busy = []
        if not result["kept"]:
            busy = [card for card in result["gpus"] if (card["used_mib"] or 0) > _SETTLED_MIB]
        if not held and not busy and not (ended and clients):
            return
        waited = time.monotonic() - began
        if waited > bound_s or context.wire.cancelled.is_set():
            parts = ["GPU %d still %d MiB after %d s" % (card["index"], card["used_mib"], waited) for card in busy]
            parts += ["pid %d still holds a device (%s)" % (process.pid, process.command[:80]) for process in held]
            parts += ["the driver still lists pid %d" % pid for pid in sorted(clients)] if not parts else []
            raise Failure(
                "; ".join(parts),
                kind="gpu-not-clean",
                hint="nvidia-smi; a process in a container or of another user may hold it",
                exit_code=EXIT_NOT_CLEAN,
                **result,
            )
        context.wire.event(
            "step",
            name="clean",
            state="progress",
            text="waiting for GPU memory: " + ", ".join("GPU %d %d MiB" % (c["index"], c["used_mib"]) for c in busy),
        )
        time.sleep(min(1.0, max(0.05, bound_s / 20)))


def remove_shm_leftovers(context):
    """Remove what dead processes of our attempts left in /dev/shm; nobody else's.

    A file counts as ours when its name holds the pid of a process of a dead attempt, it belongs to this user, and it
    was not changed after that attempt ended.

    Returns:
        The names removed.
    """
    folder = context.host.get("shm_dir") or "/dev/shm"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    dead = {}
    for attempt in attempts.listing(context.state):
        run = attempt["run"] or {}
        if run.get("pid") and run["boot_id"] == processes.boot_id() and not attempts.is_alive(attempt):
            dead[run["pid"]] = (attempt["exit"] or {}).get("at") or time.time()
    removed = []
    for name in names:
        pids = {int(word) for word in re.findall(r"(?<!\d)\d{2,7}(?!\d)", name)} & set(dead)
        path = os.path.join(folder, name)
        for pid in pids:
            try:
                found = os.lstat(path)
                if (
                    found.st_uid == os.geteuid()
                    and found.st_mtime <= dead[pid] + 5
                    and processes.start_time(pid) is None
                ):
                    os.unlink(path)
                    removed.append(name)
                    break
            except OSError:
                continue  # a folder, or gone meanwhile
    if removed:
        context.wire.event(
            "step", name="clean", state="progress", text="removed from %s: %s" % (folder, ", ".join(removed))
        )
    return removed
