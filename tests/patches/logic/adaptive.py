"""The flag through the engine's own resolution of arguments, and what its adaptive speculation makes of the result."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import types

# Libraries that the environment on the CPU leaves out and that the argument parser imports on its way.
_LEFT_OUT = ("xgrammar", "xgrammar.structural_tag", "tvm_ffi")


class _Anything:
    @classmethod
    def __get_pydantic_core_schema__(cls, *_args):
        from pydantic_core import core_schema

        return core_schema.any_schema()


def _stand_in(name):
    def attribute(wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (_Anything,), {})

    module = types.ModuleType(name)
    module.__getattr__ = attribute
    module.__file__, module.__path__ = f"{name}.py", []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


for _name in _LEFT_OUT:
    if _name.partition(".")[0] in sys.modules or importlib.util.find_spec(_name.partition(".")[0]) is None:
        sys.modules[_name] = _stand_in(_name)

from sglang.srt.server_args import prepare_server_args  # noqa: E402
from sglang.srt.speculative import adaptive_spec_params, dynspec_config  # noqa: E402

FLAGS = """
    --device cpu --attention-backend torch_native --dtype float32 --grammar-backend none --mem-fraction-static 0.1
    --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1
    --speculative-disable-batch-threshold 8
""".split()


def resolve(*more):
    """The engine's arguments, resolved as its launcher would."""
    model = os.environ["DEPLOYCTL_TEST_MODEL"]
    args = prepare_server_args(["--model-path", model, "--speculative-draft-model-path", model, *FLAGS, *more])
    if hasattr(args, "resolve_once"):
        args.resolve_once()
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(args)
    return args


def refusal(*more):
    """The text with which these flags are refused."""
    try:
        resolve(*more)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"not refused: {more}")


def check_the_flag_becomes_the_configuration():
    """Adaptive speculation is on with one choice of steps on each side of the threshold."""
    args = resolve()
    assert args.speculative_adaptive is True
    assert args.speculative_num_draft_tokens == 4
    assert args.speculative_disable_batch_threshold == 8
    with open(args.speculative_adaptive_config, encoding="utf-8") as source:
        assert json.load(source) == {"1": {"candidate_steps": [3]}, "9": {"candidate_steps": [0]}}
    assert args.speculative_adaptive_config.startswith(os.environ["XDG_CACHE_HOME"])


def check_without_the_flag_nothing_changes():
    """The engine's defaults."""
    FLAGS.remove("--speculative-disable-batch-threshold")
    FLAGS.remove("8")
    try:
        args = resolve()
    finally:
        FLAGS.extend(("--speculative-disable-batch-threshold", "8"))
    assert not args.speculative_adaptive
    assert args.speculative_adaptive_config is None
    assert args.speculative_disable_batch_threshold is None


def check_what_the_engine_would_drop_is_refused():
    """Each of these the engine itself answers with a warning, and then speculates at every batch size."""
    assert "supported" in refusal("--enable-dp-attention", "--tp-size", "2", "--dp-size", "2")
    assert "topk" in refusal("--speculative-eagle-topk", "4")
    assert "enable_two_batch_overlap" in refusal("--enable-two-batch-overlap")
    assert "enable_pdmux" in refusal("--enable-pdmux")
    assert "multi_layer" in refusal("--enable-multi-layer-eagle")
    assert "only EAGLE/EAGLE3" in refusal("--speculative-algorithm", "STANDALONE")


def check_what_makes_no_sense_is_refused():
    """All faults in one message, with what to do."""
    text = refusal("--speculative-disable-batch-threshold", "0", "--speculative-adaptive")
    assert "a threshold of 0" in text
    assert "--speculative-adaptive" in text
    assert "needs 4: steps + 1" in refusal("--speculative-num-draft-tokens", "16")


def _steps(threshold, graph_sizes):
    """{batch size: draft steps} as the engine chooses them."""
    path = dynspec_config.path_of(threshold, 3)
    dynspec_config.write(path, dynspec_config.adaptive_config(threshold, 3))
    params = adaptive_spec_params.AdaptiveSpeculativeParams(initial_steps=3, cfg_path=path)
    params.set_cuda_graph_bs(graph_sizes)
    for batch_size in range(1, 65):
        for drafts in (0, 3):  # nothing was accepted, all was: neither may move it
            for _ in range(50):
                params.on_verify_complete([drafts] * batch_size, batch_size)
    return {size: params.get_steps_for_batch(size) for size in range(1, 65)}


def check_the_batch_size_alone_decides():
    """Three steps up to the threshold and none above, whatever is accepted, with graphs and without."""
    for sizes in (None, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]):
        assert {size: 3 if size <= 8 else 0 for size in range(1, 65)} == _steps(8, sizes)


def check_thresholds_are_rounded_to_graph_sizes():
    """As the flag's help says: between two captured sizes the larger one counts."""
    assert {size: 3 if size <= 32 else 0 for size in range(1, 65)} == _steps(34, [1, 8, 16, 24, 32, 40, 48, 56, 64])


def check_resolved_arguments_can_be_resolved_again():
    """Some launchers make the arguments a second time from their fields."""
    namespace = types.SimpleNamespace(
        speculative_disable_batch_threshold=8,
        speculative_num_steps=3,
        speculative_adaptive=True,
        speculative_adaptive_config=dynspec_config.path_of(8, 3),
    )
    with contextlib.redirect_stderr(io.StringIO()):
        dynspec_config.configure(namespace, namespace)
