"""How fast a report of thirty attempts is made and opens: printed, not judged. Needs Chromium.

`opened` is the time from the navigation to the end of the load event, when every section stands and every chart is
drawn; the first opening of a fresh browser, and the median of those after it.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "report"))

from dossiers import STORY_AT, story  # the same attempts as the tests show

from deployctl.render.report import page
from deployctl.render.report.model import build

OPENINGS = 9
LOADED = "() => performance.getEntriesByType('navigation')[0].loadEventEnd"


def main() -> None:
    """Make one report, open it several times at two widths."""
    told = story()
    began = time.perf_counter()
    html = page(build(told, {}, at=STORY_AT, version="benchmark"))
    made_s = time.perf_counter() - began
    attempts = sum(len(dossier["attempts"]) for dossier in told.values())
    print(f"{attempts} attempts: {len(html.encode()) / 1000:.0f} kB, made in {made_s * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(html)
        for width in (1400, 400):
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": width, "height": 900})
            times = []
            for _ in range(OPENINGS):
                tab.goto(path.as_uri())
                times.append(tab.evaluate(LOADED))
            browser.close()
            print(f"{width} px: opened in {times[0]:.0f} ms, then {statistics.median(times[1:]):.0f} ms")


if __name__ == "__main__":
    main()
