"""The servers that are compared: one arm is one command line of the engine."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

THRESHOLD = 8  # speculation goes off above so many requests
MAX_RUNNING = 64
VOCABULARY = 32000  # of the synthetic models
FIRST_PORT, LAST_PORT = 20000, 32768  # above are the ports of outgoing connections
PORTS_OF_AN_ARM = 20

EAGLE = {"speculative-algorithm": "EAGLE", "speculative-num-steps": 5}
# Top-k above 1 has a tree and runs on the v1 worker; top-k 1 runs on v2, the overlap worker.
TREE = {**EAGLE, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 16}
CHAIN = {**EAGLE, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 6}
DYNAMIC = {"speculative-disable-batch-threshold": THRESHOLD}
NO_OVERLAP = {"disable-overlap-schedule": True}
PAGE_64 = {"page-size": 64}
RADIX = {"disable-radix-cache": False, "chunked-prefill-size": 256}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}

# A stopped server must not be taken for a hung one, neither by the engine nor by NCCL.
ENVIRONMENT = {"TORCH_NCCL_ENABLE_MONITORING": "0", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}


@dataclass(frozen=True)
class Arm:
    """One server.

    Args:
        name: Within its pair.
        pair: "a" (output known exactly) or "b" (output depends on the KV cache).
        args: Of the engine, beyond what all arms share.
        env: Of the engine, likewise.
        prompt_tokens: How long the prompts are that it is asked.
    """

    name: str
    pair: str
    args: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int = 64

    @property
    def key(self) -> str:
        """The arm's profile in hosts.yaml."""
        return f"{self.pair}-{self.name}"

    @property
    def speculates(self) -> bool:
        """Whether it has a draft model."""
        return "speculative-algorithm" in self.args

    @property
    def dynamic(self) -> bool:
        """Whether it switches speculation off."""
        return "speculative-disable-batch-threshold" in self.args


def _pair_a() -> list[Arm]:
    return [
        Arm("base-no-overlap", "a", NO_OVERLAP),
        Arm("v1-dynamic", "a", {**TREE, **DYNAMIC}),
        Arm("v2-dynamic", "a", {**CHAIN, **DYNAMIC}),
        Arm("base", "a", {}),
        Arm("v1", "a", TREE),
        Arm("v2", "a", CHAIN),
    ]


def _pair_b() -> list[Arm]:
    v1, v2 = {**TREE, **DYNAMIC}, {**CHAIN, **DYNAMIC}
    return [
        Arm("base-no-overlap", "b", NO_OVERLAP),
        Arm("v1-dynamic", "b", v1),
        Arm("v2-dynamic", "b", v2),
        Arm("base", "b", {}),
        Arm("v1", "b", TREE),
        Arm("v2", "b", CHAIN),
        Arm("v1-dynamic-page64", "b", {**v2, **PAGE_64, **NO_OVERLAP}),  # v1 knows pages only with top-k 1
        Arm("v2-dynamic-page64", "b", {**v2, **PAGE_64}),
        Arm("v1-dynamic-radix", "b", {**v1, **RADIX}, prompt_tokens=600),
        Arm("v1-dynamic-retract", "b", v1, RETRACT),
        Arm("v2-dynamic-retract", "b", v2, RETRACT),
    ]


def grammar_backend() -> str | None:
    """The first grammar library of this interpreter that the engine knows, or None."""
    return next((name for name in ("xgrammar", "llguidance") if importlib.util.find_spec(name)), None)


def _grammar() -> list[Arm]:
    backend = grammar_backend()
    if backend is None:
        return []
    # Compact, or a synthetic model may write blanks until it runs out of tokens.
    chosen = {"grammar-backend": backend, "constrained-json-disable-any-whitespace": True}
    return [
        Arm("base-no-overlap-grammar", "b", {**NO_OVERLAP, **chosen}),
        Arm("v1-dynamic-grammar", "b", {**TREE, **DYNAMIC, **chosen}),
        Arm("v2-dynamic-grammar", "b", {**CHAIN, **DYNAMIC, **chosen}),
    ]


def all_arms() -> dict[str, Arm]:
    """Every arm by its key."""
    return {arm.key: arm for arm in [*_pair_a(), *_pair_b(), *_grammar()]}


def common_args(attention_backend: str) -> dict[str, Any]:
    """What all arms share: the same memory, batch sizes and kernels."""
    return {
        "attention-backend": attention_backend,
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "mem-fraction-static": "0.85",
        "max-total-tokens": 40000,  # several servers share the card
        "cuda-graph-max-bs": MAX_RUNNING,
        "max-running-requests": MAX_RUNNING,  # the engine's own default under speculation is 48
        "disable-radix-cache": True,
        "disable-piecewise-cuda-graph": True,
        "watchdog-timeout": 1200,
        "decode-log-interval": 20,
    }


def rehearsal_args() -> dict[str, Any]:
    """The same on a CPU, where there is no speculation: shows that this program works, and nothing else."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "mem-fraction-static": "0.1",
        "max-total-tokens": 16000,
        "max-running-requests": MAX_RUNNING,
        "disable-radix-cache": True,
        "decode-log-interval": 5,
    }


def profiles(folder: str, attention_backend: str, *, rehearsal: bool, first_port: int = FIRST_PORT) -> dict[str, Any]:
    """The profiles of hosts.yaml, one an arm.

    Args:
        folder: Where the models lie: <folder>/<pair>/target and /draft.
        attention_backend: Of the engine.
        rehearsal: On a CPU, without speculation.
        first_port: Of the first arm; the next ones follow.
    """
    made = {}
    for number, arm in enumerate(all_arms().values()):
        port = first_port + number * PORTS_OF_AN_ARM
        args: dict[str, Any] = {
            "model-path": f"{folder}/{arm.pair}/target",
            "port": port,
            "nccl-port": port + PORTS_OF_AN_ARM // 2,
        }
        env = {**ENVIRONMENT, **arm.env, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if rehearsal:
            args.update(rehearsal_args())
            args["grammar-backend"] = arm.args.get("grammar-backend", "none")
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        else:
            args.update(common_args(attention_backend))
            args.update(arm.args)
            if arm.speculates:
                args["speculative-draft-model-path"] = f"{folder}/{arm.pair}/draft"
        made[arm.key] = {
            "command": ["{python}", "-m", "sglang.launch_server"],
            "args": args,
            "env": env,
            "ready": {"url": f"http://127.0.0.1:{port}/health", "timeout": "10m"},
            "smoke": {"prompt": "The capital of France is", "max_tokens": 32, "burst": 10},
        }
    return made
