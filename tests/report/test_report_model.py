"""The report as a value: headlines, cards, bounds, and JSON that may stand in a page."""

import datetime as dt
import json

import dossiers
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_crashes import frame

from deployctl.domain.bench import Record
from deployctl.render import report
from deployctl.render.report.headline import Entry, best_by_concurrency, headline
from deployctl.render.report.model import build, harmless


def entry(name, *throughputs, baseline=False):
    """A bench at C=1, 2, 4, ... with these throughputs; None where the level failed."""
    levels = [
        {"concurrency": 2**place, "sent": 16, "completed": 16 if value else 3, "output_tok_per_s": value}
        for place, value in enumerate(throughputs)
    ]
    record = {"bench": 1, "attempt": 1, "log_tag": name, "started": "", "state": "complete", "levels": levels}
    return Entry(name=name, record=Record.decode(record), baseline=baseline)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], []),
        ([entry("a", None)], []),
        ([entry("a", 96.04, 2310)], ["a: 96.0 tok/s at C=1, 2\u202f310 tok/s at C=2"]),
        (
            [entry("base", 100, 200, 400), entry("eagle", 180, 210, 184)],
            ["eagle wins up to C=2, 1.80x at C=1", "base wins from C=4 on, 2.17x at C=4"],
        ),
        (
            [entry("base", 100, 200, 400), entry("eagle", 180, 210, 200), entry("v4", 178, 212, 396)],
            ["v4 leads or is even at every concurrency: 1.98x eagle at C=4, 1.78x base at C=1"],
        ),
        ([entry("base", 100, 200), entry("v4", 200, 300)], ["v4 leads at every concurrency: 2.00x base at C=1"]),
        (
            [entry("x", 100, 200, baseline=True), entry("y", 101, 199)],
            ["x and the others are even at every concurrency"],
        ),
        (
            [entry("a", 300, 100, 100), entry("b", 100, 300, 100), entry("c", 100, 100, 300)],
            ["a leads at C=1 (300 tok/s at C=1)", "b at C=2 (300 tok/s at C=2)", "c at C=4 (300 tok/s at C=4)"],
        ),
        # A level that failed counts for nobody.
        ([entry("a", 100, None), entry("b", 50, 80)], ["a wins at C=1, 2.00x at C=1"]),
    ],
)
def test_headlines(entries, said):
    """The one that nobody beats with its gains, the crossover of two, or each leader with its place."""
    assert said == headline(entries)[0]


def test_the_best_of_each_concurrency():
    """Whoever has the highest throughput, noise or not."""
    assert {1: "b", 2: "a"} == best_by_concurrency([entry("a", 100, 200), entry("b", 101, None)])


def built(told=None, **more):
    return build(dossiers.story() if told is None else told, {}, at=dossiers.STORY_AT, version="0.1.0", **more)


def test_attempts_of_all_hosts_in_the_order_of_time():
    """With names that tell them apart, and a colour of its own for each that was measured, the shown ones first."""
    attempts = built()["attempts"]
    assert 31 == len(attempts)
    assert sorted(one["at"] for one in attempts) == [one["at"] for one in attempts]
    names = [one["name"] for one in attempts]
    assert len(set(names)) == len(names)
    assert {"t3_mem(9)", "t3_mem(10)"} <= set(names)
    assert {"t0_base": 0, "t1_eagle": 1, "t8_v4": 2, "h0_base": 3, "h1_eagle": 4} == {
        one["name"]: one["colour"] for one in attempts if one["colour"] is not None
    }


def test_benches_are_charted_with_their_like():
    """Another prompt set, other GPUs or another token limit make another chart; of one load the newest bench counts."""
    told = dossiers.story()
    attempt = told["gpu-a"]["attempts"][0]
    again = json.loads(json.dumps(attempt["benches"][0]))
    again.update(bench=3)
    attempt["benches"].append(again)
    loads = built(told)["loads"]
    assert [("coding", 3), ("agentic", 2), ("coding", 2)] == [(load["name"], len(load["series"])) for load in loads]
    assert (3, 2) == (loads[0]["series"][0]["bench"], loads[0]["series"][0]["benches"])
    assert "8 \u00d7 NVIDIA B200" == loads[0]["gpus"]
    assert any("max_running_requests: 48 against 256" in note for note in loads[0]["notes"])


