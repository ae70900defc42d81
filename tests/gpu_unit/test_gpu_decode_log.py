"""Reading decode lines and the patch's own lines out of a server's log."""

from tests.gpu import decode_log

SPECULATING = (
    "[2026-12-01 04:00:01] Decode batch, #running-req: 4, #token: 812, token usage: 0.02, accept len: 2.93, "
    "accept rate: 0.39, cuda graph: True, gen throughput (token/s): 1722.31, #queue-req: 0\n"
)
PLAIN = (
    "[2026-12-01 04:00:02] Decode batch, #running-req: 64, #token: 9120, token usage: 0.23, "
    "cuda graph: False, gen throughput (token/s): 13679.90, #queue-req: 3\n"
)


def test_a_step_with_a_draft_model_has_its_accept_length():
    """Every figure of a decode line is read."""
    assert [decode_log.Step(4, 812, 2.93, True, 1722.31)] == decode_log.steps(SPECULATING)


def test_a_step_without_a_draft_model_has_none():
    """The accept length is absent, not zero, and an eager step is told."""
    assert [decode_log.Step(64, 9120, None, False, 13679.9)] == decode_log.steps(PLAIN)


def test_lines_do_not_borrow_from_each_other():
    """An accept length belongs to its own line, whichever kind comes before it."""
    both = decode_log.steps(PLAIN + SPECULATING + PLAIN)
    assert [None, 2.93, None] == [step.accept_length for step in both]


def test_prefill_lines_are_no_steps():
    """Prefill lines name a graph and a throughput too."""
    line = "Prefill batch, #new-seq: 3, #new-token: 85, #running-req: 0, cuda graph: False, input throughput (token/s): 4.2\n"
    assert [] == decode_log.steps(line)


def test_switches_keep_their_order():
    """Each transition of the patch's policy is one word."""
    text = (
        "[dynspec] ready: limit=8 resume=8\n[dynspec] speculation OFF: batch=10 limit=8 resume=8, after 3 steps\n"
        "[dynspec] speculation ON: batch=7 limit=8 resume=8, after 90 steps\n"
    )
    assert ["OFF", "ON"] == decode_log.switches(text)
    assert "[dynspec] ready: limit=8 resume=8" == decode_log.ready_line(text)


def test_leaks_and_retractions_are_found_among_other_lines():
    """The command line names memory and retraction as well, and is neither."""
    text = (
        "server_args=ServerArgs(enable_memory_saver=False, disable_radix_cache=True)\n"
        "ValueError: token_to_kv_pool_allocator memory leak detected! available_size=39990\n"
        "Testing retraction. #retracted_reqs: 7, #new_tokens_gained: 500\n"
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 80\n"
    )
    assert 1 == len(decode_log.leak_lines(text))
    assert 9 == decode_log.retractions(text)


def test_a_summary_prefers_lines_of_the_wanted_batch():
    """Lines of a batch that is still filling do not count where there are full ones."""
    found = decode_log.summary(decode_log.steps(SPECULATING + PLAIN), 64)
    assert {"lines": 1, "tokens_per_s": 13679.9, "accept_length": None, "without_cuda_graph": 1} == found


def test_a_log_is_read_from_a_mark_and_to_one(tmp_path):
    """Marks are byte positions, and a carriage return ends a line."""
    path = tmp_path / "server.log"
    path.write_bytes("größe\n".encode())
    log = decode_log.Log(str(path))
    mark = log.mark()
    path.write_bytes(path.read_bytes() + b"second\rthird\n")
    assert "second\nthird\n" == log.since(mark)
    assert "größe\n" == log.since(0, mark)
    assert "third\n" == log.tail(6)
