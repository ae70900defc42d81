"""Shared by all tests: the helpers beside them are importable, and nothing of the caller's environment leaks in."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "agent"):
    sys.path.insert(0, str(folder))

for variable in ("DEPLOYCTL_CONFIG", "DEPLOYCTL_OPERATOR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "NO_COLOR"):
    os.environ.pop(variable, None)
