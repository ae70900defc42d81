"""`--speculative-disable-batch-threshold` by the engine's own adaptive speculation.

The adaptive configuration names, by batch size, the numbers of draft steps to choose from. With one choice each, N
steps up to the threshold and none above, nothing is left to adapt: the batch size alone decides, at every step.
"""

import json
import logging
import os
import tempfile

logger = logging.getLogger(__name__)

FLAG = "--speculative-disable-batch-threshold"


def adaptive_config(threshold, steps):
    """The engine's configuration: `steps` draft steps for batches up to `threshold`, none above."""
    return {"1": {"candidate_steps": [steps]}, str(threshold + 1): {"candidate_steps": [0]}}


def faults_of(args):
    """What stands in the way besides what the engine itself does not support."""
    threshold, steps = args.speculative_disable_batch_threshold, args.speculative_num_steps
    faults = []
    if args.speculative_adaptive or args.speculative_adaptive_config is not None:
        faults.append("--speculative-adaptive and its configuration (the flag writes that configuration)")
    if threshold < 1:
        faults.append(f"a threshold of {threshold} (needs 1 or more; without speculation leave its flags out)")
    if steps is None or steps < 1:
        faults.append(f"--speculative-num-steps {steps} (give the number of steps below the threshold)")
    elif args.speculative_num_draft_tokens not in (None, steps + 1):
        faults.append(
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens} (needs {steps + 1}: steps + 1)"
        )
    return faults


def configure(server_args, args):
    """Turn the flag into the adaptive configuration; called before the engine looks at its adaptive flags.

    Args:
        server_args: ServerArgs to change.
        args: Where its values are read: itself, or from 0.5.23 the view of what is resolved so far.

    Raises:
        ValueError: All that stands in the way, in one message. The engine alone would warn and speculate always.
    """
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    threshold, steps = args.speculative_disable_batch_threshold, args.speculative_num_steps
    path = path_of(threshold, steps)
    if args.speculative_adaptive and args.speculative_adaptive_config == path:
        return  # arguments that were resolved before and are made again
    faults = faults_of(args)
    reason = adaptive_unsupported_reason(server_args)
    if reason is not None:
        faults.append(reason)
    if faults:
        raise ValueError(f"{FLAG} does not work with: {'; '.join(faults)}")
    write(path, adaptive_config(threshold, steps))
    if args is server_args:
        server_args.speculative_adaptive = True
        server_args.speculative_adaptive_config = path
    else:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(
            server_args, "dynspec_config.configure", speculative_adaptive=True, speculative_adaptive_config=path
        )
    logger.info(
        "[dynspec] limit=%d through %s; batch sizes are rounded up to a captured CUDA graph size first",
        threshold,
        path,
    )
    logger.warning("[dynspec] how fast this engine decodes with no draft step has not been measured: compare")
    most = args.max_running_requests
    if threshold >= (48 if most is None else most):
        logger.warning(
            "[dynspec] limit %d is never exceeded: at most %s requests run (--max-running-requests)",
            threshold,
            "48" if most is None else most,
        )


def path_of(threshold, steps):
    """Where the configuration is written: a place that every process of this server can read, named by what it says."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "sglang", f"dynspec-{steps}-steps-to-batch-{threshold}.json")


def write(path, config):
    """Write the configuration; several servers may do so at once."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".dynspec-")
    with os.fdopen(handle, "w", encoding="ascii") as out:
        json.dump(config, out)
    os.replace(temporary, path)
