"""A graph is captured for one token width; replaying copies the inputs into its buffers."""

from sglang.srt.utils import Tensor


class CudaGraphRunner:
    def __init__(self, num_tokens_per_bs, max_bs=256):
        self.num_tokens_per_bs = num_tokens_per_bs
        self.input_ids = Tensor([0] * (max_bs * num_tokens_per_bs))

    def can_run(self, batch):
        return len(batch.reqs) <= 256

    def replay_prepare(self, batch):
        raw_num_token = len(batch.reqs) * self.num_tokens_per_bs
        self.input_ids[:raw_num_token].copy_(batch.input_ids)

    def replay(self, batch):
        self.replay_prepare(batch)
        return [req.next_word() for req in batch.reqs]
