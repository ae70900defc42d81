"""The arguments of the server."""

import argparse
import dataclasses
import math
from typing import List, Optional

STANDIN_MODES = {
    "ok": "works",
    "early200": "/v1/models answers 200 from the first second, /health stays 503 until the load ends",
    "dead200": "the scheduler aborts (at --standin-die-at after ready, else at the first request); health stays 200",
    "slowhealth": "health answers only after --standin-health-delay",
    "die": "CUDA out of memory at --standin-die-at of the load",
    "garbage": "every answer is one repeated token",
    "empty": "every answer is empty",
    "nulltext": "every answer's text is null",
    "html": "every answer is a web page with status 200",
    "burst": "the scheduler crashes when more than --standin-burst-limit requests run at once",
    "burst-hang": "requests above --standin-burst-limit are never answered",
    "silent": "no log line for the whole load",
    "stubborn": "SIGTERM is ignored",
    "orphan": "the schedulers survive the server's death",
    "oldcrash": "the scheduler crashes (as dead200), the server lives on without it, as 0.5.9 did",
    "exit0": "leaves with status 0 after ready",
    "sigsegv": "the server dies by SIGSEGV (at --standin-die-at of the load, else after ready)",
    "portlate": "binds the port only after the load, as the engine does",
}


def duration(text):
    """A number of the stand-in's own options: finite and not negative."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("must be finite and not negative")
    return value


@dataclasses.dataclass
class ServerArgs:
    # Model and tokenizer
    model_path: str
    tokenizer_path: Optional[str] = None
    served_model_name: Optional[str] = None
    trust_remote_code: bool = False
    context_length: Optional[int] = None
    dtype: str = "auto"
    quantization: Optional[str] = None
    kv_cache_dtype: str = "auto"

    # HTTP server
    host: str = "127.0.0.1"
    port: int = 30000
    skip_server_warmup: bool = False
    api_key: Optional[str] = None

    # Memory and scheduling
    mem_fraction_static: Optional[float] = None
    max_running_requests: Optional[int] = None
    max_total_tokens: Optional[int] = None
    chunked_prefill_size: Optional[int] = None
    page_size: Optional[int] = None
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    watchdog_timeout: float = 300

    # Parallelism
    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: Optional[str] = None

    # Logging
    log_level: str = "info"
    decode_log_interval: int = 40
    enable_metrics: bool = False

    # Kernels and graphs
    attention_backend: Optional[str] = None
    sampling_backend: Optional[str] = None
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: Optional[int] = None

    # Speculative decoding
    speculative_algorithm: Optional[str] = None
    speculative_draft_model_path: Optional[str] = None
    speculative_num_steps: Optional[int] = None
    speculative_eagle_topk: Optional[int] = None
    speculative_num_draft_tokens: Optional[int] = None

    # The stand-in's own: how it loads and how it fails
    standin_load: float = 3.0
    standin_step_ms: float = 5.0
    standin_mode: str = "ok"
    standin_die_at: Optional[float] = None
    standin_fail_rank: int = 0
    standin_health_delay: float = 3.0
    standin_burst_limit: int = 4

    def __post_init__(self):
        if self.tokenizer_path is None:
            self.tokenizer_path = self.model_path
        if self.served_model_name is None:
            self.served_model_name = self.model_path
        if not 1 <= self.port <= 65535:
            raise ValueError("port (%d) must be between 1 and 65535" % self.port)
        self._handle_speculative_decoding()
        if self.max_running_requests is None:
            self.max_running_requests = 2048

    def _handle_speculative_decoding(self):
        if self.speculative_algorithm is None:
            return
        if self.max_running_requests is None:
            self.max_running_requests = 48
        if self.speculative_num_steps is None:
            self.speculative_num_steps = 5
        if self.speculative_eagle_topk is None:
            self.speculative_eagle_topk = 4
        if self.speculative_num_draft_tokens is None:
            self.speculative_num_draft_tokens = 16

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser):
        # Model and tokenizer
        parser.add_argument("--model-path", "--model", type=str, required=True, help="The path of the model weights.")
        parser.add_argument("--tokenizer-path", type=str, default=ServerArgs.tokenizer_path)
        parser.add_argument("--served-model-name", type=str, default=ServerArgs.served_model_name)
        parser.add_argument("--trust-remote-code", action="store_true")
        parser.add_argument("--context-length", type=int, default=ServerArgs.context_length)
        parser.add_argument("--dtype", type=str, default=ServerArgs.dtype)
        parser.add_argument("--quantization", type=str, default=ServerArgs.quantization)
        parser.add_argument("--kv-cache-dtype", type=str, default=ServerArgs.kv_cache_dtype)

        # HTTP server
        parser.add_argument("--host", type=str, default=ServerArgs.host, help="The host of the HTTP server.")
        parser.add_argument("--port", type=int, default=ServerArgs.port, help="The port of the HTTP server.")
        parser.add_argument("--skip-server-warmup", action="store_true")
        parser.add_argument("--api-key", type=str, default=ServerArgs.api_key)

        # Memory and scheduling
        parser.add_argument("--mem-fraction-static", type=float, default=ServerArgs.mem_fraction_static)
        parser.add_argument("--max-running-requests", type=int, default=ServerArgs.max_running_requests)
        parser.add_argument("--max-total-tokens", type=int, default=ServerArgs.max_total_tokens)
        parser.add_argument("--chunked-prefill-size", type=int, default=ServerArgs.chunked_prefill_size)
        parser.add_argument("--page-size", type=int, default=ServerArgs.page_size)
        parser.add_argument("--disable-overlap-schedule", action="store_true")
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--watchdog-timeout", type=float, default=ServerArgs.watchdog_timeout)

        # Parallelism
        parser.add_argument(
            "--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int, default=ServerArgs.tp_size
        )
        parser.add_argument("--nnodes", type=int, default=ServerArgs.nnodes)
        parser.add_argument("--node-rank", type=int, default=ServerArgs.node_rank)
        parser.add_argument("--dist-init-addr", "--nccl-init-addr", type=str, default=ServerArgs.dist_init_addr)

        # Logging
        parser.add_argument("--log-level", type=str, default=ServerArgs.log_level)
        parser.add_argument("--decode-log-interval", type=int, default=ServerArgs.decode_log_interval)
        parser.add_argument("--enable-metrics", action="store_true")

        # Kernels and graphs
        parser.add_argument("--attention-backend", type=str, default=ServerArgs.attention_backend)
        parser.add_argument("--sampling-backend", type=str, default=ServerArgs.sampling_backend)
        parser.add_argument("--disable-cuda-graph", action="store_true")
        parser.add_argument("--cuda-graph-max-bs", type=int, default=ServerArgs.cuda_graph_max_bs)

        # Speculative decoding
        parser.add_argument(
            "--speculative-algorithm",
            type=str,
            choices=["EAGLE", "EAGLE3"],
            help="Speculative algorithm.",
        )
        parser.add_argument(
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            type=str,
            help="The path of the draft model weights.",
        )
        parser.add_argument(
            "--speculative-num-steps",
            type=int,
            help="The number of steps sampled from draft model in Speculative Decoding.",
            default=ServerArgs.speculative_num_steps,
        )
        parser.add_argument(
            "--speculative-eagle-topk",
            type=int,
            help="The number of tokens sampled from the draft model in eagle2 each step.",
            default=ServerArgs.speculative_eagle_topk,
        )
        parser.add_argument(
            "--speculative-num-draft-tokens",
            type=int,
            help="The number of tokens sampled from the draft model in Speculative Decoding.",
            default=ServerArgs.speculative_num_draft_tokens,
        )

        # The stand-in's own
        parser.add_argument("--standin-load", type=duration, default=ServerArgs.standin_load, help="Seconds.")
        parser.add_argument(
            "--standin-step-ms",
            type=duration,
            default=ServerArgs.standin_step_ms,
            help="Milliseconds of a decode step.",
        )
        parser.add_argument(
            "--standin-mode",
            choices=sorted(STANDIN_MODES),
            default=ServerArgs.standin_mode,
            help="How to fail: " + "; ".join("%s: %s" % item for item in STANDIN_MODES.items()),
        )
        parser.add_argument("--standin-die-at", type=duration, default=ServerArgs.standin_die_at, help="Seconds.")
        parser.add_argument("--standin-fail-rank", type=int, default=ServerArgs.standin_fail_rank)
        parser.add_argument("--standin-health-delay", type=duration, default=ServerArgs.standin_health_delay)
        parser.add_argument("--standin-burst-limit", type=int, default=ServerArgs.standin_burst_limit)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace):
        attrs = [attr.name for attr in dataclasses.fields(cls)]
        return cls(**{attr: getattr(args, attr) for attr in attrs if hasattr(args, attr)})

    def check_server_args(self):
        # Check parallel size constraints
        assert self.tp_size > 0, "tp_size must be positive"
        assert self.nnodes > 0, "nnodes must be positive"
        assert self.tp_size % self.nnodes == 0, "tp_size must be divisible by number of nodes"
        assert 0 <= self.node_rank < self.nnodes, "node_rank must be in 0..nnodes-1"
        if self.nnodes > 1:
            address, _, port = (self.dist_init_addr or "").rpartition(":")
            assert address and port.isdigit(), "nnodes > 1 needs --dist-init-addr HOST:PORT"
        assert self.max_running_requests > 0, "max_running_requests must be positive"
        assert 0 <= self.standin_fail_rank < self.tp_size, "standin_fail_rank must be a rank"

    def rank_mark(self, rank):
        """What stands after the time stamp in a rank's lines."""
        return " TP%d" % rank if self.tp_size > 1 else ""

    def local_ranks(self):
        """The ranks that run on this node."""
        per_node = self.tp_size // self.nnodes
        return range(self.node_rank * per_node, (self.node_rank + 1) * per_node)


def prepare_server_args(argv: List[str]) -> ServerArgs:
    """The arguments of a command line, checked; wrong ones end the process with status 2."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    raw_args = parser.parse_args(argv)
    server_args = ServerArgs.from_cli_args(raw_args)
    server_args.check_server_args()
    return server_args
