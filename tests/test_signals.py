"""How the tests were started must not decide what their children do with a signal."""

import signal
import subprocess
import sys
from pathlib import Path

CHILD = """
import signal
print(*(number.name for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_IGN))
"""
PARENT = "import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def ignore() -> None:
    """What nohup and a script's `&` do to a process before it begins."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def test_children_get_the_default_signals_also_under_nohup():
    """A test that sends SIGINT to a command it started works in a run that ignores SIGINT itself."""
    inherited, begun = (
        subprocess.run(
            [sys.executable, "-c", *words],
            cwd=Path(__file__).parent,
            preexec_fn=ignore,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()
        for words in ([CHILD], [PARENT, CHILD])
    )
    assert ["SIGINT", "SIGHUP", "SIGQUIT"] == inherited, "nothing was ignored: this test would show nothing"
    assert [] == begun
