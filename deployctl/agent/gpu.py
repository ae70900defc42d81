"""Who holds the GPUs, freeing them, and proving that they are free."""

import glob
import os
import re
import shutil
import time

from . import attempts, audit, lock, processes, shm
from .failure import EXIT_NOT_CLEAN, Cancelled, Failure, counted
from .tools import TOOL_S, Tool

_SETTLED_MIB = 1024
_ROUNDS = 3
_DEVICES = "/dev/nvidia[0-9]*"
# A GPU that is lost, or an error in the place of a figure, is no card whose memory is free.
_CARD = re.compile(
    r"\s*(?P<index>\d+)\s*,\s*(?P<name>.+?)\s*,\s*(?P<used>\d+|\[N/A\]|\[Not Supported\])\s*"
    r",\s*(?P<total>\d+|\[N/A\]|\[Not Supported\])\s*"
)
# Never ended, whoever asks: management and display. By the program's own name, whatever its arguments are.
_DAEMONS = re.compile(
    r"nvidia-persistenced|nv-hostengine|dcgm\S*|nvidia-smi|Xorg|Xorg\.bin|X|Xwayland|gnome-shell|nvidia-powerd"
    r"|nv-fabricmanager|nvidia-fabricmanager|nvidia-cuda-mps-(control|server)"
)


def devices(context):
    """The GPU device files of this host."""
    return sorted(glob.glob(pattern(context)))


def pattern(context):
    """The glob of the GPU device files."""
    return (context.host.get("gpu") or {}).get("devices") or _DEVICES


def holders(context, tools):
    """[Process] that have a GPU device open. `tools` gets a line per source used or missing."""
    paths = devices(context)
    if not paths:
        return []
    if os.geteuid() != 0:
        tools["/proc"] = "without root only the processes of this user can be seen"
    # Both are asked: neither a fuser that fails in silence nor a /proc that hides others' files is the whole truth.
    pids, blind = _holders_from_proc(paths)
    tool = _tool(context, ["fuser"] + paths)
    if tool.problem is None:
        tools["fuser"] = "ok"
        # Process ids come on stdout, names and access letters on stderr.
        pids |= {int(word) for word in re.findall(rb"\d+", tool.stdout)}
    else:
        tools["fuser"] = tool.problem + ": only /proc was read"
        if blind:
            tools["/proc"] = "%s of other users could not be looked at" % counted(blind, "process", "processes")
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


def _tool(context, argv):
    return Tool(argv, context.limit("tool_s", TOOL_S))


