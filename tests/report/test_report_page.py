"""The page in a browser, as a team sees it in a meeting: drawn, quiet, readable, and deaf to what hostile texts say."""

import copy
import datetime as dt

import dossiers
import pytest
from conftest import NARROW, WIDE

SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">\x1b[31m\u202e&lt;\'"`${1}'
UNKNOWN = chr(0x2013)
SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")

CHARTS = "() => [...document.querySelectorAll('canvas')].map((canvas) => Chart.getChart(canvas).data.datasets.length)"
# How many pixels of each canvas have exactly one of the colours that its data are drawn in.
PAINTED = """() => [...document.querySelectorAll('canvas')].map((canvas) => {
  const wanted = new Set(Chart.getChart(canvas).data.datasets
    .map((set) => set.pointRadius === 0 || !set.backgroundColor ? set.borderColor : set.backgroundColor)
    .filter((ink) => typeof ink === 'string').map((ink) => ink.match(/[\\d.]+/g).slice(0, 3).join()));
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let at = 0; at < pixels.length; at += 4)
    if (pixels[at + 3] > 250 && wanted.has(`${pixels[at]},${pixels[at + 1]},${pixels[at + 2]}`)) count++;
  return count;
})"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = """() => { for (const one of document.querySelectorAll('details')) one.open = true;
  for (const one of document.querySelectorAll('.unfold')) one.click(); }"""
# Every element that is wider than the window and whose own scroller does not take care of it.
WIDER = """() => [...document.querySelectorAll('main *')].filter((one) => one.getBoundingClientRect().right > innerWidth + 1
  && !one.closest('.scroll')).map((one) => one.outerHTML.slice(0, 120))"""


@SIZES
@SCHEMES
def test_everything_is_drawn_and_nothing_is_asked_for(opened, size, scheme):
    """Six charts with as many series as there are data, painted in their colours; no console line, no request."""
    shown = opened(size=size, scheme=scheme)
    # Throughput, three latencies with p50 and p99, lives and marks of four kinds of verdict, five phases.
    assert [3, 6, 6, 6, 8, 5] == shown.ask(CHARTS)
    assert [] == [count for count in shown.ask(PAINTED) if count < 100]
    assert [] == shown.said
    assert 1 == len(shown.requested)
    assert shown.requested[0].startswith("file://")


@SIZES
@SCHEMES
def test_nothing_is_wider_than_the_window(opened, size, scheme):
    """With everything unfolded: only tables and diffs scroll, each in its own box."""
    shown = opened(size=size, scheme=scheme, failures=unreachable())
    shown.ask(OPEN_ALL)
    assert [] == shown.ask(WIDER)
    assert 0 == shown.ask(OVERFLOW)
    assert [] == shown.said


def test_nothing_comes_from_the_network_even_if_asked(opened):
    """The page's own policy refuses every fetch, image and script, whoever wants them."""
    shown = opened()
    assert "refused" == shown.ask("() => fetch('http://127.0.0.1:9/').then(() => 'allowed', () => 'refused')")
    blocked = """() => new Promise((done) => {
      document.addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
      const added = document.createElement('script');
      added.textContent = 'window.hacked = 1';
      document.body.append(added);
      setTimeout(done, 10000, 'it was allowed');
    })"""
    assert shown.ask(blocked).startswith("script-src")
    assert shown.ask("() => window.hacked") is None


@SCHEMES
def test_hostile_texts_are_shown_as_text(opened, scheme):
    """Tags, causes, frames, diffs, arguments, hosts and problems may hold markup and controls: all are letters here."""
    told = {name + HOSTILE: poisoned(dossier) for name, dossier in dossiers.story().items()}
    failures = {"far" + HOSTILE: {"status": "unreachable", "exit": 3, "error": {"message": HOSTILE, "hint": HOSTILE}}}
    shown = opened(told, failures, size=NARROW, scheme=scheme)
    shown.ask(OPEN_ALL)
    assert shown.ask("() => window.hacked") is None
    assert [] == shown.said
    assert 1 == len(shown.requested)
    assert 0 == shown.ask("() => document.querySelectorAll('img').length")
    assert 3 == shown.ask("() => document.querySelectorAll('script').length")
    text = shown.page.text_content("main")
    assert "\x1b" not in text
    assert "\u202e" not in text
    for selector in (
        "h1", ".tile", ".chip", ".crash h3", ".culprit code", ".frames code", ".place", ".diff code", ".release b",
        ".attempts td b", ".below dd", ".host h3", ".host.failed .problem", ".care", ".numbers th", ".settings td",
    ):  # fmt: skip
        assert any(SHOWN in one for one in shown.page.locator(selector).all_text_contents()), selector
    assert 0 == shown.ask(OVERFLOW)


def test_hover_tells_all_attempts_at_one_concurrency(opened):
    """Over the curve at C=32: each attempt's throughput, best first, with how far it is behind."""
    shown = opened()
    canvas = shown.page.locator("canvas").first
    box = canvas.bounding_box()
    place = shown.ask(
        """() => { const chart = Chart.getChart(document.querySelector('canvas'));
        const { x, y } = chart.getDatasetMeta(0).data[5]; return [x, y]; }"""
    )
    assert 0 == shown.ask("() => Chart.getChart(document.querySelector('canvas')).tooltip.opacity")
    shown.page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    told = shown.ask(
        """() => { const { tooltip } = Chart.getChart(document.querySelector('canvas'));
        return [tooltip.opacity, tooltip.title, tooltip.body.flatMap((item) => item.lines)]; }"""
    )
    assert (1, ["32 concurrent"]) == tuple(told[:2])
    assert ["t0_base", "t8_v4", "t1_eagle"] == [line.split()[0] for line in told[2]]
    assert "1\u202f691 tok/s" in told[2][0]
    assert "(-56 %)" in told[2][2]


@pytest.mark.parametrize("number", range(1, 6))
def test_every_other_chart_tells_something_too(opened, number):
    """Latencies, time line and load phases have their own words under the pointer."""
    shown = opened()
    canvas = shown.page.locator("canvas").nth(number)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    place = shown.ask(
        """(number) => { const chart = Chart.getChart(document.querySelectorAll('canvas')[number]);
        const all = chart.data.datasets.map((_, at) => chart.getDatasetMeta(at).data.filter((one) => !one.skip && !(one.options.radius === 0)));
        const found = all.filter((one) => one.length).at(-1)[0];
        return found.width === undefined ? [found.x, found.y] : [found.x - found.width / 2, found.y]; }""",
        number,
    )
    shown.page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    opacity, body = shown.ask(
        """(number) => { const { tooltip } = Chart.getChart(document.querySelectorAll('canvas')[number]);
        return [tooltip.opacity, (tooltip.body ?? []).flatMap((item) => item.lines).join()]; }""",
        number,
    )
    assert 1 == opacity
    assert any(word in body for word in (" ms", " min", " s", "attempt"))
    assert "undefined" not in body
    assert "NaN" not in body


def test_attempts_are_chosen(opened):
    """A chip takes its attempt out of all four charts and the table, and puts it back in the same colour."""
    shown = opened()
    chip = shown.page.locator(".chip", has_text="t1_eagle")
    ink = "() => Chart.getChart(document.querySelector('canvas')).data.datasets.map((set) => [set.label, set.borderColor])"
    before = shown.ask(ink)
    chip.click()
    assert "false" == chip.get_attribute("aria-pressed")
    assert [2, 4, 4, 4, 8, 5] == shown.ask(CHARTS)
    assert ["t0_base", "t8_v4"] == shown.page.locator(".numbers tbody th").all_text_contents()
    assert [one for one in before if one[0] != "t1_eagle"] == shown.ask(ink)
    chip.click()
    assert before == shown.ask(ink)


def test_loads_are_told_apart(opened):
    """Benches with other prompts or on other GPUs are charts of their own."""
    shown = opened()
    picker = shown.page.get_by_role("combobox", name="Load")
    options = picker.locator("option").all_text_contents()
    assert 3 == len(options)
    (agentic,) = (at for at, text in enumerate(options) if text.startswith("agentic"))
    picker.select_option(index=agentic)
    assert ["t0_base", "t8_v4"] == shown.page.locator(".numbers tbody th").all_text_contents()
    assert ["1", "2", "4", "8", "16"] == shown.page.locator(".numbers thead th").all_text_contents()[1:]


def test_two_loads_never_read_the_same(opened):
    """Where they differ only in the seed, or in the requests of a level, the list says so."""
    told = copy.deepcopy(dossiers.story())
    one = next(one for host in told.values() for one in host["attempts"] if one["benches"])
    for number, change in enumerate(({"seed": 7}, {"requests_per_level": 40}), 90):
        record = copy.deepcopy(one["benches"][0])
        record.update(bench=number, load={**record["load"], **change})
        one["benches"].append(record)
    options = opened(told).page.get_by_label("Load").locator("option").all_text_contents()
    assert len(set(options)) == len(options) > 3
    assert any("seed 7" in text for text in options)
    assert any("40 requests a level" in text for text in options)


def test_another_metric(opened):
    """The table shows what is picked; the best of a column is the lowest where lower is better."""
    shown = opened()
    shown.page.get_by_label("Numbers").select_option(label="TTFT p50")
    first = shown.page.locator(".numbers tbody tr").first
    assert "t0_base" in first.text_content()
    assert 7 == first.locator(".best").count()
    assert all(cell.endswith("ms") for cell in first.locator("td").all_text_contents())


def test_levels_that_failed_are_no_points(opened):
    """Where not all requests came back there is no point but a count, and a line of warning."""
    told = dossiers.story()
    level = told["gpu-a"]["attempts"][1]["benches"][0]["levels"][6]
    level.update(completed=200, problem="56 of 256 requests failed: HTTP 500")
    shown = opened(told)
    assert shown.ask("() => Chart.getChart(document.querySelector('canvas')).data.datasets[1].data[6]") is None
    assert ["200/256"] == shown.page.locator(".numbers .failed").all_text_contents()
    assert "t1_eagle at C=64: 56 of 256 requests failed: HTTP 500" in shown.page.locator(".care").text_content()


def test_theme_follows_the_system_and_the_toggle(opened):
    """Dark where the system is, and the other way round after a click; charts are drawn in the colours of then."""
    shown = opened(scheme="dark")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    ink = "() => Chart.getChart(document.querySelector('canvas')).data.datasets[0].borderColor"
    dark = (shown.ask(paper), shown.ask(ink))
    assert "rgb(16, 20, 26)" == dark[0]
    shown.page.get_by_role("button", name="Show in light colours").click()
    light = (shown.ask(paper), shown.ask(ink))
    assert "rgb(255, 255, 255)" == light[0]
    assert dark[1] != light[1]
    shown.page.get_by_role("button", name="Show in dark colours").click()
    assert dark == (shown.ask(paper), shown.ask(ink))
    shown.page.emulate_media(color_scheme="light")
    assert "rgb(16, 20, 26)" == shown.ask(paper)


def test_paper_is_light_and_has_the_crashes_open(opened):
    """Printing from the dark theme: light charts, every crash unfolded; afterwards all is as it was."""
    shown = opened(scheme="dark")
    ink = "() => Chart.getChart(document.querySelector('canvas')).data.datasets[0].borderColor"
    folded = "() => document.querySelectorAll('#crashes details:not([open])').length"
    before = (shown.ask(ink), shown.ask(folded))
    assert before[1] > 0
    shown.ask("() => dispatchEvent(new Event('beforeprint'))")
    assert "rgb(255, 255, 255)" == shown.ask("() => getComputedStyle(document.body).backgroundColor")
    assert (True, 0) == (before[0] != shown.ask(ink), shown.ask(folded))
    shown.ask("() => dispatchEvent(new Event('afterprint'))")
    assert before == (shown.ask(ink), shown.ask(folded))
    assert shown.page.pdf(format="A4").startswith(b"%PDF")
    assert [] == shown.said


def test_crash_cards_show_the_patched_line(opened):
    """One card a kind: cause, exit, attempts, frames, and the patch's line marked in frames and in its diff."""
    shown = opened()
    cards = shown.page.locator(".crash")
    assert 4 == cards.count()
    card = cards.filter(has_text="too many values to unpack")
    assert ["t3_v2", "t3_v2_page1", "t3_mem(10)"] == card.locator(".seen a").all_text_contents()
    assert "signal SIGKILL" in card.text_content()
    assert (
        "out_cache_loc, _ = alloc_token_slots(batch.tree_cache, len(batch.reqs))"
        == card.locator(".culprit code").text_content()
    )
    assert "dynamic_spec/v2" in card.locator(".frames .patched").text_content()
    release = shown.page.locator(".release").filter(has_text="dynamic_spec/v2")
    assert 0 == release.locator(".diff").count()
    release.locator("summary").click()
    hit = release.locator(".diff .hit")
    assert (
        "+            out_cache_loc, _ = alloc_token_slots(batch.tree_cache, len(batch.reqs))"
        == hit.locator("code").text_content()
    )
    assert "t3_v2" in hit.locator(".here").text_content()
    assert release.locator(".diff .add").count() > 1
    assert release.locator(".diff .del").count() > 0


def test_the_table_is_sorted_and_filtered(opened):
    """Numbers as numbers, both ways, unknown ones last; words narrow it down; a row unfolds its command."""
    shown = opened()
    rows = shown.page.locator(".attempts tbody tr:not(.below):not([hidden])")
    assert 31 == rows.count()
    head = shown.page.get_by_role("button", name="Best tok/s")
    column = (
        "() => [...document.querySelectorAll('.attempts td[data-label=\"Best tok/s\"]')].map((one) => one.textContent)"
    )
    head.click()
    rising = shown.ask(column)
    head.click()
    falling = shown.ask(column)
    known = [one for one in rising if one != UNKNOWN]
    assert (5, UNKNOWN) == (len(known), rising[-1])
    assert sorted(known, key=lambda one: int(one.replace("\u202f", ""))) == known
    assert (known[::-1], UNKNOWN) == (falling[:5], falling[-1])
    shown.page.get_by_label("Filter attempts").fill("v3 crashed gpu-b")
    assert ["h2_v3", "h2_v3_b"] == rows.locator("b").all_text_contents()
    assert "2 of 31 attempts" == shown.page.get_by_role("status").text_content()
    rows.first.get_by_role("button").click()
    below = shown.page.locator(".below:not([hidden])")
    assert "--speculative-disable-batch-threshold 2" in below.text_content()
    assert "HF_TOKEN=***" in below.text_content()


def test_a_host_that_did_not_answer_is_named(opened):
    """First thing on the page, with the reason and what to type."""
    shown = opened(failures=unreachable())
    assert "gpu-c could not be asked" in shown.page.locator("main > aside").text_content()
    card = shown.page.locator(".host.failed").text_content()
    assert "connection timed out" in card
    assert "deployctl doctor --host gpu-c" in card


def test_without_benches_the_page_says_what_to_type(opened):
    """No empty chart: the command that measures."""
    told = dossiers.story()
    for dossier in told.values():
        for attempt in dossier["attempts"]:
            attempt["benches"] = []
    shown = opened(told)
    assert "deployctl bench --host gpu-a --sweep" in shown.page.locator("#curve").text_content()
    assert "31 attempts: 15 came up, 13 crashed" == shown.page.locator("h1").text_content()
    assert [8, 5] == shown.ask(CHARTS)
    assert [] == shown.said


def test_a_host_that_nobody_used(opened):
    """Nothing launched, nothing pushed: each section says which command comes next."""
    empty = dossiers.dossier("gpu-a", ("NVIDIA B200", 183359), [], [], None)
    shown = opened({"gpu-a": {**empty, "gpus": [], "version": None}})
    text = shown.page.text_content("main")
    assert "deployctl launch --log-tag TAG" in text
    assert "deployctl push --patch REF" in text
    assert [] == shown.ask(CHARTS)
    assert [] == shown.said


def test_one_level_of_one_attempt_is_drawn(opened):
    """A single point has an axis, too."""
    told = {"gpu-a": dossiers.story()["gpu-a"]}
    told["gpu-a"]["attempts"] = told["gpu-a"]["attempts"][:1]
    bench = told["gpu-a"]["attempts"][0]["benches"][0]
    told["gpu-a"]["attempts"][0]["benches"] = [{**bench, "levels": bench["levels"][:1]}]
    shown = opened(told)
    assert [1, 2, 2, 2, 8, 5] == shown.ask(CHARTS)
    assert shown.ask(PAINTED)[0] > 20
    assert [] == shown.said


def test_a_season_stays_readable(opened):
    """Over three hundred attempts: the newest have a place in each chart, the others are a click away or in the table."""
    told = dossiers.season(14)
    shown = opened(told, at=dossiers.STORY_AT + dt.timedelta(days=7 * 13))
    assert 317 == shown.page.locator(".attempts tbody tr:not(.below)").count()
    chips = shown.page.locator(".chip")
    assert 12 == chips.count()
    shown.page.locator(".chips .quiet").click()
    assert 42 == chips.count()
    lanes = "() => Chart.getChart(document.querySelectorAll('canvas')[4]).scales.y.ticks.length"
    assert 20 == shown.ask(lanes)
    assert "releases that ran longest ago stand in the table alone" in shown.page.locator("#attempts").text_content()
    rows = "() => Chart.getChart(document.querySelectorAll('canvas')[5]).data.labels.length"
    assert 20 == shown.ask(rows)
    shown.page.get_by_role("button", name="Show all 317 loads").click()
    assert 317 == shown.ask(rows)
    assert "earlier and" in shown.page.locator(".crash .seen").first.text_content()
    assert 8 == shown.page.locator(".crash .seen").first.locator("a").count()
    assert [] == shown.said
    assert 0 == shown.ask(OVERFLOW)


def unreachable():
    message = "gpu-c (10.0.0.3): connection timed out after 15 s"
    hint = "deployctl doctor --host gpu-c"
    return {
        "gpu-c": {
            "status": "unreachable",
            "exit": 3,
            "error": {"kind": "unreachable", "message": message, "hint": hint},
        }
    }


KEPT = {"at", "ended", "started", "state", "tree", "status", "sha256"}


def poisoned(value, key=""):
    """The same dossier, every text of it hostile; what the page decides by keeps its meaning."""
    if isinstance(value, dict):
        return {name if key != "env" else name + HOSTILE: poisoned(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, key) for inner in value]
    if not isinstance(value, str) or key in KEPT:
        return value
    if key == "diff":
        return value.replace("\n+ ", f"\n+ {HOSTILE} ")
    return value + HOSTILE
