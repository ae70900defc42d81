"""The criteria: what holds, what does not, and what was not measured."""

import pytest

from tests.gpu import tables, verdicts
from tests.gpu.stages.features import logprob_differences, part_by_a_tie, stopped_rightly
from tests.gpu.stages.grammars import follows

MEDIANS = {
    "base-no-overlap": {1: 332, 4: 1285, 10: 3045, 32: 8000, 64: 13000},
    "base": {1: 362, 4: 1419, 10: 3394, 32: 9000, 64: 15000},
    "v1": {1: 485, 4: 1722, 10: 3521, 32: 6879, 64: 8186},
    "v2": {1: 554, 4: 1904, 10: 4019, 32: 8629, 64: 11160},
    "v1-dynamic": {1: 494, 4: 1700, 10: 2800, 32: 7700, 64: 12400},
    "v2-dynamic": {1: 549, 4: 1893, 10: 2900, 32: 7800, 64: 12650},
}


GOOD = {arm: {level: (value,) for level, value in levels.items()} for arm, levels in MEDIANS.items()}


def test_a_ratio_is_that_of_rounds_and_not_of_bests():
    """A slow spell meets both arms of a round; the best of one arm is not held against another's worst."""
    sweeps = {"a": {1: (100.0, 50.0, 104.0)}, "b": {1: (100.0, 52.0, 100.0, 400.0)}}
    assert [1.0, 50 / 52, 1.04] == verdicts.paired(sweeps, "a", "b", 1)
    assert 1.0 == verdicts.ratio(sweeps, "a", "b", 1)
    assert verdicts.ratio(sweeps, "a", "b", 2) is None
    made = verdicts.at_least("speed", "a / b", 1.0, 0.9, 0.97, spread=(0.96, 1.0, 1.04))
    assert "goal 0.97 reached, 0.960 to 1.040 in 3 rounds" == made.note


def _with(arm, level, value):
    return {**GOOD, arm: {**GOOD[arm], level: (value,)}}


def test_all_floors_hold_for_good_numbers():
    """Floors, not goals, decide."""
    made = verdicts.speed_verdicts(GOOD)
    assert {verdicts.PASS} == {verdict.outcome for verdict in made}
    assert 11 == len(made)
    goals = [verdict.note for verdict in made if verdict.what == "v2-dynamic / base at 32"]
    assert ["goal 0.93 missed"] == goals


@pytest.mark.parametrize(
    ("arm", "level", "value", "failing"),
    [
        ("v1-dynamic", 64, 12300, ["v1-dynamic / base-no-overlap at 64"]),
        ("v1-dynamic", 10, 2700, ["v1-dynamic / base-no-overlap at 10"]),
        ("v1-dynamic", 4, 1650, ["v1-dynamic / v1 at 4"]),
        ("v2-dynamic", 32, 7300, ["v2-dynamic / base-no-overlap at 32", "v2-dynamic / base at 32"]),
        ("v2-dynamic", 1, 500, ["v2-dynamic / v2 at 1"]),
    ],
)
def test_each_floor_can_fail(arm, level, value, failing):
    """A number just below a floor fails that floor and no other."""
    made = verdicts.speed_verdicts(_with(arm, level, value))
    assert failing == [verdict.what for verdict in made if verdict.outcome == verdicts.FAIL]


def test_what_was_not_measured_is_not_run():
    """Neither a pass nor a failure, for both sides of a ratio."""
    made = verdicts.speed_verdicts({"v1-dynamic": {32: (7700,)}, "base-no-overlap": {64: (13000,)}})
    assert {verdicts.NOT_RUN} == {verdict.outcome for verdict in made}


@pytest.mark.parametrize(
    ("outcomes", "errors", "expected"),
    [
        (["PASS", "REPORT"], 0, 0),
        (["PASS", "FAIL", "NOT RUN"], 0, 1),
        (["PASS", "NOT RUN"], 0, 3),
        (["PASS"], 1, 1),
        ([], 0, 3),
    ],
)
def test_exit_status(outcomes, errors, expected):
    """Failures outweigh gaps, and nothing measured is not success."""
    assert expected == verdicts.exit_status([{"outcome": outcome} for outcome in outcomes], errors)


