"""The flags of dynamic speculation, and the combinations that are refused at start."""

import logging
from typing import NamedTuple, Optional

logger = logging.getLogger(__name__)

FLAG = "--speculative-disable-batch-threshold"
RESUME_FLAG = "--speculative-resume-batch-threshold"

# Other speculative algorithms have workers of their own, which nothing here has looked at.
ALGORITHMS = ("EAGLE", "EAGLE3")

# Flags that change what a step is made of, or make ranks see different batches.
REFUSED_SWITCHES = {
    "enable_dp_attention": "ranks see batches of different sizes and would decide differently",
    "speculative_adaptive": "it swaps the same objects",
    "enable_two_batch_overlap": "it splits a batch over attention backends of its own",
    "enable_pdmux": "it splits a batch over streams with graphs of their own",
    "enable_multi_layer_eagle": "its draft worker is another one",
    "enable_lora": "its graph buffers belong to one graph runner",
}


class Thresholds(NamedTuple):
    """Speculation goes off in batches above `limit`; once off, it comes back in batches of at most `resume`."""

    limit: int
    resume: int


def thresholds_of(server_args) -> Optional[Thresholds]:
    """What the flags say; None where speculation is never switched off."""
    limit = getattr(server_args, "speculative_disable_batch_threshold", None)
    if limit is None:
        return None
    resume = getattr(server_args, "speculative_resume_batch_threshold", None)
    return Thresholds(limit, limit if resume is None else resume)


def check(server_args) -> None:
    """Refuse what this patch does not cover: called by ServerArgs.check_server_args() and again by every worker.

    Raises:
        ValueError: All that stands in the way, in one message.
    """
    thresholds = thresholds_of(server_args)
    if thresholds is None:
        if getattr(server_args, "speculative_resume_batch_threshold", None) is not None:
            raise ValueError(f"{RESUME_FLAG} needs {FLAG}")
        return
    faults = []
    if server_args.speculative_algorithm not in ALGORITHMS:
        faults.append(f"--speculative-algorithm {server_args.speculative_algorithm} (needs EAGLE or EAGLE3)")
    if not 0 <= thresholds.resume <= thresholds.limit:
        faults.append(f"limit {thresholds.limit} with resume {thresholds.resume} (needs 0 <= {RESUME_FLAG} <= {FLAG})")
    for name, reason in REFUSED_SWITCHES.items():
        if getattr(server_args, name, False):
            faults.append(f"--{name.replace('_', '-')} ({reason})")
    if server_args.pp_size > 1:
        faults.append("--pipeline-parallel-size above 1")
    if not str(server_args.device).startswith("cuda"):
        faults.append(f"--device {server_args.device} (needs cuda)")
    if faults:
        raise ValueError(f"{FLAG} does not work with: {'; '.join(faults)}")
    _warn(server_args, thresholds)


def _warn(server_args, thresholds):
    most = server_args.max_running_requests
    if most is not None and thresholds.limit >= most:
        # The engine makes it 48 under speculation where it is not given.
        logger.warning(
            "[dynspec] limit %d is never exceeded: at most %d requests run (--max-running-requests)",
            thresholds.limit,
            most,
        )
    if getattr(server_args, "disaggregation_mode", "null") not in (None, "null"):
        logger.warning("[dynspec] not tried with prefill and decode on different servers")
