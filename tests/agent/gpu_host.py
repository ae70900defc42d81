"""A host with a device file, tools of our own first on PATH, and real processes that hold the device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support import MemoryWire

from deployctl.agent.main import Context, perform
from deployctl.agent.state import State


class GpuHost:
    """A device file, tools of our own first on PATH, a state directory."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        (root / "dev").mkdir()
        self.device = root / "dev" / "nvidia0"
        self.device.write_text("")
        (root / "shm").mkdir()
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        self.state = State(str(root / "state"))
        self.state.create()
        self.host = {
            "name": "h",
            "state_dir": self.state.root,
            "log_dir": str(root / "logs"),
            "shm_dir": str(root / "shm"),
            "gpu": {"devices": f"{root}/dev/nvidia[0-9]*", "clean": "ours"},
            "limits": {"term_grace_s": 2, "kill_patience_s": 5, "gpu_memory_s": 1},
        }
        self.children: list[subprocess.Popen] = []
        self.smi("0, NVIDIA H200, 4, 143771")

    def smi(self, cards: str, clients: str = "", first: str = "") -> None:
        """nvidia-smi answers so; `first` is run before it does."""
        self.tool(
            "nvidia-smi",
            f'{first}\ncase "$1" in *compute-apps*) printf "{clients}";; *) printf "{cards}\\n";; esac',
        )

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def without(self, *names: str) -> None:
        """A PATH with everything but these."""
        folder = self.root / "only"
        folder.mkdir(exist_ok=True)
        for name in ("sh", "cat", "sleep", "printf", "ps", "git"):
            if name not in names and shutil.which(name):
                (folder / name).symlink_to(shutil.which(name))
        self.monkeypatch.setenv("PATH", str(folder))

    def holder(self, marker: str = "", ignore_term: bool = False, argv0: str = "holder") -> subprocess.Popen:
        """A process that has the device open."""
        script = "import sys,time,signal;"
        if ignore_term:
            script += "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        script += f"f=open({str(self.device)!r});print(1,flush=True);time.sleep(300)"
        environment = dict(os.environ, **({"DEPLOYCTL_ATTEMPT": marker} if marker else {}))
        child = subprocess.Popen(
            [argv0, "-c", script],
            executable=sys.executable,
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
        self.children.append(child)
        return child

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()

    def context(self, operation, on_event=None, **args):
        self.wire = MemoryWire(on_event=on_event)
        request = {"op": operation, "args": args, "host": self.host, "operator": "ann", "run_id": "r"}
        return Context(request, self.wire, [], {})

    def ask(self, operation="clean", on_event=None, **args):
        return perform(self.context(operation, on_event, **args))
