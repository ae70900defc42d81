"""launch, wait, smoke, stop, clean, status and the other operations that ask each host once."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployctl.domain.attempt import command_difference, launch_args, relaunch_tag
from deployctl.domain.inventory import Host, Profile
from deployctl.domain.report import HostReport, Report
from deployctl.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_READY,
    EXIT_OK,
    EXIT_SMOKE,
    DeployError,
    Interrupted,
    LinkLost,
    Unreachable,
    UsageError,
    worst_exit,
)
from deployctl.remote.client import Exchange
from deployctl.workflows.run import Run

# A link that breaks during a load is retried for as long as the load takes; a single outage for this long.
_OUTAGE_S = 600.0
_ONE_RANK = 1


def ask_each(run: Run, operation: str, hosts: Sequence[Host], args: Mapping[str, Any] | None = None) -> Report:
    """An operation that may be asked once per host and not again (stop, clean, lock, run)."""
    return run.each(
        hosts,
        lambda host: HostReport.from_result(host.name, run.ask(host, operation, args)),
        command=operation,
    )


def read_each(run: Run, operation: str, hosts: Sequence[Host], args: Mapping[str, Any] | None = None) -> Report:
    """An operation that may be asked twice: again when the link breaks (status, history, audit, doctor, smoke)."""
    return run.each(
        hosts,
        lambda host: HostReport.from_result(host.name, run.ask_patiently(host, operation, args, for_s=15.0)),
        command=operation,
        detaches=True,
    )


def launch(run: Run, profile: Profile, hosts: Sequence[Host], *, log_tag: str, **options: Any) -> Report:
    """Start a profile on every host; with `nodes` above 1 as the ranks of one server.

    Args:
        run: The run.
        profile: What to start.
        hosts: One server each, or one rank each in this order.
        log_tag: Names the logs.
        options: Further arguments of `launch_args`: extra, timeout_s, wait, clean, smoke, burst, replace.
    """
    if profile.nodes == _ONE_RANK:
        args = launch_args(profile, log_tag=log_tag, **options)
        return run.each(hosts, lambda host: launch_one(run, host, args), command="launch", detaches=True)
    return _launch_ranks(run, profile, hosts, log_tag, options)


def launch_one(
    run: Run,
    host: Host,
    args: Mapping[str, Any],
    on_event: Any = None,
) -> HostReport:
    """Launch on one host; when the link breaks, attach again to the attempt that was started."""
    seen: dict[str, Any] = {}

    def watch(event: Mapping[str, Any], exchange: Exchange) -> None:
        if event["event"] == "attempt":
            seen["attempt"] = event["attempt"]
        if on_event is not None:
            on_event(event, exchange)

    try:
        return HostReport.from_result(host.name, run.ask(host, "launch", args, on_event=watch))
    except LinkLost as lost:
        if run.interrupted.is_set():
            raise _detached() from lost
        run.on_event(host.name, {"event": "link", "text": f"{lost.message}; attaching again"})
        again: dict[str, Any] = {key: args[key] for key in ("smoke", "burst", "watch")}
        again.update(attempt=seen["attempt"]) if seen else again.update(run_id=run.run_id)
        again.update(timeout_s=args["timeout_s"], resumed=True)
        if not args["wait"]:
            again.update(wait=False)
        return _wait_one(run, host, again, on_event, reached=True)


def _detached() -> Interrupted:
    return Interrupted(
        "detached while the link was down: a server that was started goes on loading",
        hint="deployctl wait comes back to it, deployctl stop ends it",
    )


def _wait_one(
    run: Run, host: Host, args: Mapping[str, Any], on_event: Any = None, *, reached: bool = False
) -> HostReport:
    """Attach until there is a verdict, again and again through broken links."""

    def ask() -> dict[str, Any]:
        return run.ask(host, "wait", args, on_event=on_event)

    text = "trying again, the server is not affected"
    return HostReport.from_result(host.name, through_outages(run, host, ask, text, _detached, reached=reached))


def through_outages(
    run: Run,
    host: Host,
    ask: Callable[[], dict[str, Any]],
    text: str,
    given_up: Callable[[], Interrupted],
    *,
    reached: bool = False,
) -> dict[str, Any]:
    """Ask until there is a verdict, again and again through broken links, each down for at most `_OUTAGE_S`.

    A host that was never reached has no broken link: there the ordinary tries of a connection decide.

    Args:
        run, host: Where.
        ask: What may be asked again.
        text: What a broken link means, for whoever watches.
        given_up: The error when Ctrl-C comes while the link is down.
        reached: Whether the command had a link to the host, and it broke just now.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential_jitter
    from tenacity.nap import sleep_using_event

    # None: there was no link yet that could have broken.
    down_since: float | None = time.monotonic() if reached else None

    def passing(error: BaseException) -> bool:
        nonlocal down_since
        lost = isinstance(error, LinkLost) or (
            down_since is not None and isinstance(error, Unreachable) and error.kind_now == "unreachable"
        )
        if lost and run.interrupted.is_set():
            raise given_up() from error
        if lost:
            run.on_event(host.name, {"event": "link", "text": f"{error}; {text}"})
        if isinstance(error, LinkLost):
            down_since = time.monotonic()  # the link had been there until now
        return lost

    def down_for_too_long(_state: RetryCallState) -> bool:
        return down_since is not None and time.monotonic() - down_since > _OUTAGE_S

    def once() -> dict[str, Any]:
        if run.interrupted.is_set():
            raise given_up()
        return ask()

    retrying = Retrying(
        retry=retry_if_exception(passing),
        stop=down_for_too_long,
        wait=wait_exponential_jitter(multiplier=0.5, max=10.0),
        sleep=sleep_using_event(run.interrupted),
        reraise=True,
    )
    result: dict[str, Any] = retrying(once)
    return result


