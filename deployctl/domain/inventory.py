"""hosts.yaml as values: hosts, groups, profiles, and which of them a command means.

Defaults are merged at load: a `Host` is complete. Only what SSH itself would look up (user, port, jump) stays None
where hosts.yaml does not say it, so that an unwritten default never overrides the user's ssh_config.
"""

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from deployctl import yamlconf
from deployctl.errors import ConfigError, UsageError
from deployctl.yamlconf import Value

CONFIG_VARIABLE = "DEPLOYCTL_CONFIG"
CONFIG_NAME = "hosts.yaml"

_NAME = re.compile(r"[A-Za-z0-9_.:\[\]@-]+")
_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:]+(%[A-Za-z0-9._-]+)?|[0-9A-Fa-f:]+:[0-9.]+")
_MODULE_FLAG = "-m"


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
                for key in ("term_grace_s", "kill_patience_s", "gpu_memory_s", "burst_s", "hold_s")
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


def find_config(explicit: str | None, environment: Mapping[str, str], folder: Path) -> Path:
    """The inventory file: `--config`, `$DEPLOYCTL_CONFIG`, else hosts.yaml in `folder` or the nearest parent.

    Raises:
        UsageError: There is none.
    """
    named = explicit or environment.get(CONFIG_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            source = "--config" if explicit else f"${CONFIG_VARIABLE}"
            raise UsageError(f"{source} names {named}, which is not a file", hint="deployctl init makes one here")
        return path
    for parent in (folder, *folder.parents):
        if (parent / CONFIG_NAME).is_file():
            return parent / CONFIG_NAME
    raise UsageError(f"no {CONFIG_NAME} in {folder} or a parent of it", hint="deployctl init")


# -- decoding ----------------------------------------------------------------------------------------------------------

_HOST_KEYS = ("address connection user port jump host_keys python package state_dir log_dir gpu limits").split()
_LIMIT_KEYS = {
    "connect": "connect_s",
    "tries": "connect_tries",
    "dead_peer": "dead_peer_s",
    "term_grace": "term_grace_s",
    "kill_patience": "kill_patience_s",
    "gpu_memory": "gpu_memory_s",
    "burst": "burst_s",
    "hold": "hold_s",
}


def load(path: Path) -> Inventory:
    """Read hosts.yaml.

    Raises:
        ConfigError: With file:line, key path and the nearest valid key.
    """
    return decode(yamlconf.load(path, name=_shown(path)), path)


def _shown(path: Path) -> str:
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


def decode(document: Value, path: Path) -> Inventory:
    """The same, from parsed YAML."""
    top = document.fields("defaults", "hosts", "groups", "profiles")
    base = Host(name="", address="")
    if "defaults" in top:
        known = [key for key in _HOST_KEYS if key != "address"]
        base = _host(base, top["defaults"].fields(*known))
    hosts: dict[str, Host] = {}
    if "hosts" not in top or not top["hosts"].mapping():
        document.fail("no hosts", hint="add `hosts:` with at least one `name: {address: ...}`")
    for name, value in top["hosts"].mapping().items():
        _check_name(value, name)
        hosts[name] = _host(replace(base, name=name, address=name), value.fields(*_HOST_KEYS))
    groups: dict[str, tuple[str, ...]] = {}
    for name, value in (top["groups"].mapping() if "groups" in top else {}).items():
        _check_name(value, name)
        if name in hosts:
            value.fail("a host has the same name")
        for item in value.sequence():
            if item.text() not in hosts:
                item.fail(f"unknown host {item.text()!r}", hint=yamlconf.nearest(item.text(), hosts))
        groups[name] = value.texts()
    profiles: dict[str, Profile] = {}
    for name, value in (top["profiles"].mapping() if "profiles" in top else {}).items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
            value.fail("profile names are 1-64 letters, digits, '.', '_' and '-' (they name log files)")
        profiles[name] = _profile(name, value)
        if profiles[name].default and sum(profile.default for profile in profiles.values()) > 1:
            value.fail("a second profile with `default: true`")
    return Inventory(path=path, hosts=hosts, groups=groups, profiles=profiles, defaults=base)


def _check_name(value: Value, name: str) -> None:
    if name.startswith(("-", ".")) or not _NAME.fullmatch(name):
        value.fail(f"{name!r} is not a usable name", hint="letters, digits, '.', '_', '-' and ':'")


def _host(base: Host, entries: Mapping[str, Value]) -> Host:
    changes: dict[str, Any] = {}
    for key, value in entries.items():
        match key:
            case "connection":
                changes[key] = _choice(value, "ssh", "local")
            case "host_keys":
                changes[key] = _choice(value, "strict", "accept-new")
            case "port":
                changes[key] = value.integer(least=1, most=65535)
            case "gpu":
                inner = value.fields("devices", "clean")
                gpu: dict[str, Any] = {}
                if "devices" in inner:
                    gpu["devices"] = inner["devices"].text()
                if "clean" in inner:
                    gpu["clean"] = _choice(inner["clean"], "ours", "all")
                changes[key] = replace(base.gpu, **gpu)
            case "limits":
                limits: dict[str, Any] = {}
                for limit, bound in value.fields(*_LIMIT_KEYS).items():
                    limits[_LIMIT_KEYS[limit]] = bound.integer(least=1) if limit == "tries" else bound.duration_s()
                changes[key] = replace(base.limits, **limits)
            case "package":
                if not value.text().isidentifier():
                    value.fail(f"{value.text()!r} is not the name of a package")
                changes[key] = value.text()
            case "address":
                _, address, port = parse_address(value.text())
                if port is not None:
                    value.fail("has a port", hint="write the port under `port:`")
                changes[key] = address
            case _:
                text = value.text()
                if text.startswith("-") or "\n" in text:
                    value.fail(f"{text!r} is not usable here")
                changes[key] = text
    return replace(base, **changes)


def _choice(value: Value, *choices: str) -> str:
    word = value.text()
    if word not in choices:
        value.fail(f"should be {' or '.join(choices)}, not {word!r}", hint=yamlconf.nearest(word, choices))
    return word


def _profile(name: str, value: Value) -> Profile:
    entries = value.fields("default", "command", "args", "env", "cwd", "engine", "ready", "smoke", "bench", "nodes")
    if "command" not in entries:
        value.fail("has no command", hint='command: ["{python}", -m, sglang.launch_server]')
    command = _command(entries["command"])
    arguments = _arguments(entries["args"]) if "args" in entries else ()
    argv = (*command, *arguments)
    engine = _choice(entries["engine"], "sglang", "openai") if "engine" in entries else _engine_of(command)
    port = port_of(argv)
    ready = entries["ready"].fields("url", "timeout") if "ready" in entries else {}
    url = ready["url"].text() if "url" in ready else ""
    if url:
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            ready["url"].fail(f"{url!r} is not an http:// address")
        port = port or split.port
    elif port is not None:
        url = f"http://127.0.0.1:{port}/health"
    else:
        value.fail("no port in args and no ready.url: nothing tells when it is ready", hint="args: {port: 30000}")
    return Profile(
        name=name,
        default=entries["default"].boolean() if "default" in entries else False,
        argv=argv,
        env=_environment(entries["env"]) if "env" in entries else {},
        cwd=entries["cwd"].text() if "cwd" in entries else "~",
        engine=engine,  # type: ignore[arg-type]
        ready_url=url,
        ready_timeout_s=ready["timeout"].duration_s() if "timeout" in ready else 900.0,
        port=port,
        smoke=_smoke(entries["smoke"]) if "smoke" in entries else Smoke(),
        nodes=entries["nodes"].integer(least=1, most=1024) if "nodes" in entries else 1,
        bench_python=_bench_python(entries["bench"]) if "bench" in entries else None,
    )


def _bench_python(value: Value) -> str:
    entries = value.fields("python")
    if "python" not in entries:
        value.fail("names no interpreter", hint="bench: {python: ~/bench-env/bin/python}")
    return entries["python"].text()


def _command(value: Value) -> tuple[str, ...]:
    if isinstance(value.raw, str):
        try:
            words = tuple(shlex.split(value.text()))
        except ValueError as error:
            value.fail(f"cannot be split into words: {error}")
    else:
        words = tuple(item.scalar_text() for item in value.sequence())
    if not words or not words[0]:
        value.fail("is empty")
    return words


def _arguments(value: Value) -> tuple[str, ...]:
    """`{model-path: /m, trust-remote-code: true, cuda-graph-bs: [1, 2]}` as command arguments.

    true is the flag alone, false and null leave it out, a list is one flag with several values.
    """
    words: list[str] = []
    for key, item in value.mapping().items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", key):
            item.fail(f"{key!r} is not the name of an option (write it without dashes in front)")
        if item.is_null or (item.plain and item.raw == "false"):
            continue
        words.append(f"--{key}")
        if isinstance(item.raw, list):
            words.extend(one.scalar_text() for one in item.raw)
        elif isinstance(item.raw, dict):
            item.fail("should be a value or a list", hint="JSON arguments are written in quotes")
        elif not (item.plain and item.raw == "true"):
            words.append(item.scalar_text())
    return tuple(words)


def _environment(value: Value) -> dict[str, str]:
    variables: dict[str, str] = {}
    for key, item in value.mapping().items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            item.fail(f"{key!r} is not the name of a variable")
        variables[key] = "" if item.is_null else item.scalar_text()
    return variables


def _smoke(value: Value) -> Smoke | None:
    if value.plain and value.raw == "false":
        return None
    entries = value.fields("prompt", "max_tokens", "expect", "burst", "model")
    expect = entries["expect"].text(empty=True) if "expect" in entries else ""
    try:
        re.compile(expect)
    except re.error as error:
        entries["expect"].fail(f"not a regular expression: {error}")
    default = Smoke()
    return Smoke(
        prompt=entries["prompt"].text() if "prompt" in entries else default.prompt,
        max_tokens=entries["max_tokens"].integer(least=1) if "max_tokens" in entries else default.max_tokens,
        expect=expect,
        burst=entries["burst"].integer(least=0, most=4096) if "burst" in entries else 0,
        model=entries["model"].text() if "model" in entries else "",
    )


def _engine_of(command: Sequence[str]) -> str:
    """`sglang` when the command runs a module of the package sglang."""
    for flag, module in itertools.pairwise(command):
        if flag == _MODULE_FLAG:
            return "sglang" if module.partition(".")[0] == "sglang" else "openai"
    return "openai"


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


__all__ = [
    "ConfigError",
    "Gpu",
    "Host",
    "Inventory",
    "Limits",
    "Profile",
    "Smoke",
    "decode",
    "find_config",
    "load",
    "parse_address",
    "port_of",
]
