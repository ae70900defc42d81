"""EAGLE on the v1 scheduler: draft a tree, verify it with the target, keep what was accepted."""

from sglang.srt.mem_cache.common import TreeCache, alloc_token_slots
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.utils import Tensor


class EagleVerifyInput:
    """The drafted tree: `draft_token_num` nodes a request."""

    def __init__(self, draft_token, draft_token_num):
        self.draft_token = draft_token
        self.draft_token_num = draft_token_num


class EAGLEWorker:
    def __init__(self, server_args):
        self.server_args = server_args
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.tree_cache = TreeCache()
        self.graph_runner = CudaGraphRunner(self.speculative_num_draft_tokens)

    def forward_batch_generation(self, batch):
        if batch.forward_mode == "extend":
            return self.forward_target_extend(batch)
        else:
            spec_info = self.draft(batch)
            words, accept_lengths = self.verify(batch, spec_info)
            self.forward_draft_extend_after_decode(batch)
            return words, accept_lengths

    def forward_target_extend(self, batch):
        # What the draft model saw last stays on the batch: one draft and the bonus token.
        batch.input_ids = Tensor([1, 2])
        return [req.next_word() for req in batch.reqs], [1] * len(batch.reqs)

    def draft(self, batch):
        num_tokens = len(batch.reqs) * self.speculative_num_steps * self.topk
        out_cache_loc, state = alloc_token_slots(self.tree_cache, num_tokens, backup_state=True)
        self.tree_cache.token_to_kv_pool_allocator.restore_state(state)
        nodes = len(batch.reqs) * self.speculative_num_draft_tokens
        return EagleVerifyInput(Tensor([7] * nodes), self.speculative_num_draft_tokens)

    def verify(self, batch, spec_info):
        batch.spec_info = spec_info
        batch.input_ids = spec_info.draft_token
        self.run_target(batch)
        accepted = [1 + (position % 3) for position in range(len(batch.reqs))]
        return [
            [req.next_word() for _ in range(count)] for req, count in zip(batch.reqs, accepted)
        ], accepted

    def run_target(self, batch):
        return self.graph_runner.replay_prepare(batch)

    def forward_draft_extend_after_decode(self, batch):
        # The accepted tokens of the newest request: ragged, and left on the batch.
        batch.input_ids = Tensor([1, 2])
