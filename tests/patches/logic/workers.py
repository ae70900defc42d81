"""The wrapped methods on the engine's real worker classes: what is swapped in, for how long, and what is not touched."""

import contextlib
import inspect
from types import SimpleNamespace
from unittest import mock

import torch
from fakes import Request, Sampling, draft_input, python_kernels
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative import eagle_worker, eagle_worker_v2
from sglang.srt.speculative.dynspec import resources, worker_v1, worker_v2
from sglang.srt.speculative.dynspec.arguments import Thresholds
from sglang.srt.speculative.dynspec.policy import Policy

STEPS, DRAFT_TOKENS = 3, 4
NORMAL = ("attention", "graphs", "draft attention", "draft graphs")
ONE_TOKEN = ("attention 1", "graphs 1", "draft attention 1", "draft graphs 1")


def make_batch(size, *, extend=False, idle=False):
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend, is_idle=lambda: idle),
        is_extend_in_batch=False,
        spec_info=draft_input(list(range(size))),
        seq_lens=torch.full((size,), 7),
        seq_lens_cpu=torch.full((size,), 7),
        seq_lens_sum=7 * size,
        reqs=[Request(7) for _ in range(size)],
        sampling_info=Sampling(size),
        maybe_evict_swa=lambda: None,
        return_hidden_states=True,
    )
    batch.batch_size = lambda: size
    return batch


class Drafted(SimpleNamespace):
    """A tree that was really drafted."""

    draft_token_num = "drafted"

    def is_verify_input(self):
        return True


def unwrapped(cls, name):
    """The engine's own method: the patch has wrapped it on import."""
    return getattr(cls, name).__wrapped__


def make_v1():
    """(worker, target, seen): EAGLEWorker on stand-ins for everything below draft(), verify() and draft extend."""
    seen = []

    def state_of(worker, target):
        found = (target.attn_backend, target.graph_runner)
        return (*found, worker.draft_extend_attn_backend, worker.cuda_graph_runner_for_draft_extend)

    class Worker(eagle_worker.EAGLEWorker):
        forward_batch_generation = unwrapped(eagle_worker.EAGLEWorker, "forward_batch_generation")

        def draft(self, batch):
            return Drafted()

        def forward_draft_extend_after_decode(self, batch):
            seen.append(("draft extend", self.speculative_num_steps, state_of(self, target)))
            return batch.spec_info

        def verify(self, batch, spec_info=None):
            tree = batch.spec_info if spec_info is None else spec_info
            counts = (self.speculative_num_steps, self.speculative_num_draft_tokens)
            seen.append(("verify", tree.draft_token_num, counts, state_of(self, target)))
            size = len(batch.seq_lens)
            batch.spec_info = SimpleNamespace(verified_id=torch.zeros(size), input_ids=torch.zeros(size))
            result = SimpleNamespace(
                verified_id=torch.zeros(size),
                accept_tokens=torch.zeros(size),
                accept_length_per_req_cpu=[0] * size,
                num_correct_drafts_per_req_cpu=[0] * size,
                num_accepted_drafts_per_req_cpu=[0] * size,
                draft_extend_input=batch.spec_info,
            )
            four = "spec_info" in inspect.signature(eagle_worker.EAGLEWorker.verify).parameters
            return (SimpleNamespace(), result, None, False) if four else (SimpleNamespace(), result, False)

        def forward_target_extend(self, batch):
            seen.append(("prefill", state_of(self, target)))
            values = SimpleNamespace(hidden_states=None, mm_input_embeds=None), None, None, False
            return values if self.prefill_tells_graphs else values[:3]

        def forward_draft_extend(self, *_args):
            pass

    # Since 0.5.11 the method also says whether prefill ran in a graph.
    source = inspect.getsource(eagle_worker.EAGLEWorker.forward_target_extend)
    Worker.prefill_tells_graphs = "batch_result.can_run_cuda_graph," in source
    worker_v1.install(Worker)
    target = SimpleNamespace(attn_backend=NORMAL[0], graph_runner=NORMAL[1])
    worker = object.__new__(Worker)
    worker.speculative_num_steps, worker.speculative_num_draft_tokens, worker.topk = STEPS, DRAFT_TOKENS, 1
    worker.draft_extend_attn_backend, worker.cuda_graph_runner_for_draft_extend = NORMAL[2:]
    worker.draft_tp_context = lambda group: contextlib.nullcontext()
    worker._model_runner = SimpleNamespace(tp_group=None)
    worker.server_args = SimpleNamespace(enable_dp_attention=False)
    worker.adaptive_controller = None
    worker.speculative_algorithm = SimpleNamespace(is_standalone=lambda: False)
    return worker, target, seen


