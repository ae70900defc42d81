"""A host with a small package to patch, whose servers are small programs that run until they are stopped."""

import json
import os
import signal
import time

from support import Box, perform

from deployctl.agent import processes

DEADLINE_S = 30.0


class ServingBox(Box):
    """A host on this machine that can be pushed to and launched on."""

    def launch(self, tag, *words, script="import time\ntime.sleep(300)\n", env=None, port=None):
        """Start a server of the test's own, without waiting for it."""
        path = self.root / f"{tag}.py"
        path.write_text(script)
        result = self.ask(
            "launch",
            profile="eagle3",
            argv=["{python}", str(path), *words],
            env=env or {},
            cwd=str(self.home),
            engine="openai",
            log_tag=tag,
            ready={"url": "http://127.0.0.1:9/health", "timeout_s": 20},
            timeout_s=None,
            port=port,
            smoke_spec=None,
            smoke=False,
            burst=None,
            clean=None,
            replace=True,
            wait=False,
            rank=0,
            nodes=1,
            watch="ready",
        )
        assert result["attempt"], result["error"]
        return result["attempt"]

    def record(self, number, name, content):
        """Write a file of an attempt as whoever measured it would have."""
        path = self.root / "state dir" / "attempts" / str(number) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def dossier(self, *names, **args):
        """Ask for attempts by name, in this process; all without any."""
        result = perform(self, "dossier", attempts=[{"name": name} for name in names] if names else None, **args)
        assert "traceback" not in result, result["traceback"]
        return result

    def end(self):
        """End every server by its marked processes, and wait for them."""
        machine = self.root / "state dir" / "machine"
        if not machine.exists():
            return
        marker = json.loads(machine.read_text())["id"] + ":"
        finish = time.monotonic() + DEADLINE_S
        while left := processes.marked(marker):
            for process, _ in left:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            assert time.monotonic() < finish, left
            time.sleep(0.02)
