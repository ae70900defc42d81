"""Everything a push or a launch would need, looked at without changing anything."""

import errno
import glob
import os
import pwd
import shutil
import sys
import tempfile
import time

from . import attempts, gpu, launch, lock, package, releases
from .failure import Failure, counted
from .state import disk_failure
from .tools import TOOL_S, Tool

_SPARE = 64 << 20
_SPARE_SHM = 1 << 30
# In the order of systemd: the main file first, drop-ins of whatever folder by their names.
_LOGIND = "/etc/systemd/logind.conf"
_LOGIND_FOLDERS = (
    "/usr/lib/systemd/logind.conf.d",
    "/usr/local/lib/systemd/logind.conf.d",
    "/run/systemd/logind.conf.d",
    "/etc/systemd/logind.conf.d",
)


def doctor(context):
    """A list of checks: {"name", "ok": True|False|None, "detail", "hint"}; exit 1 when one is False."""
    checks = []

    def check(name, look):
        try:
            ok, detail, hint = look()
        except Failure as failure:
            ok, detail, hint = False, failure.message, failure.hint
        except Exception as error:
            ok, detail, hint = False, "%s: %s" % (type(error).__name__, error), ""
        checks.append({"name": name, "ok": ok, "detail": detail, "hint": hint})

    check(
        "python",
        lambda: (sys.version_info >= (3, 8), "%s %s" % (sys.executable, sys.version.split()[0]), "3.8 or newer"),
    )
    check("package", lambda: _package(context))
    check("state", lambda: _folder(context.state.root))
    check("logs", lambda: _folder(context.log_dir))
    check("lock", lambda: _lock(context))
    check("journal", lambda: _journal(context))
    check("gpus", lambda: _gpus(context))
    for port in context.args.get("ports") or []:
        check("port %d" % port["port"], lambda port=port: _port(context, port))
    check("shared memory", lambda: _shm(context))
    check("session", lambda: _session(context))
    check("clock", lambda: _clock(context))
    failed = [entry for entry in checks if entry["ok"] is False]
    result: dict = {"status": "ok" if not failed else "failed", "checks": checks}
    if failed:
        result["exit"] = 1
        result["error"] = {
            "kind": "doctor",
            "message": "; ".join("%s: %s" % (entry["name"], entry["detail"].splitlines()[0]) for entry in failed),
            "hint": failed[0]["hint"],
        }
    return result


def _package(context):
    found = package.locate(context)
    detail = "%s %s (%s) in %s" % (found.name, found.version, found.kind, found.directory)
    try:
        release = releases.current(context.state)
    except Failure:
        release = None  # that it is damaged is said by the check of the journal
    reason = package.hidden(context, release) if release is not None else None
    if reason:
        return False, reason, "move that folder away, or rename it: it hides the package that was pushed to"
    if found.warnings:
        detail += "; " + "; ".join(found.warnings)
    locked = next((folder for folder, _, _ in os.walk(found.directory) if not os.access(folder, os.W_OK)), None)
    if locked is not None:
        if os.statvfs(locked).f_flag & os.ST_RDONLY:
            failure = disk_failure(OSError(errno.EROFS, ""), locked)
            return False, "%s; %s" % (detail, failure.message), failure.hint
        return False, "%s; %s is not writable" % (detail, locked), "set `user` of this host to the package's owner"
    disk = os.statvfs(found.directory)
    if disk.f_bavail * disk.f_frsize < _SPARE:
        free = disk.f_bavail * disk.f_frsize >> 20
        return False, "%s: %d MiB free there" % (detail, free), "free some space there (df -h %s)" % found.directory
    if disk.f_flag & os.ST_NOEXEC:
        return (
            None,
            detail + ": mounted noexec",
            "compiled extensions cannot be loaded from there: remount it with exec",
        )
    return True, detail, ""


def _folder(path):
    """A folder that exists or can be made, is writable, and has space. Nothing is left behind."""
    existing = path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return False, "%s is no folder" % existing, "move it out of the way, or name another folder in hosts.yaml"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise disk_failure(error, existing) from error
    disk = os.statvfs(existing)
    if disk.f_files and not disk.f_favail:
        return False, "%s: no inodes left" % path, "remove some files there (df -i %s)" % existing
    free = disk.f_bavail * disk.f_frsize
    return free >= _SPARE, "%s (%d MiB free)" % (path, free >> 20), "free some space there (df -h %s)" % existing


