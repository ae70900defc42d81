"""The load phases from the log lines of every SGLang generation, as a pure reducer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl.agent import crash, phases

FIXTURE = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.12-cpu-load.log"
STAMP = "[2026-03-04 05:06:07%s] "


def read(lines, **state):
    """The state after some lines, one second apart, and all events."""
    now = 100.0
    state, events = phases.State(since=now, **state), []
    for line in lines:
        now += 1
        state, told = phases.advance(state, line.encode(), now)
        events += told
    return state, events


def line(text, ranks=""):
    return STAMP % ranks + text


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("Init torch distributed begin.", "init"),
        ("Init parallel ends. elapsed=3.75 s, mem usage=1.16 GB", "init"),
        ("sglang is using nccl==2.27.5", "init"),
        ("Load weight begin. avail mem=137.34 GB", "weights"),
        ("Load weight end. elapsed=9.1 s, type=X, dtype=torch.bfloat16, avail mem=1 GB, mem usage=2 GB.", "kv-cache"),
        ("KV Cache is allocated. #tokens: 2795207, K size: 53.31 GB, V size: 53.31 GB", "kv-cache"),
        ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10, KV size: 1 GB", "kv-cache"),
        ("Memory pool end. avail mem=11.87 GB", "kv-cache"),
        ("Post-capture KV sizing: KV cache allocated.", "kv-cache"),
        ("Capture cuda graph begin. This can take up to several minutes. avail mem=3 GB", "graphs"),
        ("Capture cuda graph bs [1, 2, 4]", "graphs"),
        ("Capture target verify cuda graph begin. backend=x, num_tokens_per_req=4", "graphs"),
        ("Capture draft decode CUDA graph begin. backend=x", "graphs"),
        ("INFO:     Started server process [4711]", "warm-up"),
        ("INFO:     Application startup complete.", "warm-up"),
        ("INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)", "warm-up"),
    ],
)
def test_each_milestone_begins_its_phase(text, phase):
    """Formats of 0.5.9 to 0.5.23."""
    assert phase == read([line(text)])[0].phase


def test_a_real_log_goes_through_its_phases():
    """What SGLang 0.5.12 printed on a CPU: no graphs there, everything else in order, and ready."""
    lines = [part.decode() for part in crash.split(FIXTURE.read_bytes())]
    state, events = read(lines)
    assert state.ready_line
    assert [entry["name"] for entry in phases.as_list(state)] == ["init", "weights", "kv-cache", "warm-up"]
    assert all(event["seconds"] >= 0 for event in events if event["state"] == "done")


def test_progress_of_both_bars():
    """The shard bar and tqdm's: the fraction of its counter."""
    _, events = read(
        [
            line("Load weight begin. avail mem=1 GB"),
            "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01, 2.32it/s]",
            "Multi-thread loading shards:  50% Completed | 3/6 [00:00<00:01,  2.32it/s]",
            "Loading safetensors checkpoint shards: of unknown number",
            line("Capture cuda graph begin."),
            "Capturing batches (bs=8 avail_mem=3.00 GB):  60%|######    | 6/10 [00:01<00:01, 5.1it/s]",
            "Capturing batches (bs=8 avail_mem=3.00 GB): 70%",
        ]
    )
    shown = [(event["name"], event["progress"]) for event in events if event["state"] == "progress"]
    assert shown == [("weights", 0.25), ("weights", 0.5), ("graphs", 0.6), ("graphs", 0.7)]


def test_other_ranks_do_not_move_the_load():
    """Every rank prints its own lines; rank 0 tells the phase."""
    state, events = read([line("Load weight begin.", " DP0 TP1 EP1"), line("Capture cuda graph begin.", " PP1 TP0")])
    assert (state.phase, events) == ("init", [])
    assert read([line("Load weight begin.", " DP0 TP0 EP0")])[0].phase == "weights"


def test_a_node_without_rank_0_follows_whoever_is_first():
    """On the second node of a server all ranks are above 0."""
    state, _ = read([line("Load weight begin.", " TP4"), line("Load weight begin.", " TP5")], every_rank=True)
    assert state.phase == "weights"


def test_draft_weights_and_graphs_do_not_go_back():
    """The draft model loads after the target's graphs: the load moves on, never back."""
    state, _ = read(
        [
            line("Load weight begin."),
            line("Load weight end. elapsed=1 s"),
            line("Capture cuda graph begin."),
            line("Load weight begin."),
            line("KV Cache is allocated. #tokens: 1"),
            line("Capture draft cuda graph begin"),
        ]
    )
    assert state.phase == "graphs"
    assert [entry["name"] for entry in phases.as_list(state)] == ["init", "weights", "kv-cache"]


def test_after_ready_nothing_moves():
    """Requests may hold any text, the engine's own lines too."""
    ready = line("The server is fired up and ready to roll!")
    state, _ = read([ready])
    again, events = read([ready, ready, line("Load weight begin.")])
    assert events[-1] == {"event": "phase", "name": "warm-up", "state": "done", "seconds": 0.0}
    assert state.phases[-1][0] == again.phases[-1][0] == "warm-up"
    assert again.ready_line


def test_a_state_without_a_clock_takes_the_first_lines():
    """`since` may be left to the first line."""
    state, _ = phases.advance(phases.State(), b"anything", 7.0)
    assert state.since == 7.0


@given(st.lists(st.sampled_from(crash.split(FIXTURE.read_bytes())), max_size=60))
def test_phases_never_go_back_whatever_the_order_of_lines(lines):
    """Any lines in any order: phases end at most once each and in order, with durations that are not negative."""
    state, now = phases.State(since=0.0), 0.0
    for text in lines:
        now += 0.5
        state, _ = phases.advance(state, text, now)
    names = [name for name, _ in state.phases]
    assert names == sorted(set(names), key=phases.ORDER.index)
    assert all(seconds >= 0 for _, seconds in state.phases)
