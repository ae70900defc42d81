"""Everything a push or a launch would need, looked at without changing anything."""

import os
import shutil
import socket
import sys
import tempfile

from . import gpu, launch, lock, package, processes, releases
from .failure import Failure


def doctor(context):
    """A list of checks: {"name", "ok": True|False|None, "detail", "hint"}; exit 1 when one is False."""
    checks = []

    def check(name, look):
        try:
            ok, detail, hint = look()
        except Failure as failure:
            ok, detail, hint = False, failure.message, failure.hint
        except OSError as error:
            ok, detail, hint = False, str(error), ""
        checks.append({"name": name, "ok": ok, "detail": detail, "hint": hint})

    check(
        "python",
        lambda: (sys.version_info >= (3, 8), "%s %s" % (sys.executable, sys.version.split()[0]), "3.8 or newer"),
    )
    check("package", lambda: _package(context))
    check("state", lambda: _folder(context.state.root, 64 << 20))
    check("logs", lambda: _folder(context.log_dir, 64 << 20))
    check("lock", lambda: _lock(context))
    check("journal", lambda: _journal(context))
    check("gpus", lambda: _gpus(context))
    for port in context.args.get("ports") or []:
        check("port %d" % port["port"], lambda port=port: _port(port))
    check("shared memory", lambda: _shm(context))
    check("session", lambda: _session())
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
    writable = os.access(found.directory, os.W_OK)
    detail = "%s %s (%s) in %s" % (found.name, found.version, found.kind, found.directory)
    if found.warnings:
        detail += "; " + "; ".join(found.warnings)
    if not writable:
        return False, detail + ": not writable", "set `user:` of this host to the owner of the package"
    return True, detail, ""


def _folder(path, wanted):
    """A folder that exists or can be made, is writable, and has space. Nothing is left behind."""
    existing = path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing) or "/"
    with tempfile.TemporaryFile(dir=existing):
        pass
    free = shutil.disk_usage(existing).free
    return free >= wanted, "%s (%d MiB free)" % (path, free >> 20), "free some space there"


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
        return True, "release %d" % now["number"] if now else "nothing was pushed yet", ""
    return None, "an interrupted %s is open" % entry["operation"], "deployctl status recovers it"


def _gpus(context):
    tools: dict = {}
    paths = gpu.devices(context)
    if not paths:
        return None, "no GPU devices (%s)" % context.host["gpu"]["devices"], ""
    cards = gpu.cards(tools)
    held = gpu.holders(context, tools)
    missing = ["%s: %s" % item for item in sorted(tools.items()) if item[1] != "ok"]
    detail = "%d devices, %d cards, %d holders" % (len(paths), len(cards), len(held))
    if missing:
        return None, detail + "; " + "; ".join(missing), "apt install psmisc; the driver brings nvidia-smi"
    return True, detail, ""


def _port(port):
    launch.check_port(port["port"], port["argv"], port["engine"])
    return True, "free (%s)" % port["profile"], ""


def _shm(context):
    folder = context.host.get("shm_dir") or "/dev/shm"
    if not os.path.isdir(folder):
        return None, "no %s on this platform" % folder, ""
    usage = shutil.disk_usage(folder)
    return usage.free > usage.total // 10, "%s: %d of %d MiB free" % (folder, usage.free >> 20, usage.total >> 20), ""


def _session():
    """Logind may end everything of a user at logout, servers included."""
    if os.geteuid() == 0 or shutil.which("loginctl") is None:
        return True, "servers outlive the session (host %s)" % socket.gethostname(), ""
    tool = gpu.Tool(["loginctl", "show-user", str(os.geteuid()), "--property=Linger"])
    settings = ""
    try:
        with open("/etc/systemd/logind.conf", encoding="utf-8", errors="replace") as source:
            settings = source.read()
    except OSError:
        pass  # no such file means its defaults
    kills = any(line.strip().lower() == "killuserprocesses=yes" for line in settings.splitlines())
    if kills and b"Linger=yes" not in tool.stdout:
        return (
            False,
            "logind ends all of a user's processes at logout (KillUserProcesses=yes)",
            "loginctl enable-linger",
        )
    return True, "servers outlive the session", ""


__all__ = ["doctor", "processes"]
