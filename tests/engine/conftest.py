"""Real SGLang on the CPU behind a real sshd. The environment is built once and kept; see env/README.md."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench_env import generator_packages
from sshd_rig import Sshd, free_port

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
HOSTS = """\
defaults:
  user: root
  python: {python}
  state_dir: {home}/.deployctl
  log_dir: {home}/deployctl-logs
  gpu: {{devices: "/dev/nvidia[0-9]*", clean: ours}}
hosts:
  10.1.230.174: {{address: 127.0.0.1, port: {port}}}
groups:
  default: [10.1.230.174]
profiles:
  cpu:
    default: true
    command: ["{{python}}", -m, sglang.launch_server]
    args:
      model-path: {model}
      device: cpu
      dtype: float32
      attention-backend: torch_native
      grammar-backend: none
      mem-fraction-static: "0.1"
      max-total-tokens: 4096
      max-running-requests: 32
      host: 127.0.0.1
      port: {server_port}
    env: {{SGLANG_USE_CPU_ENGINE: "1", HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}}
    ready: {{url: "http://127.0.0.1:{server_port}/health", timeout: 5m}}
    smoke: {{prompt: "The capital of France is", max_tokens: 16, burst: 10}}
"""


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter of the engine's environment, built at first need."""
    done = subprocess.run(
        [sys.executable, str(HERE / "env" / "build.py")], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def own_engine(engine_python, tmp_path_factory):
    """A copy of the environment's own files, so that the tests' patches never reach the kept one.

    Everything but the package to patch is shared through a .pth file.
    """
    root = tmp_path_factory.mktemp("engine")
    subprocess.run([engine_python, "-m", "venv", "--without-pip", str(root / "ml-env")], check=True)
    python = root / "ml-env" / "bin" / "python3"
    kept = next(Path(engine_python).parent.parent.glob("lib/python*/site-packages"))
    own = next((root / "ml-env").glob("lib/python*/site-packages"))
    shutil.copytree(kept / "sglang", own / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(kept / "sglang-0.5.12.dist-info", own / "sglang-0.5.12.dist-info")
    (own / "kept.pth").write_text(f"{kept}\n")
    return python


@pytest.fixture(scope="session")
def model(engine_python, tmp_path_factory):
    """A tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([engine_python, str(HERE / "env" / "make_model.py"), str(folder)], check=True, capture_output=True)
    return folder


class EngineHost:
    """The host and the command line."""

    def __init__(self, root: Path, sshd: Sshd, python: Path, model: Path) -> None:
        self.sshd = sshd
        self.python = python
        self.package = next(python.parent.parent.glob("lib/python*/site-packages")) / "sglang"
        self.work = root / "work"
        shutil.copytree(PROJECT / "patches", self.work / "patches")
        (self.work / "hosts.yaml").write_text(
            HOSTS.format(python=python, home=sshd.home, port=sshd.port, model=model, server_port=free_port())
        )
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("DEPLOYCTL_", "SSH_"))}
        self.environment.update(
            DEPLOYCTL_CONFIG=str(self.work / "hosts.yaml"),
            DEPLOYCTL_SSH_CONFIG=str(sshd.config),
            DEPLOYCTL_OPERATOR="ann@example.org",
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the user types it."""
        done = subprocess.run(
            [sys.executable, "-m", "deployctl", *words],
            env=self.environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        transcript = os.environ.get("DEPLOYCTL_TRANSCRIPT")
        if transcript:
            with open(transcript, "a", encoding="utf-8") as out:
                out.write(f"$ deployctl {' '.join(words)}\n{done.stderr}{done.stdout}\n")
        return done


@pytest.fixture
def engine_host(tmp_path, own_engine, model):
    """A loopback sshd named 10.1.230.174 with real SGLang."""
    with Sshd(tmp_path / "sshd", {"SGLANG_USE_CPU_ENGINE": "1"}) as sshd:
        host = EngineHost(tmp_path, sshd, own_engine, model)
        try:
            yield host
        finally:
            host.run("stop")


@pytest.fixture
def generator(engine_python, own_engine):
    """The engine's environment with what its load generator needs."""
    packages = generator_packages(engine_python)
    own = next(own_engine.parent.parent.glob("lib/python*/site-packages"))
    (own / "zz-bench.pth").write_text(f"{packages}\n")
    yield
    (own / "zz-bench.pth").unlink()
