"""The command line: parses, calls a workflow, renders. Nothing else of deployctl knows Typer."""

import os
import signal
import sys
from typing import Any, NoReturn, cast

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run a command and leave with its exit code, without the interpreter's long goodbye."""
    # Until there is somebody to tell about it, Ctrl-C ends the process at once and without a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
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
    import typer

    from deployctl.cli.app import program

    words = sys.argv[1:] if argv is None else argv
    completing = "_DEPLOYCTL_COMPLETE" in os.environ
    app = program(None if completing else next(iter(words), None))
    # The base of every error of the command line (Typer exports its leaves alone).
    mistake = cast("type[Exception]", typer.BadParameter.__mro__[2])
    signal.signal(signal.SIGTERM, _as_interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = app(args=argv, prog_name="deployctl", standalone_mode=False)
        return _interrupted(words) if code == EXIT_INTERRUPTED else code if isinstance(code, int) else 0
    except mistake as error:
        told: Any = error
        told.show()
        asked = told.ctx.command_path if getattr(told, "ctx", None) else "deployctl"
        _say_in_json(words, "usage", told.format_message(), f"{asked} --help")
        return EXIT_USAGE
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(words)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, but nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _interrupted(words: list[str]) -> int:
    sys.stderr.write("interrupted\n")
    _say_in_json(words, "interrupted", "interrupted before anything was begun", "")
    return EXIT_INTERRUPTED


def _say_in_json(words: list[str], kind: str, message: str, hint: str) -> None:
    """The one object of `--json` for a command that never came to begin."""
    options = words[: words.index("--")] if "--" in words else words
    if "--json" not in options:
        return
    import json

    command = next((word for word in options if not word.startswith("-")), "")
    error = {"kind": kind, "message": message, "hint": hint}
    sys.stdout.write(json.dumps({"ok": False, "command": command, "hosts": {}, "error": error}) + "\n")


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
