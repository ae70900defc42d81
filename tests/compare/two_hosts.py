"""Two hosts on this machine, each with its own package, state and log, and the command line that reaches both."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "agent"), str(Path(__file__).parents[1] / "agent" / "dossier")]

from serving_box import ServingBox

HOSTS = """
hosts:
  one: {{connection: local, python: {one.python}, state_dir: {one.host[state_dir]}, log_dir: {one.host[log_dir]}}}
  two: {{connection: local, python: {two.python}, state_dir: {two.host[state_dir]}, log_dir: {two.host[log_dir]}}}
defaults:
  package: fakesgl
  gpu: {{devices: "{root}/no-device*"}}
  limits: {{term_grace: 5s, kill_patience: 10s}}
profiles:
"""
PROFILE = """
  {name}:
    command: ["{{python}}", {server}]
    args: {{port: {port}}}
    ready: {{url: "http://127.0.0.1:{port}/health", timeout: 20s}}
    smoke: false
"""


class Two:
    """Two hosts on this machine and the command line that reaches both.

    Args:
        root: An empty folder.
        profiles: {name: (server script, port)}.
    """

    def __init__(self, root, profiles):
        self.root = root
        (root / "one").mkdir()
        (root / "two").mkdir()
        self.boxes = [ServingBox(root / "one"), ServingBox(root / "two")]
        hosts = HOSTS.format(one=self.boxes[0], two=self.boxes[1], root=root)
        for name, (server, port) in profiles.items():
            hosts += PROFILE.format(name=name, server=server, port=port)
        (root / "hosts.yaml").write_text(hosts)

    def run(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "deployctl", *words],
            env={**os.environ, "DEPLOYCTL_CONFIG": str(self.root / "hosts.yaml"), "DEPLOYCTL_OPERATOR": "ann"},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def json(self, *words):
        done = self.run(*words, "--json")
        return {**json.loads(done.stdout), "exit_code": done.returncode}

    def end(self):
        for box in self.boxes:
            box.end()
