"""verify() of a root-only tree, for v1 since 0.5.12.

The engine's verify() is made for trees: it evicts the slots of rejected nodes, re-assigns the others, and synchronises
with the GPU four times. Of a root nothing can be rejected. For batches that need nothing special this does what is
left, with one synchronisation; any other batch goes to the engine's.
"""

import functools

import torch

from . import root_tree


@functools.lru_cache(maxsize=None)
def root_verify_input():
    """The class, made on first use: it needs the engine's."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative import eagle_info

    class RootVerifyInput(eagle_info.EagleVerifyInput):
        """EagleVerifyInput with one node a request, which also pays the draft extend that the last step owes."""

        deferred = None  # DeferredDraftExtend, set by whoever builds it

        def verify(self, batch, logits_output, allocator, page_size, vocab_mask=None):
            """See EagleVerifyInput.verify(); the same result."""
            if _needs_more(batch, vocab_mask) or eagle_info.SIMULATE_ACC_LEN > 0:
                if self.deferred.is_owed:
                    # The draft extend's graph will write to the same logits buffer.
                    logits_output.next_token_logits = logits_output.next_token_logits.clone()
                    self.deferred.pay()
                return super().verify(batch, logits_output, allocator, page_size, vocab_mask)
            tokens = torch.argmax(logits_output.next_token_logits, dim=-1).to(torch.int32)
            unfinished = _append(batch, self.deferred.tokens_on_host(tokens))
            batch.seq_lens.add_(1)
            batch.seq_lens_cpu.add_(1)
            return eagle_info.EagleVerifyOutput(
                draft_extend_input=self._draft_extend_input(batch, tokens, unfinished),
                logits_output=logits_output,
                accept_tokens=tokens,
                num_correct_drafts_per_req_cpu=[0] * len(batch.reqs),
                accept_indices=slice(None),  # every node
            )

        def _draft_extend_input(self, batch, tokens, unfinished):
            count = len(unfinished)
            if not count:
                return eagle_info.EagleDraftExtendInput.create_idle_input(
                    device=batch.device, hidden_size=None, dtype=None, capture_hidden_mode=CaptureHiddenMode.LAST
                )
            hidden = self.hidden_states
            if count == len(batch.reqs):
                rows = {
                    "input_ids": tokens,
                    # A view of the graph's output, which the next replay overwrites; the draft extend is deferred.
                    "hidden_states": None if hidden is None else hidden.clone(),
                    "seq_lens": batch.seq_lens,
                    "seq_lens_cpu": batch.seq_lens_cpu,
                    "req_pool_indices": batch.req_pool_indices,
                }
            else:
                chosen = torch.tensor(unfinished, dtype=torch.int64, device=tokens.device)
                batch.out_cache_loc = batch.out_cache_loc[chosen]
                rows = {
                    "input_ids": tokens[chosen],
                    "hidden_states": None if hidden is None else hidden[chosen],
                    "seq_lens": batch.seq_lens[chosen],
                    "seq_lens_cpu": batch.seq_lens_cpu[unfinished],
                    "req_pool_indices": batch.req_pool_indices[chosen],
                }
            parts = root_tree.constants_for(len(batch.reqs), tokens.device)
            return eagle_info.EagleDraftExtendInput(
                num_correct_drafts=parts.zeros[:count],
                num_accept_tokens=parts.ones[:count],
                num_accept_tokens_cpu=[1] * count,
                **rows,
            )

    return RootVerifyInput


def _needs_more(batch, vocab_mask):
    """Sampling, grammars, penalties, biases and logprobs are the engine's business."""
    sampling = batch.sampling_info
    return (
        not sampling.is_all_greedy
        or sampling.has_custom_logit_processor
        or sampling.penalizer_orchestrator.is_required
        or sampling.logit_bias is not None
        or len(sampling) != len(batch.reqs)
        or vocab_mask is not None
        or batch.return_logprob
    )


def _append(batch, tokens):
    """Give each request its token, as the engine's verify() does; the rows of those that go on."""
    think_end = batch.model_config.think_end_id
    unfinished = []
    for row, (request, token) in enumerate(zip(batch.reqs, tokens)):
        request.output_ids.append(token)
        if request.require_reasoning and think_end is not None:
            request.update_reasoning_tokens(token, think_end)
        request.check_finished()
        request.kv_committed_len += 1
        request.kv_allocated_len = request.kv_committed_len
        request.spec_verify_ct += 1
        request.update_spec_correct_drafts_histogram(0)
        if not request.finished():
            unfinished.append(row)
    return unfinished
