"""The program: its rooms of commands. A command is a few lines: options in, a workflow called, its report finished."""

from typing import Annotated

import typer

from deployctl import __version__
from deployctl.cli import measure, people, project, release, serving


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deployctl {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Patch, launch, watch and roll back the installed inference engine on GPU servers."""


# In this order `--help` shows them.
_ROOMS = (release, serving, measure, people, project)


def program(word: str | None = None) -> typer.Typer:
    """The program: with the one command that is asked for, or whole.

    Typer makes every option of every command that it knows before it looks at the command line, which costs a tenth of
    a second.

    Args:
        word: The first word of the command line. The program is whole where that is no command: for help, completion,
            and a mistake to which the nearest command is offered.
    """
    made = typer.Typer(
        name="deployctl",
        help="Patch, launch, watch and roll back the installed inference engine on GPU servers.",
        epilog="Start with: deployctl demo. Every command has --help with an example.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root)
    for room in _ROOMS:
        room.add_to(made)
    commands = [one for one in made.registered_commands if word == (one.name or getattr(one.callback, "__name__", ""))]
    groups = [one for one in made.registered_groups if word == one.name]
    if commands or groups:
        made.registered_commands, made.registered_groups = commands, groups
    return made
