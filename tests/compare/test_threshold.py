"""Up to how many requests at once speculation pays: which attempts tell, which threshold follows, what is warned of."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_attempts import attempt, bench, level, sides

from deployctl.domain import threshold
from deployctl.domain.comparison import comparison
from deployctl.render import compare as render

SPEC = {"speculative_algorithm": "EAGLE3", "max_running_requests": 64}
OFF = {**SPEC, "speculative_disable_batch_threshold": 0}
PLAIN = {"speculative_algorithm": None, "max_running_requests": 64}
SET = ["/env/bin/python", "-m", "sglang.launch_server", "--max-running-requests", "64"]

speeds = st.floats(min_value=1, max_value=1e6, allow_nan=False)
curves = st.dictionaries(st.integers(1, 64), st.tuples(speeds, speeds), min_size=1, max_size=9)


def one(number, tag, curve, settings, **changes):
    return attempt(number, tag, bench(curve, settings=settings), **{"argv": SET, **changes})


def pair(spec, other, other_settings=OFF, settings=SPEC, **changes):
    """The advice for a speculating server against another one."""
    return threshold.advise(
        sides(one(1, "other", other, other_settings), one(2, "spec", spec, settings, **changes)),
    )


# -- the threshold -----------------------------------------------------------------------------------------------------


def test_curves_that_cross():
    """Speculation up to where they cross, on again a little below; the flags and the command that serves so."""
    advice = pair({1: 150, 16: 1200, 32: 1800, 64: 2000}, {1: 100, 16: 1000, 32: 2160, 64: 4000})
    assert ("threshold", 22, 20) == (advice.verdict, advice.limit, advice.resume)
    assert (
        "speculation (spec) pays up to about 22 requests at once: 1.20x of other at C=16, 0.83x of other at C=32"
        == advice.reason
    )
    flags = "--speculative-disable-batch-threshold 22 --speculative-resume-batch-threshold 20"
    assert flags == " ".join(advice.flags)
    launch = "deployctl launch --host gpu-1 --profile eagle3 --log-tag spec-r1 --replace --"
    assert f"{launch} --max-running-requests 64 {flags}" == advice.next_command
    assert () == advice.warnings


@pytest.mark.parametrize("load", [{"prompts": {"name": "agentic", "sha256": "bb"}}, {"max_tokens": 8}])
def test_other_texts_decide_nothing(load):
    """What a draft is worth depends on the text: two prompt sets, or two lengths, give no threshold."""
    assert pair({1: 150, 64: 2000}, {1: 100, 64: 4000}) is not None
    one_side = one(1, "other", {1: 100, 64: 4000}, OFF)
    record = one_side["benches"][0]
    record["load"] = {**record["load"], **load}
    assert threshold.advise(sides(one_side, one(2, "spec", {1: 150, 64: 2000}, SPEC))) is None


@given(curves)
def test_no_other_threshold_loses_less(curve):
    """Whatever was measured: with the levels up to the limit speculating and the others not, no limit has a higher
    throughput, all levels weighing the same."""
    levels = sorted(curve)
    advice = pair({c: curve[c][0] for c in levels}, {c: curve[c][1] for c in levels})
    ratios = {c: math.log(curve[c][0] / curve[c][1]) for c in levels}

    def worth(limit):
        return sum(ratio for concurrency, ratio in ratios.items() if concurrency <= limit)

    best = max(worth(limit) for limit in [0, *levels])
    limit = {"threshold": advice.limit, "never": 0, "always": levels[-1]}[advice.verdict]
    # What is even (within 3 %) is not worth a flag: there the simpler setting may lose so much at every level.
    slack = 0 if advice.verdict == "threshold" else len(levels) * math.log(1.03)
    assert worth(limit) >= best - slack - 1e-9


@given(curves)
def test_the_threshold_lies_where_the_lead_changes(curve):
    """Between a level at which speculation is ahead and the next, at which it is not; the resume never above it."""
    levels = sorted(curve)
    advice = pair({c: curve[c][0] for c in levels}, {c: curve[c][1] for c in levels})
    if advice.verdict != "threshold":
        assert (None, None, (), None) == (advice.limit, advice.resume, advice.flags, advice.next_command)
        return
    changes = [
        (here, there)
        for here, there in itertools.pairwise(levels)
        if curve[here][0] > curve[here][1] and curve[there][0] <= curve[there][1]
    ]
    assert any(here <= advice.limit < there for here, there in changes)
    assert 1 <= advice.resume <= advice.limit


@given(st.integers(1, 4096))
def test_the_resume_leaves_room(limit):
    """Below the limit wherever there is a batch size below it: else a load that hovers there switches at every step."""
    resume = threshold.resume_of(limit)
    assert 1 <= resume <= limit
    assert (limit == 1) == (resume == limit)
    assert limit - resume <= max(1, limit / 8)


@pytest.mark.parametrize("concurrency", range(2, 64))
def test_a_level_that_is_just_ahead_is_below_the_limit(concurrency):
    """However the logarithms are rounded, the limit is no lower than a level at which speculation is ahead, and lower
    than one at which it is not."""
    spec = {1: 200, concurrency: math.nextafter(100, 101), 64: 1}
    assert concurrency == pair(spec, dict.fromkeys(spec, 100)).limit
    spec[concurrency] = 100
    assert concurrency - 1 == pair(spec, dict.fromkeys(spec, 100)).limit


def test_of_thresholds_that_are_as_good_the_lowest():
    """A level at which it makes no difference needs no drafting."""
    assert [0, 0, 1, 3] == [
        threshold.best_prefix(ratios) for ratios in ([], [1.0, 1.0], [2.0, 1.0, 1.0, 0.5], [2.0, 0.5, 2.5])
    ]


def test_noise_moves_no_threshold():
    """One level that is out of line does not end speculation at 2, nor carry it to 64."""
    other = dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 100)
    spec = {1: 150, 2: 99, 4: 140, 8: 120, 16: 80, 32: 101, 64: 60}
    advice = pair(spec, other)
    assert 8 <= advice.limit < 16


# -- without a threshold -----------------------------------------------------------------------------------------------


def test_speculation_that_never_pays():
    """Said so, and nothing is advised to be set; where one request at once was not measured, that too."""
    advice = pair({1: 102, 8: 50}, {1: 100, 8: 100})
    assert ("never", ()) == (advice.verdict, advice.flags)
    assert "pays at no concurrency from C=1 on: 1.02x of other at C=1 at best; serve without it" in advice.reason
    advice = pair({8: 50}, {8: 100})
    assert "fewer requests at once were not measured" in advice.reason


def test_speculation_that_always_pays():
    """No threshold as far as was measured; whether that is as far as it can go is told apart."""
    advice = pair({1: 200, 32: 110}, {1: 100, 32: 111})
    assert ("always", ()) == (advice.verdict, advice.flags)
    assert "up to C=32: 0.99x of other at C=32; more requests at once were not measured" in advice.reason
    advice = pair({1: 200, 64: 110}, {1: 100, 64: 100})
    assert "more do not run at once: it needs no threshold" in advice.reason
    dynamic = {**SPEC, "speculative_disable_batch_threshold": 24}
    advice = pair({1: 200, 24: 150, 32: 90}, {1: 100, 24: 100, 32: 100}, PLAIN, dynamic)
    assert ("always", [1, 24]) == (advice.verdict, [point.concurrency for point in advice.points])
    assert "above 24 it is off in spec: the threshold may be higher" in advice.reason


# -- who is compared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        (PLAIN, PLAIN),
        (SPEC, SPEC),
        (OFF, PLAIN),
        ({**SPEC, "speculative_algorithm": "NGRAM"}, PLAIN),
    ],
)
def test_attempts_that_tell_of_no_threshold(settings, other):
    """None speculates, both do, or with something that the flag is not for."""
    assert None is pair({1: 200, 8: 50}, {1: 100, 8: 100}, other, settings)


def test_without_a_common_level_nothing_is_advised():
    """Nor without a bench, nor of another engine."""
    assert None is pair({1: 200}, {8: 100})
    assert None is threshold.advise(sides(attempt(1, "a"), one(2, "b", {1: 2}, SPEC)))
    assert None is threshold.advise(sides(attempt(1, "a"), attempt(2, "b")))
    assert None is pair({1: 200, 8: 50}, {1: 100, 8: 100}, PLAIN, engine="openai")


def test_what_is_switched_off_goes_before_what_has_no_speculation():
    """It is what the flag will give. Where it speculates itself the plain server stands in."""
    curve = {1: 150, 8: 150, 32: 80}
    for off, against in ((0, ["off", "off", "off"]), (1, ["base", "off", "off"]), (8, ["base", "base", "off"])):
        told = sides(
            one(1, "base", dict.fromkeys(curve, 100), PLAIN),
            one(2, "off", dict.fromkeys(curve, 90), {**SPEC, "speculative_disable_batch_threshold": off}),
            one(3, "spec", curve, SPEC),
        )
        advice = threshold.advise(told)
        assert (against, "spec") == ([point.against for point in advice.points], advice.speculative)
        assert [] == [text for text in advice.warnings if "no speculation at all" in text]


def three(spec, off, base):
    """The advice where a plain server was measured beside one that is switched off throughout."""
    return threshold.advise(
        sides(one(1, "base", base, PLAIN), one(2, "off", off, OFF), one(3, "spec", spec, SPEC)),
    )


def test_a_plain_server_that_is_faster_is_named_in_every_verdict():
    """Beating a server that only switches speculation off is no reason to speculate."""
    always = three({1: 144, 16: 1997}, {1: 135, 16: 1785}, {1: 175, 16: 2293})
    assert "always" == always.verdict
    assert "but base, without speculation, is faster at each of these levels: 1.22x at C=1" in always.reason
    limit = three({1: 144, 8: 900, 32: 1000}, {1: 100, 8: 700, 32: 2000}, {1: 120, 8: 1000, 32: 2100})
    assert "threshold" == limit.verdict
    assert "but base, without speculation, is faster at C=8: 1.11x at C=8" in limit.reason
    assert "base, without" not in three({1: 144, 16: 1997}, {1: 135, 16: 1785}, {1: 140, 16: 1900}).reason


def test_of_two_that_speculate_always_nothing_is_advised():
    """There is no saying which of them is meant."""
    plain, spec = one(1, "base", {1: 100, 8: 100}, PLAIN), {1: 200, 8: 50}
    assert None is threshold.advise(sides(plain, one(2, "a", spec, SPEC), one(3, "b", spec, SPEC)))


def test_what_is_left_where_it_is_off():
    """Against the server without speculation, above the threshold: who serves many all day should know."""
    off, spec = {1: 80, 8: 95, 16: 90, 32: 85}, {1: 200, 8: 50, 16: 40, 32: 30}
    told = [one(1, "base", dict.fromkeys(off, 100), PLAIN), one(2, "off", off, OFF), one(3, "spec", spec, SPEC)]
    advice = threshold.advise(sides(*told))
    assert ("off", "base", 0.85, 0.95) == tuple(advice.as_json()["while_off"].values())
    assert advice.reason.endswith("; where off is off it reaches 0.85x to 0.95x of base")
    assert None is threshold.advise(sides(*told[1:])).while_off
    assert None is threshold.advise(sides(told[0], told[2])).as_json()["while_off"]


def test_a_server_that_does_not_tell_is_known_by_its_command_line():
    """Where /server_info says nothing the arguments do; the server's own word goes first."""
    argv = [*SET, "--speculative-algorithm=EAGLE", "--speculative-disable-batch-threshold", "0"]
    told = sides(
        one(1, "off", {1: 100, 8: 100}, {}, argv=argv),
        one(2, "spec", {1: 200, 8: 50}, {}, argv=argv[:-2]),
    )
    assert ("threshold", "spec") == (threshold.advise(told).verdict, threshold.advise(told).speculative)