def _lock(context):
    hold = context.state.read_json("hold.json")
    if hold:
        return None, "held by %s: %s" % (hold.get("operator"), hold.get("message")), "deployctl lock show"
    found = lock.current_holder(context.state)
    if found:
        return None, "a command of %s is at work: %s" % (found.get("operator"), found.get("command")), ""
    return True, "free", ""


def _journal(context):
    entry = context.state.read_json("journal.json")
    if entry is None:
        now = releases.current(context.state)
        if now is not None:
            releases.expected(context.state, now)  # says what of it is damaged
        return True, "release %d" % now["number"] if now else "nothing was pushed yet", ""
    found = lock.current_holder(context.state)
    if found or context.state.read_json("journal.json") != entry:
        who = (found or entry).get("operator")
        return None, "a %s of %s is in progress" % (entry["operation"], who), "wait for its end: deployctl status"
    return None, "an interrupted %s is open" % entry["operation"], "deployctl status recovers it"


def _gpus(context):
    tools: dict = {}
    paths = gpu.devices(context)
    if not paths:
        return None, "no GPU devices (%s)" % gpu.pattern(context), ""
    cards = gpu.cards(context, tools)
    held = gpu.holders(context, tools)
    missing = [
        state if state.startswith(name + " ") else "%s: %s" % (name, state)
        for name, state in sorted(tools.items())
        if state != "ok"
    ]
    counts = ((paths, "device"), (cards, "card"), (held, "holder"))
    detail = ", ".join(counted(len(found), word) for found, word in counts)
    if missing:
        return None, detail + "; " + "; ".join(missing), "fuser is of psmisc, nvidia-smi of the driver; root sees all"
    return True, detail, ""


def _port(context, port):
    for attempt in attempts.live(context.state):
        if attempt["port"] == port["port"]:
            return None, "our attempt %d (%s) serves there" % (attempt["attempt"], attempt["log_tag"]), "deployctl stop"
    launch.check_port(port["port"], port["argv"], port["engine"])
    return True, "free (%s)" % port["profile"], ""


def _shm(context):
    folder = context.host.get("shm_dir") or "/dev/shm"
    if not os.path.isdir(folder):
        return None, "no %s on this platform" % folder, ""
    usage = shutil.disk_usage(folder)
    detail = "%s: %d of %d MiB free" % (folder, usage.free >> 20, usage.total >> 20)
    if usage.free < usage.total // 10:
        return False, detail, "deployctl clean removes what dead servers of ours left; ls -l %s shows the rest" % folder
    if usage.free < _SPARE_SHM:
        return None, detail, "ranks talk through it: give the container more (--shm-size, or --ipc=host)"
    return True, detail, ""


def _session(context):
    """Logind may end everything of a user at logout, servers included."""
    if shutil.which("loginctl") is None:
        return True, "servers outlive the session (no logind)", ""
    settings = _logind()
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    only, exempt = settings.get("killonlyusers", "").split(), settings.get("killexcludeusers", "root").split()
    kills = settings.get("killuserprocesses", "no").lower() in ("yes", "true", "on", "1", "y", "t")
    if not kills or user in exempt or (only and user not in only):
        return True, "servers outlive the session", ""
    tool = Tool(["loginctl", "show-user", user, "--property=Linger"], context.limit("tool_s", TOOL_S))
    if b"Linger=yes" in tool.stdout:
        return True, "servers outlive the session (%s lingers)" % user, ""
    return (
        False,
        "logind ends all processes of %s at logout, servers too (KillUserProcesses)" % user,
        "loginctl enable-linger %s" % user,
    )


def _logind():
    """The [Login] settings in force: {name in lower case: value}."""
    drop_ins = {os.path.basename(path): path for folder in _LOGIND_FOLDERS for path in glob.glob(folder + "/*.conf")}
    found = {}
    for path in [_LOGIND] + [drop_ins[name] for name in sorted(drop_ins)]:
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                lines = source.read().splitlines()
        except OSError:
            continue  # no such file means its defaults
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith(("#", ";")):
                found[name.strip().lower()] = value.strip()
    return found


def _clock(context):
    """Records of the future mean that the clock was set back: ages and ETAs are wrong until it has caught up."""
    now = time.time()
    newest = max(
        [attempt["at"] for attempt in attempts.listing(context.state)] + [releases.pointer(context.state)["at"]]
    )
    said = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if newest > now + 60:
        return None, "%s, %d s before our latest record" % (said, newest - now), "set the clock (timedatectl)"
    return True, said, ""
