"""The command line: parses, calls a workflow, renders. Nothing else of deployctl knows Typer."""

import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code."""
    from deployctl.cli.app import app

    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        app(args=argv, prog_name="deployctl")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        _leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, but nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(0)
    _leave(0)


def _leave(code: int) -> NoReturn:
    raise SystemExit(code)


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
