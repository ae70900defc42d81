"""The smallest surroundings in which the engine's own verify() and workers run without a GPU.

What stands in here: the scheduler's batch and requests, three kernels, MoE contexts. What is the engine's own: the
workers, EagleVerifyInput and its bookkeeping, the slot allocator.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt import server_args as server_args_module
from sglang.srt.layers.moe import utils as moe
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.speculative import eagle_info, eagle_worker, eagle_worker_v2
from sglang.srt.speculative.dynspec import engine

server_args_module.set_global_server_args_for_scheduler(
    SimpleNamespace(
        enable_mamba_extra_buffer=lambda: False,
        attention_backend="torch_native",
        page_size=1,
        speculative_accept_threshold_single=1,
        speculative_accept_threshold_acc=1,
        speculative_algorithm="EAGLE3",
    )
)

VOCABULARY = 97
HIDDEN = 4


def next_token(token):
    """The model: it knows one continuation of every token."""
    return (token * 31 + 7) % VOCABULARY


def continuation(first, length):
    """`length` tokens of plain decoding from `first`, which counts."""
    tokens = [first]
    while len(tokens) < length:
        tokens.append(next_token(tokens[-1]))
    return tokens


class Request:
    """What verify() and the workers touch of a request."""

    def __init__(self, prompt_length, most=10**6, name=None):
        self.name = name
        self.output_ids = []
        self.most = most
        self.grammar = None
        self.kv_committed_len = self.kv_allocated_len = prompt_length
        self.decode_batch_idx = 0
        self.spec_verify_ct = 0
        self.spec_accepted_tokens = self.spec_accepted_drafts = self.spec_num_correct_drafts = 0
        self.histogram = []
        self.require_reasoning = False
        self.time_stats = SimpleNamespace()
        self.aborted = False

    def check_finished(self, *_args):
        pass

    def finished(self):
        return self.aborted or len(self.output_ids) >= self.most

    def update_spec_acceptance_histogram(self, drafts):
        self.histogram.append(drafts)

    update_spec_correct_drafts_histogram = update_spec_acceptance_histogram


class Sampling:
    """A greedy batch's SamplingBatchInfo; `changes` make it need more."""

    def __init__(self, count, **changes):
        self.count = count
        self.is_all_greedy = True
        self.has_custom_logit_processor = False
        self.logit_bias = None
        self.acc_linear_penalties = None
        self.penalizer_orchestrator = SimpleNamespace(is_required=False)
        self.__dict__.update(changes)

    def __len__(self):
        return self.count


def draft_input(tokens, **state):
    """EagleDraftInput with these pending tokens."""
    name = "bonus_tokens" if "bonus_tokens" in engine.field_names(eagle_info.EagleDraftInput) else "verified_id"
    return eagle_info.EagleDraftInput(**{name: torch.tensor(tokens, dtype=torch.int32)}, **state)


def _assign_slots(req_pool_indices, req_to_token, starts, ends, slots, _batch_size):
    used = 0
    for row in range(len(starts)):
        count = int(ends[row] - starts[row])
        chosen = slots[used : used + count].to(req_to_token.dtype)
        req_to_token[req_pool_indices[row], int(starts[row]) : int(ends[row])] = chosen
        used += count


def _accept_greedily(predicts, accept_index, accept_token_num, candidates, target_predict, topk, **tree):
    """sgl_kernel.verify_tree_greedy, in Python."""
    index, child, sibling = (
        next(value for name, value in tree.items() if name.endswith(ending))
        for ending in ("_index", "_next_token", "_next_sibling")
    )
    assert candidates.dtype == torch.int64 == index.dtype
    predicted = target_predict.reshape(-1)
    for row in range(accept_index.shape[0]):
        last, node, accepted = int(index[row, 0]), 0, 0
        accept_index[row, 0] = last
        for _ in range(1, accept_index.shape[1]):
            node = int(child[row, node])
            while node != -1 and int(candidates[row, node]) != int(predicted[last]):
                node = int(sibling[row, node])
            if node == -1:
                break
            predicts[last] = predicted[last]
            accepted, last = accepted + 1, int(index[row, node])
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = predicted[last]
    return predicts, accept_index, accept_token_num


