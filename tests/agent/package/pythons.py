"""Runs agent code under any interpreter, as its own package, without the rest of the project."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import MemoryWire

import deployctl.agent

AGENT = Path(deployctl.agent.__file__).parent

_RUNNER = """
import json, os, sys, types
package = types.ModuleType("deployctl_agent")
package.__path__ = [{agent!r}]
sys.modules["deployctl_agent"] = package
sys.dont_write_bytecode = True
class Wire:
    def __init__(self):
        import threading
        self.events, self.cancelled = [], threading.Event()
    def event(self, kind, /, **fields):
        self.events.append(dict(fields, event=kind))
context = types.SimpleNamespace(host={host!r}, wire=Wire(), python=sys.executable, server_path=[e for e in sys.path if e])
from deployctl_agent.failure import Failure
def attempt(act):
    try:
        return act()
    except Failure as failure:
        return dict(failure.as_result()["error"], exit=failure.exit_code)
"""


def run_agent(python, body, home, host=None, **env):
    """Run `body` with a `context` at hand under `python`; it must leave a JSON value in `answer`."""
    text = (
        _RUNNER.format(agent=str(AGENT), host=host or {"package": "fakesgl"}) + body + "\nprint(json.dumps(answer))\n"
    )
    done = subprocess.run(
        [str(python), "-c", text],
        check=False,
        capture_output=True,
        text=True,
        cwd=home,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def context_for(python, server_path=(), package="fakesgl", wire=None):
    """A context for calls in this process."""
    return SimpleNamespace(
        host={"package": package},
        wire=wire or MemoryWire(),
        python=str(python),
        server_path=[str(entry) for entry in server_path],
    )


def all_pythons():
    """Every CPython from 3.8 on that pyenv has here, as pytest parameters."""
    root = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser()) / "versions"
    found = [path for path in root.glob("3.*/bin/python") if int(path.parts[-3].split(".")[1]) >= 8]
    found.sort(key=lambda path: int(path.parts[-3].split(".")[1]))
    return [pytest.param(path, id=path.parts[-3]) for path in found]
