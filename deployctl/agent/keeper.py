"""Keeps one server: starts it in its own session with its own log, and writes down how it ended.

Runs on the host as `python -I keeper.py ATTEMPT_DIR`, started by exec and detached, so that it outlives every SSH
session and holds neither the lock nor any descriptor of the command that started it. The server writes to its log
directly: it would outlive even the keeper. Self-contained: this file is all there is on the host.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

_RECORD_BYTES = 4096
_DISK_PATIENCE_S = 3600.0
_FOLDER_PATIENCE_S = 30.0


def write_json(path, value):
    """Write a small file atomically and durably."""
    temporary = path + ".new"
    with open(temporary, "w", encoding="ascii") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.rename(temporary, path)


def reserve(path):
    """Claim the disk blocks of a record that will be written later, when the disk may be full (servers write logs)."""
    handle = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(handle, b" " * _RECORD_BYTES)
    os.fsync(handle)
    return handle


def write_reserved(handle, path, value, patience_s=_DISK_PATIENCE_S):
    """Write a record into its reserved blocks and rename it into place; blanks at the end are JSON too.

    Copy-on-write file systems may need space even so: tried again for up to `patience_s` seconds.
    """
    content = json.dumps(value).encode("ascii").ljust(_RECORD_BYTES)
    began = time.monotonic()
    finish = began + patience_s
    while True:
        try:
            os.pwrite(handle, content, 0)
            os.fsync(handle)
            os.rename(path + ".new", path)
            return True
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                # Somebody removed the attempt: unless its folder comes back soon, nobody will read the record.
                finish = min(finish, began + _FOLDER_PATIENCE_S)
            if time.monotonic() > finish:
                return False
            time.sleep(0.5)


def start_of(pid):
    """The start time of a process, as deployctl's agent reads it, or None."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as source:
            text = source.read()
        return int(text[text.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError):
        pass  # no /proc here: ps knows to the second
    try:
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
        return done.stdout.decode().strip() or None
    except OSError:
        return None


def become_subreaper():
    """Have orphans of the server reparented to us while we live, so that they are reaped."""
    try:
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    except (OSError, AttributeError, ImportError):
        pass  # not Linux: init reaps them


def outlive_signals():
    """Nothing but SIGKILL ends the keeper before the server.

    Handlers and not SIG_IGN: exec gives the server the defaults back for a handler, but would hand an ignored signal
    on. The same for signals that the SSH session had blocked.
    """
    for name in ("SIGHUP", "SIGTERM", "SIGINT", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def environment_of(spec, inherited):
    """The server's environment: what the session had, the profile's, and the mark of the attempt."""
    environment = dict(inherited)
    # What the server prints must be in the log when it is printed: a crash would take a buffer with it.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # A process that sets its title (SGLang's ranks do, with setproctitle) would write it over its own environment as
    # the kernel shows it, and with it our mark: its orphans could not be told from a stranger's processes.
    environment.setdefault("SPT_NOENV", "1")
    environment.update(spec["env"])
    environment["DEPLOYCTL_ATTEMPT"] = spec["marker"]
    return environment


def ending(status):
    """exit.json of a wait status."""
    if not os.WIFSIGNALED(status):
        return {"status": os.WEXITSTATUS(status), "signal": None, "at": time.time()}
    number = os.WTERMSIG(status)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "signal %d" % number  # a real-time signal has no name
    return {"status": None, "signal": name, "at": time.time()}


def keep(folder):
    """Start the server of an attempt directory and wait for its end."""
    outlive_signals()
    with open(os.path.join(folder, "spec.json"), encoding="utf-8") as source:
        spec = json.load(source)
    become_subreaper()
    run = {"keeper_pid": os.getpid(), "keeper_start": start_of(os.getpid()), "boot_id": spec["boot_id"]}
    run_path, exit_path = os.path.join(folder, "run.json"), os.path.join(folder, "exit.json")
    log = None
    try:
        record = reserve(exit_path)
        log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        started = time.time()
        server = subprocess.Popen(
            spec["argv"],
            cwd=spec["cwd"],
            env=environment_of(spec, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = _reason(error, spec["argv"][0])
        if log is not None:
            os.write(log, ("deployctl: cannot start the server: %s\n" % reason).encode("utf-8", "replace"))
        write_json(exit_path, {"status": 127, "signal": None, "at": time.time(), "reason": reason})
        run.update(pid=None, start=None, failed=reason)
        write_json(run_path, run)
        return
    os.close(log)
    run.update(pid=server.pid, start=start_of(server.pid), pgid=server.pid, at=started)
    write_json(run_path, run)

    def note_end(ended):
        left = orphans()
        if left:
            # What hides its mark (a cleared environment, a title written over it) can still be told by its descent,
            # but only now: init adopts it when we go.
            write_json(os.path.join(folder, "orphans.json"), {"processes": left})
        write_reserved(record, exit_path, ended)

    await_end(server.pid, note_end)
    server.returncode = 0  # reaped above, behind the back of Popen
    os.close(record)


def orphans():
    """[[pid, start]] of all our living descendants: once the server has ended, what it left behind.

    Empty where there is no /proc, or where orphans are not ours to adopt.
    """
    parents = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as source:
                    text = source.read()
            except OSError:
                continue  # ended meanwhile
            fields = text[text.rindex(b")") + 2 :].split()
            if fields[0] not in (b"Z", b"X"):
                parents[int(name)] = (int(fields[1]), int(fields[19]))
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in ours} - ours
        ours |= more
        grown = bool(more)
    return sorted([pid, parents[pid][1]] for pid in ours if pid != os.getpid())


def _reason(error, program):
    if not isinstance(error, OSError):
        return "%s: %s" % (program, error)
    name = error.filename or program
    if error.errno == errno.ENOSPC:
        return "no space left on %s" % name
    return "%s: %s" % (name if isinstance(name, str) else os.fsdecode(name), error.strerror)


def await_end(pid, record):
    """Reap children, adopted orphans included, until the server itself has ended; then hand its end to `record`."""
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            return  # somebody else reaped it: there is no status to be had
        if ended == pid:
            record(ending(status))
            return


if __name__ == "__main__":
    keep(sys.argv[1])
