"""What engine versions 0.5.9 to 0.5.12 call differently, and facts about them. Nothing else here knows a version."""

import contextlib
import dataclasses
import functools


def field_names(of):
    """Names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(of)}


def bonus_tokens_of(draft_input):
    """The token each request has pending: its KV is not written yet. `verified_id` before 0.5.12."""
    tokens = getattr(draft_input, "bonus_tokens", None)
    return draft_input.verified_id if tokens is None else tokens


@functools.lru_cache(maxsize=None)
def tree_prefix():
    """The tree fields are retrive_* before 0.5.11, retrieve_* since."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return "retrieve" if "retrieve_index" in field_names(EagleVerifyInput) else "retrive"


@functools.lru_cache(maxsize=None)
def draft_extend_can_wait():
    """Whether verify() hands the draft extend over as a value of the shape that `deferred` and `root_verify` build.

    Since 0.5.12. Asked by looking at the classes and not at the version, so that a source tree between two releases is
    judged by what it holds.
    """
    from sglang.srt.speculative import eagle_info

    return (
        hasattr(eagle_info, "EagleDraftExtendInput")
        and "bonus_tokens" in field_names(eagle_info.EagleDraftInput)
        and field_names(eagle_info.EagleVerifyOutput)
        == {
            "draft_extend_input",
            "logits_output",
            "accept_tokens",
            "num_correct_drafts_per_req_cpu",
            "accept_indices",
        }
    )


def result_carries_stride(result):
    """Whether the scheduler takes the row width of next_token_ids from the result itself (0.5.12)."""
    return hasattr(result, "speculative_num_draft_tokens")


def draft_runner_of(draft_worker):
    """The draft's ModelRunner: `draft_runner` in the overlap worker, `draft_model_runner` in v1."""
    return getattr(draft_worker, "draft_runner", None) or draft_worker.draft_model_runner


@contextlib.contextmanager
def draft_contexts(draft_worker):
    """The contexts in which the engine runs its draft model: its tensor-parallel group and its MoE backends."""
    from sglang.srt.layers.moe import utils as moe

    group = draft_worker.draft_tp_context(draft_runner_of(draft_worker).tp_group)
    with group, moe.speculative_moe_backend_context(), moe.speculative_moe_a2a_backend_context():
        yield


def is_decode(batch):
    """A decode step, and not a prefill, a mixed or an idle one."""
    mode = batch.forward_mode
    return not (mode.is_extend() or batch.is_extend_in_batch or mode.is_idle())
