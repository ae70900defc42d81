"""Install dependency groups of pyproject.toml with a pip that may be too old for `--group`."""

import subprocess
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """`install_groups.py test lint`."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    wanted = [line for name in sys.argv[1:] for line in project["dependency-groups"][name]]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True
    )


if __name__ == "__main__":
    main()
