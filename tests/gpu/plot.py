"""Draws results.json: throughput over concurrency, and what the dynamic arms are worth against the plain ones.

    python -m tests.gpu.plot gpu-results/results.json docs/dynamic-speculation.svg

Needs matplotlib; nothing else here does.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import arms

STYLES = {
    "base": ("#555555", "--", "no speculation"),
    "base-no-overlap": ("#999999", "--", "no speculation, no overlap scheduler"),
    "v1": ("#d98c5f", ":", "EAGLE, tree (v1 worker)"),
    "v1-dynamic": ("#b3421a", "-", "the same, off above {threshold}"),
    "v2": ("#6fa3d8", ":", "EAGLE, chain (v2 worker)"),
    "v2-dynamic": ("#1f5f9e", "-", "the same, off above {threshold}"),
}


def curves(results: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """tokens/s of each arm by concurrency.

    Raises:
        ValueError: The stage `speed` was not run.
    """
    found = {
        key.removeprefix("a-"): {int(level): measured["median_tokens_per_s"] for level, measured in levels.items()}
        for key, levels in results.get("stages", {}).get("speed", {}).items()
        if key.startswith("a-")
    }
    if not found:
        raise ValueError("these results have no stage `speed`")
    return found


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture; its format is that of the path's ending."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = curves(results)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    base = found.get("base-no-overlap") or next(iter(found.values()))
    for name, (colour, line, label) in STYLES.items():
        by_level = found.get(name, {})
        levels = sorted(by_level)
        text = label.format(threshold=arms.THRESHOLD)
        left.plot(
            levels, [by_level[level] for level in levels], line, color=colour, marker="o", markersize=3, label=text
        )
        shared = [level for level in levels if level in base]
        ratios = [by_level[level] / base[level] for level in shared]
        right.plot(shared, ratios, line, color=colour, marker="o", markersize=3)
    for axes, title in ((left, "tokens/s"), (right, "relative to no speculation, no overlap scheduler")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests at once")
        axes.set_title(title, fontsize=10)
        axes.axvline(arms.THRESHOLD, color="#cccccc", linewidth=0.8)
        axes.grid(alpha=0.25)
        levels = sorted({level for by_level in found.values() for level in by_level})
        axes.set_xticks(levels, [str(level) for level in levels])
    left.legend(fontsize=8, frameon=False)
    gpus = results.get("machine", {}).get("gpus") or ["GPU unknown"]
    figure.suptitle(f"{gpus[0]}, SGLang {results.get('machine', {}).get('sglang')}", fontsize=10)
    figure.savefig(path, dpi=150)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
