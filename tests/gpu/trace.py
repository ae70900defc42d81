"""A torch profiler's trace (Chrome's format) in numbers: what a decode step costs the host, and how long the GPU idles."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
_GRAPH = ("cudaGraphLaunch",)
_COPY = ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset")
_SYNC = ("Synchronize",)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, plain or gzipped."""
    content = path.read_bytes()
    found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return found["traceEvents"] if isinstance(found, dict) else found


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Counts a step, and the share of time in which the GPU does nothing.

    Args:
        events: Of `read`.
        steps: How many steps were recorded.

    Returns:
        Per step: kernels, gpu_copies (on the GPU); launches, graph_launches, copies, synchronizations (host calls);
        step_ms, gpu_busy_ms; and gpu_idle_share, most_kernels.
    """
    if steps < 1:
        raise ValueError("a trace of no steps")
    spans: list[tuple[float, float]] = []
    on_gpu, on_host, kernels = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat", ""), event.get("name", "")
        if category in _GPU:
            spans.append((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))))
            on_gpu["kernels" if category == "kernel" else "gpu_copies"] += 1
            if category == "kernel":
                kernels[name[:80]] += 1
        elif category in _HOST:
            on_host[_host_kind(name)] += 1
    found: dict[str, Any] = {"steps": steps}
    for name in ("kernels", "gpu_copies"):
        found[name] = round(on_gpu[name] / steps, 2)
    for name in ("launches", "graph_launches", "copies", "synchronizations"):
        found[name] = round(on_host[name] / steps, 2)
    whole = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    busy = union_us(spans)
    found["step_ms"] = round(whole / steps / 1000, 4)
    found["gpu_busy_ms"] = round(busy / steps / 1000, 4)
    found["gpu_idle_share"] = round(1 - busy / whole, 4) if whole else None
    found["most_kernels"] = {name: round(count / steps, 2) for name, count in kernels.most_common(8)}
    return found


def _host_kind(name: str) -> str:
    for kind, prefixes in (("graph_launches", _GRAPH), ("launches", _LAUNCH), ("copies", _COPY)):
        if name.startswith(prefixes):
            return kind
    return "synchronizations" if any(part in name for part in _SYNC) else "other"
