"""Starts a server: free GPUs, free port, its own log, a keeper; then follows it to ready."""

import errno
import os
import re
import shutil
import socket
import subprocess
import threading
import time

from . import attempts, audit, gpu, lock, package, processes, releases, shm, smoke, stop, watch
from .failure import EXIT_NOT_CLEAN, EXIT_USAGE, Cancelled, Failure
from .state import disk_failure, write_file

_START_S = 20.0
_LEAST_FREE = 16 << 20
_SPARE_SHM = 64 << 20
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - the address that a port is tried on, closed at once


def launch(context):
    """Start a profile's server detached, and unless told otherwise follow it to its verdict.

    Raises:
        Failure: Nothing was started: a twin (exit 10), a taken port (10), GPUs not clean (10), no space, a program or
            folder that is not there.
        Cancelled: The client asked to stop, or went away, before the server was started.
    """
    with lock.exclusive(context):
        try:
            attempt, cleaned = _start(context)
        except Failure as failure:
            audit.record(context, failure.as_result())
            raise
        audit.record(
            context, {"status": "started", "exit": 0, **{k: attempt[k] for k in ("attempt", "log_tag", "release")}}
        )
    if context.args.get("wait", True) or attempt["run"].get("failed"):
        result = watch.follow(context, attempt)
        audit.record(context, result)
    else:
        result = watch.describe({"state": attempts.LOADING}, attempt, [], None)
    result["clean"] = cleaned
    return result


def _start(context):
    args = context.args
    python = os.path.expanduser(context.host.get("python") or context.python)
    argv = [word.replace("{python}", python) for word in args["argv"]]
    argv[0] = os.path.expanduser(argv[0])
    cwd = os.path.expanduser(args.get("cwd") or "~")
    # What can be known to fail is looked at before a server that runs is stopped for this one.
    _check_request(args, argv, cwd)
    _check_log_folder(context.log_dir)
    _check_package(context, argv, cwd)
    _refuse_twins(context)
    _go_on(context)
    cleaned = None
    if args.get("clean") != "none":
        cleaned = gpu.clean_up(context, args.get("clean"))
    check_port(args.get("port"), argv, args["engine"])
    shm.remove_leftovers(context)
    _check_shm(context)
    _go_on(context)
    number = context.state.next_number("attempt")
    spec = _spec(context, number, argv, cwd)
    spec["log"] = _open_log(context.log_dir, args["profile"], args["log_tag"])
    spec["log_inode"] = os.stat(spec["log"]).st_ino  # known again where somebody moves it away
    for layer in (releases.current(context.state) or {"patches": []})["patches"]:
        reason = layer["metadata"].get("known_bad")
        if reason:
            context.wire.event("warning", text="%s is KNOWN BAD: %s" % (layer["ref"], reason))
    try:
        context.state.write_json(spec, "attempts", number, "spec.json")
    except Failure:
        os.unlink(spec["log"])
        raise
    attempt = attempts.load(context.state, number)
    try:
        _start_keeper(context, number)
    except Failure as failure:
        attempts.set_verdict(context.state, attempt, state=attempts.CRASHED, reason=failure.message)
        raise
    attempt = attempts.load(context.state, number)
    watch.announce(context, attempt)
    return attempt, cleaned


def _go_on(context):
    if context.wire.cancelled.is_set():
        raise Cancelled("cancelled before the server was started", hint="nothing was launched: deployctl launch again")


def _check_request(args, argv, cwd):
    for what, word in (("log tag", args["log_tag"]), ("profile", args["profile"])):
        if not _TAG.fullmatch(word):
            raise Failure(
                "the %s %r cannot name a log" % (what, word),
                kind="usage",
                hint="1-64 letters, digits, '.', '_' and '-', not beginning with '.' or '-'",
                exit_code=EXIT_USAGE,
            )
    if args.get("smoke_spec"):
        smoke.check(args["smoke_spec"])
    if not os.path.isdir(cwd):
        raise Failure("the working directory %s is not there" % cwd, kind="cannot-run", hint="set `cwd` of the profile")
    path = (args.get("env") or {}).get("PATH") or os.environ.get("PATH")
    program = argv[0] if os.path.isabs(argv[0]) or os.sep not in argv[0] else os.path.join(cwd, argv[0])
    if shutil.which(program, path=path) is None:
        raise Failure(
            "%s is not there, or not executable" % argv[0],
            kind="cannot-run",
            hint="set `python` of the host, or `command` of the profile, in hosts.yaml",
        )


