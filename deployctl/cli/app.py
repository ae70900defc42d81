"""The commands. Each is a few lines: options in, a workflow called, its report finished."""

from pathlib import Path
from typing import Annotated

import typer

from deployctl import __version__
from deployctl.cli import measure
from deployctl.cli.session import Config, Debug, Hosts, Json, Session, Verbose

app = typer.Typer(
    name="deployctl",
    help="Patch, launch, watch and roll back the installed inference engine on GPU servers.",
    epilog="Start with: deployctl demo. Every command has --help with an example.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lock_app = typer.Typer(
    help="Keep others from changing a host until you release it.",
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog="Example: deployctl lock acquire -m 'benchmark until noon'",
)
app.add_typer(lock_app, name="lock")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deployctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Patch, launch, watch and roll back the installed inference engine on GPU servers."""


@app.command(epilog="Example: deployctl push --patch v3 --host 10.1.230.174")
def push(
    patch: Annotated[
        str, typer.Option("--patch", "-p", help="Patch: v3 where that is unique, else series/v3.", metavar="REF")
    ],
    hosts: Hosts = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Also import this module on the host.", metavar="MODULE")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its diff; change nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Set hand-made edits aside (copies are kept) and go on.")
    ] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Make files that differ from the wheel part of the base.")
    ] = False,
    independent: Annotated[
        bool, typer.Option("--independent", help="A failing host does not restore the others.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Patch the installed package as one transaction; nothing changes unless everything works."""
    with Session("push", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.domain import patch as patches
        from deployctl.render.terminal import say, style
        from deployctl.workflows import push as workflow

        chosen = patches.load(patch, session.inventory.root)
        if chosen.metadata.known_bad:
            say(style(f"warning: {chosen.reference} is KNOWN BAD: {chosen.metadata.known_bad}", "bold", "yellow"))
        session.finish(
            workflow.push(
                session.run(),
                chosen,
                session.hosts,
                imports=imports or (),
                dry_run=dry_run,
                force=force,
                adopt=adopt,
                independent=independent,
            )
        )


@app.command(epilog="Example: deployctl launch --log-tag t5_v3 -- --max-running-requests 64")
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
        str | None, typer.Option("--timeout", help="Give up waiting after this, e.g. 20m; the server stays.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option("--burst", min=0, help="So many requests at once after the smoke.")
    ] = None,
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
            timeout_s=_seconds(timeout),
            burst=burst,
            replace=replace,
        )
        session.finish(then(run, report))


@app.command(epilog="Example: deployctl wait")
def wait(
    hosts: Hosts = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="This attempt instead of the newest.")] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="Give up waiting after this, e.g. 20m.")] = None,
    no_smoke: Annotated[bool, typer.Option("--no-smoke", help="Ready is enough.")] = False,
    burst: Annotated[
        int | None, typer.Option("--burst", min=0, help="So many requests at once after the smoke.")
    ] = None,
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
                timeout_s=_seconds(timeout),
                smoke=not no_smoke,
                burst=burst,
            )
        )


@app.command(epilog="Example: deployctl smoke --burst 16")
def smoke(
    hosts: Hosts = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="This attempt instead of the newest.")] = None,
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
        session.finish(serve.ask_each(session.run(), "smoke", session.hosts, args))


