"""Root-only steps through the engine's own EagleVerifyInput: slots, lengths, tokens and finished rows."""

from types import SimpleNamespace

import torch
from fakes import Decoding, continuation, next_token, python_kernels
from sglang.srt.speculative.dynspec import worker_v1


def state_with(deferred=None):
    return SimpleNamespace(deferred=deferred, resources=SimpleNamespace(target_attention=None))


def step(decoding, state):
    """One step of v1 without speculation: what draft(), the forward and verify() do."""
    batch = decoding.batch
    tree = worker_v1.root_input(state, batch)
    last = [request.output_ids[-1] for request in batch.reqs]
    assert last == tree.draft_token.tolist()
    assert batch.seq_lens.tolist() == tree.positions.tolist()
    assert tree.positions.data_ptr() != batch.seq_lens.data_ptr()
    tree.num_tokens_per_req = 1
    free = decoding.allocator.available_size()
    tree.prepare_for_verify(batch, 1)
    assert batch.out_cache_loc.numel() == len(batch.reqs) == free - decoding.allocator.available_size()
    batch.spec_info = tree
    logits = decoding.forward(tree)
    result = tree.verify(batch, logits, decoding.allocator, 1, None)
    assert decoding.allocator.available_size() == free - len(batch.reqs), "a root is never evicted"
    return tree, logits, result


def check_steps_equal_plain_decoding_and_leak_no_slot():
    """Every step adds one token and one slot a request; at the end all tokens are plain decoding's and all slots free."""
    with python_kernels():
        decoding = Decoding(lengths=[5, 9, 3], most=[4, 6, 2], first=[11, 22, 33])
        state = state_with()
        while decoding.batch.reqs:
            batch = decoding.batch
            before, live = batch.seq_lens.clone(), list(batch.reqs)
            last = [request.output_ids[-1] for request in live]
            _, _, result = step(decoding, state)
            assert (before + 1).tolist() == batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()
            assert [next_token(token) for token in last] == [request.output_ids[-1] for request in live]
            for request, length in zip(live, batch.seq_lens.tolist(), strict=True):
                assert length == request.kv_committed_len == request.kv_allocated_len
                slots = decoding.slots[decoding.row_of(request), :length].tolist()
                assert len(set(slots)) == length
                assert 0 not in slots
            unfinished = [request.output_ids[-1] for request in live if not request.finished()]
            handed_over = getattr(result, "draft_extend_input", None) or result.draft_input
            ids = getattr(handed_over, "input_ids", None)
            assert unfinished == (handed_over.verified_id if ids is None else ids).tolist()
            decoding.drop_finished()
        for request, first in zip(decoding.requests, decoding.first, strict=True):
            assert continuation(first, request.most) == request.output_ids
            assert request.most - 1 == request.spec_verify_ct
        assert decoding.free_at_start == decoding.allocator.available_size()


def check_penalties_see_the_pending_token():
    """draft() adds it to the penalties, so a step without a draft must."""
    seen = []
    penalties = SimpleNamespace(is_required=True, cumulate_output_tokens=lambda ids: seen.append(ids))
    decoding = Decoding(lengths=[5, 9], most=[4, 4], first=[11, 22], penalizer_orchestrator=penalties)
    worker_v1.root_input(state_with(), decoding.batch)
    assert [[11, 22]] == [ids.tolist() for ids in seen]
    assert torch.int64 == seen[0].dtype
    assert [1, 1] == [request.decode_batch_idx for request in decoding.requests]
    assert decoding.batch.return_hidden_states is False
