"""Patches: where they lie, what a reference means, and what their metadata block says.

A patch is `patches/<series>/<version>.py` (a script) or `.patch`/`.diff` (a unified diff). Its metadata is an inline
block in the style of PEP 723: comment lines that hold TOML.
"""

import ast
import hashlib
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from deployctl import yamlconf
from deployctl.errors import ConfigError, UsageError

PATCHES_FOLDER = "patches"
SUFFIXES: Mapping[str, Literal["script", "diff"]] = {".py": "script", ".patch": "diff", ".diff": "diff"}
_FENCE = re.compile(r"^# /// deployctl\s*$")
_END = re.compile(r"^# ///\s*$")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h)?")
_METADATA_KEYS = ("package", "versions", "targets", "verify", "requires", "known_bad", "timeout", "verify_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a patch says of itself.

    Attributes:
        package: The package it changes; empty means the host's.
        versions: PEP 440 specifiers of the package's version; empty means any.
        targets: Files relative to the package that it may change; None means a live script.
        verify: Modules to import afterwards; None means the modules of the changed files.
        requires: Other series that must lie below it in the stack.
        known_bad: A reason to say loudly before going on.
        timeout_s, verify_timeout_s: Bounds for the script and for the imports.
    """

    package: str = ""
    versions: str = ""
    targets: tuple[str, ...] | None = None
    verify: tuple[str, ...] | None = None
    requires: tuple[str, ...] = ()
    known_bad: str = ""
    timeout_s: float = 120.0
    verify_timeout_s: float = 180.0

    def as_request(self) -> dict[str, Any]:
        """JSON for the agent."""
        return {
            "package": self.package,
            "versions": self.versions,
            "targets": list(self.targets) if self.targets is not None else None,
            "verify": list(self.verify) if self.verify is not None else None,
            "requires": list(self.requires),
            "known_bad": self.known_bad,
            "timeout_s": self.timeout_s,
            "verify_timeout_s": self.verify_timeout_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch file, read and checked."""

    series: str
    version: str
    path: Path
    kind: Literal["script", "diff"]
    content: bytes
    metadata: Metadata

    @property
    def reference(self) -> str:
        """`series/version`."""
        return f"{self.series}/{self.version}"

    def as_request(self) -> dict[str, Any]:
        """JSON for the agent; the content travels as a blob beside it."""
        return {
            "ref": self.reference,
            "series": self.series,
            "version": self.version,
            "kind": self.kind,
            "filename": self.path.name,
            "sha256": hashlib.sha256(self.content).hexdigest(),
            "metadata": self.metadata.as_request(),
        }


def discover(root: Path) -> dict[str, Path]:
    """`series/version` → file, for everything under `root`/patches, sorted.

    Raises:
        ConfigError: Two files are the same reference (`v3.py` and `v3.diff`).
    """
    found: dict[str, Path] = {}
    for path in sorted((root / PATCHES_FOLDER).glob("*/*")):
        if path.suffix not in SUFFIXES or path.name.startswith((".", "_")) or not path.is_file():
            continue
        reference = f"{path.parent.name}/{path.stem}"
        if reference in found:
            raise ConfigError(f"{found[reference]} and {path.name} are both {reference}", hint="rename one of them")
        found[reference] = path
    return found


def resolve(reference: str, known: Mapping[str, Path]) -> str:
    """The full `series/version` of a reference, which may be the version alone where it is unique.

    Raises:
        UsageError: Unknown (nearest names offered) or ambiguous (all candidates named).
    """
    word = reference.strip().removeprefix(f"{PATCHES_FOLDER}/")
    for suffix in SUFFIXES:
        word = word.removesuffix(suffix)
    if word in known:
        return word
    candidates = [name for name in known if name.partition("/")[2] == word]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(f"patch {reference!r} is ambiguous", hint=f"one of: {', '.join(candidates)}")
    if not known:
        raise UsageError(f"unknown patch {reference!r}: there are none", hint="put it at patches/<series>/<version>.py")
    short = {name.partition("/")[2]: name for name in known}
    close = yamlconf.nearest(word, [*known, *short])
    raise UsageError(f"unknown patch {reference!r}", hint=close or f"patches: {', '.join(known)}")


def load(reference: str, root: Path) -> Patch:
    """Find, read and check a patch.

    Raises:
        UsageError: Unknown or ambiguous reference, unusable name.
        ConfigError: A fault in the file, with file:line.
    """
    known = discover(root)
    full = resolve(reference, known)
    path = known[full]
    series, _, version = full.partition("/")
    for part in (series, version):
        if part.startswith(("-", ".")) or any(ord(character) < 32 for character in part):
            raise UsageError(f"patch name {part!r} begins with a dash or dot, or holds control characters")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    kind = SUFFIXES[path.suffix]
    text = _text_of(content, path, kind)
    if kind == "script":
        _check_syntax(text, path)
    return Patch(
        series=series,
        version=version,
        path=path,
        kind=kind,
        content=content,
        metadata=parse_metadata(text, str(path), kind),
    )


def _text_of(content: bytes, path: Path, kind: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if kind == "diff":
            return content.decode("utf-8", "surrogateescape")
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line} not UTF-8 text", hint="save the script as UTF-8") from error


def _check_syntax(text: str, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text, str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} syntax error in the patch script: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}:1 not a Python script: {error}") from error


