"""The one-token set: what the engine's constructors see while it is made, and that nothing of it stays behind."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from fakes import python_kernels
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor import cuda_graph_runner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import draft_utils, eagle_draft_extend_cuda_graph_runner
from sglang.srt.speculative.dynspec import one_token, resources
from sglang.srt.speculative.dynspec.arguments import Thresholds


def make_args(**changes):
    args = SimpleNamespace(
        speculative_disable_batch_threshold=8,
        speculative_resume_batch_threshold=6,
        speculative_algorithm="EAGLE",
        speculative_num_steps=3,
        speculative_num_draft_tokens=16,
        speculative_eagle_topk=4,
        cuda_graph_bs=[1, 2, 4, 8, 16],
        disable_cuda_graph=False,
        device="cuda",
        pp_size=1,
        max_running_requests=64,
    )
    vars(args).update(changes)
    return args


def build(args, mamba=None, graphs="graphs"):
    """(resources, what each constructor saw, facts before, facts after)."""
    seen = []

    def look(what):
        counts = (args.speculative_num_steps, args.speculative_num_draft_tokens, args.speculative_eagle_topk)
        worker_counts = (worker.speculative_num_steps, worker.speculative_num_draft_tokens)
        seen.append((what, counts, worker_counts, args.cuda_graph_bs and list(args.cuda_graph_bs)))

    def target_backend(*, init_new_workspace):
        assert init_new_workspace
        look("target attention")
        target.init_new_workspace = "changed"
        return "target attention"

    class Graphs:
        def __init__(self, runner):
            look(("target graphs", runner.attn_backend, runner.init_new_workspace))
            args.cuda_graph_bs.append(64)  # as get_batch_sizes_to_capture does
            runner.graph_runner = "left behind"
            self.capture_bs = args.cuda_graph_bs

    class DraftGraphs:
        def __init__(self, owner):
            look(("draft graphs", owner.draft_extend_attn_backend))
            self.capture_bs = [8]

    class Factory:
        def __init__(self, server_args, runner, topk, steps):
            seen.append(("factory", runner, topk, steps))

        def create_draft_extend_backend(self):
            look("draft attention")
            return "draft attention"

    target = SimpleNamespace(
        attn_backend="normal", graph_runner=graphs, init_new_workspace=False, mambaish_config=mamba
    )
    target._get_attention_backend = target_backend
    worker = SimpleNamespace(
        server_args=args,
        target_worker=SimpleNamespace(model_runner=target),
        draft_runner=SimpleNamespace(tp_group=None),
        draft_tp_context=lambda group: contextlib.nullcontext(),
        topk=4,
        speculative_num_steps=3,
        speculative_num_draft_tokens=16,
        draft_extend_attn_backend="normal draft",
        cuda_graph_runner_for_draft_extend=graphs,
    )

    def facts():
        """Everything that a constructor or the build may have changed."""
        holders = (args, target, worker)
        return [{name: str(value) for name, value in vars(holder).items()} for holder in holders]

    before = facts()
    with (
        python_kernels(),
        mock.patch.object(cuda_graph_runner, "CudaGraphRunner", Graphs),
        mock.patch.object(draft_utils, "DraftBackendFactory", Factory),
        mock.patch.object(eagle_draft_extend_cuda_graph_runner, "EAGLEDraftExtendCudaGraphRunner", DraftGraphs),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(2**30, 2**31)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=0),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        try:
            made = resources.build(worker, worker, Thresholds(8, 6), deferred=True)
        finally:
            after = facts()
            assert before == after, [
                {name: (a[name], b[name]) for name in a if a[name] != b[name]}
                for a, b in zip(before, after, strict=True)
            ]
    return made, seen, target, worker


def check_what_constructors_see():
    """One token and no steps; topk 1 for the target alone; only sizes that can be without speculation."""
    made, seen, target, worker = build(make_args())
    sizes = [8, 16]
    assert seen == [
        ("target attention", (0, 1, 1), (3, 16), sizes),
        (("target graphs", "target attention", False), (0, 1, 1), (3, 16), sizes),
        ("factory", worker.draft_runner, 4, 1),
        ("draft attention", (0, 1, 4), (0, 1), [*sizes, 64]),
        (("draft graphs", "draft attention"), (0, 1, 4), (0, 1), [*sizes, 64]),
    ]
    with made.in_place():
        assert (0, 1) == (worker.speculative_num_steps, worker.speculative_num_draft_tokens)
        assert ("target attention", "draft attention") == (target.attn_backend, worker.draft_extend_attn_backend)
        assert [8, 16, 64] == target.graph_runner.capture_bs
        assert made.active
    assert not made.active
    assert "normal" == target.attn_backend


def check_no_graphs():
    """Graphs disabled: none is captured, and a step runs eagerly."""
    made, seen, target, worker = build(make_args(disable_cuda_graph=True, cuda_graph_bs=None))
    assert not any("graphs" in str(what[0]) for what in seen)
    with made.in_place():
        assert target.graph_runner is None
        assert worker.cuda_graph_runner_for_draft_extend is None


def check_no_size_above_the_threshold():
    """All sizes are kept then, in a list of its own."""
    _, seen, _, _ = build(make_args(cuda_graph_bs=[1, 2, 4]))
    assert [1, 2, 4] == seen[0][3]


def check_recurrent_models_are_refused():
    """They keep a state per token that a swapped width would not match."""
    try:
        build(make_args(), mamba=object())
    except ValueError as error:
        assert "recurrent state" in str(error)
    else:
        raise AssertionError("not refused")


def check_flags_are_checked_again():
    """Engines are also started without the launcher's check."""
    try:
        build(make_args(enable_dp_attention=True))
    except ValueError as error:
        assert "--enable-dp-attention" in str(error)
    else:
        raise AssertionError("not refused")


