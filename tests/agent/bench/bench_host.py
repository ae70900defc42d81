"""A host to measure: the stand-in engine, the agent's `bench` in this process, and its records on disk."""

import hashlib
import json
from pathlib import Path

from launch_host import LaunchHost, Wire

from deployctl.remote.bundle import source_of

PROMPTS = [
    {"prompt": "Write a function that adds two numbers"},
    {"prompt": "Explain what a semaphore is good for"},
    {
        "messages": [
            {"role": "system", "content": "You mend code"},
            {"role": "user", "content": "It hangs at the third request"},
            {"role": "assistant", "content": "Show me the loop"},
            {"role": "user", "content": "while True: pass"},
        ]
    },
]


def blob_of(prompts):
    """The JSONL of some prompts."""
    return "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()


class BenchHost(LaunchHost):
    """A LaunchHost with the stand-in's load generator."""

    def bench_args(self, levels=(1, 2), prompts=PROMPTS, **changes):
        """Arguments of a bench, as the client makes them, and the wire that carries the prompts."""
        blob = blob_of(prompts)
        args = {
            "attempt": None,
            "log_tag": None,
            "levels": list(levels),
            "prompts": {"name": "own", "sha256": hashlib.sha256(blob).hexdigest(), "count": len(prompts)},
            "max_tokens": 8,
            "requests_per_level": 6,
            "seed": 1,
            "timeout_s": 60,
            "resume": None,
        }
        args.update(changes)
        wire = Wire()
        wire.blobs = {"prompts": blob}
        return args, wire

    def context(self, operation, wire=None, **args):
        context = super().context(operation, wire, **args)
        context.sources["loadgen_render"] = source_of("loadgen_render")
        return context

    def bench(self, levels=(1, 2), prompts=PROMPTS, **changes):
        """A bench to its result."""
        args, wire = self.bench_args(levels, prompts, **changes)
        return self.ask("bench", wire, **args)

    def bench_behind(self, levels=(1, 2), prompts=PROMPTS, **changes):
        """A bench in a thread of its own."""
        args, wire = self.bench_args(levels, prompts, **changes)
        return self.ask_behind("bench", wire=wire, **args)

    def record(self, bench=1, attempt=1):
        """bench.json, or None."""
        return self.state.read_json("attempts", attempt, "bench", bench, "bench.json")

    def file(self, name, bench=1, attempt=1):
        """A file of a bench."""
        return Path(self.state.path("attempts", attempt, "bench", bench, name))

    def generators(self):
        """The load generators that live."""
        return [process for process, _ in self.marked() if "bench_serving" in process.command]
