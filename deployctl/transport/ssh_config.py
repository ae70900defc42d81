"""What `ssh` itself would do for a host: its resolved options.

Where OpenSSH is installed, `ssh -G` answers (Include, Match, canonical names, tokens and all). Elsewhere paramiko's own
reading of ~/.ssh/config is used, which refuses what it cannot honour instead of ignoring it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployctl.errors import Unreachable

CONFIG_VARIABLE = "DEPLOYCTL_SSH_CONFIG"
_DEADLINE_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """The options that matter for a connection, resolved.

    `proxy_jump` and `proxy_command` are None where there is none; `strict` is the value of StrictHostKeyChecking.
    """

    hostname: str
    user: str
    port: int
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str = ""
    certificate_files: tuple[Path, ...] = ()
    proxy_jump: str | None = None
    proxy_command: str | None = None
    known_hosts: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    strict: str = "ask"
    extra: Mapping[str, str] = field(default_factory=dict)


def argv_for(address: str, user: str | None, port: int | None, environment: Mapping[str, str]) -> list[str]:
    """The `ssh -G` command that resolves an address."""
    argv = ["ssh", "-G"]
    if environment.get(CONFIG_VARIABLE):
        argv += ["-F", environment[CONFIG_VARIABLE]]
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", str(port)]
    return [*argv, "--", address]


def resolve(
    address: str, user: str | None, port: int | None, environment: Mapping[str, str] | None = None
) -> SshOptions:
    """Ask OpenSSH, or else paramiko, what an address means.

    Args:
        address: What hosts.yaml or --host says; an alias of ssh_config works.
        user, port: As written there; they win over ssh_config. None where nothing was written.
        environment: `$DEPLOYCTL_SSH_CONFIG` names another file than ~/.ssh/config.

    Raises:
        Unreachable: The configuration is broken, or asks for what cannot be honoured (kind `ssh-config`).
    """
    environment = os.environ if environment is None else environment
    if shutil.which("ssh"):
        return parse(_ask_ssh(argv_for(address, user, port, environment)), address)
    return _from_paramiko(address, user, port, environment)


def _ask_ssh(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"ssh -G gave no answer: {error}", kind="ssh-config") from error
    if done.returncode != 0:
        said = "; ".join(done.stderr.split("\n")).strip("; ") or f"exit status {done.returncode}"
        raise Unreachable(f"ssh cannot read its configuration: {said}", hint=" ".join(argv), kind="ssh-config")
    return done.stdout


def parse(text: str, address: str) -> SshOptions:
    """The output of `ssh -G` as options."""
    single: dict[str, str] = {}
    many: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        single.setdefault(key, value)
        many.setdefault(key, []).append(value)

    def paths(key: str) -> tuple[Path, ...]:
        words = [word for value in many.get(key, []) for word in _words(value)]
        return tuple(Path(os.path.expanduser(word)) for word in words if word != "none")

    def optional(key: str) -> str | None:
        value = single.get(key, "none")
        return None if value in ("none", "") else value

    return SshOptions(
        hostname=single.get("hostname", address),
        user=single.get("user", ""),
        port=int(single.get("port", "22")),
        identity_files=tuple(
            Path(os.path.expanduser(value)) for value in many.get("identityfile", []) if value != "none"
        ),
        identities_only=single.get("identitiesonly") == "yes",
        identity_agent=optional("identityagent") or "",
        certificate_files=tuple(Path(os.path.expanduser(v)) for v in many.get("certificatefile", []) if v != "none"),
        proxy_jump=optional("proxyjump"),
        proxy_command=optional("proxycommand"),
        known_hosts=paths("userknownhostsfile") + paths("globalknownhostsfile"),
        host_key_alias=optional("hostkeyalias"),
        strict=single.get("stricthostkeychecking", "ask"),
    )


def _words(value: str) -> list[str]:
    """Split a list of files as ssh prints it; names with spaces come in double quotes."""
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', value)]


def _from_paramiko(address: str, user: str | None, port: int | None, environment: Mapping[str, str]) -> SshOptions:
    import getpass

    from paramiko.config import SSHConfig

    path = Path(environment.get(CONFIG_VARIABLE) or "~/.ssh/config").expanduser()
    found: dict[str, object] = {}
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            word = line.strip().split(None, 1)[0].lower() if line.strip() else ""
            if word.partition("=")[0] in ("include", "match"):
                raise Unreachable(
                    f"{path}:{number} uses {word}, which cannot be honoured without OpenSSH",
                    hint="install the OpenSSH client, or write the options out",
                    kind="ssh-config",
                )
        found = dict(SSHConfig.from_text(text).lookup(address))
    identity = found.get("identityfile", [])
    assert isinstance(identity, list)
    jump = found.get("proxyjump")
    command = found.get("proxycommand")
    return SshOptions(
        hostname=str(found.get("hostname", address)),
        user=user or str(found.get("user", getpass.getuser())),
        port=port or int(str(found.get("port", 22))),
        identity_files=tuple(Path(name).expanduser() for name in identity)
        or tuple(Path(f"~/.ssh/{name}").expanduser() for name in ("id_ed25519", "id_ecdsa", "id_rsa")),
        identities_only=found.get("identitiesonly") == "yes",
        proxy_jump=str(jump) if jump and jump != "none" else None,
        proxy_command=str(command) if command and command != "none" else None,
        known_hosts=tuple(
            Path(name).expanduser() for name in str(found.get("userknownhostsfile", "~/.ssh/known_hosts")).split()
        ),
        host_key_alias=str(found["hostkeyalias"]) if "hostkeyalias" in found else None,
        strict=str(found.get("stricthostkeychecking", "ask")),
    )
