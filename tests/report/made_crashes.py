"""How the first three versions of the patch end under load, and how a load ends that no patch has to do with."""

from made_patches import patched


def frame(file, line, function, text, patch=None):
    return {
        "file": f"/opt/ml-env/lib/python3.11/site-packages/sglang/{file}",
        "line": line,
        "function": function,
        "text": text,
        "patch": patch,
    }


def crash(version, log):
    """How each of the first three versions ends under load."""
    worker = patched(version)["srt/speculative/eagle_worker.py"].split("\n")
    text = {
        1: "            result = self.target_worker",
        2: "            out_cache_loc, _ = alloc",
        3: "            batch.seq_lens.add_(1)",
    }[version]
    line = next(at for at, one in enumerate(worker, 1) if one.startswith(text))
    shown = worker[line - 1].strip()
    patch = f"dynamic_spec/v{version}"
    frames = [
        frame("srt/managers/scheduler.py", 4041, "run_scheduler_process", "scheduler.run_event_loop()"),
        frame("srt/managers/scheduler.py", 1534, "run_event_loop", "dispatch_event_loop(self)"),
        frame("srt/managers/scheduler.py", 3912, "dispatch_event_loop", "scheduler.event_loop_normal()"),
        frame("srt/utils/common.py", 124, "decorate_context", "return func(*args, **kwargs)"),
        frame("srt/managers/scheduler.py", 1552, "event_loop_normal", "result = self.run_batch(batch)"),
        frame(
            "srt/managers/scheduler.py", 3076, "run_batch", "batch_result = self.model_worker.forward_batch_generation("
        ),
        frame("srt/speculative/eagle_worker.py", line, "forward_batch_generation", shown, patch),
    ]
    if version == 1:
        frames += [
            frame("srt/managers/tp_worker.py", 472, "forward_batch_generation", "out = self.model_runner.forward("),
            frame("srt/model_executor/model_runner.py", 3439, "_forward_raw", "ret = self.forward_decode("),
            frame(
                "srt/model_executor/model_runner.py",
                3153,
                "forward_decode",
                "self.attn_backend.init_forward_metadata(forward_batch)",
            ),
            frame(
                "srt/layers/attention/triton_backend.py", 333, "init_forward_metadata", "bs = kv_indptr.shape[0] - 1"
            ),
        ]
    cause = {
        1: "AttributeError: 'NoneType' object has no attribute 'shape'",
        2: "ValueError: too many values to unpack (expected 2)",
        3: "RuntimeError: The size of tensor a (160) must match the size of tensor b (2) at non-singleton dimension 0",
    }[version]
    return {
        "cause": cause,
        "exit_code": None,
        "signal": "SIGKILL",
        "frames": frames,
        "patched": {
            "patch": patch,
            "file": "srt/speculative/eagle_worker.py",
            "line": line,
            "text": shown,
            "function": "forward_batch_generation",
            "exact": True,
        },
        "log": log,
        "tail": ["Killed"],
    }


def out_of_memory(log):
    """A crash in the load that no patch has to do with."""
    return {
        "cause": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "exit_code": 1,
        "signal": None,
        "frames": [
            frame("srt/managers/scheduler.py", 4012, "run_scheduler_process", "scheduler = Scheduler("),
            frame(
                "srt/model_executor/model_runner.py",
                1702,
                "init_memory_pool",
                'raise RuntimeError("Not enough memory. "',
            ),
        ],
        "patched": None,
        "log": log,
        "tail": [],
    }