@contextlib.contextmanager
def python_kernels():
    """The engine's kernels for the length of a block, and what asks for a GPU, replaced."""
    with contextlib.ExitStack() as stack:

        def replace(holder, name, value):
            if hasattr(holder, name):
                stack.enter_context(mock.patch.object(holder, name, value))

        replace(eagle_info, "assign_req_to_token_pool_func", _assign_slots)
        replace(eagle_info, "verify_tree_greedy_func", _accept_greedily)
        for module in (moe, eagle_worker, eagle_worker_v2):
            replace(module, "speculative_moe_backend_context", contextlib.nullcontext)
            replace(module, "speculative_moe_a2a_backend_context", contextlib.nullcontext)
            replace(module, "set_time_batch", lambda *_args, **_options: None)
            replace(module, "get_global_tracing_enabled", lambda: False)
        yield


class Decoding:
    """A batch that decodes: slots, pools and requests, on the engine's own allocator.

    Args:
        lengths: The prompts' lengths.
        most: The number of tokens after which each request is finished.
        first: The token that each request has pending.
    """

    def __init__(self, lengths, most, first, **sampling):
        self.allocator = TokenToKVPoolAllocator(256, torch.float16, "cpu", None, False)
        self.free_at_start = self.allocator.available_size()
        self.lengths, self.first, self.sampling = lengths, first, sampling
        self.requests = [Request(length, limit) for length, limit in zip(lengths, most, strict=True)]
        self.slots = torch.zeros(8, 64, dtype=torch.int32)
        for row, length in enumerate(lengths):
            self.slots[row, :length] = self.allocator.alloc(length).to(torch.int32)
            self.requests[row].output_ids.append(first[row])
        tree_cache = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            is_chunk_cache=lambda: True,
            page_size=1,
            pretty_print=lambda: None,
        )
        self.batch = SimpleNamespace(
            reqs=list(self.requests),
            spec_info=draft_input(first),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=None,
            req_pool_indices=torch.arange(len(lengths)),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots),
            tree_cache=tree_cache,
            token_to_kv_pool_allocator=self.allocator,
            device="cpu",
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            sampling_info=Sampling(len(lengths), **sampling),
            has_grammar=False,
            return_hidden_states=True,
            return_logprob=False,
            out_cache_loc=None,
            input_ids=None,
            maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(
                hidden_size=HIDDEN, dtype=torch.float32, spec_hidden_size=HIDDEN, think_end_id=None
            ),
        )
        self.batch.batch_size = lambda: len(self.batch.reqs)

    def row_of(self, request):
        return self.requests.index(request)

    def forward(self, tree):
        """What the target's forward would give for the batch, with the tree's hidden states set."""
        last = [request.output_ids[-1] for request in self.batch.reqs]
        logits = torch.zeros(len(last), VOCABULARY)
        for row, token in enumerate(last):
            logits[row, next_token(token)] = 1
        tree.hidden_states = torch.tensor(last, dtype=torch.float32)[:, None].expand(-1, HIDDEN).contiguous()
        return SimpleNamespace(next_token_logits=logits, hidden_states=tree.hidden_states)

    def drop_finished(self):
        """What the scheduler does between two steps."""
        batch = self.batch
        for request in batch.reqs:
            if request.finished():
                self.allocator.free(self.slots[self.row_of(request), : request.kv_committed_len].to(torch.int64))
        kept = [row for row, request in enumerate(batch.reqs) if not request.finished()]
        rows = torch.tensor(kept, dtype=torch.long)
        batch.reqs = [batch.reqs[row] for row in kept]
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens[rows], batch.seq_lens_cpu[rows]
        batch.req_pool_indices = batch.req_pool_indices[rows]
        batch.sampling_info = Sampling(len(kept), **self.sampling)
        batch.spec_info = draft_input([request.output_ids[-1] for request in batch.reqs])
