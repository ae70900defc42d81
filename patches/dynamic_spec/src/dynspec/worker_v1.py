"""EAGLEWorker, the worker without overlap scheduling. Its methods are wrapped; none is copied."""

import functools
import os

import torch

from . import arguments, deferred, engine, policy, resources, root_tree, root_verify


class DynamicSpeculation:
    """What one worker holds.

    Attributes:
        policy: When speculation is off.
        resources: The one-token set.
        deferred: DeferredDraftExtend; None where the draft extend runs at once.
    """

    def __init__(self, decides, one_token_resources, deferred_extend=None):
        self.policy = decides
        self.resources = one_token_resources
        self.deferred = deferred_extend

    def settle(self):
        """Pay the draft extend that is owed: before anything else writes draft KV."""
        if self.deferred is not None and self.deferred.is_owed:
            with self.resources.in_place():
                self.deferred.pay(keep=True)


def install(worker_class):
    """Give EAGLEWorker dynamic speculation. Without the flag, and in subclasses, all stays the engine's."""
    engine_init = worker_class.__init__
    engine_forward = worker_class.forward_batch_generation
    engine_draft = worker_class.draft
    engine_draft_extend = worker_class.forward_draft_extend_after_decode

    @functools.wraps(engine_init)
    def start(self, server_args, *args, **kwargs):
        self.dynspec = None
        engine_init(self, server_args, *args, **kwargs)
        thresholds = arguments.thresholds_of(server_args)
        if thresholds is not None and type(self) is worker_class:  # StandaloneWorker derives from it
            defers = engine.draft_extend_can_wait() and os.environ.get("SGLANG_DYNSPEC_DEFER", "1") != "0"
            self.dynspec = DynamicSpeculation(
                policy.Policy(thresholds, speaks=self.tp_rank == 0),
                resources.build(self, self, thresholds, deferred=defers),
                deferred.DeferredDraftExtend(functools.partial(draft_extend_now, self)) if defers else None,
            )

    def draft_extend_now(self, batch):
        with engine.draft_contexts(self):
            return engine_draft_extend(self, batch)

    @functools.wraps(engine_forward)
    def forward_batch_generation(self, batch):
        state = getattr(self, "dynspec", None)
        if state is None:
            return engine_forward(self, batch)
        if engine.is_decode(batch) and state.policy.decide(batch.batch_size()):
            with state.resources.in_place():
                return engine_forward(self, batch)
        state.settle()
        return engine_forward(self, batch)

    @functools.wraps(engine_draft)
    def draft(self, batch):
        state = getattr(self, "dynspec", None)
        if state is None:
            return engine_draft(self, batch)
        if state.resources.active:
            return root_input(state, batch)
        if state.deferred is not None and not batch.forward_mode.is_idle():
            state.deferred.fill_in(batch)
        return engine_draft(self, batch)

    @functools.wraps(engine_draft_extend)
    def forward_draft_extend_after_decode(self, batch):
        state = getattr(self, "dynspec", None)
        if state is None or not state.resources.active or state.deferred is None:
            return engine_draft_extend(self, batch)
        bonus_tokens = batch.spec_info.input_ids  # of a root-only tree: one for each request that goes on
        state.deferred.owe(batch)
        return deferred.placeholder(self, bonus_tokens)

    worker_class.__init__ = start
    worker_class.forward_batch_generation = forward_batch_generation
    worker_class.draft = draft
    worker_class.forward_draft_extend_after_decode = forward_draft_extend_after_decode


def root_input(state, batch):
    """What draft() does to the batch, without drafting, and the root-only tree."""
    batch.maybe_evict_swa()
    for request in batch.reqs:
        request.decode_batch_idx += 1
    penalties = batch.sampling_info.penalizer_orchestrator
    if penalties.is_required:
        penalties.cumulate_output_tokens(engine.bonus_tokens_of(batch.spec_info).to(torch.int64))
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.return_hidden_states = False
    cheap = root_verify.root_verify_input() if state.deferred is not None else None
    tree = root_tree.build(batch, batch.seq_lens_sum, state.resources.target_attention, cheap)
    if cheap is not None:
        tree.deferred = state.deferred
    return tree
