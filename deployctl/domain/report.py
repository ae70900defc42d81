"""What a command has to say: one result per host, and the worst of them as exit code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployctl.errors import DeployError, worst_exit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The outcome on one host.

    `error` holds `kind`, `message` and `hint` where something went wrong, and `fields` whatever the command adds.
    """

    name: str
    status: str
    exit_code: int = 0
    error: Mapping[str, Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

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

    def as_json(self) -> dict[str, Any]:
        """The host's object in `--json`."""
        return {"status": self.status, "exit": self.exit_code, **self.fields, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a command on all its hosts, in inventory order."""

    command: str
    hosts: tuple[HostReport, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The worst host's."""
        return worst_exit([host.exit_code for host in self.hosts])

    def as_json(self) -> dict[str, Any]:
        """The one object of `--json`."""
        return {
            "ok": self.exit_code == 0,
            "command": self.command,
            "hosts": {host.name: host.as_json() for host in self.hosts},
            **self.extra,
        }
