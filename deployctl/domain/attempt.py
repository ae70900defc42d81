"""What a launch is asked to do: the log tag, the command line, the ranks. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deployctl.domain.inventory import Host, Profile, port_of
from deployctl.errors import UsageError

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# SGLang's own default for --dist-init-addr is a port next to the server's; a fixed one is easier to open in firewalls.
DIST_PORT = 20000


def check_log_tag(tag: str) -> str:
    """The tag, if it can name a file: 1-64 letters, digits, '.', '_', '-', not beginning with '.' or '-'.

    Raises:
        UsageError: It cannot.
    """
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"log tag {tag!r} cannot name a log",
            hint="1-64 letters, digits, '.', '_' and '-', not beginning with '.' or '-', such as t5_v3",
        )
    return tag


def launch_args(
    profile: Profile,
    *,
    log_tag: str,
    extra: Sequence[str] = (),
    timeout_s: float | None = None,
    wait: bool = True,
    clean: str | None = None,
    smoke: bool = True,
    burst: int | None = None,
    replace: bool = False,
    rank: int = 0,
    hosts: Sequence[Host] = (),
) -> dict[str, Any]:
    """The agent's arguments for one rank of a launch.

    Args:
        profile: The profile.
        log_tag: Checked here.
        extra: Further server arguments, after the profile's; a `--port` among them wins.
        timeout_s: Instead of the profile's ready timeout.
        wait: Whether to follow the load.
        clean: "ours", "all" or "none"; None means the host's setting.
        smoke, burst: Whether to smoke test, and how many at once instead of the profile's number.
        replace: Stop a server of ours on the same port first.
        rank, hosts: For `nodes` > 1: this host's rank, and all hosts in rank order.
    """
    argv = [*profile.argv, *extra]
    port = port_of(argv) or profile.port
    url = profile.ready_url
    if profile.port is not None and port != profile.port:
        url = url.replace(f":{profile.port}/", f":{port}/")
    if profile.nodes > 1:
        argv += rank_arguments(argv, profile.nodes, rank, hosts)
    return {
        "profile": profile.name,
        "argv": argv,
        "env": dict(profile.env),
        "cwd": profile.cwd,
        "engine": profile.engine,
        "log_tag": check_log_tag(log_tag),
        "ready": {"url": url, "timeout_s": timeout_s or profile.ready_timeout_s},
        "timeout_s": timeout_s or profile.ready_timeout_s,
        "port": port,
        "smoke_spec": profile.smoke.as_request() if profile.smoke else None,
        "smoke": smoke and rank == 0,
        "burst": burst,
        "clean": clean,
        "replace": replace,
        "wait": wait,
        "rank": rank,
        "nodes": profile.nodes,
        "watch": "ready" if rank == 0 else "alive",
    }


def rank_arguments(argv: Sequence[str], nodes: int, rank: int, hosts: Sequence[Host]) -> list[str]:
    """`--nnodes --node-rank --dist-init-addr` for one rank; what the profile sets itself is left alone.

    Raises:
        UsageError: The number of hosts is not the number of nodes.
    """
    if len(hosts) != nodes:
        raise UsageError(
            f"the profile needs {nodes} hosts, {len(hosts)} are selected",
            hint="--host GROUP with as many hosts as the profile's `nodes`, in rank order",
        )
    words = ["--nnodes", str(nodes), "--node-rank", str(rank)]
    if not any(word.partition("=")[0] == "--dist-init-addr" for word in argv):
        words += ["--dist-init-addr", f"{hosts[0].address}:{DIST_PORT}"]
    return words


def relaunch_tag(tag: str, used: Sequence[str]) -> str:
    """The tag of a relaunch: the earlier one with `-r<N>`, the first that is free."""
    stem = re.sub(r"-r[0-9]+$", "", tag)
    number = 1
    while f"{stem}-r{number}" in used:
        number += 1
    return f"{stem[:56]}-r{number}"


def command_difference(stored: Mapping[str, Any], now: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of a stored command line that are gone now, and words that are new."""
    before = [str(word) for word in stored.get("argv", [])]
    gone = [word for word in before if word not in now]
    new = [word for word in now if word not in before and "{python}" not in word]
    return gone, new
