"""The commands for people who share a host: holds, and who did what."""

from typing import Annotated

import typer

from deployctl.cli.session import Config, Debug, Hosts, Json, Session, Verbose

lock_app = typer.Typer(
    help="Keep others from changing a host until you release it.",
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog="Example: deployctl lock acquire -m 'benchmark until noon'",
)


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.add_typer(lock_app, name="lock")
    app.command(epilog="Example: deployctl audit -n 20")(audit)


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