# -- what is warned of -------------------------------------------------------------------------------------------------


def test_levels_that_measure_a_queue_do_not_count():
    """A batch of 64 never ran where 48 run at once: what such a level says is nothing about a threshold."""
    spec, other = {1: 200, 32: 150, 64: 50}, {1: 100, 32: 100, 64: 100}
    advice = pair(spec, other, OFF, {**SPEC, "max_running_requests": 48}, argv=SET[:3])
    assert ("always", [1, 32]) == (advice.verdict, [point.concurrency for point in advice.points])
    queue, default = advice.warnings
    crossed = pair({1: 200, 8: 50}, {1: 100, 8: 100}, OFF, SPEC, argv=SET[:3])
    assert " --replace -- --speculative-disable-batch-threshold" in crossed.next_command
    assert "spec does not run 64 requests at once" in queue
    assert "without --max-running-requests, which the engine makes 48 under speculation" in default
    advice = pair(spec, other, {**OFF, "max_running_requests": 16}, SPEC)
    assert [1] == [point.concurrency for point in advice.points]
    assert "other does not run 32 requests at once" in advice.warnings[0]


def test_a_plain_server_is_no_server_that_is_switched_off():
    """The threshold that follows from it is a little low, and with the overlap scheduler lower still."""
    plain, spec = {1: 100, 8: 100}, {1: 200, 8: 50}
    (text,) = pair(spec, plain, PLAIN).warnings
    assert "other has no speculation at all" in text
    v1 = {**SPEC, "disable_overlap_schedule": True}
    texts = pair(spec, plain, {**PLAIN, "disable_overlap_schedule": False}, v1).warnings
    assert "spec runs without the overlap scheduler" in texts[1]
    assert "a fair baseline has --disable-overlap-schedule" in texts[1]
    assert 1 == len(pair(spec, plain, {**PLAIN, "disable_overlap_schedule": True}, v1).warnings)


def test_the_baseline_with_the_same_scheduler_is_taken():
    """Of two servers without speculation, the one whose overlap scheduler is as the speculating server's."""
    told = sides(
        one(1, "base", {1: 100, 8: 100}, {**PLAIN, "disable_overlap_schedule": False}),
        one(2, "no-overlap", {1: 90, 8: 90}, {**PLAIN, "disable_overlap_schedule": True}),
        one(3, "spec", {1: 200, 8: 50}, {**SPEC, "disable_overlap_schedule": True}),
    )
    assert {"no-overlap"} == {point.against for point in threshold.advise(told).points}


@pytest.mark.parametrize(
    ("version", "patches", "flags", "command"),
    [
        ("0.5.9", [], 4, "push --host gpu-1 --patch dynamic_spec/v4 && deployctl launch"),
        ("0.5.12.post1", ["dynamic_spec/v1"], 4, "push --host gpu-1 --patch dynamic_spec/v4 && deployctl launch"),
        ("0.5.12+cu130", ["other/v1", "dynamic_spec/v4"], 4, "launch"),
        ("0.5.18", [], 2, "push --host gpu-1 --patch dynamic_spec/v5 && deployctl launch"),
        ("0.5.13", [], 4, None),
        ("main", [], 4, None),
    ],
)
def test_the_patch_that_this_engine_needs(version, patches, flags, command):
    """v4, v5 or none; v5's engines have no resume and round batches up, which is said."""
    plain = {**PLAIN, "engine_version": version}
    advice = pair(
        {1: 200, 8: 50}, {1: 100, 8: 100}, plain, {**SPEC, "engine_version": version}, patches=patches, version=version
    )
    assert flags == len(advice.flags)
    assert (flags == 2) == (advice.resume is None)
    if command is None:
        assert None is advice.next_command
        assert any("no shipped patch gives engine" in text for text in advice.warnings)
    else:
        assert advice.next_command.startswith(f"deployctl {command}")
    assert (version == "0.5.18") == any("rounds a batch up" in text for text in advice.warnings if "0.5.13" != version)


