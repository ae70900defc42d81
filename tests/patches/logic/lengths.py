"""known_lengths on the engine's own EagleDraftInput and ScheduleBatch: when the host waits for the GPU, and when not."""

from types import SimpleNamespace
from unittest import mock

import torch
from fakes import Request, Sampling, draft_input
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative import eagle_info_v2, spec_utils
from sglang.srt.speculative.dynspec import known_lengths
from workers import give_state, make_batch, make_v2, python_kernels, worker_v2


class OnGpu:
    """seq_lens of a step that still runs: reading it is waiting."""

    def __init__(self, values, log):
        self.values, self.log = values, log

    def cpu(self):
        self.log.append("read")
        return torch.tensor(self.values)


def make_running(lengths, log):
    """A batch of the scheduler's whose last step has been launched, on stand-ins for its pools."""
    requests = [Request(length) for length in lengths]
    for request in requests:
        request.origin_input_ids = [1]
    state = draft_input(list(range(len(lengths))))
    state.verify_done = SimpleNamespace(synchronize=lambda: log.append("wait"))
    batch = SimpleNamespace(
        reqs=requests,
        spec_info=state,
        is_spec_v2=True,
        seq_lens=OnGpu([length + 1 for length in lengths], log),
        seq_lens_cpu=None,
        seq_lens_sum=None,
        device="cpu",
        sampling_info=Sampling(len(lengths)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        req_pool_indices=torch.arange(len(lengths)),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        tree_cache=None,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        multimodal_inputs=None,
        maybe_evict_swa=lambda: None,
        batch_size=lambda: len(requests),
    )
    batch.maybe_wait_verify_done = lambda: ScheduleBatch.maybe_wait_verify_done(batch)
    return batch


def prepare(batch):
    with (
        mock.patch.object(eagle_info_v2, "alloc_token_slots", lambda _cache, count: torch.arange(count)),
        mock.patch.object(eagle_info_v2, "get_alloc_len_per_decode", return_value=4),
        mock.patch.object(spec_utils, "assign_req_to_token_pool_func", return_value=None),
    ):
        batch.spec_info.prepare_for_decode(batch)


def check_the_engine_waits_where_nothing_is_known():
    """The measure of the others: after a step with speculation the host waits, then reads."""
    log = []
    batch = make_running([7, 9], log)
    prepare(batch)
    assert ["wait", "read"] == log
    assert [8, 10] == batch.seq_lens_cpu.tolist()


def check_known_lengths_are_used_without_waiting():
    """The same lengths and the same sum; seq_lens and the event are as they were, for whoever needs them later."""
    log = []
    batch = make_running([7, 9], log)
    on_gpu, event = batch.seq_lens, batch.spec_info.verify_done
    known_lengths.remember(batch.spec_info, torch.tensor([7, 9]))
    prepare(batch)
    assert [] == log
    assert ([8, 10], 18) == (batch.seq_lens_cpu.tolist(), batch.seq_lens_sum)
    assert batch.seq_lens is on_gpu
    assert batch.spec_info.verify_done is event


def check_a_failing_preparation_puts_back():
    """Out of memory while slots are allocated: the batch has its own seq_lens again."""
    log = []
    batch = make_running([7], log)
    on_gpu, event = batch.seq_lens, batch.spec_info.verify_done
    known_lengths.remember(batch.spec_info, torch.tensor([7]))
    batch.maybe_evict_swa = mock.Mock(side_effect=RuntimeError)
    try:
        prepare(batch)
    except RuntimeError:
        assert batch.seq_lens is on_gpu
        assert batch.spec_info.verify_done is event
    else:
        raise AssertionError


def check_filtering_waits_only_where_something_is_filtered():
    """Nobody finished: no wait, nothing changed. A finished or an excluded request, or rows named: the engine's way."""
    log = []
    batch = make_running([7, 9], log)
    known_lengths.remember(batch.spec_info, torch.tensor([7, 9]))
    requests = batch.reqs
    assert ScheduleBatch.filter_batch(batch) is None
    assert ([], requests) == (log, batch.reqs)
    ScheduleBatch.filter_batch(batch, requests[0:0])
    assert [] == log
    ScheduleBatch.filter_batch(batch, keep_indices=[0, 1])
    assert ["wait"] == log
    for request in requests:
        request.aborted = True
    ScheduleBatch.filter_batch(batch)
    assert (["wait"] * 2, []) == (log, batch.reqs)


def check_filtering_without_knowledge_is_the_engines():
    """After a step with speculation the host waits, whoever finished."""
    log = []
    ScheduleBatch.filter_batch(make_running([7, 9], log))
    assert ["wait"] == log


def check_a_changed_batch_is_not_known():
    """What filters or merges draft inputs on the GPU forgets the lengths, before the engine does its part."""
    other = draft_input([5])
    other.future_indices = SimpleNamespace(indices=torch.tensor([6]))
    for name, argument in (("filter_batch", torch.tensor([0])), ("merge_batch", other)):
        state = draft_input([1, 2])
        state.future_indices = SimpleNamespace(indices=torch.tensor([3, 4]))
        known_lengths.remember(state, torch.tensor([7, 9]))
        getattr(state, name)(argument)
        assert getattr(state, known_lengths.FIELD) is None
        assert state.future_indices.indices.tolist() == ([3] if name == "filter_batch" else [3, 4, 6])


def check_only_a_step_without_speculation_is_remembered():
    """By the worker: one token more for each request; not where acceptance is made up."""
    with python_kernels():
        worker, draft_worker, target, _ = make_v2()
        give_state(worker_v2, worker, target, [worker, draft_worker], (2, 1))
        for size, expected in ((2, None), (3, [8, 8, 8])):
            result = worker.forward_batch_generation(make_batch(size))
            found = getattr(result.next_draft_input, known_lengths.FIELD)
            assert expected == (None if found is None else found.tolist()), size
        with mock.patch.object(spec_utils, "SIMULATE_ACC_LEN", 2.5):
            result = worker.forward_batch_generation(make_batch(3))
            assert getattr(result.next_draft_input, known_lengths.FIELD) is None