def wait(
    run: Run,
    hosts: Sequence[Host],
    *,
    attempt: int | None = None,
    timeout_s: float | None = None,
    smoke: bool = True,
    burst: int | None = None,
) -> Report:
    """Attach to the newest (or the named) attempt on every host."""
    args = {"attempt": attempt, "timeout_s": timeout_s, "smoke": smoke, "burst": burst}
    return run.each(hosts, lambda host: _wait_one(run, host, args), command="wait", detaches=True)


def _launch_ranks(
    run: Run, profile: Profile, hosts: Sequence[Host], log_tag: str, options: Mapping[str, Any]
) -> Report:
    """One server over several hosts: ready by rank 0, alive by all, ended together."""
    plans = {
        host.name: launch_args(profile, log_tag=log_tag, rank=rank, hosts=hosts, **options)
        for rank, host in enumerate(hosts)
    }
    first = hosts[0].name
    exchanges: dict[str, Exchange] = {}
    guard = threading.Lock()
    decision = ""

    def tell(name: str, exchange: Exchange) -> None:
        if decision == "cancel" or name != first:
            with contextlib.suppress(DeployError):  # its own reader meets the broken link
                exchange.control(decision)

    def decide(word: str) -> None:
        nonlocal decision
        with guard:
            if decision:
                return
            decision = word
            for name, exchange in exchanges.items():
                tell(name, exchange)

    def one(host: Host) -> HostReport:
        def on_event(_event: Mapping[str, Any], exchange: Exchange) -> None:
            with guard:
                if exchanges.get(host.name) is not exchange:
                    exchanges[host.name] = exchange
                    if decision:
                        tell(host.name, exchange)  # it was still connecting when the others decided

        # A server that answers wrongly lives, and so do its ranks.
        word = "cancel"
        try:
            report = launch_one(run, host, plans[host.name], on_event)
            if report.exit_code in (EXIT_OK, EXIT_SMOKE):
                word = "enough"
            return report
        finally:
            if word == "cancel" or host.name == first:
                decide(word)

    report = run.each(hosts, one, command="launch", detaches=True)
    if run.interrupted.is_set() or report.exit_code == EXIT_OK:
        return report
    outcomes = [_with_the_others(host, report) for host in report.hosts]
    if all(host.exit_code in (EXIT_OK, EXIT_SMOKE, EXIT_NOT_READY) for host in outcomes):
        return Report(command="launch", hosts=tuple(outcomes))
    # Ranks that survive hang in NCCL and hold their GPUs.
    stopped = ask_each(run, "stop", hosts)
    extra = {"ended_together": {outcome.name: outcome.status for outcome in stopped.hosts}}
    return Report(command="launch", hosts=tuple(outcomes), extra=extra)


