"""Benches set against each other: which ones, where the curves cross, who is ahead, which one is kept."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_attempts import attempt, bench, level, record, sides

from deployctl.domain import compare
from deployctl.domain.comparison import comparison
from deployctl.errors import UsageError

speeds = st.floats(min_value=0.1, max_value=1e6, allow_nan=False)
curves = st.dictionaries(st.integers(1, 4096), st.tuples(speeds, speeds), min_size=1, max_size=9)


def pair(curve):
    return record({c: a for c, (a, _) in curve.items()}), record({c: b for c, (_, b) in curve.items()})


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_of_attempts():
    """A number, a tag, and either with a host before it, whatever that host is called."""
    found = compare.parse_names(["3", "t1_eagle", "gpu-2:7", "10.1.230.174:t5.v3", "root@h:2222:9"])
    assert [
        (None, "3"),
        (None, "t1_eagle"),
        ("gpu-2", "7"),
        ("10.1.230.174", "t5.v3"),
        ("root@h:2222", "9"),
    ] == [(name.host, name.name) for name in found]


@pytest.mark.parametrize(
    "words", [["a"], [], ["a", "a"], ["a", ":b"], ["a", "b:"], ["a", ""], ["a", "b c"], ["a", "-x"]]
)
def test_what_names_no_two_attempts(words):
    """Refused before anything is asked, with an example or the rule."""
    with pytest.raises(UsageError) as caught:
        compare.parse_names(words)
    assert caught.value.hint


# -- crossings ---------------------------------------------------------------------------------------------------------


@given(curves)
def test_there_is_a_crossing_for_every_change_of_the_lead(curve):
    """As many as the sign of the lead changes, each between the two levels, ascending."""
    leads = [(c, a - b) for c, (a, b) in sorted(curve.items()) if math.log(a / b)]
    between = [(left, right) for (left, one), (right, other) in itertools.pairwise(leads) if (one > 0) != (other > 0)]
    found = compare.crossings(*pair(curve))
    assert len(between) == len(found)
    assert found == sorted(found)
    for at, (left, right) in zip(found, between, strict=True):
        assert left * (1 - 1e-9) <= at <= right * (1 + 1e-9)


@given(curves)
def test_it_does_not_matter_who_is_named_first(curve):
    """The same crossings, and the other's ratio."""
    a, b = pair(curve)
    assert compare.crossings(a, b) == pytest.approx(compare.crossings(b, a))
    for one, other in zip(compare.rows([a, b]), compare.rows([b, a]), strict=True):
        assert one.ratios[1] == pytest.approx(1 / other.ratios[1])
        assert one.best == (None if other.best is None else 1 - other.best)


@given(curves, st.floats(min_value=0.01, max_value=100))
def test_a_faster_machine_moves_no_crossing(curve, factor):
    """Both curves multiplied by the same number cross where they did."""
    faster = {c: (a * factor, b * factor) for c, (a, b) in curve.items()}
    before, after = compare.crossings(*pair(curve)), compare.crossings(*pair(faster))
    # A difference in the last bit may come or go with the multiplication.
    if all(abs(math.log(a / b)) > 1e-9 for a, b in curve.values() if a != b):
        assert before == pytest.approx(after, rel=1e-4)


@given(
    st.integers(0, 10),
    st.integers(1, 4),
    st.floats(min_value=-3, max_value=-0.2),
    st.floats(min_value=0.2, max_value=3),
)
def test_power_laws_cross_where_they_do(start, steps, bend, other_bend):
    """Two straight lines on logarithmic axes: the crossing is exact, wherever it lies between the levels."""
    levels = [2**exponent for exponent in range(start, start + steps + 1)]
    middle = math.sqrt(levels[0] * levels[-1])
    a = {c: 100 * (c / middle) ** bend for c in levels}
    b = {c: 100 * (c / middle) ** other_bend for c in levels}
    assert [middle] == pytest.approx(compare.crossings(record(a), record(b)))


def test_equal_at_a_level_is_a_crossing_only_where_the_lead_changes():
    """Touching is no crossing; meeting at a measured level is one at that level."""
    flat = record({1: 100, 2: 100, 4: 100})
    assert [2.0] == pytest.approx(compare.crossings(record({1: 120, 2: 100, 4: 80}), flat))
    assert [] == compare.crossings(record({1: 120, 2: 100, 4: 130}), flat)
    assert [] == compare.crossings(flat, flat)
    assert [] == compare.crossings(record({1: 100}), record({2: 50}))


def test_levels_that_failed_decide_nothing():
    """Where not everything came back there is no ratio, no best one and no crossing."""
    whole = record({1: 100, 8: 100})
    partly = record([level(1, 200), level(8, 10, completed=3)])
    rows = compare.rows([whole, partly])
    assert [(1, 1, 2.0), (8, None, None)] == [(row.concurrency, row.best, row.ratios[1]) for row in rows]
    assert [] == compare.crossings(whole, partly)