def _check_package(context, argv, cwd):
    """What was pushed is what must serve: a copy of the package in the way of it would run instead, and say nothing."""
    release = releases.current(context.state)
    name = context.host.get("package") or "sglang"
    python = os.path.expanduser(context.host.get("python") or context.python)
    runs_package = argv[0] == python and "-m" in argv[:-1] and argv[argv.index("-m") + 1].split(".")[0] == name
    if release is None or not runs_package:
        return
    reason = package.hidden(context, release, cwd, (context.args.get("env") or {}).get("PYTHONPATH") or "")
    if reason:
        raise Failure(
            reason,
            kind="other-package",
            hint="move that folder away, or rename it: it hides the package that was pushed to",
            exit_code=EXIT_USAGE,
        )


def _spec(context, number, argv, cwd):
    args = context.args
    release = releases.current(context.state)
    return {
        "attempt": number,
        "log_tag": args["log_tag"],
        "profile": args["profile"],
        "argv": argv,
        "env": args.get("env") or {},
        "cwd": cwd,
        "engine": args["engine"],
        "port": args.get("port"),
        "ready": args["ready"],
        "smoke": args.get("smoke_spec"),
        "release": release["number"] if release else None,
        "base": release["base"] if release else None,
        "patches": releases.references(release) if release else [],
        "marker": "%s:%d" % (lock.machine_identity(context.state), number),
        "boot_id": processes.boot_id(),
        "machine": processes.machine_id(),
        "node": os.uname().nodename,
        "at": time.time(),
        "monotonic": time.monotonic(),
        "by": context.operator,
        "command": context.command,
        "run_id": context.run_id,
        "rank": args.get("rank", 0),
        "nodes": args.get("nodes", 1),
    }


def _refuse_twins(context):
    """No second load of the same port, and no server of ours in the way; `replace` stops it first."""
    port = context.args.get("port")
    for attempt in attempts.told(context, attempts.live):
        if attempt["port"] != port:
            continue
        if context.args.get("replace"):
            stop.stop_attempt(context, attempt)
            continue
        state = attempts.state_of(attempt)
        raise Failure(
            "attempt %d (%s, %s) %s on port %s"
            % (
                attempt["attempt"],
                attempt["profile"],
                attempt["log_tag"],
                "is still loading" if state == attempts.LOADING else "is running",
                port,
            ),
            kind="twin" if state == attempts.LOADING else "already-running",
            hint="deployctl wait, deployctl stop, or launch with --replace",
            exit_code=EXIT_NOT_CLEAN,
            attempt=attempt["attempt"],
            state=state,
        )


def check_port(port, argv, engine):
    """The port must be bindable now: the engine would find out only after the whole load, minutes later.

    Args:
        port: TCP port, or None for a profile without one.
        argv: The server's command line, for `--host`.
        engine: "sglang" listens on 127.0.0.1 without `--host`; of others every address is tried.

    Raises:
        Failure: exit 10: taken (naming the holder where that can be known), not permitted, or not an address of this
            machine.
    """
    if port is None:
        return
    given = _option(argv, "--host")
    host = given if given is not None else "127.0.0.1" if engine == "sglang" else _EVERY_ADDRESS
    bound, foreign = False, []
    for family, address in _addresses(host):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a machine without IPv6
        try:
            # As servers do: addresses still in TIME_WAIT after the last one do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            bound = True
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise _port_failure(port, error) from error
            foreign.append(address)
        finally:
            listener.close()
    if foreign and not bound:
        raise Failure(
            "the server's --host %s (%s) is no address of this machine" % (host, ", ".join(foreign)),
            kind="address",
            hint="set `host` of the profile to 0.0.0.0 or to an address of this machine (ip addr)",
            exit_code=EXIT_NOT_CLEAN,
        )