def check_a_triton_backend_decodes():
    """Capture, replay, eager metadata and the forward go to the decode path, over as many tokens more as are uncounted."""
    calls = []

    def record(name):
        return lambda self, *args, **kwargs: calls.append((name, args, kwargs))

    names = [
        "init_forward_metadata",
        "init_forward_metadata_capture_cuda_graph",
        "init_forward_metadata_replay_cuda_graph",
        "forward_decode",
    ]
    lengths = torch.tensor([5, 7, 1, 1])
    rows = torch.arange(4)
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(TritonAttnBackend, name, record(name)))
        for uncounted in (1, 0):
            calls.clear()
            backend = object.__new__(TritonAttnBackend)
            backend.use_mla = False
            assert one_token.decode_view(backend, uncounted) is backend
            assert one_token.is_decode_view(backend)
            backend.init_forward_metadata_capture_cuda_graph(
                4, 4, rows, lengths, None, ForwardMode.TARGET_VERIFY, SimpleNamespace()
            )
            backend.init_forward_metadata_replay_cuda_graph(
                bs=2,
                req_pool_indices=rows,
                seq_lens=lengths,
                seq_lens_sum=12,
                encoder_lens=None,
                forward_mode=ForwardMode.DRAFT_EXTEND,
                spec_info=SimpleNamespace(),
                seq_lens_cpu=lengths,
            )
            eager = SimpleNamespace(
                forward_mode=ForwardMode.TARGET_VERIFY,
                spec_info=SimpleNamespace(),
                seq_lens=lengths,
                seq_lens_sum=14,
                batch_size=4,
            )
            backend.init_forward_metadata(eager)
            backend.forward_extend(1, 2, 3, "layer", "batch", save_kv_cache=True)
            capture, replay, metadata, forward = calls
            assert (lengths + uncounted).tolist() == capture[1][3].tolist()
            assert (ForwardMode.DECODE, None) == capture[1][5:]
            assert (2, [5 + uncounted, 7 + uncounted], 12 + 2 * uncounted) == (
                replay[1][0],
                replay[1][2].tolist(),
                replay[1][3],
            )
            assert (ForwardMode.DECODE, None) == replay[1][5:7]
            seen = metadata[1][0]
            assert (ForwardMode.DECODE, None, 14 + 4 * uncounted) == (
                seen.forward_mode,
                seen.spec_info,
                seen.seq_lens_sum,
            )
            assert (lengths + uncounted).tolist() == seen.seq_lens.tolist()
            assert (ForwardMode.TARGET_VERIFY, 14) == (eager.forward_mode, eager.seq_lens_sum), "the batch is not ours"
            assert ("forward_decode", (1, 2, 3, "layer", "batch"), {"save_kv_cache": True}) == forward


def check_other_backends_are_left_alone():
    """MLA, subclasses and other makers' backends keep their verify kernel, and say that no mask may be left out."""

    class Derived(TritonAttnBackend):
        pass

    mla, derived = object.__new__(TritonAttnBackend), object.__new__(Derived)
    mla.use_mla, derived.use_mla = True, False
    for backend, kind in ((mla, TritonAttnBackend), (derived, Derived), (SimpleNamespace(), SimpleNamespace)):
        assert one_token.decode_view(backend, 1) is backend
        assert type(backend) is kind
        assert not one_token.is_decode_view(backend)
