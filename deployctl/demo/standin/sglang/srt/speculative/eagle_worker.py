"""EAGLE: a small model drafts a tree of tokens, the target model verifies it in one pass."""

from sglang.srt.managers.schedule_batch import GenerationBatchResult
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.tensors import Tensor, cat


class EagleVerifyInput:
    """The tree to verify: `draft_token_num` nodes a request, the root first."""

    def __init__(self, draft_token, spec_steps, topk, draft_token_num):
        self.draft_token = draft_token
        self.spec_steps = spec_steps
        self.topk = topk
        self.draft_token_num = draft_token_num


class EAGLEWorker:
    """Draft, verify, and keep the draft model in step."""

    def __init__(self, server_args, target_worker):
        # Parse arguments
        self.server_args = server_args
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.target_worker = target_worker

    def forward_batch_generation(self, batch):
        """Run one step; the forward mode decides which.

        Returns:
            GenerationBatchResult with the accepted tokens of each request.
        """
        if batch.forward_mode == "extend":
            rows = self.forward_target_extend(batch)
            result = GenerationBatchResult([row[:1] for row in rows])
            self.forward_draft_extend(batch, result.next_token_ids)
            return result
        else:
            spec_info = self.draft(batch)
            result = self.verify(batch, spec_info)
            self.forward_draft_extend_after_decode(batch, result.next_token_ids)
            return result

    def forward_target_extend(self, batch):
        """Prefill with the target model."""
        return self.target_worker.forward_batch_generation(batch)

    def draft(self, batch):
        """Draft a tree for each request; the slots are only borrowed.

        Returns:
            EagleVerifyInput.
        """
        num_seqs = batch.batch_size()
        out_cache_loc, token_to_kv_pool_state_backup = alloc_token_slots(
            batch.tree_cache, num_seqs * self.speculative_num_steps * self.topk, backup_state=True
        )
        batch.out_cache_loc = out_cache_loc
        trees = []
        for req in batch.reqs:
            root = req.last_token()
            trees.append(Tensor([root + node for node in range(self.speculative_num_draft_tokens)]))
        batch.tree_cache.token_to_kv_pool_allocator.restore_state(token_to_kv_pool_state_backup)
        return EagleVerifyInput(cat(trees), self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)

    def verify(self, batch, spec_info):
        """Check the trees with the target model in one pass; the root's own successor is always accepted."""
        batch.spec_info = spec_info
        batch.input_ids = spec_info.draft_token
        batch.out_cache_loc = alloc_token_slots(batch.tree_cache, batch.batch_size() * spec_info.draft_token_num)
        rows = self.target_worker.forward_batch_generation(batch)
        # The draft model of the stand-in is right once, then wrong.
        accept_length = 2 if spec_info.spec_steps else 1
        batch.tree_cache.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        return GenerationBatchResult([row[:accept_length] for row in rows])

    def forward_draft_extend(self, batch, next_token_ids):
        """After prefill: the draft model reads each prompt's end and the first new token."""
        for req, tokens in zip(batch.reqs, next_token_ids):
            batch.input_ids = Tensor([req.last_token()] + tokens)

    def forward_draft_extend_after_decode(self, batch, next_token_ids):
        """The draft model reads the accepted tokens, a request at a time; the last ones stay in `batch.input_ids`."""
        for tokens in next_token_ids:
            batch.input_ids = Tensor(tokens)
