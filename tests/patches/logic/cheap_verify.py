"""The verify() of our own, for engines where the draft extend can wait."""

from types import SimpleNamespace
from unittest import mock

import torch
from bookkeeping import state_with, step
from fakes import Decoding, Sampling, python_kernels
from sglang.srt.speculative import eagle_info
from sglang.srt.speculative.dynspec import engine, root_verify
from sglang.srt.speculative.dynspec.deferred import DeferredDraftExtend


def _run(decoding, state):
    """Every fact of every step that anybody reads afterwards."""
    facts = []
    while decoding.batch.reqs:
        batch, live = decoding.batch, list(decoding.batch.reqs)
        _, logits, result = step(decoding, state)
        extend = result.draft_extend_input
        unfinished = [request for request in live if not request.finished()]
        facts.append(
            {
                "tokens": result.accept_tokens.tolist(),
                "drafts": result.num_correct_drafts_per_req_cpu,
                "logits": logits.next_token_logits[result.accept_indices].shape,
                "input": extend.input_ids.tolist(),
                "dtype": extend.input_ids.dtype if unfinished else None,
                "hidden": None if extend.hidden_states is None else extend.hidden_states.tolist(),
                "counts": (extend.num_correct_drafts.tolist(), extend.num_accept_tokens.tolist()),
                "counts on host": extend.num_accept_tokens_cpu,
                "lengths": (extend.seq_lens.tolist(), extend.seq_lens_cpu.tolist()),
                "rows": extend.req_pool_indices.tolist(),
                "batch": (batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist()),
                "slots": batch.out_cache_loc.tolist() if unfinished else None,
                "free": decoding.allocator.available_size(),
                "pool": decoding.slots.tolist(),
                "requests": [
                    (
                        request.output_ids[:],
                        request.kv_committed_len,
                        request.kv_allocated_len,
                        request.spec_verify_ct,
                        request.spec_num_correct_drafts,
                        request.histogram[:],
                    )
                    for request in live
                ],
            }
        )
        decoding.drop_finished()
    return facts


def check_cheap_verify_equals_the_engines():
    """The same result, batch, slots and requests after every step."""
    runs = []
    for deferred in (None, DeferredDraftExtend(lambda batch: None)):
        with python_kernels():
            decoding = Decoding(lengths=[5, 9, 3], most=[4, 6, 2], first=[11, 22, 33])
            runs.append(_run(decoding, state_with(deferred)))
    assert runs[0] == runs[1]
    assert len(runs[0]) == 5


def check_batches_that_need_more_go_to_the_engine():
    """Sampling, penalties, biases, processors, logprobs and grammar masks: the engine's verify(), after the debt is paid
    and with logits that the paid draft extend cannot overwrite."""
    required = SimpleNamespace(is_required=True)
    needs = [
        ({"is_all_greedy": False}, {}, None),
        ({"has_custom_logit_processor": True}, {}, None),
        ({"penalizer_orchestrator": required}, {}, None),
        ({"logit_bias": torch.zeros(1)}, {}, None),
        ({}, {"sampling_info": Sampling(3)}, None),
        ({}, {"return_logprob": True}, None),
        ({}, {}, torch.ones(1)),
    ]
    for sampling, changes, mask in needs:
        log = []

        def engines_verify(_self, _batch, logits_output, *_rest, log=log):
            log.append(logits_output.next_token_logits.data_ptr())
            return "the engine's"

        decoding = Decoding(lengths=[5, 9], most=[4, 4], first=[11, 22], **sampling)
        vars(decoding.batch).update(changes)
        deferred = DeferredDraftExtend(lambda _batch, log=log: log.append("paid"))
        deferred.owe(decoding.batch)
        logits = SimpleNamespace(next_token_logits=torch.zeros(2, 4))
        buffer = logits.next_token_logits.data_ptr()
        tree = object.__new__(root_verify.root_verify_input())
        tree.deferred = deferred
        with mock.patch.object(eagle_info.EagleVerifyInput, "verify", engines_verify):
            assert tree.verify(decoding.batch, logits, None, 1, mask) == "the engine's"
        assert log[0] == "paid"
        assert log[1] != buffer, "the engine must not read the buffer that the draft extend writes"
        assert not deferred.is_owed


def check_the_draft_extend_waits():
    """The class checks see that this engine has what is built here."""
    assert engine.draft_extend_can_wait()
