"""What a command has to say: one result per host, and the worst of them as exit code."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deployctl.errors import EXIT_INTERRUPTED, DeployError, worst_exit

_ON_A_HOST = re.compile(
    r"\bdeployctl (push|launch|wait|smoke|bench|logs|status|history|stop|clean|rollback|audit|doctor"
    r"|lock (?:acquire|release|show))\b(?! --host)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The outcome on one host.

    `error` holds `kind`, `message` and `hint` where something went wrong, and `fields` whatever the command adds.
    `where` is what the commands that are offered as the next ones need to mean this host: ` --host NAME`, or nothing
    where they mean it anyway.
    """

    name: str
    status: str
    exit_code: int = 0
    error: Mapping[str, Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @classmethod
    def from_result(cls, name: str, result: Mapping[str, Any]) -> "HostReport":
        """From the agent's verdict."""
        rest = {key: value for key, value in result.items() if key not in ("status", "exit", "error")}
        return cls(name=name, status=result["status"], exit_code=result["exit"], error=result.get("error"), fields=rest)

    @classmethod
    def from_error(cls, name: str, error: DeployError, **fields: Any) -> "HostReport":
        """From an exception: the host could not be asked."""
        status = {3: "unreachable", 130: "interrupted"}.get(error.exit_code, "failed")
        return cls(name=name, status=status, exit_code=error.exit_code, error=error.as_json(), fields=fields)

    def named(self) -> "HostReport":
        """The same, its hint naming the host: without --host the command would go to the default hosts."""
        where = f" --host {shlex.quote(self.name)}"
        error = self.error
        if error and error.get("hint"):
            error = {**error, "hint": _ON_A_HOST.sub(lambda match: match[0] + where, str(error["hint"]))}
        return replace(self, where=where, error=error)

    def as_json(self) -> dict[str, Any]:
        """The host's object in `--json`."""
        return {"status": self.status, "exit": self.exit_code, **self.fields, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a command on all its hosts, in inventory order; `interrupted` by Ctrl-C, whatever they say."""

    command: str
    hosts: tuple[HostReport, ...]
    interrupted: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else the worst host's."""
        return EXIT_INTERRUPTED if self.interrupted else worst_exit([host.exit_code for host in self.hosts])

    def as_json(self) -> dict[str, Any]:
        """The one object of `--json`."""
        return {
            "ok": self.exit_code == 0,
            "command": self.command,
            "hosts": {host.name: host.as_json() for host in self.hosts},
            **self.extra,
        }