def give_state(module, worker, target, workers, thresholds):
    one_token = resources.for_workers(target, workers, (ONE_TOKEN[0], ONE_TOKEN[2]), (ONE_TOKEN[1], ONE_TOKEN[3]))
    state = module.DynamicSpeculation(Policy(Thresholds(*thresholds)), one_token)
    for holder in workers:
        holder.dynspec = state
    return state


def check_v1_swaps_for_the_length_of_a_step():
    """Limit 2, resume 1: off from 3, on again at 1; the normal set is back after every step, and for prefill."""
    with python_kernels():
        worker, target, seen = make_v1()
        give_state(worker_v1, worker, target, [worker], (2, 1))
        for size, off in ((1, False), (2, False), (3, True), (2, True), (1, False), (3, True)):
            seen.clear()
            worker.forward_batch_generation(make_batch(size))
            counts, parts, tree = ((0, 1), ONE_TOKEN, 1) if off else ((STEPS, DRAFT_TOKENS), NORMAL, "drafted")
            assert seen == [("verify", tree, counts, parts), ("draft extend", counts[0], parts)], (size, seen)
            assert (STEPS, DRAFT_TOKENS) == (worker.speculative_num_steps, worker.speculative_num_draft_tokens)
            assert NORMAL[:2] == (target.attn_backend, target.graph_runner)
        seen.clear()
        worker.forward_batch_generation(make_batch(9, extend=True))
        assert seen == [("prefill", NORMAL)]


def check_v1_restores_when_a_step_fails():
    """An exception in a step without speculation leaves the normal set in place."""
    with python_kernels():
        worker, target, _ = make_v1()
        state = give_state(worker_v1, worker, target, [worker], (0, 0))

        def fail(*_args):
            raise RuntimeError("CUDA error")

        type(worker).verify = fail
        try:
            worker.forward_batch_generation(make_batch(1))
        except RuntimeError as error:
            assert str(error) == "CUDA error"
        else:
            raise AssertionError("the engine's exception was swallowed")
        assert NORMAL[:2] == (target.attn_backend, target.graph_runner)
        assert (STEPS, DRAFT_TOKENS) == (worker.speculative_num_steps, worker.speculative_num_draft_tokens)
        assert not state.resources.active


def check_without_the_flag_all_is_the_engines():
    """A worker without state runs the engine's methods, however many requests there are."""
    with python_kernels():
        worker, _, seen = make_v1()
        worker.forward_batch_generation(make_batch(9))
        assert seen == [
            ("verify", "drafted", (STEPS, DRAFT_TOKENS), NORMAL),
            ("draft extend", STEPS, NORMAL),
        ]


def make_v2(forward=None):
    """(worker, draft worker, target, seen), as make_v1(); `forward` in place of the engine's."""
    seen = []

    class DraftWorker(eagle_worker_v2.EagleDraftWorker):
        def draft(self, batch):
            return Drafted()

        def _draft_extend_for_decode(self, batch, result):
            found = (self.draft_extend_attn_backend, self.cuda_graph_runner_for_draft_extend)
            seen.append(("draft extend", self.speculative_num_steps, found))

    class Worker(eagle_worker_v2.EAGLEWorkerV2):
        def verify(self, batch, *_args):
            size, width = len(batch.seq_lens), self.speculative_num_draft_tokens
            parts = (target.attn_backend, target.graph_runner)
            seen.append(("verify", batch.spec_info.draft_token_num, (self.speculative_num_steps, width), parts))
            fields = {"next_token_ids": torch.arange(size * width), "accept_lens": torch.ones(size, dtype=torch.int32)}
            fields["next_draft_input"] = draft_input([0] * size)
            if "speculative_num_draft_tokens" in GenerationBatchResult.__dataclass_fields__:
                fields["speculative_num_draft_tokens"] = width
            return GenerationBatchResult(**fields)

    Worker.forward_batch_generation = forward or unwrapped(eagle_worker_v2.EAGLEWorkerV2, "forward_batch_generation")
    worker_v2.install(Worker, DraftWorker)
    target = SimpleNamespace(attn_backend=NORMAL[0], graph_runner=NORMAL[1])
    worker, draft_worker = object.__new__(Worker), object.__new__(DraftWorker)
    worker._draft_worker, worker._target_worker = draft_worker, SimpleNamespace(model_runner=target)
    worker.plan_stream, worker.device, worker.topk = None, "cpu", 1
    for holder in (worker, draft_worker):
        holder.speculative_num_steps, holder.speculative_num_draft_tokens = STEPS, DRAFT_TOKENS
    draft_worker.draft_extend_attn_backend, draft_worker.cuda_graph_runner_for_draft_extend = NORMAL[2:]
    draft_worker.draft_tp_context = lambda group: contextlib.nullcontext()
    draft_worker.draft_runner = SimpleNamespace(tp_group=None)
    return worker, draft_worker, target, seen


