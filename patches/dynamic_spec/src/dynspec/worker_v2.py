"""EAGLEWorkerV2, the worker under overlap scheduling, and its EagleDraftWorker. Methods are wrapped; none is copied."""

import functools

from . import arguments, engine, known_lengths, policy, resources, root_tree


class DynamicSpeculation:
    """What one worker and its draft worker share.

    Attributes:
        policy: When speculation is off.
        resources: The one-token set.
    """

    def __init__(self, decides, one_token_resources):
        self.policy = decides
        self.resources = one_token_resources


def install(worker_class, draft_class):
    """Give EAGLEWorkerV2 dynamic speculation. Without the flag, and in subclasses, all stays the engine's."""
    engine_init = worker_class.__init__
    engine_forward = worker_class.forward_batch_generation
    engine_draft = draft_class.draft

    @functools.wraps(engine_init)
    def start(self, server_args, *args, **kwargs):
        self.dynspec = None
        engine_init(self, server_args, *args, **kwargs)
        thresholds = arguments.thresholds_of(server_args)
        if thresholds is not None and type(self) is worker_class:
            # The draft extend is not deferred here: scheduling the next step already overlaps with it.
            self.dynspec = self._draft_worker.dynspec = DynamicSpeculation(
                policy.Policy(thresholds, speaks=self.tp_rank == 0),
                resources.build(self, self._draft_worker, thresholds, deferred=False),
            )

    @functools.wraps(engine_forward)
    def forward_batch_generation(self, batch):
        state = getattr(self, "dynspec", None)
        if (
            state is None
            or not engine.is_decode(batch)
            or batch.spec_info is None
            or not state.policy.decide(len(batch.seq_lens))
        ):
            return engine_forward(self, batch)
        width, lengths = self.speculative_num_draft_tokens, batch.seq_lens_cpu
        with state.resources.in_place():
            result = engine_forward(self, batch)
        known_lengths.remember(result.next_draft_input, lengths)
        if not engine.result_carries_stride(result):
            widen(result, width)
        return result

    @functools.wraps(engine_draft)
    def draft(self, batch):
        state = getattr(self, "dynspec", None)
        if state is None or not state.resources.active:
            return engine_draft(self, batch)
        return root_tree.build(batch, int(batch.seq_lens_sum), state.resources.target_attention)

    worker_class.__init__ = start
    worker_class.forward_batch_generation = forward_batch_generation
    draft_class.draft = draft


def widen(result, width):
    """Lay one token a request out in rows of `width`.

    Before 0.5.12 the scheduler reads next_token_ids one step later, in rows as wide as the worker's count of draft
    tokens is by then; of each row it takes as many as were accepted, which is one.
    """
    rows = result.next_token_ids.new_zeros((result.accept_lens.numel(), width))
    rows[:, 0] = result.next_token_ids
    result.next_token_ids = rows.flatten()
