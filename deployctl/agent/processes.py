"""Processes by (pid, start time): a pid alone may have been given to somebody else.

Linux reads /proc; elsewhere `ps` gives what it can (start times to the second, and environments of our own processes).
"""

import collections
import os
import re
import signal
import subprocess
import time

from .failure import counted

Process = collections.namedtuple("Process", "pid start ppid pgid sid user age_s command state")
Process.__doc__ = "One process; `start` tells it from a later one with the same pid (clock ticks since boot on Linux)."

MARKER = "DEPLOYCTL_ATTEMPT"
_LINUX = os.path.isdir("/proc/self")
_TICKS = os.sysconf("SC_CLK_TCK")


def boot_id():
    """A text that changes with every boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            return source.read().strip()
    except OSError:
        return _command_output(["sysctl", "-n", "kern.bootsessionuuid"]).strip() or "unknown"


def machine_id():
    """A text that tells machines apart which share a home directory."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, encoding="ascii") as source:
                found = source.read().strip()
        except OSError:
            continue
        if found:
            return found
    return os.uname().nodename


def _command_output(argv):
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape")


def _stat(pid):
    """The fields of /proc/PID/stat after the command name (which may hold spaces and parentheses), or None."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as source:
            text = source.read()
    except (OSError, ValueError):
        return None
    return text[text.rindex(b")") + 2 :].split()


def start_time(pid):
    """When a process started (Linux: clock ticks since boot), or None where there is no such process, or a zombie."""
    if _LINUX:
        fields = _stat(pid)
        if fields is None or fields[0] in (b"Z", b"X"):
            return None
        return int(fields[19])
    found = snapshot([pid]).get(pid)
    return found.start if found else None


def alive(pid, start):
    """Whether that very process lives; a zombie does not."""
    return bool(pid) and start is not None and start_time(pid) == start


def snapshot(pids=None):
    """{pid: Process} of all processes, or of some; zombies left out."""
    return _from_proc(pids) if _LINUX else _from_ps(pids)


def _from_proc(pids):
    import pwd

    with open("/proc/uptime", encoding="ascii") as source:
        uptime = float(source.read().split()[0])
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    users = {}
    found = {}
    for pid in pids:
        fields = _stat(pid)
        if fields is None or fields[0] in (b"Z", b"X"):
            continue
        try:
            uid = os.stat("/proc/%d" % pid).st_uid
            with open("/proc/%d/cmdline" % pid, "rb") as source:
                words = source.read().rstrip(b"\0").split(b"\0")
            command = b" ".join(words).decode("utf-8", "surrogateescape").strip()
            if not command:
                with open("/proc/%d/comm" % pid, "rb") as source:
                    command = "[%s]" % source.read().decode("utf-8", "surrogateescape").strip()
        except OSError:
            continue  # ended meanwhile
        if uid not in users:
            try:
                users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                users[uid] = str(uid)
        start = int(fields[19])
        found[pid] = Process(
            pid,
            start,
            int(fields[1]),
            int(fields[2]),
            int(fields[3]),
            users[uid],
            max(0.0, uptime - start / float(_TICKS)),
            command,
            fields[0].decode(),
        )
    return found


def _from_ps(pids):
    argv = ["ps", "-ww", "-o", "pid=,ppid=,pgid=,stat=,user=,etime=,lstart=,command="]
    argv += ["-p", ",".join(str(pid) for pid in pids)] if pids is not None else ["-ax"]
    found = {}
    pattern = re.compile(
        r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(\S+)\s+(\S+)\s+(\S+)\s+"
        r"(\w{3} \w{3} +\d+ [\d:]+ \d{4}|\S+ +\d+ \w+ [\d:]+ \d{4})\s(.*)"
    )
    for line in _command_output(argv).splitlines():
        match = pattern.match(line)
        if match is None or match.group(4).startswith("Z"):
            continue
        pid = int(match.group(1))
        found[pid] = Process(
            pid,
            match.group(7),
            int(match.group(2)),
            int(match.group(3)),
            0,
            match.group(5),
            _elapsed_s(match.group(6)),
            match.group(8).strip(),
            match.group(4)[:1],
        )
    return found


def _elapsed_s(text):
    """Seconds of ps's [[dd-]hh:]mm:ss."""
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return float(seconds + int(days or 0) * 86400)