def cards(context, tools):
    """[{"index", "name", "used_mib", "total_mib"}] from nvidia-smi.

    `tools` says "ok", or why it cannot be relied on: missing, failed, or a line that is no card's. Memory is None where
    the driver has no figure for it ([N/A], as with memory that CPU and GPU share): there the holders must do.
    """
    query = "--query-gpu=index,name,memory.used,memory.total"
    tool = _tool(context, ["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if tool.problem is not None:
        tools["nvidia-smi"] = tool.problem
        return []
    tools["nvidia-smi"] = "ok"
    found, odd = [], []
    for line in tool.stdout.decode("utf-8", "replace").splitlines():
        match = _CARD.fullmatch(line)
        if match is None and not line.strip():
            continue
        if match is None:
            odd.append(line.strip()[:200])
            continue
        used, total = (int(text) if text.isdigit() else None for text in match.group("used", "total"))
        found.append({"index": int(match["index"]), "name": match["name"], "used_mib": used, "total_mib": total})
    if odd:
        tools["nvidia-smi"] = "nvidia-smi said: %s" % "; ".join(odd[:3])
    elif not found:
        tools["nvidia-smi"] = "nvidia-smi named no GPU"
    return found


def compute_pids(context, tools):
    """Pids that the driver lists as compute clients."""
    query = "--query-compute-apps=pid,used_memory"
    tool = _tool(context, ["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if tool.problem is not None:
        tools["nvidia-smi"] = tool.problem
        return set()
    return {int(found) for found in re.findall(r"^\s*(\d+)", tool.stdout.decode("utf-8", "replace"), re.MULTILINE)}


def ours(state):
    """Our servers and whatever they started: {pid: (Process, attempt number)}.

    By the mark in their environment; a living server's session and descendants, and what a dead one left behind, also
    where a child cleared it.
    """
    known = state.read_json("machine")
    if known is None:
        return {}  # nothing was ever launched from this state directory
    found = {process.pid: (process, value) for process, value in processes.marked(known["id"] + ":")}
    numbers = {pid: (process, int(value.rpartition(":")[2])) for pid, (process, value) in found.items()}
    everyone = processes.snapshot()
    for attempt in attempts.listing(state):
        for process in attempts.left_behind(attempt):
            numbers.setdefault(process.pid, (process, attempt["attempt"]))
        if not attempts.is_alive(attempt):
            continue
        leader = attempt["run"]["pid"]
        for process in everyone.values():
            if leader in (process.pid, process.sid):
                numbers.setdefault(process.pid, (process, attempt["attempt"]))
    for pid, (_, number) in list(numbers.items()):
        for process in processes.descendants(pid, everyone):
            numbers.setdefault(process.pid, (process, number))
    for pid in processes.spared(everyone):
        numbers.pop(pid, None)
    return numbers


def report(context):
    """For status: GPUs, holders and which tools could be asked."""
    tools: dict = {}
    paths = devices(context)
    found = cards(context, tools) if paths or shutil.which("nvidia-smi") else []
    held = holders(context, tools)
    mine = ours(context.state) if held else {}
    described = [
        dict(processes.describe(process), attempt=mine[process.pid][1] if process.pid in mine else None)
        for process in held
    ]
    return {"gpus": found, "holders": described, "tools": tools, "devices": paths}


def clean(context):
    """Free the GPUs; `all` also ends foreign holders and healthy servers of ours."""
    with lock.exclusive(context):
        try:
            result = clean_up(context, "all" if context.args.get("all") else None)
        except Failure as failure:
            audit.record(context, failure.as_result())
            raise
        result["shm_removed"] += shm.remove_leftovers(context)
        result["status"] = "clean"
        if result["unverified"]:
            result.update(
                status="unverified",
                exit=EXIT_NOT_CLEAN,
                error={
                    "kind": "gpu-unverified",
                    "message": "whether the GPUs' memory is free is not known: %s" % result["unverified"],
                    "hint": "the NVIDIA driver brings nvidia-smi: put it on the PATH of this host",
                },
            )
        audit.record(context, result)
    return result


def clean_up(context, mode=None):
    """End who may be ended and verify that devices and memory are free.

    Args:
        context: Of the operation; the lock is held.
        mode: "ours" or "all"; the host's `gpu.clean` where None.

    Returns:
        {"ended", "spared", "kept", "gpus", "tools", "devices", "unverified", "shm_removed"}; `unverified` says why
        nothing is known of the memory where nvidia-smi is missing.

    Raises:
        Failure: exit 10: foreign holders (mode ours), survivors, a nvidia-smi that hangs or fails, or memory that does
            not come back.
        Cancelled: The client went away.
    """
    mode = mode or (context.host.get("gpu") or {}).get("clean") or "ours"
    tools: dict = {}
    paths = devices(context)
    result = {
        "ended": [],
        "spared": [],
        "kept": [],
        "gpus": [],
        "tools": tools,
        "devices": paths,
        "unverified": "",
        "shm_removed": [],
    }
    context.wire.event("step", name="clean", state="start", mode=mode)
    if not paths:
        context.wire.event("step", name="clean", state="progress", text="no GPU devices (%s)" % pattern(context))
    left_open = set()
    # Again after each round: what we end may have started something in its last moments.
    for _ in range(_ROUNDS):
        targets, foreign, allowed = _sort_out(context, mode, result)
        if not targets:
            break
        left_open |= shm.in_use_by(context, [process.pid for process in targets])
        _end(context, targets, result)
    if foreign:
        raise Failure(
            "GPUs are held by %s: %s"
            % (
                counted(len(foreign), "foreign process", "foreign processes"),
                "; ".join("pid %d (%s, %d s, %s)" % (p.pid, p.user, p.age_s, p.command[:100]) for p in foreign[:8]),
            ),
            kind="foreign-holders",
            hint="ask their owners, or end them too: deployctl clean --all",
            exit_code=EXIT_NOT_CLEAN,
            **dict(result, foreign=[processes.describe(process) for process in foreign]),
        )
    _verify(context, result, allowed)
    if left_open:
        result["shm_removed"] = shm.remove_leftovers(context, left_open)
    context.wire.event("step", name="clean", state="done", ended=len(result["ended"]), tools=tools)
    return result


def _sort_out(context, mode, result):
    """Who is to be ended, who is foreign, and the pids that may stay; `spared` and `kept` of the result are set."""
    recorded = attempts.listing(context.state)
    # A server that serves is none to be ended because somebody damaged its record.
    recorded += attempts.unrecorded(context.state, {attempt["attempt"] for attempt in recorded})
    alive = {attempt["attempt"]: attempt for attempt in recorded if attempts.is_alive(attempt)}
    never = processes.spared()
    mine = ours(context.state)
    targets, foreign, spared, kept = [], [], [], []
    for process, number in mine.values():
        if number in alive and mode != "all":
            kept.append(process)
        else:
            targets.append(process)
    for process in holders(context, result["tools"]):
        if process.pid in mine:
            continue
        program = os.path.basename(process.command.split(" ")[0])
        if process.pid in never or _DAEMONS.fullmatch(program):
            spared.append(process)
        elif mode == "all":
            targets.append(process)
        else:
            foreign.append(process)
    result["spared"] = [processes.describe(process) for process in spared]
    result["kept"] = [
        dict(processes.describe(process), attempt=mine[process.pid][1])
        for process in kept
        if process.pid == alive[mine[process.pid][1]]["run"]["pid"]
    ]
    return targets, foreign, {process.pid for process in kept + spared}


def _end(context, targets, result):
    """End processes; attempts among them are stopped, not crashed."""
    pids = {process.pid for process in targets}
    ending = [attempt for attempt in attempts.live(context.state) if attempt["run"]["pid"] in pids]
    for attempt in ending:
        attempts.mark_stopping(context.state, attempt, context.operator)
    left = processes.end(
        targets,
        context.limit("term_grace_s", 30.0),
        context.limit("kill_patience_s", 60.0),
        lambda text: context.wire.event("step", name="clean", state="progress", text=text),
    )
    remain = {process.pid for process in left}
    result["ended"] += [processes.describe(process) for process in targets if process.pid not in remain]
    for attempt in ending:
        if attempt["run"]["pid"] not in remain:
            attempts.set_verdict(context.state, attempt, state=attempts.STOPPED, by=context.operator)
    if left:
        raise Failure(
            "%s still on the GPUs after SIGKILL: %s"
            % (
                counted(len(left), "process", "processes"),
                "; ".join("pid %d (%s, state %s, %s)" % (p.pid, p.user, p.state, p.command[:80]) for p in left),
            ),
            kind="not-stopped",
            hint="state D waits for the driver: look at dmesg; a process of another user needs its owner or root",
            exit_code=EXIT_NOT_CLEAN,
            **dict(result, survivors=[processes.describe(process) for process in left]),
        )


def _verify(context, result, allowed):
    """Devices without other holders, and memory back; where servers of ours stay, their cards' memory is theirs."""
    bound_s = context.limit("gpu_memory_s", 120.0)
    began = time.monotonic()
    tools = result["tools"]
    ended = {entry["pid"] for entry in result["ended"]}
    while True:
        held = [process for process in holders(context, tools) if process.pid not in allowed]
        result["gpus"] = cards(context, tools)
        # The driver charges memory for a while after a process has gone; a card that others use legitimately is theirs.
        clients = compute_pids(context, tools) & ended if result["gpus"] and ended else set()
        if result["devices"] and tools["nvidia-smi"] != "ok":
            _memory_unknown(result)
        busy = []
        if not result["kept"]:
            busy = [card for card in result["gpus"] if (card["used_mib"] or 0) > _SETTLED_MIB]
        if not held and not busy and not clients:
            return
        waited = time.monotonic() - began
        remains = ["GPU %d still %d MiB after %d s" % (card["index"], card["used_mib"], waited) for card in busy]
        remains += ["pid %d (%s) still holds a device: %s" % (p.pid, p.user, p.command[:80]) for p in held]
        remains += ["the driver still lists pid %d" % pid for pid in sorted(clients)]
        if context.wire.cancelled.is_set():
            raise Cancelled("cancelled while waiting for the GPUs: %s" % "; ".join(remains), **result)
        if waited > bound_s:
            others = compute_pids(context, tools) - ended if busy else set()
            if others:
                remains.append("nvidia-smi names pid %s" % ", ".join(str(pid) for pid in sorted(others)))
            raise Failure(
                "; ".join(remains),
                kind="gpu-not-clean",
                hint="nvidia-smi; a process in a container or of another user may hold it",
                exit_code=EXIT_NOT_CLEAN,
                **result,
            )
        context.wire.event("step", name="clean", state="progress", text="waiting: " + "; ".join(remains))
        context.wire.cancelled.wait(min(1.0, max(0.05, bound_s / 20)))


def _memory_unknown(result):
    """There are GPUs and nvidia-smi does not say how they are: never read as clean."""
    problem = result["tools"]["nvidia-smi"]
    if shutil.which("nvidia-smi") is None:
        result["unverified"] = problem
        return
    raise Failure(
        "whether the GPUs are free is not known: %s" % problem,
        kind="gpu-unknown",
        hint="run nvidia-smi on the host and look at dmesg; launch --no-clean goes on without looking",
        exit_code=EXIT_NOT_CLEAN,
        **result,
    )
