"""A whole host for the command line: a real sshd, the stand-in engine, an inventory whose 10.1.230.174 is loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sshd_rig import Sshd, free_port

from deployctl.demo.site import build_site

PROJECT = Path(__file__).resolve().parent.parent

HOSTS = """\
defaults:
  user: root
  python: {python}
  state_dir: {home}/.deployctl
  log_dir: {home}/deployctl-logs
  gpu: {{devices: "{home}/dev/nvidia[0-9]*", clean: ours}}
  limits: {{connect: 10s, term_grace: 5s, kill_patience: 10s, gpu_memory: 3s, burst: 20s, dead_peer: 15s}}
hosts:
  10.1.230.174: {{address: 127.0.0.1, port: {port}}}
{more}
groups:
  default: [10.1.230.174]
profiles:
  eagle3:
    default: true
    command: ["{{python}}", -m, sglang.launch_server]
    args:
      model-path: /models/stand-in
      port: {server_port}
      speculative-algorithm: EAGLE3
      speculative-num-draft-tokens: 16
      max-running-requests: 64
      standin-load: "{load_s}"
    ready: {{url: "http://127.0.0.1:{server_port}/health", timeout: 40s}}
    smoke: {{prompt: "The capital of France is", max_tokens: 16, burst: 8}}
"""


class Rig:
    """One loopback host and the command line that reaches it."""

    def __init__(self, root: Path, *, load_s: float = 0.8, more_hosts: str = "", **sshd_options: str) -> None:
        self.root = root
        self.sshd = Sshd(root / "sshd", **sshd_options)
        self.home = self.sshd.home
        self.python = build_site(self.home, python=sys.executable)
        self.package = next((self.home / "ml-env").rglob("site-packages")) / "sglang"
        self.server_port = free_port()
        self.work = root / "work"
        self.work.mkdir()
        self.more_hosts = more_hosts
        self.load_s = load_s
        self.write_hosts()
        shutil.copytree(PROJECT / "deployctl" / "demo" / "patches", self.work / "patches")
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("DEPLOYCTL_", "SSH_"))
        }
        self.environment.update(
            DEPLOYCTL_CONFIG=str(self.work / "hosts.yaml"),
            DEPLOYCTL_SSH_CONFIG=str(self.sshd.config),
            DEPLOYCTL_OPERATOR="ann@example.org",
            HOME=str(root),
        )

    def write_hosts(self, port: int | None = None) -> None:
        (self.work / "hosts.yaml").write_text(
            HOSTS.format(
                python=self.python,
                home=self.home,
                port=port or self.sshd.port,
                server_port=self.server_port,
                load_s=self.load_s,
                more=self.more_hosts.format(port=port or self.sshd.port),
            )
        )

    def __enter__(self) -> "Rig":
        self.sshd.start()
        return self

    def __exit__(self, *_) -> None:
        try:
            self.write_hosts()
            self.run("stop")
        finally:
            self.sshd.stop()

    def run(self, *words: str, **options) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "deployctl", *words],
            env=options.pop("env", self.environment),
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )

    def start(self, *words: str) -> subprocess.Popen:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "deployctl", *words],
            env=self.environment,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def json(self, *words: str) -> dict:
        """Run a command with --json; its one object, which must be all there is on stdout."""
        at = words.index("--") if "--" in words else len(words)
        done = self.run(*words[:at], "--json", *words[at:])
        value = json.loads(done.stdout)
        value["exit_code"] = done.returncode
        return value

    def host(self, *words: str) -> dict:
        """The same, the only host's object."""
        value = self.json(*words)
        assert list(value["hosts"]) == ["10.1.230.174"], value
        return {**value["hosts"]["10.1.230.174"], "exit_code": value["exit_code"]}

    def tree(self) -> dict[str, bytes]:
        """The package's files, bytecode left out."""
        return {
            str(path.relative_to(self.package)): path.read_bytes()
            for path in sorted(self.package.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }
