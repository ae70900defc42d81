"""Runs the model by replaying captured graphs: each is captured for a batch size and a fixed token width."""

from sglang.srt.tensors import zeros


class CudaGraphRunner:
    """Graphs whose token width per request is fixed at capture."""

    def __init__(self, model_runner, speculative_num_draft_tokens=None):
        self.model_runner = model_runner
        self.capture_bs = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]
        self.max_bs = self.capture_bs[-1]
        # With speculation only the verify pass is captured: every request brings its whole tree.
        self.num_tokens_per_bs = speculative_num_draft_tokens or 1
        self.input_ids = zeros(self.max_bs * self.num_tokens_per_bs)

    def can_run(self, forward_batch):
        return forward_batch.batch_size() <= self.max_bs

    def replay_prepare(self, forward_batch):
        raw_bs = forward_batch.batch_size()
        raw_num_token = raw_bs * self.num_tokens_per_bs
        # Common inputs
        self.input_ids[:raw_num_token].copy_(forward_batch.input_ids)
        return raw_num_token

    def replay(self, forward_batch):
        raw_num_token = self.replay_prepare(forward_batch)
        return self.model_runner.compute(forward_batch, self.input_ids[:raw_num_token])
