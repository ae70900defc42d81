"""Requests, and the batch that runs."""

import zlib

from sglang.srt.tensors import Tensor


class Req:
    """One request on its way through the scheduler."""

    def __init__(self, rid, prompt, max_new_tokens, kind="generate", stream=False):
        self.rid = rid
        self.stream = stream
        self.kind = kind
        # One fact is known; other prompts start anywhere in the vocabulary.
        self.seed = 0 if "France" in prompt else zlib.crc32(prompt.encode("utf-8", "backslashreplace"))
        self.prompt_tokens = max(1, len(prompt.split()))
        self.max_new_tokens = max_new_tokens
        self.output_ids = []
        self.forward_ct = 0

    def last_token(self):
        return self.output_ids[-1] if self.output_ids else 0

    def finished(self):
        return len(self.output_ids) >= self.max_new_tokens


class GenerationBatchResult:
    """The new tokens of each request of a batch, in its order."""

    def __init__(self, next_token_ids):
        self.next_token_ids = next_token_ids


class ScheduleBatch:
    """The requests of one step, with what the last step left behind."""

    def __init__(self, reqs, tree_cache, forward_mode="decode"):
        self.reqs = list(reqs)
        self.tree_cache = tree_cache
        self.forward_mode = forward_mode
        self.input_ids = Tensor([token for req in self.reqs for token in range(req.prompt_tokens)])
        self.out_cache_loc = None
        self.spec_info = None

    def batch_size(self):
        return len(self.reqs)

    def prepare_for_decode(self):
        self.forward_mode = "decode"

    def merge_batch(self, other):
        """Take another batch's requests in; a decode step's inputs are not merged, it makes its own."""
        if not self.reqs:
            self.input_ids = other.input_ids
        self.reqs.extend(other.reqs)
        self.out_cache_loc = None

    def filter_batch(self):
        """Keep the requests that have not finished."""
        self.reqs = [req for req in self.reqs if not req.finished()]
