"""One self-contained HTML page: a template, a style sheet, scripts, a chart library and the data, put together.

Chart.js draws the charts because it alone of what was looked at has everything at a moderate size: stacked and floating
bars (the load phases), logarithmic axes, hover over all lines of one concurrency, and redrawing on resize, in 210 kB
with no dependency but the colour parser that it bundles, MIT, released for over ten years by many people. ECharts does
the same in 500 kB (its smallest build) to 1.1 MB; uPlot is a quarter of the size but has neither category axes nor
horizontal bars.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

# The first line that is ours: by it a later report knows that it may replace the file.
MARK = '<meta name="generator" content="deployctl report">'
_SCRIPTS = ("base.js", "charts.js", "curves.js", "load.js", "changes.js", "table.js", "main.js")


def page(model: Mapping[str, Any]) -> str:
    """The whole page of a model (`deployctl.render.report.model.build`)."""
    here = resources.files("deployctl.render.report")
    library = (here / "vendor" / "chart.umd.min.js").read_text("utf-8")
    # Its source map is not shipped, and nothing may be fetched.
    library = "\n".join(line for line in library.split("\n") if not line.startswith("//# sourceMappingURL"))
    style = (here / "report.css").read_text("utf-8")
    code = "\n".join((here / "js" / name).read_text("utf-8") for name in _SCRIPTS)
    script = f'"use strict";(() => {{\n{code}\n}})();'
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "MARK": MARK,
        "POLICY": policy,
        "STYLE": style,
        "DATA": embedded(model),
        "LIBRARY": library,
        "SCRIPT": script,
    }
    return _filled((here / "report.html").read_text("utf-8"), parts)


def embedded(value: Any) -> str:
    """JSON that may stand in a script element: it holds no `<`, `>` or `&`, and nothing but ASCII."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with each `{{NAME}}` filled in; what is filled in is never looked at again."""
    pieces = []
    for piece in template.split("{{"):
        name, end, rest = piece.partition("}}")
        pieces.append(parts[name] + rest if end and name in parts else piece)
    return "".join(pieces)


def _hash(text: str) -> str:
    """The source expression of a Content-Security-Policy by which an inline element is allowed."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
