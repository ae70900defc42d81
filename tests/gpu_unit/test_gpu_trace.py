"""A profiler's trace in numbers."""

import gzip
import json

import pytest

from tests.gpu import trace


def _event(category, name, start, length, **more):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, **more}


EVENTS = [
    _event("kernel", "gemm", 0, 100),
    _event("kernel", "attention", 50, 100),  # beside the first on another stream
    _event("gpu_memcpy", "Memcpy DtoH", 300, 50),
    _event("kernel", "gemm", 350, 50),
    _event("cuda_runtime", "cudaLaunchKernelExC", 1, 2),
    _event("cuda_driver", "cuLaunchKernelEx", 3, 2),
    _event("cuda_runtime", "cudaGraphLaunch", 5, 2),
    _event("cuda_runtime", "cudaMemcpyAsync", 7, 2),
    _event("cuda_runtime", "cudaStreamSynchronize", 9, 2),
    _event("cuda_runtime", "cudaEventRecord", 11, 2),
    _event("cpu_op", "aten::mm", 0, 400),
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 5000},
]


def test_counts_are_per_step_and_idle_time_is_what_no_stream_covers():
    """Overlapping kernels are busy once; CPU operations are not the GPU's."""
    found = trace.summary(EVENTS, 2)
    assert {
        "steps": 2,
        "kernels": 1.5,
        "gpu_copies": 0.5,
        "launches": 1.0,
        "graph_launches": 0.5,
        "copies": 0.5,
        "synchronizations": 0.5,
        "step_ms": 0.2,
        "gpu_busy_ms": 0.125,
        "gpu_idle_share": 0.375,
        "most_kernels": {"gemm": 1.0, "attention": 0.5},
    } == found


def test_a_trace_without_gpu_has_no_idle_share():
    """Absent, not zero."""
    assert trace.summary([], 1)["gpu_idle_share"] is None


def test_no_steps_are_refused():
    """Nothing can be divided by them."""
    with pytest.raises(ValueError, match="no steps"):
        trace.summary(EVENTS, 0)


def test_the_union_of_spans():
    """Nested, touching and separate ones, in any order."""
    assert 7.0 == trace.union_us([(10, 12), (0, 4), (1, 2), (4, 5)])


@pytest.mark.parametrize("wrapped", [True, False])
def test_files_are_read_gzipped_and_in_both_shapes(tmp_path, wrapped):
    """Chrome's format is a list, or an object that holds one."""
    path = tmp_path / "trace.json.gz"
    content = {"traceEvents": EVENTS} if wrapped else EVENTS
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert EVENTS == trace.read(path)
    plain = tmp_path / "trace.json"
    plain.write_text(json.dumps(content))
    assert EVENTS == trace.read(plain)