def _with_the_others(host: HostReport, report: Report) -> HostReport:
    """A rank that we let go because another failed: nobody pressed Ctrl-C, the other's failure is its own too."""
    if host.exit_code != EXIT_INTERRUPTED:
        return host
    failed = [other for other in report.hosts if other.exit_code not in (EXIT_OK, EXIT_INTERRUPTED)]
    code = worst_exit([other.exit_code for other in failed])
    why = next((other for other in failed if other.exit_code == code), host)
    left = code in (EXIT_SMOKE, EXIT_NOT_READY)
    error = {
        "kind": "other-rank",
        "message": f"the rank on {why.name} {why.status}: this one was {'left running' if left else 'ended with it'}",
        "hint": (why.error or {}).get("hint") or "deployctl logs",
    }
    return replace(host, status=host.status if left else "stopped", exit_code=code, error=error)


def relaunch(run: Run, hosts: Sequence[Host]) -> Report:
    """After a rollback: start the profile of the attempt that was last ready on the release a host is at now."""
    if len(hosts) > _ONE_RANK:
        first = run.ask_patiently(hosts[0], "history")
        profile, tag = _relaunched(run, hosts[0], first)
        if profile.nodes > _ONE_RANK:
            return _launch_ranks(run, profile, hosts, tag, {"replace": True})

    def one(host: Host) -> HostReport:
        profile, tag = _relaunched(run, host, run.ask_patiently(host, "history"))
        return launch_one(run, host, launch_args(profile, log_tag=tag, replace=True))

    return run.each(hosts, one, command="launch", detaches=True)


def with_rollback(launched: Report, rolled_back: Report) -> Report:
    """A relaunch's report that keeps, for each host, what the rollback before it did (`rollback`)."""
    before = {host.name: host.as_json() for host in rolled_back.hosts}
    hosts = tuple(replace(host, fields={**host.fields, "rollback": before.get(host.name)}) for host in launched.hosts)
    return replace(launched, hosts=hosts)


def _relaunched(run: Run, host: Host, history: Mapping[str, Any]) -> tuple[Profile, str]:
    """The profile and the tag of a relaunch; tells what of the command line is not as it was."""
    candidates = [
        attempt
        for attempt in history["attempts"]
        if attempt["release"] in (history["release"], None if history["release"] == 0 else history["release"])
    ]
    ready = [attempt for attempt in candidates if attempt["ready_seconds"] is not None]
    everything = ready or candidates or history["attempts"]
    if not everything:
        raise UsageError(f"{host.name}: nothing was ever launched", hint="deployctl launch --log-tag TAG")
    last = everything[-1]
    profile = run.inventory.profile(last["profile"])
    tag = relaunch_tag(last["log_tag"], [attempt["log_tag"] for attempt in history["attempts"]])
    run.on_event(
        host.name,
        {"event": "note", "text": f"relaunching {profile.name} of attempt {last['attempt']} as {tag}"},
    )
    # The interpreter stands first in both; it is filled in on the host. Words of the ranks come with the launch.
    gone, new = command_difference({"argv": last["argv"][1:]}, profile.argv[1:]) if profile.nodes == 1 else ([], [])
    if gone or new:
        words = [f"without {' '.join(gone)}"] * bool(gone) + [f"with {' '.join(new)}"] * bool(new)
        text = f"hosts.yaml is not what attempt {last['attempt']} ran: now {', '.join(words)}"
        run.on_event(host.name, {"event": "warning", "text": text})
    return profile, tag


def doctor(run: Run, hosts: Sequence[Host]) -> Report:
    """Check every host for what a push or a launch would need."""
    ports = [
        {"port": profile.port, "argv": list(profile.argv), "engine": profile.engine, "profile": profile.name}
        for profile in run.inventory.profiles.values()
        if profile.port is not None
    ]
    distinct = list({port["port"]: port for port in ports}.values())
    return read_each(run, "doctor", hosts, {"ports": distinct})
