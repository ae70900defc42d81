"""The second set of everything whose shape depends on the tokens a request brings to a step, made for one token."""

import contextlib
import logging
import time

import torch

from . import arguments, engine, one_token

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def replaced(parts):
    """Set every (object, attribute, value) for the length of a block; all are put back whatever happens in it."""
    kept = [(holder, name, getattr(holder, name)) for holder, name, _ in parts]
    try:
        for holder, name, value in parts:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in reversed(kept):
            setattr(holder, name, value)


class OneTokenResources:
    """What a step without speculation uses in place of the engine's.

    Args:
        target_attention: The target's attention backend for one token a request.
        parts: [(object, attribute, value)] to set for the length of such a step.
    """

    def __init__(self, target_attention, parts):
        self.target_attention = target_attention
        self.active = False  # a step without speculation is running
        self._parts = parts

    @contextlib.contextmanager
    def in_place(self):
        """For the length of a block the worker has the one-token set; prefill and drafting always find the other."""
        with replaced(self._parts):
            self.active = True
            try:
                yield
            finally:
                self.active = False


def for_workers(target, workers, attention, graphs):
    """OneTokenResources that swap `attention` and `graphs` (target's, draft's) in.

    Args:
        target: The target's ModelRunner.
        workers: All objects that hold the step and token counts; the last one owns the draft's parts.
        attention, graphs: (target's, draft extend's).
    """
    parts = [
        (target, "attn_backend", attention[0]),
        (target, "graph_runner", graphs[0]),
        (workers[-1], "draft_extend_attn_backend", attention[1]),
        (workers[-1], "cuda_graph_runner_for_draft_extend", graphs[1]),
    ]
    for worker in workers:
        parts += [(worker, "speculative_num_steps", 0), (worker, "speculative_num_draft_tokens", 1)]
    return OneTokenResources(attention[0], parts)


def build(worker, draft_worker, thresholds, *, deferred):
    """Make the one-token set at the end of a worker's start, on every rank in the same order.

    Args:
        worker: EAGLEWorker or EAGLEWorkerV2.
        draft_worker: The owner of the draft side: v1's worker itself, v2's EagleDraftWorker.
        thresholds: Batch sizes above which it will be used; smaller graphs are not captured.
        deferred: Whether the draft extend will be deferred; for the log.

    Returns:
        OneTokenResources.

    Raises:
        ValueError: The model or the flags are not supported.
    """
    server_args, target = worker.server_args, worker.target_worker.model_runner
    arguments.check(server_args)
    if getattr(target, "mambaish_config", None) is not None:
        raise ValueError(f"{arguments.FLAG} does not work with models that keep a recurrent state (Mamba, GDN)")
    began, free, reserved = time.perf_counter(), torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    one_token_args = [(server_args, "speculative_num_steps", 0), (server_args, "speculative_num_draft_tokens", 1)]
    if server_args.cuda_graph_bs:
        # Batches that small are never without speculation. A list of our own in any case: capturing appends to it.
        sizes = [size for size in server_args.cuda_graph_bs if size > thresholds.resume]
        one_token_args.append((server_args, "cuda_graph_bs", sizes or list(server_args.cuda_graph_bs)))
    # Only here: at run time server_args keep the full counts, because the scheduler allocates by them before the
    # worker decides, and the step in which speculation resumes must fit.
    with replaced(one_token_args):
        target_attention, target_graphs = _for_target(server_args, target)
        draft_attention, draft_graphs = _for_draft_extend(server_args, draft_worker)
    torch.cuda.synchronize()
    logger.info(
        "[dynspec] ready: limit=%d resume=%d deferred draft extend=%s attention=%s target graphs=%s "
        "draft-extend graphs=%s elapsed=%.2f s mem=%.3f GB (torch reserved +%.3f GB)",
        thresholds.limit,
        thresholds.resume,
        deferred,
        type(target_attention).__name__,
        target_graphs and target_graphs.capture_bs,
        draft_graphs and draft_graphs.capture_bs,
        time.perf_counter() - began,
        (free - torch.cuda.mem_get_info()[0]) / 2**30,
        (torch.cuda.memory_reserved() - reserved) / 2**30,
    )
    if not one_token.is_decode_view(target_attention):
        logger.warning(
            "[dynspec] %s verifies one token with the kernel it has for several: how fast that is has not been "
            "measured; compare with a server without speculation",
            type(target_attention).__name__,
        )
    workers = [worker] if worker is draft_worker else [worker, draft_worker]
    return for_workers(target, workers, (target_attention, draft_attention), (target_graphs, draft_graphs))


def _for_target(server_args, target):
    """(attention backend, CUDA graphs or None) of the target.

    A backend of its own, because backends freeze the number of draft tokens when they are made and own the buffers
    that graphs read: a second token width through the first one would corrupt its graphs silently. Outside the
    speculative MoE contexts: it is the target that is captured.
    """
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    wanted = not server_args.disable_cuda_graph and target.graph_runner is not None
    own_workspace = target.init_new_workspace
    kept = [(target, name, getattr(target, name)) for name in ("init_new_workspace", "attn_backend", "graph_runner")]
    with replaced([*kept, (server_args, "speculative_eagle_topk", 1)]):
        attention = target._get_attention_backend(init_new_workspace=True)  # noqa: SLF001
        attention = one_token.decode_view(attention, uncounted=1)
        target.init_new_workspace = own_workspace
        target.attn_backend = attention  # the runner takes it from there
        return attention, CudaGraphRunner(target) if wanted else None


def _for_draft_extend(server_args, draft_worker):
    """(attention backend, CUDA graphs or None) of the draft's catching up; the draft's own graphs are made for more.

    The real topk: what the draft extend leaves behind starts the next real draft.
    """
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    draft, graphs_name = engine.draft_runner_of(draft_worker), "cuda_graph_runner_for_draft_extend"
    wanted = not server_args.disable_cuda_graph and getattr(draft_worker, graphs_name) is not None
    parts = [(draft_worker, "speculative_num_steps", 0), (draft_worker, "speculative_num_draft_tokens", 1)]
    parts += [(draft_worker, name, getattr(draft_worker, name)) for name in ("draft_extend_attn_backend", graphs_name)]
    with replaced(parts), engine.draft_contexts(draft_worker):
        # One step: none would build an empty multi-step backend, which crashes, and one needs no such backend.
        factory = DraftBackendFactory(server_args, draft, draft_worker.topk, 1)
        attention = one_token.decode_view(factory.create_draft_extend_backend(), uncounted=0)
        draft_worker.draft_extend_attn_backend = attention
        return attention, EAGLEDraftExtendCudaGraphRunner(draft_worker) if wanted else None