def check_v2_swaps_for_the_length_of_a_step():
    """As v1; the draft worker's counts and parts too. Rows are as wide as the scheduler of that version reads them."""
    carries = "speculative_num_draft_tokens" in GenerationBatchResult.__dataclass_fields__
    with python_kernels():
        worker, draft_worker, target, seen = make_v2()
        give_state(worker_v2, worker, target, [worker, draft_worker], (2, 1))
        for size, off in ((2, False), (3, True), (2, True), (1, False)):
            seen.clear()
            result = worker.forward_batch_generation(make_batch(size))
            counts, parts, tree = ((0, 1), ONE_TOKEN, 1) if off else ((STEPS, DRAFT_TOKENS), NORMAL, "drafted")
            assert seen == [("verify", tree, counts, parts[:2]), ("draft extend", counts[0], parts[2:])], (size, seen)
            for holder in (worker, draft_worker):
                assert (STEPS, DRAFT_TOKENS) == (holder.speculative_num_steps, holder.speculative_num_draft_tokens)
            assert NORMAL[:2] == (target.attn_backend, target.graph_runner)
            found = (draft_worker.draft_extend_attn_backend, draft_worker.cuda_graph_runner_for_draft_extend)
            assert NORMAL[2:] == found
            if off and carries:
                assert (list(range(size)), 1) == (result.next_token_ids.tolist(), result.speculative_num_draft_tokens)
            elif off:
                rows = result.next_token_ids.reshape(size, DRAFT_TOKENS)
                assert list(range(size)) == rows[:, 0].tolist()
            else:
                assert size * DRAFT_TOKENS == result.next_token_ids.numel()


def check_v2_leaves_prefill_and_idle_alone():
    """Neither counts as a decode step: the policy does not see them."""
    with python_kernels():
        called = []
        worker, draft_worker, target, _ = make_v2(
            lambda self, batch: called.append((target.attn_backend, len(batch.seq_lens)))
        )
        state = give_state(worker_v2, worker, target, [worker, draft_worker], (2, 1))
        without_input = make_batch(9)
        without_input.spec_info = None
        for batch in (make_batch(9, extend=True), make_batch(9, idle=True), without_input):
            worker.forward_batch_generation(batch)
        assert [(NORMAL[0], 9)] * 3 == called
        assert not state.policy.off


def check_start():
    """The set is built once the engine's start is done; not without the flag, and not in classes that derive."""
    log = []

    class First(SimpleNamespace):
        def __init__(self, server_args, *, tp_rank):
            log.append("engine")
            self.tp_rank = tp_rank
            self._draft_worker = SimpleNamespace()

        forward_batch_generation = draft = forward_draft_extend_after_decode = None

    def build(worker, draft_worker, thresholds, *, deferred):
        log.append(("build", draft_worker is worker, tuple(thresholds)))

    for module, extra in ((worker_v1, ()), (worker_v2, (SimpleNamespace(draft=None),))):
        Worker = type("Worker", (First,), {})  # noqa: N806
        module.install(Worker, *extra)
        derived = type("Derived", (Worker,), {})
        flags = SimpleNamespace(speculative_disable_batch_threshold=8, speculative_resume_batch_threshold=None)
        none = SimpleNamespace(speculative_disable_batch_threshold=None, speculative_resume_batch_threshold=None)
        with mock.patch.object(resources, "build", build):
            log.clear()
            assert derived(server_args=flags, tp_rank=0).dynspec is None
            assert Worker(none, tp_rank=0).dynspec is None
            assert log == ["engine"] * 2
            worker = Worker(server_args=flags, tp_rank=1)
            assert log[2:] == ["engine", ("build", module is worker_v1, (8, 8))]
            assert worker.dynspec.policy.thresholds == (8, 8)
            if module is worker_v2:
                assert worker._draft_worker.dynspec is worker.dynspec