def test_a_bench_in_which_everything_failed_is_told_and_decides_nothing():
    """It is a bench: its levels are there as failed, each said not to count; one with a good level goes before it."""
    broken = [level(1, 90, completed=13), level(8, 300, completed=3)]
    told = sides(
        attempt(1, "base", bench({1: 100, 8: 400})), attempt(2, "flaky", bench(broken, state="failed", number=2))
    )
    value = comparison(told).as_json()
    assert 2 == value["attempts"][1]["bench"]["bench"]
    assert [False, False] == [row["attempts"]["flaky"]["good"] for row in value["levels"]]
    assert {"flaky: C=1 does not count: 13 of 16 answered", "flaky: C=8 does not count: 3 of 16 answered"} <= set(
        value["warnings"]
    )
    assert not any("wins" in text or "even" in text for text in value["headlines"])
    good = sides(
        attempt(1, "base", bench({1: 100})),
        attempt(2, "flaky", bench({1: 90}, number=1), bench(broken, state="failed", number=2)),
    )
    assert 1 == good[1].record.bench


# -- sentences ---------------------------------------------------------------------------------------------------------


def test_a_crossover_in_words():
    """Who wins up to where, by how much at the end, and near which concurrency it changes."""
    two = sides(
        attempt(1, "t0_base", bench({1: 100, 2: 190, 4: 350, 16: 800, 64: 773})),
        attempt(2, "t1_eagle", bench({1: 214, 2: 260, 4: 300, 16: 420, 64: 354})),
    )
    (text,) = compare.headlines(two)
    assert (
        "t1_eagle wins up to C=2, 2.14x at C=1; t0_base wins from C=4 on, 2.18x at C=64; the curves cross near C=3.2"
        == text
    )


def test_three_attempts_are_each_compared_with_the_first():
    """One sentence for each of the others; who has no bench is in none."""
    three = sides(
        attempt(1, "a", bench({1: 100})),
        attempt(2, "b", bench({1: 150})),
        attempt(3, "c"),
        attempt(4, "d", bench({1: 101})),
    )
    assert [
        "b against a: b wins at C=1, 1.50x at C=1",
        "d against a: a and d are even at C=1",
    ] == compare.headlines(three)


def test_labels_tell_sides_apart():
    """The tag alone where it suffices; with the host, or the number, where it does not."""
    told = sides(attempt(1, "x"), attempt(2, "x"), attempt(3, "y"))
    assert ["x(1)", "x(2)", "y"] == [side.label for side in told]
    told = sides(attempt(1, "x"), attempt(1, "x"), attempt(2, "x"), hosts=["h1", "h2", "h2"])
    assert ["h1:x", "h2:x(1)", "h2:x(2)"] == [side.label for side in told]


# -- which bench -------------------------------------------------------------------------------------------------------


def test_the_newest_complete_bench_is_taken():
    """Not a newer one that failed; of that the levels so far only where there is no complete one, and it is said."""
    whole = bench({1: 1.0}, 1)
    torn = bench({1: 2.0}, 2, state="crashed")
    empty = bench([level(1, 1.0, completed=0)], 3)
    (chosen, note), (other, other_note), nothing = compare.choose_benches(
        [
            [record_of(whole), record_of(bench({1: 3.0}, 2)), record_of(torn | {"bench": 3})],
            [record_of(torn), record_of(empty)],
            [record_of(empty)],
        ]
    )
    assert (2, "") == (chosen.bench, note)
    assert 2 == other.bench
    assert "not complete (crashed): its levels so far" in other_note
    assert (3, "") == (nothing[0].bench, nothing[1])


def record_of(value):
    return record(value["levels"], value["bench"], state=value["state"], load=value["load"], started=value["started"])


def test_benches_of_one_load_go_before_newer_ones_of_another():
    """The newest load that all were measured with; said of those whose newest bench is left aside."""
    agentic = {"prompts": {"name": "agentic", "sha256": "bb", "count": 64}}
    a = [record({1: 1.0}, 1), record({1: 1.0}, 2, load=agentic, started="2026-01-01T12:00:00Z")]
    b = [
        record({1: 1.0}, 1),
        record({1: 1.0}, 2, load=agentic, started="2026-01-01T11:00:00Z"),
        record({1: 1.0}, 3, load={"seed": 7}, started="2026-01-01T13:00:00Z"),
    ]
    (left, left_note), (right, right_note) = compare.choose_benches([a, b])
    assert (2, 2, "") == (left.bench, right.bench, left_note)
    assert "bench 2 instead of its newest one, 3" in right_note
    (left, _), (right, right_note) = compare.choose_benches([a, b[2:]])
    assert (2, 3, "") == (left.bench, right.bench, right_note)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=4))
def test_whatever_was_measured_one_bench_of_each_is_chosen(loads):
    """None only without any; all of one load wherever there is a load common to all that have one."""
    told = [
        [record({1: 1.0}, n, load={"seed": seed}, started=f"2026-01-0{n}") for n, seed in enumerate(seeds, 1)]
        for seeds in loads
    ]
    chosen = [one for one, _ in compare.choose_benches(told)]
    assert [not seeds for seeds in loads] == [one is None for one in chosen]
    filled = [set(seeds) for seeds in loads if seeds]
    if filled and set.intersection(*filled):
        assert 1 == len({compare.load_of(one) for one in chosen if one})


