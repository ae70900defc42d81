"""Results as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from .verdicts import RATIOS


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:160]


def markdown(results: Mapping[str, Any]) -> str:
    """All tables of one run."""
    stages = results.get("stages", {})
    parts = [f"# {', '.join(results.get('machine', {}).get('gpus', []) or ['no GPU'])}\n"]
    parts.append("\n".join(f"* {key}: {value}" for key, value in results.get("machine", {}).items()) + "\n")
    parts += _verdicts(results)
    if "speed" in stages:
        parts += _speed(stages["speed"])
    for stage, title in (
        ("life", "Loads"),
        ("meaning", "Meaning"),
        ("features", "Features"),
        ("profile", "A step"),
        ("crashes", "Crashes"),
        ("servers", "Servers"),
    ):
        if stage in stages:
            parts += _stage(title, stages[stage])
    return "\n".join(parts)


def _verdicts(results: Mapping[str, Any]) -> list[str]:
    rows = [[v["outcome"], v["stage"], v["what"], v["value"], v["wanted"], v["note"]] for v in results["verdicts"]]
    parts = ["## Verdicts\n", table(["", "stage", "what", "value", "wanted", "note"], rows)]
    for name in ("skipped", "errors"):
        entries = results.get(name) or []
        if entries:
            lines = [
                f"* {entry.get('what') or entry.get('where')}: {entry.get('why') or entry.get('error')}"
                for entry in entries
            ]
            parts += [f"## {name.capitalize()}\n", "\n".join(lines) + "\n"]
    return parts


def _by_level(levels: Mapping[Any, Any]) -> dict[int, Any]:
    """JSON has made the concurrencies text."""
    return {int(level): found for level, found in levels.items()}


def _speed(found: Mapping[str, Any]) -> list[str]:
    arms = {key: _by_level(levels) for key, levels in found.items() if key.startswith("a-")}
    levels = sorted({level for by_level in arms.values() for level in by_level})

    def rows(field: str) -> list[list[Any]]:
        return [[level, *[by_level.get(level, {}).get(field) for by_level in arms.values()]] for level in levels]

    names = [key.removeprefix("a-") for key in arms]
    ratios = [f"{arm} / {against}" for arm, against in RATIOS]
    return [
        "## tokens/s, median of the rounds\n",
        table(["C", *names], rows("median_tokens_per_s")),
        "## Accept length\n",
        table(["C", *names], rows("accept_length")),
        "## Ratios\n",
        table(
            ["C", *ratios], [[row["concurrency"], *[row[name] for name in ratios]] for row in found.get("ratios", [])]
        ),
    ]


def _stage(title: str, found: Mapping[str, Any]) -> list[str]:
    rows = []
    for key, value in found.items():
        fields = value if isinstance(value, dict) else {"": value}
        simple = {name: field for name, field in fields.items() if not isinstance(field, list) or len(field) < 8}
        rows.append([key, ", ".join(f"{name} {field}" for name, field in simple.items() if name != "phases")])
    return [f"## {title}\n", table(["", ""], rows)]