def test_crashes_of_one_kind_are_one_card():
    """Same cause on the same line; those on a patch's line first, newest first; each attempt knows its card."""
    model = built()
    assert ["dynamic_spec/v3", "dynamic_spec/v2", "dynamic_spec/v1", None] == [
        card["patched"] and card["patched"]["patch"] for card in model["crashes"]
    ]
    assert 13 == sum(len(card["attempts"]) for card in model["crashes"])
    for one in model["attempts"]:
        if one["cause"]:
            assert one["id"] in model["crashes"][one["card"]]["attempts"]
            assert model["crashes"][one["card"]]["cause"] == one["cause"]


def test_inner_and_patched_frames_are_shown():
    """The innermost six and every frame of a patch; the others are a click away."""
    card = next(
        card for card in built()["crashes"] if card["patched"] and card["patched"]["patch"] == "dynamic_spec/v1"
    )
    assert [True] * 5 + [False] * 6 == [frame["outer"] for frame in card["frames"]]
    told = dossiers.story()
    for attempt in told["gpu-a"]["attempts"]:
        if attempt["crash"]:
            attempt["crash"]["frames"].insert(0, frame("srt/x.py", 1, "f", "g()", "dynamic_spec/v1"))
    assert not any(frame["outer"] for card in built(told)["crashes"] for frame in card["frames"] if frame["patch"])


def test_one_release_on_two_hosts_is_one_card():
    """The same stack with the same diff; another diff (pushed onto another release) is told by itself."""
    assert 5 == len(built()["releases"])
    told = {"gpu-a": dossiers.story()["gpu-a"]}
    told["gpu-z"] = {**told["gpu-a"], "attempts": []}
    releases = built(told)["releases"]
    assert [["gpu-a", "gpu-z"]] * 4 == [[where["host"] for where in card["where"]] for card in releases]


def test_forty_attempts_with_long_diffs_stay_below_two_megabytes():
    """Diffs are cut at a line where they are too long together, and that is said."""
    told = dossiers.story()
    for dossier in told.values():
        for number in range(30):
            lines = "".join(f"+    line_{number}_{line} = {line}\n" for line in range(2500))
            diff = f"--- a/x.py\n+++ b/x.py\n@@ -0,0 +1,2500 @@\n{lines}"[:60000]
            dossier["releases"].append(
                {**dossier["releases"][1], "number": 100 + number, "tree": str(100 + number), "diff": diff}
            )
    model = built(told)
    assert len(report.page(model).encode()) < 2_000_000
    long = [card for card in model["releases"] if "x.py" in card["diff"][:20]]
    assert {(True, "\n")} == {(card["cut"], card["diff"][-1]) for card in long}


def test_a_bench_that_cannot_be_read_hides_nothing():
    """Written by hand or by another version: its attempt is told all the same."""
    told = dossiers.story()
    told["gpu-a"]["attempts"][0]["benches"] = [{"bench": "x"}, *told["gpu-a"]["attempts"][0]["benches"]]
    assert 2 == built(told)["attempts"][0]["benches"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_embedded_is_ascii_json_without_markup(value):
    """Any JSON value, lone surrogates and infinities included, can stand in a script element and is read back."""
    clean = harmless(value)
    text = report.embedded(clean)
    assert text.isascii()
    assert not set("<>&\n\r") & set(text)
    assert clean == json.loads(text)


@given(st.text())
def test_harmless_text_has_no_controls(text):
    """Newline and tab stay; everything that a terminal or the reading direction would obey is spelled out."""
    clean = harmless(text)
    assert not [
        c for c in clean if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or 0x202A <= ord(c) <= 0x202E
    ]
    if text.isascii() and text.isprintable():
        assert text == clean


def test_placeholders_in_texts_are_not_filled():
    """A tag that looks like one of the template's own marks stays what it is."""
    told = dossiers.story()
    told["gpu-a"]["attempts"][0]["log_tag"] = "{{SCRIPT}}{{DATA}}"
    page = report.page(built(told))
    assert 1 == page.count('"tag":"{{SCRIPT}}{{DATA}}"')
    assert 3 == page.count("<script")


def test_the_page_fetches_nothing():
    """No address in the template, style or scripts but the licence line of the library; the policy allows no host."""
    page = report.page(built())
    before, _, rest = page.partition('<script type="application/json"')
    assert "http" not in before.replace("http-equiv", "")
    assert "sourceMappingURL" not in rest
    assert "default-src 'none'" in before
    assert "unsafe-inline" not in before


def test_times_that_are_none():
    """A damaged time is unknown, not an error."""
    told = dossiers.story()
    told["gpu-a"]["releases"][1]["at"] = "yesterday"
    where = [where for card in built(told)["releases"] for where in card["where"]]
    assert 1 == sum(one["at"] is None for one in where)
    assert dossiers.STORY_AT == dt.datetime.fromtimestamp(built()["at"] / 1000, dt.UTC)
