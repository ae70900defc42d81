"""`deployctl demo`: the article's story, told by the real commands on an embedded host."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from deployctl.demo.site import build_site
from deployctl.demo.sshhost import EmbeddedHost
from deployctl.render.terminal import out, style

_HOSTS = """\
defaults:
  python: {python}
  state_dir: {home}/.deployctl
  log_dir: {home}/deployctl-logs
  gpu: {{devices: "{home}/no-gpu-here[0-9]*", clean: ours}}
  limits: {{term_grace: 5s, burst: 30s}}

hosts:
  gpu-1: {{address: 127.0.0.1, port: {port}, user: demo}}

groups:
  default: [gpu-1]

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
    ready: {{url: "http://127.0.0.1:{server_port}/health", timeout: 60s}}
    smoke: {{prompt: "The capital of France is", max_tokens: 24, burst: 10}}
"""
_THRESHOLD = ("--", "--speculative-disable-batch-threshold", "5")


class _Stage:
    """The folder, the host and the commands of one telling."""

    def __init__(self, root: Path, host: EmbeddedHost) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "DEPLOYCTL_CONFIG": str(root / "hosts.yaml"),
            "DEPLOYCTL_SSH_CONFIG": str(host.ssh_config),
            "DEPLOYCTL_OPERATOR": os.environ.get("DEPLOYCTL_OPERATOR", "demo"),
        }

    def command(self, *words: str, expect: int = 0) -> None:
        """Show and run a command; anything but the expected exit code ends the story."""
        out(style("$ deployctl " + " ".join(words), "bold", "cyan"))
        sys.stdout.flush()
        done = subprocess.run([sys.executable, "-m", "deployctl", *words], env=self.environment, check=False)
        out()
        if done.returncode != expect:
            raise _Unexpected(words, done.returncode, expect)


class _Unexpected(Exception):
    """A command of the story ended otherwise than told."""

    def __init__(self, words: Sequence[str], code: int, expected: int) -> None:
        super().__init__(f"`deployctl {' '.join(words)}` ended with {code}, not {expected}")


def _note(text: str) -> None:
    out(style(f"# {text}", "dim"))


def tell(*, keep: bool = False, load_s: float = 2.0) -> int:
    """Tell the story.

    Args:
        keep: Leave host and server up until Ctrl-C.
        load_s: How long the stand-in engine loads, in seconds.

    Returns:
        The exit code: 0 when everything ended as told.
    """
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="deployctl-demo-"))
    try:
        with _hangup_is_an_interrupt(), EmbeddedHost(root / "host") as host:
            python = build_site(host.home, python=sys.executable)
            (root / "hosts.yaml").write_text(
                _HOSTS.format(python=python, home=host.home, port=host.port, server_port=_free_port(), load_s=load_s)
            )
            shutil.copytree(
                str(resources.files("deployctl.demo").joinpath("patches")),
                root / "patches",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            stage = _Stage(root, host)
            try:
                _acts(stage)
                out(style(f"The story took {time.monotonic() - began:.0f} s.", "bold"))
                if keep:
                    _wait_for_user(stage)
            except _Unexpected as error:
                out(style(f"the demo did not go as told: {error}", "bold", "red"))
                return 1
            finally:
                _silent_stop(stage)
        return 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _hangup_is_an_interrupt() -> Iterator[None]:
    """A closed terminal ends the story as Ctrl-C does: with its server stopped. Under nohup it goes on."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _acts(stage: _Stage) -> None:
    _note("A host on this machine, reached over SSH, with an inference engine (a stand-in: no GPU, no model).")
    _note("The wish: switch speculative decoding off while more than 5 requests run.")
    out()
    _note("First attempt: skip the draft, keep the rest. The import check passes.")
    stage.command("push", "--patch", "v1")
    _note("One request works. Ten at once do not, and the crash is traced to the patch's own line.")
    stage.command("launch", "--log-tag", "t1_v1", *_THRESHOLD, expect=6)
    stage.command("rollback")
    _note("Second attempt: allocate the slots by hand. Imports as well.")
    stage.command("push", "--patch", "v2")
    stage.command("launch", "--log-tag", "t2_v2", *_THRESHOLD, expect=6)
    stage.command("logs", "--crash")
    stage.command("rollback")
    _note("Third attempt: verify a tree that is only its root, with a graph of its own. What would change?")
    stage.command("push", "--patch", "v3", "--dry-run")
    stage.command("push", "--patch", "v3")
    stage.command("launch", "--log-tag", "t3_v3", *_THRESHOLD)
    stage.command("logs", "-n", "6")
    stage.command("status")
    stage.command("history")


def _wait_for_user(stage: _Stage) -> None:
    out(style("It is still up. In another terminal:", "bold"))
    for name in ("DEPLOYCTL_CONFIG", "DEPLOYCTL_SSH_CONFIG"):
        out(f"  export {name}={stage.environment[name]}")
    out("  deployctl status; deployctl smoke --burst 10; deployctl logs -f; deployctl rollback")
    out("Ctrl-C here ends it.")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        out()


def _silent_stop(stage: _Stage) -> None:
    """Whatever happened, no server stays behind."""
    subprocess.run([sys.executable, "-m", "deployctl", "stop"], env=stage.environment, capture_output=True, check=False)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
