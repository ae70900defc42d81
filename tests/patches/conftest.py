"""The engine's published wheels, unpacked into environments of their own, and its environment on the CPU."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pipeline import PROJECT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deployctl-wheels"
LOGIC = Path(__file__).parent / "logic"


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


@pytest.fixture
def package(tmp_path, installed):
    """`package(version)`: a copy of that engine's package folder that may be written to."""

    def copy(version: str) -> Path:
        return shutil.copytree(installed(version)[1], tmp_path / "site" / "sglang")

    return copy


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter of the engine's environment on the CPU, built at first need."""
    build = PROJECT / "tests" / "engine" / "env" / "build.py"
    done = subprocess.run([sys.executable, str(build)], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def model(engine_python, tmp_path_factory):
    """A model folder that the engine's argument resolution accepts."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make = PROJECT / "tests" / "engine" / "env" / "make_model.py"
    subprocess.run([engine_python, make, folder], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def checks(installed, engine_python, tmp_path_factory, request):
    """`checks(engine version, patch, modules)`: {"module.check": traceback or None} on that engine with that patch.

    The engine's dependencies are those of the environment on the CPU, whichever the version.
    """
    made: dict[str, dict[str, str | None]] = {}

    def run(version: str, patch: str, modules: tuple[str, ...]) -> dict[str, str | None]:
        if version not in made:
            root = tmp_path_factory.mktemp(f"logic-{version}")
            folder = shutil.copytree(installed(version)[1], root / "site" / "sglang")
            script = PROJECT / "patches" / "dynamic_spec" / f"{patch}.py"
            subprocess.run([sys.executable, script, folder], check=True, stdout=subprocess.DEVNULL)
            env = {
                "PATH": os.environ["PATH"],
                "HOME": str(root),
                "XDG_CACHE_HOME": str(root / "cache"),
                "PYTHONPATH": str(root / "site"),
                "SGLANG_USE_CPU_ENGINE": "1",
                "HF_HUB_OFFLINE": "1",
            }
            if "adaptive" in modules:
                env["DEPLOYCTL_TEST_MODEL"] = str(request.getfixturevalue("model"))
            report = root / "report.json"
            command = [engine_python, LOGIC / "run_checks.py", report, *modules]
            done = subprocess.run(command, env=env, check=False, text=True, stdout=-1, stderr=subprocess.STDOUT)
            assert report.exists(), done.stdout[-4000:]
            made[version] = json.loads(report.read_text())
        return made[version]

    return run
