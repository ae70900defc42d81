"""The three attempts that do not work: each loads, answers one request, and dies of ten; deployctl names the line."""

from typing import Any

from tests.gpu import verdicts
from tests.gpu.servers import Fleet
from tests.gpu.session import Session

NEEDS: tuple[str, ...] = ()
PROFILE = "a-v1"
ATTEMPTS = ("v1", "v2", "v3")
_NEED_S = 90.0
_CRASHED, _NOT_READY = 6, 5


def run(session: Session, _fleet: Fleet) -> None:
    """Push, launch, burst, diagnosis, rollback; for each attempt."""
    for version in ATTEMPTS:
        if session.clock.left_s() < _NEED_S:
            session.skip(f"crash of {version}", f"{session.clock.left_s():.0f} s left")
            session.verdicts(_verdicts(version, None, None))
            continue
        try:
            _attempt(session, version)
        except Exception as error:
            session.error(f"crash of {version}", error)
        finally:
            session.ask("stop", timeout_s=60)
            session.ask("rollback", "--to", "base", timeout_s=120)


def _attempt(session: Session, version: str) -> None:
    reference = f"dynamic_spec/{version}"
    pushed = session.ask("push", "--patch", reference, timeout_s=200)
    limit_s = int(session.clock.left_s()) - 10
    launched = session.ask(
        "launch",
        "--no-clean",
        "--profile",
        PROFILE,
        "--log-tag",
        f"t_{version}",
        "--burst",
        "10",
        "--timeout",
        f"{limit_s}s",
        "--",
        "--speculative-disable-batch-threshold",
        "5",
        timeout_s=limit_s + 60,
    )
    session.deployctl("logs", "--crash", timeout_s=60)
    session.deployctl("status", timeout_s=60)
    rolled_back = session.ask("rollback", timeout_s=120)
    clean = session.ask("status", timeout_s=60)
    crash = launched.get("crash") or {}
    session.record(
        "crashes",
        version,
        {
            "pushed": pushed.get("status"),
            "exit": launched["exit_code"],
            "cause": crash.get("cause"),
            "patched": crash.get("patched"),
            "ready_seconds": launched.get("ready_seconds"),
            "smoke": launched.get("smoke"),
            "rolled_back": rolled_back.get("status"),
            "release": clean.get("release"),
            "drift": clean.get("drift"),
        },
    )
    session.say(version, crash.get("cause"), crash.get("patched"))
    session.verdicts(_verdicts(version, launched, clean))


def _verdicts(version: str, launched: dict[str, Any] | None, clean: dict[str, Any] | None) -> list[verdicts.Verdict]:
    code = launched and launched["exit_code"]
    patched = ((launched or {}).get("crash") or {}).get("patched") or {}
    named = str(patched.get("patch") or "").endswith(version)
    back = clean is not None and clean.get("release") == 0 and clean.get("drift") == []
    # Running out of this run's own time says nothing of the patch.
    known = launched is not None and code != _NOT_READY
    return [
        verdicts.judge(
            "crashes",
            f"{version}: launch ends as crashed",
            code,
            holds=code == _CRASHED if known else None,
            wanted="exit 6",
        ),
        verdicts.judge(
            "crashes", f"{version}: a patched line is named", patched.get("text"), holds=named if known else None
        ),
        verdicts.judge(
            "crashes", f"{version}: base again after rollback", back, holds=back if clean is not None else None
        ),
    ]
