"""The engine's command line."""

import argparse
import dataclasses
from typing import Optional


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    tp_size: int = 1
    max_running_requests: Optional[int] = None
    trust_remote_code: bool = False
    api_key: Optional[str] = None
    disable_overlap_schedule: bool = False

    # Speculative decoding
    speculative_algorithm: Optional[str] = None
    speculative_draft_model_path: Optional[str] = None
    speculative_num_steps: Optional[int] = None
    speculative_eagle_topk: Optional[int] = None
    speculative_num_draft_tokens: Optional[int] = None

    # The stand-in's own: how it loads, and how it fails
    standin_load: float = 3.0
    standin_step_ms: float = 5.0
    standin_mode: str = "ok"
    standin_die_at: float = 1.0
    standin_health_delay: float = 3.0
    standin_burst_limit: int = 4

    def __post_init__(self):
        if self.speculative_algorithm is not None:
            self.speculative_num_steps = self.speculative_num_steps or 3
            self.speculative_eagle_topk = self.speculative_eagle_topk or 4
            self.speculative_num_draft_tokens = self.speculative_num_draft_tokens or 16
            if self.max_running_requests is None:
                self.max_running_requests = 48

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--host", default=ServerArgs.host)
        parser.add_argument("--port", type=int, default=ServerArgs.port)
        parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int, default=1)
        parser.add_argument("--max-running-requests", type=int, default=ServerArgs.max_running_requests)
        parser.add_argument("--trust-remote-code", action="store_true")
        parser.add_argument("--api-key", default=None)
        parser.add_argument("--disable-overlap-schedule", action="store_true")
        parser.add_argument("--speculative-algorithm", choices=["EAGLE", "EAGLE3"], default=None)
        parser.add_argument("--speculative-draft-model-path", default=None)
        parser.add_argument("--speculative-num-steps", type=int, default=ServerArgs.speculative_num_steps)
        parser.add_argument("--speculative-eagle-topk", type=int, default=ServerArgs.speculative_eagle_topk)
        parser.add_argument(
            "--speculative-num-draft-tokens",
            type=int,
            help="The number of tokens sampled from the draft model in speculative decoding.",
            default=ServerArgs.speculative_num_draft_tokens,
        )
        parser.add_argument("--standin-load", type=float, default=ServerArgs.standin_load)
        parser.add_argument("--standin-step-ms", type=float, default=ServerArgs.standin_step_ms)
        parser.add_argument("--standin-mode", default=ServerArgs.standin_mode)
        parser.add_argument("--standin-die-at", type=float, default=ServerArgs.standin_die_at)
        parser.add_argument("--standin-health-delay", type=float, default=ServerArgs.standin_health_delay)
        parser.add_argument("--standin-burst-limit", type=int, default=ServerArgs.standin_burst_limit)

    def check_server_args(self):
        assert self.tp_size > 0, "tp_size must be positive"


def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="launch_server.py")
    ServerArgs.add_cli_args(parser)
    raw = parser.parse_args(argv)
    names = [field.name for field in dataclasses.fields(ServerArgs)]
    server_args = ServerArgs(**{name: getattr(raw, name) for name in names})
    server_args.check_server_args()
    return server_args
