"""Playbooks: a YAML list of fail-fast steps, checked completely before the first one. Substitution only, no logic."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployctl import yamlconf
from deployctl.domain import patch as patches
from deployctl.domain.attempt import check_log_tag
from deployctl.domain.bench import BenchRequest, parse_sweep, request_of
from deployctl.domain.compare import parse_names
from deployctl.domain.inventory import Inventory
from deployctl.errors import ConfigError, DeployError, UsageError
from deployctl.yamlconf import Value

KEEP_BETTER = "better"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
# What each step may carry: name → how its value is read. `host` is allowed everywhere.
_STEPS: Mapping[str, Mapping[str, str]] = {
    "push": {"patch": "text!", "import": "texts", "force": "flag", "adopt": "flag", "independent": "flag"},
    "launch": {
        "log_tag": "tag!",
        "profile": "text",
        "burst": "count",
        "timeout": "duration",
        "wait": "flag",
        "clean": "text",
        "smoke": "flag",
        "replace": "flag",
        "args": "texts",
        "bench": "sweep",
        "prompts": "text",
    },
    "bench": {
        "attempt": "count",
        "log_tag": "tag",
        "sweep": "sweep",
        "prompts": "text",
        "max_tokens": "count",
        "requests_per_level": "count",
        "seed": "count",
        "timeout": "duration",
    },
    "compare": {"attempts": "texts!", "keep": "text", "at": "count"},
    "wait": {"attempt": "count", "timeout": "duration", "burst": "count", "smoke": "flag"},
    "smoke": {"attempt": "count", "burst": "count", "prompt": "text", "expect": "text", "max_tokens": "count"},
    "logs": {"attempt": "count", "log_tag": "tag", "lines": "count", "grep": "text", "crash": "flag"},
    "status": {"check": "flag"},
    "history": {},
    "stop": {"attempt": "count"},
    "clean": {"all": "flag"},
    "rollback": {"to": "text", "relaunch": "flag", "force": "flag", "independent": "flag"},
    "doctor": {},
    "run": {"argv": "texts!", "timeout": "duration", "env": "map", "cwd": "text"},
    "copy": {"source": "text!", "target": "text!", "mode": "text"},
    "pause": {"seconds": "duration!", "message": "text"},
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the command's name, its decoded arguments, the hosts it names itself (or none), and its place."""

    name: str
    args: Mapping[str, Any]
    hosts: tuple[str, ...]
    file: str
    line: int

    @property
    def title(self) -> str:
        """The step in one line."""
        shown = " ".join(f"{key}={_shown(value)}" for key, value in self.args.items())
        where = f" on {','.join(self.hosts)}" if self.hosts else ""
        return f"{self.name} {shown}".rstrip() + where


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value)
    return " ".join(value) if isinstance(value, list) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Playbook:
    """A playbook with its variables filled in."""

    name: str
    path: Path
    variables: Mapping[str, str]
    steps: tuple[Step, ...]
    on_failure: tuple[Step, ...] = field(default=())


def bench_request(step: Step, root: Path) -> BenchRequest | None:
    """What a `bench` step, or a `launch` step with `bench`, has measured; None for a launch without.

    Raises:
        UsageError, ConfigError: The load is wrong.
    """
    args = step.args
    if step.name == "launch":
        return request_of(sweep=args["bench"], prompts=args.get("prompts"), root=root) if "bench" in args else None
    return request_of(
        sweep=args.get("sweep"),
        prompts=args.get("prompts"),
        root=root,
        max_tokens=args.get("max_tokens"),
        requests_per_level=args.get("requests_per_level"),
        seed=args.get("seed"),
        timeout_s=args.get("timeout"),
    )