def parse_metadata(text: str, name: str, kind: str) -> Metadata:
    """The metadata block of a patch; defaults where there is none.

    Raises:
        ConfigError: Unclosed or second block, bad TOML, unknown keys, wrong types, targets outside the package.
    """
    lines = text.splitlines()
    if kind == "diff":
        ends = (number for number, line in enumerate(lines) if line.startswith(("diff --git", "--- ", "Index: ")))
        lines = lines[: next(ends, len(lines))]
    starts = [number for number, line in enumerate(lines) if _FENCE.match(line)]
    if not starts:
        return Metadata()
    if len(starts) > 1:
        raise ConfigError(f"{name}:{starts[1] + 1} a second `# /// deployctl` block")
    start = starts[0]
    body: list[str] = []
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if _END.match(line):
            return _decode(_toml(body, name, start + 2), name, lines, start, kind)
        if line != "#" and not line.startswith("# "):
            raise ConfigError(
                f"{name}:{number + 1} the metadata block ends without `# ///`",
                hint="every line of the block begins with `# `",
            )
        body.append(line[2:])
    raise ConfigError(f"{name}:{start + 1} the metadata block has no closing `# ///`")


def _toml(body: Sequence[str], name: str, first_line: int) -> dict[str, Any]:
    try:
        return tomllib.loads("\n".join(body))
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        line = first_line + int(at[1]) - 1 if at else first_line + len(body) - 1
        raise ConfigError(f"{name}:{line} not valid TOML: {error}") from error


def _decode(table: Mapping[str, Any], name: str, lines: Sequence[str], start: int, kind: str) -> Metadata:
    def where(key: str) -> str:
        for number in range(start, len(lines)):
            if re.match(rf"# \s*[\"']?{re.escape(key)}[\"']?\s*=", lines[number]):
                return f"{name}:{number + 1} {key}"
        return f"{name}:{start + 1} {key}"

    def text(key: str) -> str:
        value = table.get(key, "")
        if not isinstance(value, str):
            raise ConfigError(f"{where(key)}: should be text in quotes, not {value!r}")
        return value.strip()

    def texts(key: str) -> tuple[str, ...] | None:
        if key not in table:
            return None
        value = table[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f'{where(key)}: should be a list of texts, such as ["a", "b"], not {value!r}')
        return tuple(value)

    def seconds(key: str, default: float) -> float:
        if key not in table:
            return default
        value = table[key]
        match = _DURATION.fullmatch(str(value)) if not isinstance(value, bool) else None
        if match is None or float(match[1]) <= 0:
            raise ConfigError(f'{where(key)}: should be a duration such as "120s", not {value!r}')
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]

    for key in table:
        if key not in _METADATA_KEYS:
            hint = yamlconf.nearest(key, _METADATA_KEYS) or f"known here: {', '.join(_METADATA_KEYS)}"
            raise ConfigError(f"{where(key)}: unknown key", hint=hint)
    versions = text("versions")
    try:
        SpecifierSet(versions)
    except InvalidSpecifier as error:
        raise ConfigError(f"{where('versions')}: {error}", hint='for example ">=0.5.9,<0.5.13"') from error
    package = text("package")
    if package and not package.isidentifier():
        raise ConfigError(f"{where('package')}: {package!r} is not the name of a package")
    targets = texts("targets")
    for target in targets or ():
        pure = PurePosixPath(target)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in target:
            raise ConfigError(f"{where('targets')}: {target!r} is not a path inside the package")
    if targets == () and kind == "script":
        raise ConfigError(f"{where('targets')}: is empty", hint="leave the key out for a script that runs live")
    for module in (*(texts("verify") or ()), *(texts("requires") or ())):
        if not module or module.startswith("-"):
            raise ConfigError(f"{where('verify')}: {module!r} is not a usable name")
    return Metadata(
        package=package,
        versions=versions,
        targets=targets,
        verify=texts("verify"),
        requires=texts("requires") or (),
        known_bad=text("known_bad"),
        timeout_s=seconds("timeout", 120.0),
        verify_timeout_s=seconds("verify_timeout", 180.0),
    )
