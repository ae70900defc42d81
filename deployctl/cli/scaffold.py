"""`init`: the files that a new project begins with."""

import os
from pathlib import Path

from deployctl.errors import UsageError

_HOSTS = """\
# Machines and the server commands that run on them. Check with: deployctl doctor
defaults:
  user: root
  python: ~/ml-env/bin/python3       # the interpreter that serves
  package: sglang                    # the installed engine to patch

hosts:
  gpu-1: {address: 192.0.2.10}       # any name or alias that ssh knows works too

groups:
  default: [gpu-1]                   # what a command without --host means

profiles:
  baseline:
    default: true
    command: ["{python}", -m, sglang.launch_server]
    args: {model-path: /models/my-model, port: 30000}
    ready: {url: "http://127.0.0.1:30000/health", timeout: 15m}
    smoke: {prompt: "The capital of France is", max_tokens: 32, burst: 16}
"""
_PATCH = '''\
# /// deployctl
# package = "sglang"
# versions = ">=0.5.9"
# targets = ["srt/server_args.py"]
# verify = ["sglang.srt.server_args"]
# ///
"""An example: `deployctl push --patch example/v1 --dry-run` shows what it would change."""

import pathlib
import sys

package = pathlib.Path(sys.argv[1])  # a staged copy; the live files change only when every check has passed
target = package / "srt" / "server_args.py"
text = target.read_text()
marker = "# patched by example/v1\\n"
if marker not in text:
    target.write_text(text + marker)
'''
_PLAYBOOK = """\
# Push, launch, prove under load; on failure show the crash and go back.
name: iterate
vars: {patch: example/v1, log_tag: t1, burst: 16}
steps:
  - push: {patch: "{patch}"}
  - stop: {}
  - launch: {log_tag: "{log_tag}", burst: "{burst}"}
on_failure:
  - logs: {crash: true}
  - stop: {}
  - rollback: {}
"""
_FILES = {
    "hosts.yaml": _HOSTS,
    "patches/example/v1.py": _PATCH,
    "playbooks/iterate.yaml": _PLAYBOOK,
}


def scaffold(folder: Path) -> list[str]:
    """Write what is missing; returns what was made.

    Raises:
        UsageError: The folder cannot be written.
    """
    for name in _FILES:  # all or nothing: half a scaffold would be taken for a whole one
        above = next(place for place in (folder / name).parents if place.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            reason = "Permission denied" if above.is_dir() else f"{above} is no folder"
            raise UsageError(f"cannot write {folder / name}: {reason}", hint="move it away, or init in another folder")
    made = []
    for name, content in _FILES.items():
        path = folder / name
        if path.exists():
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        made.append(str(path))
    return made
