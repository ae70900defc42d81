"""The draft tree that holds nothing but its root."""

import functools
from typing import NamedTuple

import torch

from . import engine, one_token

_ROUND_UP = 256


class Constants(NamedTuple):
    """Read-only tensors for up to `capacity` requests, made once: a step then launches no kernel for them."""

    capacity: int
    index: torch.Tensor  # [capacity, 1]: the root of request i is node i
    no_child: torch.Tensor
    no_sibling: torch.Tensor
    no_mask: torch.Tensor
    zeros: torch.Tensor
    ones: torch.Tensor


@functools.lru_cache(maxsize=None)
def _constants(capacity, device):
    none = torch.full((capacity, 1), -1, dtype=torch.long, device=device)
    return Constants(
        capacity=capacity,
        index=torch.arange(capacity, dtype=torch.long, device=device).unsqueeze(1),
        no_child=none,
        no_sibling=none.clone(),
        no_mask=torch.ones(1, dtype=torch.bool, device=device),
        zeros=torch.zeros(capacity, dtype=torch.int32, device=device),
        ones=torch.ones(capacity, dtype=torch.int32, device=device),
    )


def constants_for(requests, device):
    """Constants for a batch; sizes are rounded up, so that few sets exist."""
    return _constants(-(-requests // _ROUND_UP) * _ROUND_UP, device)


def build(batch, seq_lens_sum, target_attention, verify_input=None):
    """EagleVerifyInput with one node a request: the pending token.

    Args:
        batch: ScheduleBatch (v1) or ModelWorkerBatch (v2) whose spec_info is the draft's last output.
        seq_lens_sum: Tokens with KV over all requests.
        target_attention: The backend that will run it: some need no mask.
        verify_input: A subclass of EagleVerifyInput to build instead.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    requests, device = len(batch.seq_lens), batch.seq_lens.device
    parts = constants_for(requests, device)
    if one_token.is_decode_view(target_attention):
        mask = parts.no_mask
    else:
        # Every token sees all KV of its request and itself.
        mask = torch.ones(seq_lens_sum + requests, dtype=torch.bool, device=device)
    prefix = engine.tree_prefix()
    return (verify_input or EagleVerifyInput)(
        draft_token=engine.bonus_tokens_of(batch.spec_info).to(torch.int64),  # the kernels want int64 candidates
        custom_mask=mask,
        # verify() adds to seq_lens in place, and CUDA graph replay reads positions before that: a copy.
        positions=batch.seq_lens.to(torch.int64).clone(),
        spec_steps=0,
        topk=1,  # also where the draft's topk is larger: the tree has one path, and paged slots are then simple
        draft_token_num=1,
        capture_hidden_mode=CaptureHiddenMode.FULL,  # the draft's upkeep needs the target's hidden states
        seq_lens_sum=seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
        **{
            prefix + "_index": parts.index[:requests],
            prefix + "_next_token": parts.no_child[:requests],
            prefix + "_next_sibling": parts.no_sibling[:requests],
            prefix + "_cum_len": None,
        },
    )