@pytest.mark.parametrize(("patches", "command"), [(["own/v1"], "launch"), (["else/v1"], "push")])
def test_patches_whose_server_took_the_flag_need_no_other(patches, command):
    """Whatever they are called: with the same patches the flag is known. With others that says nothing."""
    off = one(1, "off", {1: 100, 8: 100}, OFF, patches=["own/v1"])
    advice = threshold.advise(sides(off, one(2, "spec", {1: 200, 8: 50}, SPEC, patches=patches)))
    assert command == advice.next_command.split()[1]


def test_each_data_parallel_scheduler_has_a_batch_of_its_own():
    """The flag is about one batch, the concurrency about all of them."""
    two = {**SPEC, "dp_size": 2}
    advice = pair({1: 200, 16: 101, 17: 50}, {1: 100, 16: 100, 17: 100}, {**OFF, "dp_size": 2}, two)
    assert (8, True) == (advice.limit, "each of the 2 schedulers" in advice.warnings[0])


# -- as it is shown ----------------------------------------------------------------------------------------------------


def test_the_advice_in_text_and_json():
    """In the JSON beside the crossover, in the text below the headlines; null and nothing where there is none."""
    told = sides(one(1, "other", {1: 100, 8: 100}, PLAIN), one(2, "spec", {1: 200, 8: 50}, SPEC))
    value = json.loads(json.dumps(comparison(told).as_json()))
    found = value["threshold"]
    assert ("spec", "threshold", 2, 1) == tuple(found[key] for key in ("attempt", "verdict", "limit", "resume"))
    assert {"concurrency": 8, "ratio": 0.5, "against": "other"} == found["levels"][1]
    assert any(text.startswith("threshold: other has no speculation at all") for text in value["warnings"])
    text = render.lines(value)
    at = text.index(f"threshold: {found['reason']}")
    assert f"  use {' '.join(found['flags'])}" == text[at + 1]
    assert f"  next: {found['next']}" == text[at + 2]
    assert text.index(value["headlines"][0]) < at
    nothing = comparison(sides(one(1, "a", {1: 1}, PLAIN), one(2, "b", {1: 1}, PLAIN))).as_json()
    assert None is nothing["threshold"]
    assert not any(line.startswith("threshold") for line in render.lines(nothing))


def test_levels_that_failed_decide_nothing():
    """A level in which not everything came back is no point."""
    advice = threshold.advise(
        sides(
            one(1, "other", {1: 100, 8: 100}, OFF),
            one(2, "spec", [level(1, 200), level(8, 50, completed=3)], SPEC),
        )
    )
    assert [1] == [point.concurrency for point in advice.points]
