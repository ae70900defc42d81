"""Hosts, groups and profiles as values, and which of them a command means.

A `Host` is complete: defaults are merged when hosts.yaml is read. Only what SSH itself would look up (user, port, jump)
stays None where hosts.yaml does not say it, so that an unwritten default never overrides the user's ssh_config.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deployctl import yamlconf
from deployctl.errors import UsageError

_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:]+(%[A-Za-z0-9._-]+)?|[0-9A-Fa-f:]+:[0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What `clean` works on: a glob of device files, and whose processes it may end."""

    devices: str = "/dev/nvidia[0-9]*"
    clean: Literal["ours", "all"] = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds in seconds, and a count of tries; each can be set under `limits`."""

    connect_s: float = 15.0
    connect_tries: int = 3
    dead_peer_s: float = 45.0
    term_grace_s: float = 30.0
    kill_patience_s: float = 60.0
    gpu_memory_s: float = 120.0
    burst_s: float = 120.0
    hold_s: float = 300.0
    tool_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine to work on, with every default merged in.

    `python`, `state_dir`, `log_dir` may begin with `~/`, which the host itself expands. `user`, `port` and `jump` are
    None where nothing was written.
    """

    name: str
    address: str
    connection: Literal["ssh", "local"] = "ssh"
    user: str | None = None
    port: int | None = None
    jump: str | None = None
    host_keys: Literal["strict", "accept-new"] = "strict"
    python: str = "python3"
    package: str = "sglang"
    state_dir: str = "~/.deployctl"
    log_dir: str = "~/deployctl-logs"
    gpu: Gpu = field(default_factory=Gpu)
    limits: Limits = field(default_factory=Limits)

    def as_request(self) -> dict[str, Any]:
        """The host as the agent needs it (JSON)."""
        return {
            "name": self.name,
            "python": self.python,
            "package": self.package,
            "state_dir": self.state_dir,
            "log_dir": self.log_dir,
            "gpu": {"devices": self.gpu.devices, "clean": self.gpu.clean},
            "limits": {
                key: getattr(self.limits, key)
                for key in ("term_grace_s", "kill_patience_s", "gpu_memory_s", "burst_s", "hold_s", "tool_s")
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """One generation that must look right, and how many at once."""

    prompt: str = "The capital of France is"
    max_tokens: int = 32
    expect: str = ""
    burst: int = 0
    model: str = ""

    def as_request(self) -> dict[str, Any]:
        """JSON for the agent."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "expect": self.expect,
            "burst": self.burst,
            "model": self.model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A named server command.

    Attributes:
        argv: The whole command, arguments included; `{python}` stands for the host's interpreter.
        engine: `sglang` (its log and endpoints are understood) or `openai`.
        port: The port it will serve on, where the arguments or the ready URL tell.
        bench_python: The host's interpreter with the load generator; None for the one that serves.
    """

    name: str
    default: bool
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    engine: Literal["sglang", "openai"]
    ready_url: str
    ready_timeout_s: float
    port: int | None
    smoke: Smoke | None
    nodes: int
    bench_python: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything hosts.yaml says."""

    path: Path
    hosts: Mapping[str, Host]
    groups: Mapping[str, tuple[str, ...]]
    profiles: Mapping[str, Profile]
    defaults: Host

    @property
    def root(self) -> Path:
        """The folder of hosts.yaml: patches/ and playbooks/ stand beside it."""
        return self.path.parent

    def profile(self, name: str | None) -> Profile:
        """The named profile, or the default one.

        Raises:
            UsageError: There is no such profile (nearest names offered), or no default.
        """
        if name is None:
            chosen = [profile for profile in self.profiles.values() if profile.default]
            if not chosen and len(self.profiles) == 1:
                chosen = list(self.profiles.values())
            if not chosen:
                known = ", ".join(self.profiles) or "none"
                raise UsageError(
                    f"no default profile in {self.path.name} (profiles: {known})",
                    hint="name one with --profile, or set `default: true` on one",
                )
            return chosen[0]
        if name not in self.profiles:
            known = ", ".join(self.profiles) or "none"
            raise UsageError(
                f"unknown profile {name!r}", hint=yamlconf.nearest(name, self.profiles) or f"profiles: {known}"
            )
        return self.profiles[name]

    def select(self, selectors: Sequence[str]) -> tuple[Host, ...]:
        """The hosts that `--host` values mean, in inventory order, each once.

        Args:
            selectors: Names, addresses, groups, `user@addr:port`, `[v6]:port`; each may hold several, by commas.
                None at all means the group `default`, or the only host.

        Raises:
            UsageError: Something that is neither in the inventory nor looks like an address; nearest names offered.
        """
        words = [word.strip() for selector in selectors for word in selector.split(",")]
        words = [word for word in words if word]
        if any(not selector.strip(" ,") for selector in selectors):
            # Such as --host "$HOST" with an unset variable: the default group is not what was meant.
            raise UsageError(
                "--host is empty", hint=f"hosts: {', '.join(self.hosts) or 'none'}; without --host: the default ones"
            )
        if not words:
            words = self._default_words()
        chosen: dict[str, Host] = {}
        for word in words:
            for host in self._meaning(word):
                chosen.setdefault(host.name, host)
        order = {name: position for position, name in enumerate(self.hosts)}
        return tuple(sorted(chosen.values(), key=lambda host: order.get(host.name, len(order))))

    def _default_words(self) -> list[str]:
        if "default" in self.groups:
            return ["default"]
        if len(self.hosts) == 1:
            return list(self.hosts)
        raise UsageError(
            f"no --host given, and {self.path.name} has no group `default`",
            hint=f"deployctl ... --host {next(iter(self.hosts), 'NAME')}",
        )

    def _meaning(self, word: str) -> list[Host]:
        if word in self.hosts:
            return [self.hosts[word]]
        if word in self.groups:
            return [self.hosts[name] for name in self.groups[word]]
        if word.startswith("-"):
            raise UsageError(f"host {word!r} begins with a dash")
        user, address, port = parse_address(word)
        same = [
            host
            for host in self.hosts.values()
            if host.address == address and (port is None or (host.port or 22) == port)
        ]
        if same:
            return [replace(host, user=user or host.user) for host in same[:1]]
        known = [*self.hosts, *self.groups]
        named = self.hosts.get(address)
        if named is not None:
            return [replace(named, name=word, user=user or named.user, port=port or named.port)]
        looks_like_address = bool(user or port or ":" in address or "." in address)
        close = yamlconf.nearest(word, known)
        if not looks_like_address or not address:
            raise UsageError(f"unknown host {word!r}", hint=close or f"hosts: {', '.join(known) or 'none'}")
        return [replace(self.defaults, name=word, address=address, user=user or self.defaults.user, port=port)]


def parse_address(word: str) -> tuple[str | None, str, int | None]:
    """Split `user@host:port`, `[v6]:port` or a bare IPv6 address into user, address and port.

    Raises:
        UsageError: The port is not a number from 1 to 65535, a bracket is missing, or it is no host name.
    """
    user, at, rest = word.rpartition("@")
    port_text = ""
    if rest.startswith("["):
        address, bracket, after = rest[1:].partition("]")
        if not bracket or (after and not after.startswith(":")) or not _IPV6.fullmatch(address):
            raise UsageError(f"{word!r} is not an address", hint="IPv6 with a port is written [::1]:22")
        port_text = after[1:]
        if after == ":":
            raise UsageError(f"{word!r} has no port after its colon")
    elif rest.count(":") >= 2:
        address = rest
        if not _IPV6.fullmatch(address):
            raise UsageError(f"{word!r} is not an address", hint="IPv6 with a port is written [::1]:22")
    else:
        address, colon, port_text = rest.partition(":")
        if not _ADDRESS.fullmatch(address):
            raise UsageError(f"{word!r} is neither a host of the inventory nor an address")
        if colon and not port_text:
            raise UsageError(f"{word!r} has no port after its colon")
    if at and not user:
        raise UsageError(f"{word!r} has no user before its @")
    if port_text and not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 65536):
        raise UsageError(f"{word!r}: port {port_text!r} is not a number from 1 to 65535")
    return user or None, address, int(port_text) if port_text else None


def port_of(argv: Sequence[str]) -> int | None:
    """The value of the last `--port` on a command line (`--port N` or `--port=N`), or None."""
    found: int | None = None
    for position, word in enumerate(argv):
        text = ""
        if word == "--port" and position + 1 < len(argv):
            text = argv[position + 1]
        elif word.startswith("--port="):
            text = word.partition("=")[2]
        if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
            found = int(text)
    return found
