"""The commands that change which release of the package a host has, and show it."""

from dataclasses import replace
from typing import Annotated

import typer

from deployctl.cli.session import Config, Debug, Hosts, Json, Session, Verbose

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and its diff; change nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Set hand-made edits aside (copies are kept) and go on.")]
Independent = Annotated[bool, typer.Option("--independent", help="A failing host does not restore the others.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: deployctl push --patch v3 --host 10.1.230.174")(push)
    app.command(epilog="Example: deployctl rollback; deployctl rollback --to base --relaunch")(rollback)
    app.command(epilog="Example: deployctl status --check")(status)
    app.command(epilog="Example: deployctl history --host blackwell-1")(history)


def push(
    patch: Annotated[
        str, typer.Option("--patch", "-p", help="Patch: v3 where that is unique, else series/v3.", metavar="REF")
    ],
    hosts: Hosts = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Also import this module on the host.", metavar="MODULE")
    ] = None,
    dry_run: DryRun = False,
    force: Force = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Make files that differ from the wheel part of the base.")
    ] = False,
    independent: Independent = False,
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


def rollback(
    hosts: Hosts = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Release number, `base`, or the patch whose newest release is meant.")
    ] = None,
    relaunch: Annotated[
        bool, typer.Option("--relaunch", help="Then start the profile that last ran on that release.")
    ] = False,
    dry_run: DryRun = False,
    force: Force = False,
    independent: Independent = False,
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
            if as_json:
                report = replace(report, command="rollback")  # what was typed; as text it is shown like a launch
        session.finish(report)


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


def history(
    hosts: Hosts = None, config: Config = None, as_json: Json = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Releases and attempts, newest last."""
    with Session("history", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.read_each(session.run(), "history", session.hosts))