def find(word: str, root: Path) -> Path:
    """The file of a playbook: a path, or a name under playbooks/ beside hosts.yaml.

    Raises:
        UsageError: There is none; nearest names offered.
    """
    for candidate in (Path(word), root / "playbooks" / word, root / "playbooks" / f"{word}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(path.stem for path in (root / "playbooks").glob("*.yaml"))
    raise UsageError(
        f"no playbook {word!r}", hint=yamlconf.nearest(word, known) or f"playbooks: {', '.join(known) or 'none'}"
    )


def load(path: Path, inventory: Inventory, settings: Mapping[str, str]) -> Playbook:
    """Read and check a playbook completely: steps, values, variables, patches, profiles and hosts.

    Args:
        path: The file.
        inventory: Hosts, groups and profiles that steps may name; patches lie beside it.
        settings: `--set` values; each must be among the playbook's `vars`.

    Raises:
        ConfigError: With file:line and the nearest valid name.
    """
    document = yamlconf.load(path)
    top = document.fields("name", "vars", "steps", "on_failure")
    declared = top["vars"].mapping() if "vars" in top else {}
    for name in settings:
        if name not in declared:
            hint = yamlconf.nearest(name, declared) or f"vars: {', '.join(declared) or 'none'}"
            raise ConfigError(f"{path}: --set {name}: no such variable", hint=hint)
    variables = {
        name: settings.get(name, "" if value.is_null else value.scalar_text()) for name, value in declared.items()
    }
    if "steps" not in top or not top["steps"].sequence():
        document.fail("no steps")
    reader = _Reader(variables, inventory)
    return Playbook(
        name=top["name"].text() if "name" in top else path.stem,
        path=path,
        variables=variables,
        steps=tuple(reader.step(item) for item in top["steps"].sequence()),
        on_failure=tuple(reader.step(item) for item in top["on_failure"].sequence()) if "on_failure" in top else (),
    )


class _Reader:
    def __init__(self, variables: Mapping[str, str], inventory: Inventory) -> None:
        self._variables = variables
        self._inventory = inventory

    def step(self, item: Value) -> Step:
        """Decode one list item, `name: {arguments}`."""
        if isinstance(item.raw, str):
            name, body = item.text(), item
            entries: dict[str, Value] = {}
        else:
            pairs = item.mapping()
            if len(pairs) != 1:
                item.fail("a step is one command: `- push: {patch: ...}`")
            name, body = next(iter(pairs.items()))
            entries = {}
        if name not in _STEPS:
            body.fail(f"unknown step {name!r}", hint=yamlconf.nearest(name, _STEPS) or f"steps: {', '.join(_STEPS)}")
        if body is not item:
            entries = body.fields("host", *_STEPS[name])
        args: dict[str, Any] = {}
        for key, kind in _STEPS[name].items():
            if key in entries:
                args[key] = self._value(entries[key], kind.rstrip("!"))
            elif kind.endswith("!"):
                body.fail(f"{name} needs `{key}`")
        hosts = self._hosts(entries["host"]) if "host" in entries else ()
        step = Step(name, args, hosts, item.file, item.line)
        self._check(step, body)
        return step

    def _hosts(self, value: Value) -> tuple[str, ...]:
        words = [self._text(value)] if isinstance(value.raw, str) else [self._text(one) for one in value.sequence()]
        try:
            self._inventory.select(words)
        except UsageError as error:
            value.fail(error.message, hint=error.hint)
        return tuple(words)

    def _check(self, step: Step, body: Value) -> None:
        """What can be known before the first step is known now."""
        try:
            if step.name == "push":
                patches.load(step.args["patch"], self._inventory.root)
            if step.name == "launch":
                self._inventory.profile(step.args.get("profile"))
                if "bench" in step.args and step.args.get("wait") is False:
                    body.fail("`bench` needs a server that is ready, and `wait: false` does not wait for it")
                if "prompts" in step.args and "bench" not in step.args:
                    body.fail("`prompts` are for `bench`", hint="bench: true, or the sweep: bench: 1,2,4")
            if step.name in ("launch", "bench"):
                bench_request(step, self._inventory.root)
            if step.name == "compare":
                parse_names(step.args["attempts"], hosts=False)
                if step.args.get("keep", KEEP_BETTER) != KEEP_BETTER:
                    body.fail(f"keep: {step.args['keep']!r}", hint=f"keep: {KEEP_BETTER}, or nothing to compare only")
                if "at" in step.args and "keep" not in step.args:
                    body.fail("`at` decides which one is kept, and nothing is", hint=f"keep: {KEEP_BETTER}")
            if step.name == "copy" and not (self._inventory.root / step.args["source"]).is_file():
                body.fail(f"no file {step.args['source']!r} beside {self._inventory.path.name}")
        except ConfigError:
            raise
        except DeployError as error:
            body.fail(error.message, hint=error.hint)

    # -- values ------------------------------------------------------------------------------------------------------

    def _text(self, value: Value) -> str:
        """A scalar with its placeholders filled in."""
        written = value.scalar_text()

        def fill(match: re.Match[str]) -> str:
            if match[0] in ("{{", "}}"):
                return match[0][0]
            if match[1] == "python":
                return "{python}"
            if match[1] not in self._variables:
                hint = yamlconf.nearest(match[1], self._variables) or f"vars: {', '.join(self._variables) or 'none'}"
                value.fail(f"unknown variable {{{match[1]}}}", hint=hint)
            return self._variables[match[1]]

        return _PLACEHOLDER.sub(fill, written)

    def _value(self, value: Value, kind: str) -> Any:
        if kind == "map":
            return {key: self._text(item) for key, item in value.mapping().items()}
        if kind == "texts":
            if isinstance(value.raw, str):
                return [self._text(value)]
            return [self._text(item) for item in value.sequence()]
        text = self._text(value)
        # A filled-in placeholder is read as if it had been written there: "{burst}" may be a number.
        filled = Value(text, True, value.file, value.line, value.path)
        match kind:
            case "flag":
                return filled.boolean()
            case "count":
                return filled.integer(least=0)
            case "duration":
                return filled.duration_s()
            case "sweep":
                try:
                    return parse_sweep(text)
                except UsageError as error:
                    value.fail(error.message, hint=error.hint)
            case "tag":
                try:
                    return check_log_tag(text)
                except UsageError as error:
                    value.fail(error.message, hint=error.hint)
            case _:
                if not text:
                    value.fail("is empty")
                return text
