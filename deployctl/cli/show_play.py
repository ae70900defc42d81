"""`play`: steps announced on stderr, their results on stdout."""

from collections.abc import Sequence

from deployctl.cli.session import Session
from deployctl.cli.show_logs import _Printer
from deployctl.domain import playbook
from deployctl.domain.playbook import Step
from deployctl.domain.report import Report
from deployctl.errors import UsageError
from deployctl.render import crash, text
from deployctl.render.terminal import duration, out, say, style
from deployctl.workflows import play


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a mapping.

    Raises:
        UsageError: No `=`, or a key twice.
    """
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word!r} is not key=value")
        if key in settings:
            raise UsageError(f"--set {key} is given twice")
        settings[key] = value
    return settings


def show(session: Session, file: str, settings: Sequence[str], *, dry_run: bool) -> None:
    """Check the playbook, run it or print it."""
    inventory = session.inventory
    book = playbook.load(playbook.find(file, inventory.root), inventory, settings_of(settings))
    hosts = session.hosts
    if dry_run:
        if session.as_json:
            steps = [{"step": step.title, "line": step.line} for step in book.steps]
            session.print_json({"ok": True, "command": "play", "hosts": {}, "playbook": book.name, "steps": steps})
            return
        out(f"{book.name} on {', '.join(host.name for host in hosts)}")
        for number, step in enumerate(book.steps, 1):
            out(f"  {number}. {step.title}")
        for step in book.on_failure:
            out(f"  on failure: {step.title}")
        return

    def on_step(step: Step, number: int, total: int, cleanup: bool) -> None:
        label = "on failure" if cleanup else f"{number}/{total}"
        say(style(f"[{label}] {step.title}", "bold"))

    def on_report(step: Step, report: Report) -> None:
        if session.as_json:
            return
        if step.name == "logs":
            for host in report.hosts:
                if host.fields.get("crash"):
                    for line in crash.card(host.fields["crash"]):
                        out(line)
            return
        text.report(report, verbose=session.verbose)

    printer = _Printer(several=len(hosts) > 1)
    result = play.play(
        session.run(),
        book,
        hosts,
        on_step=on_step,
        on_report=on_report,
        on_data=(lambda _host, _data: None) if session.as_json else printer,
    )
    printer.flush()
    if session.as_json:
        session.print_json(result.as_json())
    else:
        for one in result.played:
            mark = (
                "not reached"
                if one.report is None
                else "ok"
                if one.report.exit_code == 0
                else f"exit {one.report.exit_code}"
            )
            took = f"  {duration(one.seconds)}" if one.report else ""
            out(f"{'  on failure: ' if one.cleanup else '  '}{one.step.title}: {mark}{took}")
    session.exit_with(result.exit_code)
