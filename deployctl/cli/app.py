"""The program: its rooms of commands. A command is a few lines: options in, a workflow called, its report finished."""

from typing import Annotated

import typer

from deployctl import __version__
from deployctl.cli import measure, people, project, release, serving

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


# In this order `--help` shows them.
for room in (release, serving, measure, people, project):
    room.add_to(app)
