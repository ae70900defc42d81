"""Every error a user can meet: what happened, the next command to type, and the exit code.

DeployError                 1   a step failed, the host is as it was before
├── UsageError              2   the command line, hosts.yaml, a patch or a playbook is wrong; nothing was contacted
│   └── ConfigError         2   the same, with file:line and key path
├── Unreachable             3   the host could not be asked; nothing is known about it
│   ├── AuthenticationError 3   no offered key or method was accepted
│   └── HostKeyError        3   the host's key is unknown or has changed
├── LinkLost                3   the connection broke after the request had been sent: the outcome must be asked for
└── Interrupted           130   Ctrl-C

What the agent reports about a host is not an exception: it arrives as a verdict (`deployctl.domain.report`).
"""

from typing import Any, ClassVar, Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_LOCKED: Final = 4
EXIT_NOT_READY: Final = 5
EXIT_CRASHED: Final = 6
EXIT_SMOKE: Final = 7
EXIT_NEEDS_RECOVERY: Final = 8
EXIT_DRIFT: Final = 9
EXIT_NOT_CLEAN: Final = 10
EXIT_INTERRUPTED: Final = 130

# The worst outcome of several hosts decides the exit code of a command; 130 always wins.
SEVERITY: Final = (
    EXIT_INTERRUPTED,
    EXIT_NEEDS_RECOVERY,
    EXIT_UNREACHABLE,
    EXIT_FAILED,
    EXIT_CRASHED,
    EXIT_SMOKE,
    EXIT_NOT_READY,
    EXIT_NOT_CLEAN,
    EXIT_DRIFT,
    EXIT_LOCKED,
    EXIT_USAGE,
)


def worst_exit(codes: list[int]) -> int:
    """The exit code of a command from those of its hosts, most severe first; 0 if all are 0."""
    for code in SEVERITY:
        if code in codes:
            return code
    return next((code for code in codes if code), EXIT_OK)


class DeployError(Exception):
    """Something the user must know. `message` says what happened, `hint` the next command to type."""

    exit_code: ClassVar[int] = EXIT_FAILED
    kind: ClassVar[str] = "failed"

    def __init__(self, message: str, *, hint: str = "", kind: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.kind_now = kind or self.kind

    def as_json(self) -> dict[str, Any]:
        """The `error` object of `--json`."""
        return {"kind": self.kind_now, "message": self.message, "hint": self.hint}


class UsageError(DeployError):
    """The command line, hosts.yaml, a patch or a playbook is wrong; no host was contacted."""

    exit_code = EXIT_USAGE
    kind = "usage"


class ConfigError(UsageError):
    """A file is wrong: the message begins with file:line and the key path."""

    kind = "config"


class Unreachable(DeployError):
    """The host could not be asked; nothing is known about it."""

    exit_code = EXIT_UNREACHABLE
    kind = "unreachable"


class AuthenticationError(Unreachable):
    """None of the offered keys or methods was accepted."""

    kind = "authentication"


class HostKeyError(Unreachable):
    """The host's key is unknown or has changed."""

    kind = "host-key"


class LinkLost(Unreachable):
    """The connection broke after the request had been sent: the outcome must be asked for."""

    kind = "link-lost"

    def __init__(self, message: str, *, hint: str = "", kind: str = "") -> None:
        super().__init__(message, hint=hint or "deployctl status tells what became of it", kind=kind)


class Interrupted(DeployError):
    """Ctrl-C."""

    exit_code = EXIT_INTERRUPTED
    kind = "interrupted"