# -- warnings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "settings", "words"),
    [
        ({"prompts": {"name": "agentic", "sha256": "bb"}}, {}, "prompts: coding against agentic"),
        ({"max_tokens": 8}, {}, "max tokens: 256 against 8"),
        ({"seed": 2}, {}, "seed: 1 against 2"),
        ({"requests_per_level": 8}, {}, "requests per level: 4 for each place against 8"),
        ({}, {"engine_version": "0.5.14"}, "engine version: 0.5.12 against 0.5.14"),
        ({}, {"gpus": ["NVIDIA B200"]}, "GPUs: 1 x NVIDIA H200 against 1 x NVIDIA B200"),
        ({}, {"max_running_requests": 48}, "max_running_requests: 64 against 48 (48 unless set, with speculation)"),
        ({}, {"disable_overlap_schedule": True}, "overlap schedule: on against off"),
    ],
)
def test_what_is_not_like_for_like_is_said(load, settings, words):
    """Each of the things that move the numbers without being the patch."""
    said = {"max_running_requests": 64, "disable_overlap_schedule": False}
    two = sides(
        attempt(1, "a", bench({1: 100}, settings=said)),
        attempt(2, "b", bench({1: 90}, load=load, settings={**said, **settings})),
    )
    (text,) = compare.warnings(two)
    assert text.startswith("not like for like: ")
    assert words in text


def test_benches_that_are_alike_warn_of_nothing():
    """No warning where there is nothing to warn of."""
    assert [] == compare.warnings(sides(attempt(1, "a", bench({1: 1})), attempt(2, "b", bench({1: 2}))))


def test_warnings_of_benches_and_failed_levels_are_repeated():
    """What a bench itself warned of, once for all who share it; levels that do not count; why this bench."""
    told = sides(
        attempt(1, "a", bench([level(1, 9), level(4, 9, sent=16, completed=3)], warnings=["no tokenizer"])),
        attempt(2, "b", bench({1: 9}, state="crashed", warnings=["no tokenizer"])),
    )
    assert [
        "b: bench 1 is not complete (crashed): its levels so far",
        "a: C=4 does not count: 3 of 16 answered",
        "a, b: no tokenizer",
    ] == compare.warnings(told)
    assert {} == compare.measured_by_some(told)
    told = sides(attempt(1, "a", bench({1: 9, 2: 9})), attempt(2, "b", bench({1: 9, 4: 9})), attempt(3, "c"))
    assert {2: ["a"], 4: ["b"]} == compare.measured_by_some(told)


# -- the better one ----------------------------------------------------------------------------------------------------


def test_the_better_one_at_the_highest_common_level():
    """Or at the level that is asked for; even is nobody's lead."""
    two = sides(attempt(1, "a", bench({1: 100, 8: 300, 64: 900})), attempt(2, "b", bench({1: 214, 8: 305})))
    assert (1, (0,), 8) == (compare.decide(two).place, compare.decide(two).equals, compare.decide(two).concurrency)
    assert "a and b are even at C=8" == compare.decide(two).reason
    at_one = compare.decide(two, 1)
    assert (1, (), "b is 2.14x a at C=1") == (at_one.place, at_one.equals, at_one.reason)
    with pytest.raises(UsageError) as caught:
        compare.decide(two, 64)
    assert ("C=64 was not measured in all of them", "measured in all: 1, 8") == (
        caught.value.message,
        caught.value.hint,
    )
    with pytest.raises(UsageError, match="no concurrency was measured in all"):
        compare.decide(sides(attempt(1, "a", bench({1: 1})), attempt(2, "b")))


@pytest.mark.parametrize(
    "fault", [{"state": "crashed"}, {"smoke": {"ok": False}}, {"state": "smoke_failed"}, {"ready_seconds": None}]
)
def test_a_server_that_failed_is_not_kept_however_fast(fault):
    """Throughput of a server that crashed, or answers nonsense, is no reason to start it again."""
    slow, fast = attempt(1, "slow", bench({4: 10})), attempt(2, "fast", bench({4: 99}), **fault)
    decision = compare.decide(sides(slow, fast))
    assert (0, "slow alone served without fault") == (decision.place, decision.reason)
    with pytest.raises(UsageError, match="none of the attempts"):
        compare.decide(sides(slow | fault, fast))


@given(st.lists(speeds, min_size=2, max_size=5))
def test_nobody_is_faster_than_the_one_that_is_kept(values):
    """The kept side has the highest throughput, and is called even only with one that is within a few per cent."""
    told = sides(*(attempt(n, f"t{n}", bench({4: speed})) for n, speed in enumerate(values)))
    decision = compare.decide(told)
    order = sorted(values, reverse=True)
    assert order[0] == values[decision.place]
    assert {n for n, speed in enumerate(values) if order[0] / speed < 1.03} == {decision.place, *decision.equals}
