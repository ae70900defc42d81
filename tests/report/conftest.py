"""Debian's Chromium, headless, driven by playwright; pages that know everything that they asked for or complained of."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import dossiers
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deployctl.render import report
from deployctl.render.report.model import build

WIDE, NARROW = (1400, 900), (400, 800)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; a container's root cannot have a sandbox."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: python scripts/system_needs.py"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A report opened from disk.

    Attributes:
        page: Playwright's.
        said: What the console and uncaught errors said.
        requested: Every URL that was asked for.
    """

    def __init__(self, browser: Browser, path: Path, size: tuple[int, int], scheme: str) -> None:
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, timezone_id="UTC", locale="en-GB"
        )
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(path.as_uri())

    def ask(self, script: str, argument: object = None) -> object:
        """The value of a JavaScript function's call in the page."""
        return self.page.evaluate(script, argument)


@pytest.fixture
def opened(browser, tmp_path):
    """`opened(dossiers, ...)` makes the page of some dossiers and opens it."""
    made: list[Opened] = []

    def open_(told=None, failures=None, size=WIDE, scheme="light", at=dossiers.STORY_AT):
        model = build(dossiers.story() if told is None else told, failures or {}, at=at, version="0.1.0")
        path = tmp_path / f"report-{len(made)}.html"
        path.write_text(report.page(model))
        made.append(Opened(browser, path, size, scheme))
        return made[-1]

    yield open_
    for one in made:
        one.context.close()