@pytest.mark.parametrize(
    ("found", "wanted", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 9, 3], [1, 2, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_where_outputs_part(found, wanted, place):
    """A text that is too short parts where it ends."""
    assert place == verdicts.first_difference(found, wanted)


def test_compared_counts_requests_that_are_equal_to_the_end():
    """Only those of both sides."""
    found = verdicts.compared([[1, 2], [3, 4]], [[1, 2], [3, 5], [6]])
    assert {"requests": 2, "equal": 1, "different": [[1, 1]]} == found


def _answer(ids, top, logprobs=()):
    return {"output_ids": ids, "meta_info": {"output_top_logprobs": top, "output_token_logprobs": list(logprobs)}}


def test_texts_may_part_only_at_a_tie():
    """The reference must have held the other token as good as its own; one that it did not list was no tie."""
    top = [[[-1.0, 5, None]], [[-1.0, 6, None], [-1.03, 7, None], [-1.5, 8, None]]]
    wanted = _answer([5, 6], top)
    assert part_by_a_tie(_answer([5, 6], []), wanted)
    assert part_by_a_tie(_answer([5, 7], []), wanted)
    assert not part_by_a_tie(_answer([5, 8], []), wanted)
    assert not part_by_a_tie(_answer([5, 9], []), wanted)
    assert not part_by_a_tie(_answer([5], []), wanted)


def test_logprobs_are_compared_up_to_where_the_texts_part():
    """After that they speak of different texts."""
    wanted = _answer([5, 6], [[[-1.0, 5, None]], [[-1.0, 6, None]]], [[-1.0, 5, None], [-1.0, 6, None]])
    found = _answer([5, 7], [[[-1.1, 5, None]], [[-9.0, 7, None]]], [[-1.2, 5, None], [-9.0, 7, None]])
    chosen, top = logprob_differences(found, wanted)
    assert [0.2] == [round(value, 6) for value in chosen]
    assert [0.1] == [round(value, 6) for value in top]


@pytest.mark.parametrize(
    ("kind", "text", "right"),
    [
        ("regex", "red-0042", True),
        ("regex", "red-42", False),
        ("json_schema", '{"city": "Rome", "people": 3}', True),
        ("json_schema", '{"city": "Oslo", "people": 3}', False),
        ("json_schema", '{"city": "Rome", "people"', False),
    ],
)
def test_grammars_are_checked_on_the_text(kind, text, right):
    """A text cut off in the middle does not follow its grammar."""
    assert right == follows(kind, text)


def test_a_stop_string_must_be_the_reason_and_not_in_the_text():
    """Ending by length is not stopping."""
    assert stopped_rightly({"reason": {"type": "stop"}, "word": "w9", "text": " w1 w2"})
    assert not stopped_rightly({"reason": {"type": "length"}, "word": "w9", "text": " w1 w2"})
    assert not stopped_rightly({"reason": {"type": "stop"}, "word": "w2", "text": " w1 w2"})


def test_tables_show_every_verdict_and_read_results_that_were_json():
    """JSON has text for keys; a bar in a value does not break the table."""
    results = {
        "machine": {"gpus": ["NVIDIA H200"]},
        "verdicts": [verdicts.judge("life", "a | b", 1.5, holds=True).as_json()],
        "skipped": [{"what": "grammars", "why": "no library"}],
        "errors": [],
        "stages": {
            "speed": {
                "a-base": {"1": {"median_tokens_per_s": 362.0, "accept_length": None}},
                "ratios": verdicts.ratio_rows(GOOD, [1]),
            }
        },
    }
    text = tables.markdown(results)
    assert "| PASS | life | a \\| b | 1.500 |" in text
    assert "| 1 | 362 |" in text
    assert "* grammars: no library" in text
    assert "| 1 | 1.488 | 1.019 | 1.654 | 1.517 | 0.991 |" in text
