"""Events while a command runs: a bar on a terminal, plain lines elsewhere. Always on stderr."""

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from deployctl.render import bench
from deployctl.render.terminal import counted, duration, neutral, say, style

_LEAST_BAR = 8
_PHASES = ("init", "weights", "kv-cache", "graphs", "warm-up")


class Progress:
    """Shows the events of one command.

    Args:
        several: Whether more than one host is asked (lines then begin with the host).
        verbose: Also show every step with its time, and what scripts print.
        quiet: Show warnings only (`--json` without -v).
    """

    def __init__(self, *, several: bool, verbose: bool, quiet: bool = False) -> None:
        self._several = several
        self._verbose = verbose
        self._quiet = quiet
        self._guard = threading.Lock()
        self._bars: dict[str, _Load | bench.Sweep] = {}
        self._waiting: dict[str, str] = {}
        self._told: set[tuple[Any, ...]] = set()
        self._live: Any = None

    def __call__(self, host: str, event: Mapping[str, Any]) -> None:
        """Take one event; called from several threads."""
        with self._guard:
            self._show(host, event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        with self._guard:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _line(self, host: str, text: str, *styles: str) -> None:
        prefix = f"{host} | " if self._several else ""
        shown = prefix + style(neutral(text), *styles, stream=sys.stderr)
        if self._live is not None:
            from rich.text import Text

            # Nothing of the text is markup or an emoji name, and a path that wraps can still be copied whole.
            self._live.console.print(Text.from_ansi(shown), soft_wrap=True)
        else:
            say(shown)

    def _once(self, host: str, text: str, *styles: str) -> None:
        """A line about a host's load, unless it was shown: whoever attaches again is told everything anew."""
        load = self._bars.get(host)
        told = (host, load.attempt if isinstance(load, _Load) else None, text)
        if told not in self._told:
            self._told.add(told)
            self._line(host, text, *styles)

    def _show(self, host: str, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "warning":
            self._line(host, f"warning: {event['text']}", "yellow")
        elif kind == "recovered":
            self._line(
                host,
                f"recovered: an interrupted `{event['command']}` of {event['operator']} was "
                f"{'finished' if event['to'] == 'after' else 'undone'}; the host is at release {event['release']}"
                + (f"; unknown files were kept in {event['displaced']}" if event.get("displaced") else ""),
                "yellow",
            )
        elif kind == "link":
            self._line(host, event["text"], "yellow")
        elif self._quiet:
            return
        elif kind == "output" and self._verbose:
            for line in event["text"].rstrip("\n").splitlines():
                self._line(host, f"  {line}", "dim")
        elif kind == "step":
            self._step(host, event)
        elif kind in ("attempt", "expect", "phase", "ready", "smoke", "burst", "crash"):
            self._launch(host, event)
        elif kind in ("bench", "level"):
            self._bench(host, event)
        elif kind == "note":
            self._line(host, event["text"])
        elif kind == "truncated":
            self._line(host, f"the log was truncated or rotated: {event['log']}", "yellow")
        elif kind == "server-ended":
            self._line(host, f"the server of attempt {event['attempt']} has ended", "yellow")

    def _step(self, host: str, event: Mapping[str, Any]) -> None:
        if event.get("text"):
            text = f"{event['name']}: {event['text']}"
            # A step that waits says so every second; once is enough until something changes.
            if self._waiting.get(host) != text:
                self._waiting[host] = text
                self._line(host, text)
        elif event["state"] == "done" and self._verbose:
            seconds = event.get("seconds")
            took = f"  {duration(seconds)}" if seconds is not None else ""
            self._line(host, f"{event['name']}{took}", "dim")
        elif event["state"] == "start" and event["name"] == "restore":
            self._line(host, "putting the host back as it was", "yellow")

    def _launch(self, host: str, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "crash":
            self._crash(host, event)
            return
        load = self._bars.get(host)
        if not isinstance(load, _Load) or (kind == "attempt" and load.attempt not in (None, event["attempt"])):
            load = self._bars[host] = _Load()
        if kind == "attempt":
            stack = " + ".join(event["patches"]) or "base"
            release = "nothing pushed" if event["release"] is None else f"release {event['release']} ({stack})"
            load.attempt = event["attempt"]
            self._once(
                host,
                f"attempt {event['attempt']} ({event['profile']}, {event['log_tag']}) on {release}, pid {event['pid']}",
            )
            self._once(host, f"log {event['log']}", "dim")
            load.began = time.monotonic() - event["elapsed_s"]
            self._start_bar()
        elif kind == "expect":
            load.expect(event)
            if self._live is None:
                self._once(host, f"earlier loads took {duration(event['ready_seconds'])}")
        elif kind == "phase":
            load.phase(event)
            if event["state"] == "done" and self._live is None:
                self._phase_done(host, load, event)
        elif kind == "ready":
            self._once(host, f"ready after {duration(event['seconds'])}", "green")
            load.text = "smoke"
        elif kind == "smoke":
            if event["ok"]:
                self._line(host, f"smoke ok in {duration(event['seconds'])}: {event['text']!r}"[:160], "green")
            else:
                self._line(host, f"smoke failed: {event['problem']}", "red")
        elif kind == "burst":
            if event["state"] == "start":
                self._line(host, f"burst of {event['sent']} at once")
                load.text = f"burst of {event['sent']}"
            elif event["problem"]:
                self._line(host, f"burst: {event['problem']}", "red")
            else:
                self._line(
                    host,
                    f"burst ok: {event['answered']} answers in {duration(event['seconds'])}, "
                    f"slowest {duration(event['slowest_seconds'])}",
                    "green",
                )

    def _phase_done(self, host: str, load: "_Load", event: Mapping[str, Any]) -> None:
        # Read from the log again after a broken link, its time may have been rounded otherwise.
        if event["name"] not in load.done:
            load.done.add(event["name"])
            self._line(host, f"{event['name']:<8} {duration(event['seconds'])}")

    def _bench(self, host: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "bench":
            levels = ",".join(str(level) for level in event["levels"])
            again = f", {counted(len(event['done']), 'level')} kept from before" if event["done"] else ""
            self._line(
                host, f"bench {event['bench']} of attempt {event['attempt']} ({event['log_tag']}): {levels}{again}"
            )
            self._bars[host] = bench.Sweep(event["levels"], event["done"])
            self._start_bar()
            return
        sweep = self._bars.get(host)
        if isinstance(sweep, bench.Sweep):
            sweep.level(event)
        if event["state"] in ("done", "failed"):
            self._line(host, bench.said(event), "green" if event["state"] == "done" else "red")

    def _crash(self, host: str, event: Mapping[str, Any]) -> None:
        self.close_bar()
        self._line(host, f"CRASHED: {event['cause']}", "bold", "red")

    # -- the bar -----------------------------------------------------------------------------------------------------

    def _start_bar(self) -> None:
        if not sys.stderr.isatty() or self._quiet:
            return
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=Console(stderr=True), get_renderable=self._render, refresh_per_second=8, transient=True
            )
            self._live.start()

    def close_bar(self) -> None:
        """Stop the bar; further lines are plain."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        # Beside a long host name the bar is what can be spared on a narrow terminal.
        width = max(0, min(32, self._live.console.width - 60)) if self._live is not None else 32
        rows = []
        for host, load in list(self._bars.items()):
            grid = Table.grid(padding=(0, 1))
            fraction = load.fraction()
            words = Text(load.describe(), no_wrap=True, overflow="ellipsis")
            name = Text(host, no_wrap=True, overflow="ellipsis")
            if width >= _LEAST_BAR:
                grid.add_row(name, ProgressBar(total=1.0, completed=fraction, width=width), words)
            else:
                grid.add_row(Text(f"{round(100 * fraction)} %"), words)
            rows.append(grid)
        return Group(*rows)


class _Load:
    """One host's load: where it is, and where it was at this time in earlier loads."""

    def __init__(self) -> None:
        self.attempt: int | None = None
        self.done: set[str] = set()
        self.began = time.monotonic()
        self.text = "starting"
        self._expected: float | None = None
        self._phases: dict[str, float] = {}
        self._current = "init"
        self._current_began = self.began
        self._progress: float | None = None

    def expect(self, event: Mapping[str, Any]) -> None:
        self._expected = event["ready_seconds"]
        self._phases = dict(event["phases"])

    def phase(self, event: Mapping[str, Any]) -> None:
        if event["state"] == "start":
            self._current, self._current_began, self._progress = event["name"], time.monotonic(), None
        elif event["state"] == "progress":
            self._progress = event["progress"]
        self.text = event["name"]

    def fraction(self) -> float:
        """How far the load is, by earlier loads where there are any; else by phases; at most 0.99."""
        if self._expected and self._phases:
            before = sum(self._phases.get(name, 0.0) for name in _PHASES[: _PHASES.index(self._current)])
            mine = self._phases.get(self._current, 0.0)
            inside = self._progress
            if inside is None:
                inside = min(1.0, (time.monotonic() - self._current_began) / mine) if mine else 0.0
            total = sum(self._phases.values()) or self._expected
            return min(0.99, (before + inside * mine) / total)
        position = _PHASES.index(self._current) if self._current in _PHASES else 0
        return min(0.99, (position + (self._progress or 0.0)) / len(_PHASES))

    def describe(self) -> str:
        """The text beside the bar."""
        elapsed = time.monotonic() - self.began
        text = f"{self.text}  {duration(elapsed)}"
        if self._expected:
            left = max(0.0, self._expected - elapsed)
            text += f", about {duration(left)} left" if left else ", any moment"
        return text
