"""The command line: parses, calls a workflow, renders. Nothing else of deployctl knows Typer."""

import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run a command and leave with its exit code, without the interpreter's long goodbye."""
    code = run()
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # nobody reads the rest
    os._exit(code)


def run(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Its words; the process's own by default.

    Returns:
        The exit code.
    """
    from deployctl.cli.app import app

    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        app(args=argv, prog_name="deployctl")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, but nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