def marked(prefix, variable=MARKER):
    """Processes whose environment at their start held a variable (DEPLOYCTL_ATTEMPT) beginning with `prefix`.

    Returns:
        [(Process, value)]. Only processes whose environment we may read: our own, or all for root. Ourselves and our
        ancestors are left out: a shell that inherited a mark is nobody's server.
    """
    everyone = snapshot()
    for pid in spared(everyone):
        everyone.pop(pid, None)
    found = []
    if _LINUX:
        needle = (variable + "=" + prefix).encode()
        for pid, process in everyone.items():
            try:
                with open("/proc/%d/environ" % pid, "rb") as source:
                    variables = source.read().split(b"\0")
            except OSError:
                continue  # another user's, or gone
            for assignment in variables:
                if assignment.startswith(needle):
                    found.append((process, assignment.partition(b"=")[2].decode("utf-8", "replace")))
                    break
        return found
    pattern = re.compile(r"\b%s=(%s\S*)" % (variable, re.escape(prefix)))
    for line in _command_output(["ps", "-axww", "-E", "-o", "pid=,command="]).splitlines():
        match = pattern.search(line)
        pid = int(line.split(None, 1)[0]) if match else None
        if match and pid in everyone:
            found.append((everyone[pid], match.group(1)))
    return found


def descendants(pid, everyone=None):
    """All children of a process and theirs, itself left out."""
    everyone = snapshot() if everyone is None else everyone
    children = collections.defaultdict(list)
    for process in everyone.values():
        children[process.ppid].append(process)
    found, todo, seen = [], [pid], {pid}
    while todo:
        for process in children[todo.pop()]:
            # Read while processes come and go, a snapshot may hold a circle of parents.
            if process.pid not in seen:
                seen.add(process.pid)
                found.append(process)
                todo.append(process.pid)
    return found


def spared(everyone=None):
    """Pids that must never be signalled: ourselves, our ancestors (the SSH session), and init."""
    everyone = snapshot() if everyone is None else everyone
    pids = {0, 1, os.getpid()}
    pid = os.getpid()
    while pid in everyone and pid not in (0, 1):
        pids.add(pid)
        pid = everyone[pid].ppid
    return pids


def send(process, number):
    """Signal that very process; False when it is gone. Raises PermissionError for another user's."""
    if not alive(process.pid, process.start):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def end(targets, grace_s, patience_s, on_event=None):
    """End processes: SIGTERM, wait, SIGKILL, wait.

    Args:
        targets: [Process]. Ourselves and our ancestors are left out.
        grace_s: Seconds to end by themselves; 0 kills at once.
        patience_s: Seconds to wait after SIGKILL (a driver may take its time).
        on_event: Called with (text) when something is worth saying.

    Returns:
        The processes that still live, empty when all are gone.
    """
    never = spared()
    left = [process for process in targets if process.pid not in never]
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, patience_s)):
        if number == signal.SIGTERM and grace_s <= 0:
            continue
        refused = []
        for process in left:
            try:
                send(process, number)
            except PermissionError:
                refused.append(process)
        finish = time.monotonic() + wait_s
        pause = 0.01
        while True:
            left = [process for process in left if alive(process.pid, process.start)]
            waiting = [process for process in left if process not in refused]
            if not waiting or time.monotonic() > finish:
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)
        if not left:
            return []
        if number == signal.SIGTERM and on_event is not None:
            on_event("%s did not end within %g s: SIGKILL" % (counted(len(left), "process", "processes"), grace_s))
    # As they are now: state D says that they wait for a driver.
    now = snapshot([process.pid for process in left])
    return [now.get(process.pid, process) for process in left]


def describe(process):
    """One process for the user: pid, user, age, command."""
    return {
        "pid": process.pid,
        "user": process.user,
        "age_s": round(process.age_s, 1),
        "command": process.command[:300],
        "state": process.state,
    }


def listening(port):
    """The process that listens on a TCP port, as (Process or None, known): known is False where nobody can tell."""
    if not _LINUX:
        output = _command_output(["lsof", "-nP", "-iTCP:%d" % port, "-sTCP:LISTEN", "-t"])
        pids = [int(word) for word in output.split() if word.isdigit()]
        found = snapshot(pids) if pids else {}
        return (next(iter(found.values()), None), bool(found))
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as source:
                rows = source.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % fields[9])
    if not inodes:
        return (None, False)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            handles = os.listdir("/proc/%s/fd" % name)
        except OSError:
            continue
        for handle in handles:
            try:
                if os.readlink("/proc/%s/fd/%s" % (name, handle)) in inodes:
                    return (snapshot([int(name)]).get(int(name)), True)
            except OSError:
                continue
    return (None, True)
