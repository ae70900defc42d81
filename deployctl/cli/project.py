"""The commands around a project as a whole: set up, check, play back, try out."""

from pathlib import Path
from typing import Annotated

import typer

from deployctl.cli.session import Config, Debug, Hosts, Json, Session, Verbose


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: deployctl init; then edit hosts.yaml and run deployctl doctor")(init)
    app.command(epilog="Example: deployctl doctor --host blackwell-1")(doctor)
    app.command(epilog="Example: deployctl play iterate --set patch=dynamic_spec/v4 --set log_tag=t1")(play)
    app.command(epilog="Example: deployctl demo --keep")(demo)


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


def doctor(
    hosts: Hosts = None, config: Config = None, as_json: Json = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Everything that a push or a launch would need, checked without changing anything."""
    with Session("doctor", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.workflows import serve

        session.finish(serve.doctor(session.run(), session.hosts))


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


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the host and the server up to play with.")] = False,
    debug: Debug = False,
) -> None:
    """The whole story on this machine: an embedded host, a stand-in engine, patches that fail and one that works."""
    with Session("demo", debug=debug) as session:
        from deployctl.demo.story import tell

        session.exit_with(tell(keep=keep))
