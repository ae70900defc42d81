"""Shared by all tests: the helpers beside them are importable, and nothing of the caller's environment leaks in."""

import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "agent"):
    sys.path.insert(0, str(folder))

for variable in ("DEPLOYCTL_CONFIG", "DEPLOYCTL_OPERATOR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "NO_COLOR"):
    os.environ.pop(variable, None)

# Started by nohup, or in the background of a script, pytest ignores these, and whoever it starts would too. A handler
# that does nothing keeps pytest as deaf as it was, and its children begin with the default: exec takes handlers away.
for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)
