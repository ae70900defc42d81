"""What a running server says of its own settings."""

import json

from . import health

_SAID = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dp_size",
    "dtype",
    "kv_cache_dtype",
    "mem_fraction_static",
    "model_path",
    "page_size",
    "pp_size",
    "quantization",
    "schedule_policy",
    "speculative_algorithm",
    "speculative_disable_batch_threshold",
    "speculative_resume_batch_threshold",
    "speculative_draft_model_path",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "tokenizer_path",
    "tp_size",
)


def ask(base_url, path, headers, timeout_s=health.HEALTH_TIMEOUT_S):
    """The JSON object of a GET, or None where there is none."""
    try:
        status, answer = health.request(base_url + path, headers=headers, timeout_s=timeout_s)
        found = json.loads(answer.decode("utf-8")) if status == 200 else None
    except Exception:
        return None  # whatever it is, it tells nothing of the server's settings
    return found if isinstance(found, dict) else None


def settings_of(engine, base_url, headers):
    """What the server says of itself; null is what it does not say.

    Args:
        engine: "sglang" or "openai".
        base_url, headers: How to ask it.
    """
    found = {"engine": engine, "engine_version": None, "max_running_requests": None}
    found.update(dict.fromkeys(_SAID))
    if engine != "sglang":
        found["engine_version"] = (ask(base_url, "/version", headers) or {}).get("version")
        models = (ask(base_url, "/v1/models", headers) or {}).get("data") or [{}]
        found["model_path"] = models[0].get("id") if isinstance(models[0], dict) else None
        return found
    said = ask(base_url, "/server_info", headers) or ask(base_url, "/get_server_info", headers) or {}
    found.update({name: said.get(name) for name in _SAID})
    found["engine_version"] = said.get("version")
    states = said.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    # What the scheduler allows (with speculation 48 by default), not what the command line left open.
    effective = _number(state.get("effective_max_running_requests_per_dp"))
    if effective is not None:
        found["max_running_requests"] = effective * (_number(said.get("dp_size")) or 1)
    else:
        found["max_running_requests"] = _number(said.get("max_running_requests"))
    return found


def _number(value):
    return value if isinstance(value, int) and not isinstance(value, bool) else None