@app.command(epilog="Example: deployctl logs --crash; deployctl logs -f --grep 'Decode batch'")
def logs(
    hosts: Hosts = None,
    log_tag: Annotated[str | None, typer.Option("--log-tag", "-t", help="The newest attempt with this tag.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="This attempt instead of the newest.")] = None,
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


@app.command(epilog="Example: deployctl status --check")
def status(
    hosts: Hosts = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 9 on drift, 6 when the newest attempt crashed.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Release, drift, server, GPUs and their holders, for every host."""
    with Session("status", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.read_each(session.run(), "status", session.hosts, {"check": check}))


@app.command(epilog="Example: deployctl history --host blackwell-1")
def history(
    hosts: Hosts = None, config: Config = None, as_json: Json = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Releases and attempts, newest last."""
    with Session("history", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.read_each(session.run(), "history", session.hosts))


@app.command(epilog="Example: deployctl stop")
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


@app.command(epilog="Example: deployctl clean --all")
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


@app.command(epilog="Example: deployctl rollback; deployctl rollback --to base --relaunch")
def rollback(
    hosts: Hosts = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Release number, `base`, or the patch whose newest release is meant.")
    ] = None,
    relaunch: Annotated[
        bool, typer.Option("--relaunch", help="Then start the profile that last ran on that release.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its diff; change nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Set hand-made edits aside (copies are kept) and go on.")
    ] = False,
    independent: Annotated[
        bool, typer.Option("--independent", help="A failing host does not restore the others.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Back to the release before the current one, by the same verified transaction."""
    with Session("rollback", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import push as workflow
        from deployctl.workflows import serve

        run = session.run()
        report = workflow.rollback(run, session.hosts, to=to, dry_run=dry_run, force=force, independent=independent)
        if relaunch and report.exit_code == 0 and not dry_run:
            if not as_json:
                from deployctl.render import text

                text.report(report, verbose=verbose)
            report = serve.with_rollback(serve.relaunch(run, session.hosts), report)
        session.finish(report)


@app.command(epilog="Example: deployctl play iterate --set patch=dynamic_spec/v4 --set log_tag=t1")
def play(
    file: Annotated[str, typer.Argument(help="A playbook file, or a name under playbooks/.", metavar="FILE")],
    hosts: Hosts = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set a variable: key=value.", metavar="K=V")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print the steps.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run a playbook: checked completely before its first step, fail-fast."""
    with Session("play", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.cli.show_play import show

        show(session, file, settings or [], dry_run=dry_run)


def _lock(action: str, hosts: Hosts, config: Config, as_json: bool, verbose: bool, debug: bool, **args: object) -> None:
    with Session("lock", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.ask_each(session.run(), "lock", session.hosts, {"action": action, **args}))


@lock_app.command("acquire", epilog="Example: deployctl lock acquire -m 'benchmark until noon'")
def lock_acquire(
    message: Annotated[str, typer.Option("--message", "-m", help="Why; others are shown it.")],
    hosts: Hosts = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Hold a host until released: others' push, launch, stop, clean and rollback are refused."""
    _lock("acquire", hosts, config, as_json, verbose, debug, message=message)


@lock_app.command("release", epilog="Example: deployctl lock release --force")
def lock_release(
    hosts: Hosts = None,
    force: Annotated[bool, typer.Option("--force", help="Release somebody else's hold.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Release the hold."""
    _lock("release", hosts, config, as_json, verbose, debug, force=force)


@lock_app.command("show", epilog="Example: deployctl lock show")
def lock_show(
    hosts: Hosts = None, config: Config = None, as_json: Json = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Who holds the host, and who is at work."""
    _lock("show", hosts, config, as_json, verbose, debug)


@app.command(epilog="Example: deployctl audit -n 20")
def audit(
    hosts: Hosts = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="So many entries, newest last.")] = 50,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Who did what on a host, with which result."""
    with Session("audit", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.read_each(session.run(), "audit", session.hosts, {"lines": lines}))


@app.command(epilog="Example: deployctl doctor --host blackwell-1")
def doctor(
    hosts: Hosts = None, config: Config = None, as_json: Json = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Everything that a push or a launch would need, checked without changing anything."""
    with Session("doctor", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.doctor(session.run(), session.hosts))


@app.command(epilog="Example: deployctl init; then edit hosts.yaml and run deployctl doctor")
def init(
    folder: Annotated[Path, typer.Argument(help="Where; the current folder by default.")] = Path(),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Scaffold hosts.yaml, patches/ and playbooks/; existing files are left alone."""
    with Session("init", as_json=as_json, debug=debug) as session:
        from deployctl.cli.scaffold import scaffold

        made = scaffold(folder)
        if as_json:
            session.print_json({"ok": True, "command": "init", "hosts": {}, "made": made})
        else:
            from deployctl.render.terminal import out

            for line in made or ["everything was there already"]:
                out(line)
            out("next: edit hosts.yaml, then: deployctl doctor")


@app.command(epilog="Example: deployctl demo --keep")
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the host and the server up to play with.")] = False,
    debug: Debug = False,
) -> None:
    """The whole story on this machine: an embedded host, a stand-in engine, two patches that fail and one that works."""
    with Session("demo", debug=debug) as session:
        from deployctl.demo.story import tell

        session.exit_with(tell(keep=keep))


measure.add_to(app)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    from deployctl.yamlconf import Value

    return Value(text, True, "--timeout", 1, "").duration_s()
