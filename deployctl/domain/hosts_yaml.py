"""hosts.yaml: found, read and decoded into an inventory; what it does not say becomes a default here, once."""

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deployctl import yamlconf
from deployctl.domain.inventory import Host, Inventory, Profile, Smoke, parse_address, port_of
from deployctl.errors import UsageError
from deployctl.yamlconf import Value

CONFIG_VARIABLE = "DEPLOYCTL_CONFIG"
CONFIG_NAME = "hosts.yaml"

_NAME = re.compile(r"[A-Za-z0-9_.:\[\]@-]+")
_MODULE_FLAG = "-m"
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
    "tool": "tool_s",
}


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
