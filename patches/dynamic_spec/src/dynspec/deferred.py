"""The draft's upkeep while speculation is off, one step late.

After every step the draft model runs over the new token ("draft extend"), so that its KV is complete when speculation
resumes: without it most drafts are rejected for the rest of a request. Nobody waits for its result while speculation
is off, but preparing it costs host time, with the GPU idle. So it is owed, and paid during the next step, while the
target's forward keeps the GPU busy.

Lost or late results cost acceptance and never a token: the target decides every token.
"""

import copy

import torch

# What a draft extend leaves for the next draft.
DRAFT_STATE = ("topk_p", "topk_index", "hidden_states")


class DeferredDraftExtend:
    """At most one draft extend is owed at a time.

    Args:
        run: Callable(batch) → EagleDraftInput: the engine's draft extend, in its contexts. Called while the one-token
            resources are in place.
    """

    def __init__(self, run):
        self._run = run
        self._owed = None  # (batch as it was, its unfinished requests)
        self._late = None  # (requests, {name of DRAFT_STATE: tensor}) of one that was paid between two steps
        self._pinned = None

    @property
    def is_owed(self):
        """Whether a draft extend has not been run yet."""
        return self._owed is not None

    def owe(self, batch):
        """Remember `batch`, whose spec_info is the draft extend's input. Its list of requests is merged in place."""
        seen = copy.copy(batch)
        seen.reqs = list(batch.reqs)
        self._owed = seen, [request for request in batch.reqs if not request.finished()]

    def pay(self, *, keep=False):
        """Run what is owed, if anything.

        Must happen before anybody else writes draft KV, and after whatever is still needed of the target's logits:
        all graph runners share their input and output buffers by name, and all graphs one memory pool.

        Args:
            keep: Keep the result for fill_in(), cloned, since graphs own its memory. Only worth it when the next step
                drafts: the next draft extend replaces it otherwise.
        """
        if self._owed is None:
            return
        (batch, requests), self._owed = self._owed, None
        result = self._run(batch)
        self._late = (requests, {name: getattr(result, name).clone() for name in DRAFT_STATE}) if keep else None

    def fill_in(self, batch):
        """Put kept results where the placeholders are: before the first draft after speculation was off."""
        if self._late is None:
            return
        (requests, kept), self._late = self._late, None
        row_of = {id(request): row for row, request in enumerate(requests)}
        pairs = [(row, row_of[id(request)]) for row, request in enumerate(batch.reqs) if id(request) in row_of]
        if pairs:
            to, source = torch.tensor(list(zip(*pairs)), device=kept["topk_p"].device)
            for name, values in kept.items():
                getattr(batch.spec_info, name)[to] = values[source]

    def tokens_on_host(self, tokens):
        """`tokens` as a list; what is owed is paid between starting the copy and waiting for it.

        The copy is enqueued before the draft extend, so it waits for the target alone.
        """
        if not tokens.is_cuda:
            self.pay()
            return tokens.tolist()
        if self._pinned is None or self._pinned.numel() < tokens.numel():
            self._pinned = torch.empty(max(256, tokens.numel()), dtype=tokens.dtype, pin_memory=True)
        host, copied = self._pinned[: tokens.numel()], torch.cuda.Event()
        host.copy_(tokens, non_blocking=True)
        copied.record()
        self.pay()
        copied.synchronize()
        return host.tolist()


def placeholder(worker, bonus_tokens):
    """EagleDraftInput of the right shapes that knows only the pending tokens, for as long as nobody drafts from it."""
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    rows, device = bonus_tokens.numel(), bonus_tokens.device
    return EagleDraftInput(
        bonus_tokens=bonus_tokens.to(torch.int32),
        topk_p=torch.ones((rows, worker.topk), dtype=torch.float32, device=device),
        topk_index=torch.zeros((rows, worker.topk), dtype=torch.int64, device=device),
        hidden_states=torch.zeros(
            (rows, EagleDraftInput.hidden_size_for(worker)), dtype=EagleDraftInput.dtype_for(worker), device=device
        ),
    )
