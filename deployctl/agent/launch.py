"""Starts a server: free GPUs, free port, its own log, a keeper; then follows it to ready."""

import errno
import os
import shutil
import socket
import subprocess
import time
from urllib.parse import urlsplit

from . import attempts, audit, gpu, lock, processes, releases, stop, watch
from .failure import EXIT_NOT_CLEAN, EXIT_USAGE, Failure
from .state import disk_failure, write_file

_START_S = 20.0
_LEAST_FREE = 16 << 20
_SPARE_SHM = 64 << 20


def launch(context):
    """Start a profile's server detached, and unless told otherwise follow it to its verdict."""
    with lock.exclusive(context):
        try:
            attempt, cleaned = _start(context)
        except Failure as failure:
            audit.record(context, failure.as_result())
            raise
    if not context.args.get("wait", True):
        result = watch._with_particulars({"state": attempts.LOADING}, attempt, [], None)
        result["clean"] = cleaned
        audit.record(context, result)
        return result
    result = watch.follow(context, attempt)
    result["clean"] = cleaned
    audit.record(context, result)
    return result


def _start(context):
    args = context.args
    _refuse_twins(context)
    cleaned = None
    if args.get("clean", "ours") != "none":
        cleaned = gpu.clean_up(context, args.get("clean") or "ours")
    _check_port(args)
    gpu.remove_shm_leftovers(context)
    _check_shm(context)
    number = context.state.next_number("attempt")
    spec = _spec(context, number)
    folder = context.state.path("attempts", number)
    spec["log"] = _open_log(context.log_dir, args["profile"], args["log_tag"])
    context.state.write_json(spec, "attempts", number, "spec.json")
    from . import keeper as _  # noqa: PLC0415, F401 - named here so that its text is sent along

    keeper = os.path.join(folder, "keeper.py")
    write_file(keeper, context.sources["keeper"].encode("utf-8"), 0o600)
    subprocess.Popen(
        [context.python, "-I", keeper, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
        cwd="/",
    )
    _await_start(context, number)
    attempt = attempts.load(context.state, number)
    watch.announce(context, attempt)
    return attempt, cleaned


def _spec(context, number):
    args = context.args
    release = releases.current(context.state)
    python = os.path.expanduser(context.host.get("python") or context.python)
    argv = [word.replace("{python}", python) for word in args["argv"]]
    if argv[0].startswith("~/"):
        argv[0] = os.path.expanduser(argv[0])
    return {
        "attempt": number,
        "log_tag": args["log_tag"],
        "profile": args["profile"],
        "argv": argv,
        "env": args.get("env") or {},
        "cwd": os.path.expanduser(args.get("cwd") or "~"),
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
        "at": time.time(),
        "by": context.operator,
        "command": context.command,
        "run_id": context.run_id,
        "rank": args.get("rank", 0),
        "nodes": args.get("nodes", 1),
    }


def _refuse_twins(context):
    """No second load of the same port, and no server of ours in the way; `replace` stops it first."""
    port = context.args.get("port")
    for attempt in attempts.live(context.state):
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


def _check_port(args):
    """The port must be bindable now: the engine would find out only after the whole load."""
    port = args.get("port")
    if port is None:
        return
    host = _option(args["argv"], "--host") or urlsplit(args["ready"]["url"]).hostname or "127.0.0.1"
    for family, address in _addresses(host):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As servers do: addresses still in TIME_WAIT after the last one do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise _port_failure(port, error) from error
        finally:
            listener.close()


def _addresses(host):
    if host in ("0.0.0.0", ""):
        return [(socket.AF_INET, "0.0.0.0")]
    if host == "::":
        return [(socket.AF_INET6, "::")]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return [(socket.AF_INET, "0.0.0.0")]
    return [(entry[0], entry[4][0]) for entry in found]


def _port_failure(port, error):
    if error.errno == errno.EACCES:
        return Failure("port %d may not be bound by this user" % port, kind="port", exit_code=EXIT_NOT_CLEAN)
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
    for position, word in enumerate(argv):
        if word == name and position + 1 < len(argv):
            return argv[position + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


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
            "%s is almost full: %d MiB free" % (folder, free >> 20),
            kind="shm-full",
            hint="ls -l %s; remove what dead processes left there" % folder,
            exit_code=EXIT_NOT_CLEAN,
        )


def _open_log(folder, profile, tag):
    """Create the attempt's log; an earlier attempt's is never touched."""
    try:
        os.makedirs(folder, exist_ok=True)
        usage = os.statvfs(folder)
        if usage.f_bavail * usage.f_frsize < min(_LEAST_FREE, usage.f_blocks * usage.f_frsize // 20):
            raise OSError(errno.ENOSPC, "almost full")
        for number in range(1, 100000):
            name = "%s_%s.log" % (profile, tag) if number == 1 else "%s_%s.%d.log" % (profile, tag, number)
            path = os.path.join(folder, name)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            except FileExistsError:
                continue
            os.close(handle)
            return path
    except OSError as error:
        raise disk_failure(error, folder) from error
    raise Failure("no free name for the log of %s in %s" % (tag, folder), kind="log", exit_code=EXIT_USAGE)


def _await_start(context, number):
    """The keeper's first record, or the reason why there is none."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        run = context.state.read_json("attempts", number, "run.json")
        if run is not None:
            return
        time.sleep(0.01)
    raise Failure(
        "the keeper of attempt %d did not start within %g s" % (number, _START_S),
        kind="keeper",
        hint="look at the load of the host and at %s" % context.state.path("attempts", number),
    )


def find_tool(name):
    """Where a program is, or None."""
    return shutil.which(name)
