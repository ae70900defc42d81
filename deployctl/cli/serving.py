"""The commands around one server: start it, follow it, ask it, read its log, end it."""

from pathlib import Path
from typing import Annotated

import typer

from deployctl.cli import measure
from deployctl.cli.session import AttemptNumber, AttemptTag, Config, Debug, Hosts, Json, Session, Verbose, duration_s

AndBurst = Annotated[int | None, typer.Option("--burst", min=0, help="So many requests at once after the smoke.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: deployctl launch --log-tag t5_v3 -- --max-running-requests 64")(launch)
    app.command(epilog="Example: deployctl wait")(wait)
    app.command(epilog="Example: deployctl smoke --burst 16")(smoke)
    app.command(epilog="Example: deployctl logs --crash; deployctl logs -f --grep 'Decode batch'")(logs)
    app.command(epilog="Example: deployctl stop")(stop)
    app.command(epilog="Example: deployctl clean --all")(clean)


def launch(
    log_tag: Annotated[str, typer.Option("--log-tag", "-t", help="Names the log: <profile>_<tag>.log.", metavar="TAG")],
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further server arguments, after --.", metavar="[-- ARGS]")
    ] = None,
    hosts: Hosts = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Profile of hosts.yaml; its default one without.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as the server has been started.")] = False,
    no_clean: Annotated[bool, typer.Option("--no-clean", help="Leave the GPUs as they are.")] = False,
    no_smoke: Annotated[bool, typer.Option("--no-smoke", help="Ready is enough.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            parser=duration_s,
            metavar="DURATION",
            help="Give up waiting after this, e.g. 20m; the server stays.",
        ),
    ] = None,
    burst: AndBurst = None,
    replace: Annotated[bool, typer.Option("--replace", help="Stop a server of ours on the same port first.")] = False,
    bench: measure.AndBench = False,
    sweep: measure.Sweep = None,
    prompts: measure.Prompts = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Free the GPUs, start the server detached with its own log, follow the load to ready, and smoke test it."""
    with Session("launch", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.domain.attempt import check_log_tag
        from deployctl.workflows import serve

        check_log_tag(log_tag)
        chosen = session.inventory.profile(profile)
        then = measure.after_launch(session, chosen, wanted=bench, wait=not no_wait, sweep=sweep, prompts=prompts)
        run = session.run()
        report = serve.launch(
            run,
            chosen,
            session.hosts,
            log_tag=log_tag,
            extra=extra or (),
            wait=not no_wait,
            clean="none" if no_clean else None,
            smoke=not no_smoke,
            timeout_s=timeout,
            burst=burst,
            replace=replace,
        )
        session.finish(then(run, report))


def wait(
    hosts: Hosts = None,
    attempt: AttemptNumber = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", parser=duration_s, metavar="DURATION", help="Give up waiting after this, e.g. 20m."),
    ] = None,
    no_smoke: Annotated[bool, typer.Option("--no-smoke", help="Ready is enough.")] = False,
    burst: AndBurst = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Attach to a load again. Ctrl-C detaches and never ends the server."""
    with Session("wait", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(
            serve.wait(
                session.run(),
                session.hosts,
                attempt=attempt,
                timeout_s=timeout,
                smoke=not no_smoke,
                burst=burst,
            )
        )


def smoke(
    hosts: Hosts = None,
    attempt: AttemptNumber = None,
    burst: Annotated[int | None, typer.Option("--burst", min=0, help="So many requests at once.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Instead of the profile's prompt.")] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", help="A regular expression that the answer must match.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """One generation, and a burst, against the running server."""
    with Session("smoke", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.errors import UsageError
        from deployctl.workflows import serve
        from deployctl.workflows.play import smoke_arguments

        if prompt is None and (expect or max_tokens):
            raise UsageError(
                "--expect and --max-tokens go with --prompt", hint="deployctl smoke --prompt TEXT --expect REGEX"
            )
        args = smoke_arguments(attempt=attempt, burst=burst, prompt=prompt, expect=expect, max_tokens=max_tokens)
        session.finish(serve.read_each(session.run(), "smoke", session.hosts, args))


def logs(
    hosts: Hosts = None,
    log_tag: AttemptTag = None,
    attempt: AttemptNumber = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="So many lines from the end (default 100).")
    ] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines that match this regular expression.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="10m, 2h, 14:30, or 2026-01-31 14:30.")] = None,
    crash: Annotated[bool, typer.Option("--crash", help="Only the cause of the crash.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="All attempts and their logs.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the whole log to this file.")] = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """The newest attempt's log. Filters run on the host; stdout is the log and nothing else."""
    with Session("logs", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.cli.show_logs import show

        args = {
            "log_tag": log_tag,
            "attempt": attempt,
            "follow": follow,
            "lines": lines,
            "grep": grep,
            "since": since,
            "crash": crash,
            "list": listing,
            "whole": output is not None and not (grep or since or lines is not None or follow),
        }
        show(session, args, output)


def stop(
    hosts: Hosts = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="Only this attempt.")] = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """End our servers, orphans included: SIGTERM, then SIGKILL, then proof."""
    with Session("stop", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.ask_each(session.run(), "stop", session.hosts, {"attempt": attempt}))


def clean(
    hosts: Hosts = None,
    everything: Annotated[bool, typer.Option("--all", help="End foreign holders and our healthy servers too.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Free the GPUs, and verify that they are free."""
    with Session("clean", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.ask_each(session.run(), "clean", session.hosts, {"all": everything}))