def _addresses(host):
    if host in (_EVERY_ADDRESS, ""):
        return [(socket.AF_INET, _EVERY_ADDRESS)]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [(socket.AF_INET, _EVERY_ADDRESS)]  # the server's own resolver may know more
    return [(entry[0], entry[4][0]) for entry in found]


def _port_failure(port, error):
    if error.errno == errno.EACCES:
        return Failure(
            "port %d may not be bound by this user" % port,
            kind="port",
            hint="give the profile a port above 1023",
            exit_code=EXIT_NOT_CLEAN,
        )
    holder, known = processes.listening(port)
    fields = {}
    if holder is not None:
        who = "pid %d (%s, %s)" % (holder.pid, holder.user, holder.command[:120])
        fields["holder"] = processes.describe(holder)
    else:
        who = "a process of another user" if known else "somebody (%s)" % error.strerror
    return Failure(
        "port %d is taken by %s" % (port, who),
        kind="port",
        hint="end it, or give the profile another port",
        exit_code=EXIT_NOT_CLEAN,
        **fields,
    )


def _option(argv, name):
    """The last value of an option of the command line (the one that argparse takes), or None."""
    found = None
    for position, word in enumerate(argv):
        if word == name and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def _check_shm(context):
    """An engine with a full /dev/shm dies late and with a bus error."""
    folder = context.host.get("shm_dir") or "/dev/shm"
    try:
        usage = os.statvfs(folder)
    except OSError:
        return  # no such thing on this platform
    free = usage.f_bavail * usage.f_frsize
    if usage.f_blocks and free < min(_SPARE_SHM, usage.f_blocks * usage.f_frsize // 10):
        raise Failure(
            "no space left on %s: %d MiB free" % (folder, free >> 20),
            kind="shm-full",
            hint="ls -l %s; remove what dead processes left there" % folder,
            exit_code=EXIT_NOT_CLEAN,
        )


def _check_log_folder(folder):
    """The folder of the logs, made where missing, writable and with space for a log."""
    try:
        os.makedirs(folder, exist_ok=True)
        usage = os.statvfs(folder)
        free = usage.f_bavail * usage.f_frsize
    except OSError as error:
        raise disk_failure(error, folder) from error
    if free < min(_LEAST_FREE, usage.f_blocks * usage.f_frsize // 20):
        raise disk_failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        why = errno.EROFS if usage.f_flag & os.ST_RDONLY else errno.EACCES
        raise disk_failure(OSError(why, os.strerror(why)), folder)


def _open_log(folder, profile, tag):
    """Create the attempt's log; an earlier attempt's is never touched."""
    number = 1
    while True:
        name = "%s_%s.log" % (profile, tag) if number == 1 else "%s_%s.%d.log" % (profile, tag, number)
        path = os.path.join(folder, name)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644))
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise disk_failure(error, path) from error


def _start_keeper(context, number):
    """Start the keeper of an attempt, and wait until it has started the server or says why not."""
    from . import keeper as _  # noqa: F401 - named here so that its text is sent along

    folder = context.state.path("attempts", number)
    program = os.path.join(folder, "keeper.py")
    write_file(program, context.sources["keeper"].encode("utf-8"), 0o600)
    keeper = subprocess.Popen(
        [context.python, "-I", program, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
        cwd="/",
    )
    # It outlives us; should it end first, it is reaped.
    threading.Thread(target=keeper.wait, daemon=True).start()
    deadline = time.monotonic() + _START_S
    ended = False
    while context.state.read_json("attempts", number, "run.json") is None:
        # Looked at once more after its end: its record may have come between.
        if ended or time.monotonic() > deadline:
            raise Failure(
                "the keeper of attempt %d %s"
                % (number, "ended without a word" if ended else "did not start within %g s" % _START_S),
                kind="keeper",
                hint="look at the load of the host, and at the space for %s" % folder,
            )
        ended = keeper.poll() is not None
        time.sleep(0.01)
