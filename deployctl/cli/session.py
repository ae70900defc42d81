"""What every command shares: its options, the loaded inventory, progress, `--json`, errors and the exit code."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from deployctl.errors import DeployError, Interrupted

if TYPE_CHECKING:
    from deployctl.domain.inventory import Host, Inventory
    from deployctl.domain.report import Report
    from deployctl.render.progress import Progress
    from deployctl.workflows.run import Run

Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        "-H",
        help="Host, group, address, user@address:port or [v6]:port; repeat or separate by commas.",
        metavar="HOST",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", help="hosts.yaml to use ($DEPLOYCTL_CONFIG, else hosts.yaml here or in a parent).", metavar="FILE"
    ),
]
AttemptNumber = Annotated[int | None, typer.Option("--attempt", help="This attempt instead of the newest.")]


def _tag(value: str | None) -> str | None:
    """A log tag, refused before anything is contacted where it cannot name a log."""
    from deployctl.domain.attempt import check_log_tag
    from deployctl.errors import UsageError

    try:
        return None if value is None else check_log_tag(value)
    except UsageError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from error


AttemptTag = Annotated[
    str | None, typer.Option("--log-tag", "-t", help="The newest attempt with this tag.", callback=_tag)
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every step and what scripts print.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def duration_s(text: str) -> float:
    """The parser of options that take a duration: 90, 90s, 20m, 1.5h. What is none is a usage error."""
    from deployctl.yamlconf import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class Session:
    """One command from its options to its exit code. Use as a context manager; leaving it ends the process.

    Args:
        command: Its name, as `--json` reports it.
        hosts, config, as_json, verbose, debug: The shared options.
    """

    def __init__(
        self,
        command: str,
        *,
        hosts: Sequence[str] | None = None,
        config: str | None = None,
        as_json: bool = False,
        verbose: bool = False,
        debug: bool = False,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.verbose = verbose
        self._selectors = list(hosts or [])
        self._config = config
        self._debug = debug or bool(os.environ.get("DEPLOYCTL_DEBUG"))
        self._inventory: Inventory | None = None
        self._progress: Progress | None = None
        self._exit_code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.close()
        if isinstance(error, KeyboardInterrupt):
            error = Interrupted("interrupted")
        if isinstance(error, DeployError):
            self._fail(error)
        elif isinstance(error, BrokenPipeError):
            return
        elif error is not None and not isinstance(error, (SystemExit, typer.Exit)):
            if self._debug:
                traceback.print_exception(error)
            self._fail(
                DeployError(
                    f"{type(error).__name__}: {error}",
                    hint="this is a fault of deployctl: run again with --debug",
                    kind="internal",
                )
            )
        elif error is not None:
            return
        sys.stdout.flush()
        raise SystemExit(self._exit_code)

    # -- what commands work with -------------------------------------------------------------------------------------

    @property
    def inventory(self) -> "Inventory":
        """hosts.yaml, loaded once."""
        if self._inventory is None:
            from deployctl.domain import hosts_yaml

            self._inventory = hosts_yaml.load(hosts_yaml.find_config(self._config, os.environ, Path.cwd()))
        return self._inventory

    @property
    def hosts(self) -> "tuple[Host, ...]":
        """The hosts that --host means."""
        return self.inventory.select(self._selectors)

    def run(self, hosts: "Sequence[Host] | None" = None) -> "Run":
        """A run whose events are shown.

        Args:
            hosts: Who will be asked, where that is not who --host means.
        """
        from deployctl.render.progress import Progress
        from deployctl.workflows.run import Run

        self._progress = Progress(
            several=len({host.name for host in (self.hosts if hosts is None else hosts)}) > 1,
            verbose=self.verbose,
            quiet=self.as_json and not self.verbose,
        )
        if not self._debug:
            # Libraries report handled connection errors, tracebacks included, where no handler is set.
            logging.getLogger().addHandler(logging.NullHandler())
        words = [self.command, *sys.argv[2:]] if sys.argv[1:2] == [self.command] else [self.command]
        return Run(self.inventory, command=" ".join(words)[:300], on_event=self._progress)

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self, report: "Report") -> None:
        """Show a report and remember its exit code."""
        if self._progress is not None:
            self._progress.close()
        if self._debug:
            for host in report.hosts:
                if host.fields.get("traceback"):
                    sys.stderr.write(f"{host.name}:\n{host.fields['traceback']}")
        if self.as_json:
            self.print_json(report.as_json())
        else:
            from deployctl.render import text

            text.report(report, verbose=self.verbose)
        self._exit_code = report.exit_code

    def exit_with(self, code: int) -> None:
        """Leave with a code, the result having been shown."""
        self._exit_code = code

    def print_json(self, value: Mapping[str, Any]) -> None:
        """The one object of `--json`."""
        sys.stdout.write(json.dumps(value) + "\n")

    def _fail(self, error: DeployError) -> None:
        from deployctl.render import text

        if self.as_json:
            self.print_json({"ok": False, "command": self.command, "hosts": {}, "error": error.as_json()})
        else:
            text.failure(error)
        if self._debug:
            traceback.print_exception(error)
        self._exit_code = error.exit_code
