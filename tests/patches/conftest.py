"""The engine's published wheels, unpacked into environments of their own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deployctl-wheels"


def wheel_of(version: str) -> Path:
    """The wheel of a version, downloaded once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    if not found:
        # Platform wheels hold the same Python files; which one is taken does not matter here.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE)]
        subprocess.run([*command, f"sglang=={version}"], check=True)
        found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    return found[0]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """`installed(version)`: (interpreter, package folder) with that wheel unpacked as pip would."""
    made: dict[str, tuple[Path, Path]] = {}

    def install(version: str) -> tuple[Path, Path]:
        if version not in made:
            root = tmp_path_factory.mktemp(f"sglang-{version}")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "env")], check=True)
            site = next((root / "env").glob("lib/python*/site-packages"))
            with zipfile.ZipFile(wheel_of(version)) as wheel:
                wheel.extractall(site)
            made[version] = (root / "env" / "bin" / "python3", site / "sglang")
        return made[version]

    return install
