"""Keeps one server: starts it in its own session with its own log, and writes down how it ended.

Runs on the host as `python -I keeper.py ATTEMPT_DIR`, started by exec and detached, so that it outlives every SSH
session and holds neither the lock nor any descriptor of the command that started it. The server writes to its log
directly: it would outlive even the keeper. Self-contained: this file is all there is on the host.
"""

import json
import os
import signal
import subprocess
import sys
import time


def write_json(path, value):
    """Write a small file atomically and durably."""
    temporary = path + ".new"
    with open(temporary, "w", encoding="ascii") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.rename(temporary, path)


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
        import ctypes  # noqa: PLC0415

        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    except (OSError, AttributeError, ImportError):
        pass  # not Linux: init reaps them


def keep(folder):
    """Start the server of an attempt directory and wait for its end."""
    with open(os.path.join(folder, "spec.json"), encoding="utf-8") as source:
        spec = json.load(source)
    for name in ("SIGHUP", "SIGTERM", "SIGINT", "SIGQUIT", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    become_subreaper()
    run = {"keeper_pid": os.getpid(), "keeper_start": start_of(os.getpid()), "boot_id": spec["boot_id"]}
    environment = dict(os.environ)
    environment.update(spec["env"])
    environment["DEPLOYCTL_ATTEMPT"] = spec["marker"]
    log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND)
    started = time.time()
    try:
        server = subprocess.Popen(
            spec["argv"],
            cwd=spec["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=default_signals,
        )
    except OSError as error:
        reason = "%s: %s" % (error.filename or spec["argv"][0], error.strerror)
        os.write(log, ("deployctl: cannot start the server: %s\n" % reason).encode("utf-8", "replace"))
        write_json(
            os.path.join(folder, "exit.json"), {"status": 127, "signal": None, "at": time.time(), "reason": reason}
        )
        run.update(pid=None, start=None, failed=reason)
        write_json(os.path.join(folder, "run.json"), run)
        return
    os.close(log)
    run.update(pid=server.pid, start=start_of(server.pid), pgid=server.pid, at=started)
    write_json(os.path.join(folder, "run.json"), run)
    while True:
        try:
            pid, status = os.wait()
        except InterruptedError:
            continue
        except ChildProcessError:
            break
        if pid == server.pid:
            ended = {"status": None, "signal": None, "at": time.time()}
            if os.WIFSIGNALED(status):
                ended["signal"] = signal.Signals(os.WTERMSIG(status)).name
            else:
                ended["status"] = os.WEXITSTATUS(status)
            write_json(os.path.join(folder, "exit.json"), ended)
            break


def default_signals():
    """The server gets the signal handling of a fresh process, not the keeper's."""
    for name in ("SIGHUP", "SIGTERM", "SIGINT", "SIGQUIT", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


if __name__ == "__main__":
    keep(sys.argv[1])
