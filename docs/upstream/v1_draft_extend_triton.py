"""SGLang 0.5.12, Triton attention, EAGLE v1 worker, CUDA graphs: draft extend reads other requests' rows.

Run it with SGLang 0.5.12 on any NVIDIA GPU; no model is needed:

    python v1_draft_extend_triton.py

After a step that accepted 1, 3 and 2 tokens, the v1 worker packs its draft extend densely: 1 + 3 + 2 rows. The
attention metadata that TritonAttnBackend.init_forward_metadata_replay_cuda_graph() makes for that batch says instead
that every request has `speculative_num_steps + 1` rows. With one request that is harmless (its rows come first); with
more, from the second request on, the queries of one request attend to the KV of another.

Exits with 1 where the metadata does not describe the rows.
"""

import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

STEPS = 5
ACCEPTED = [1, 3, 2]  # tokens a request brings to this draft extend
LENGTHS = [20, 30, 40]  # its KV, those tokens included


def main() -> int:
    """Print what the kernel is told beside what the batch holds."""
    device, requests = "cuda", len(ACCEPTED)
    backend = object.__new__(TritonAttnBackend)  # only what the method reads
    backend.device = device
    backend.speculative_num_steps = STEPS
    backend.sliding_window_size = None
    backend.qo_indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    backend.kv_indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    backend.cuda_graph_kv_indices = torch.zeros(1024, dtype=torch.int64, device=device)
    backend.req_to_token = torch.arange(requests * 64, dtype=torch.int32, device=device).reshape(requests, 64)
    accepted = torch.tensor(ACCEPTED, dtype=torch.int32, device=device)
    lengths = torch.tensor(LENGTHS, dtype=torch.int64, device=device)
    backend.init_forward_metadata_replay_cuda_graph(
        bs=requests,
        req_pool_indices=torch.arange(requests, device=device),
        seq_lens=lengths,
        seq_lens_sum=sum(LENGTHS),
        encoder_lens=None,
        forward_mode=ForwardMode.DRAFT_EXTEND,
        spec_info=SimpleNamespace(
            num_accept_tokens=accepted, num_correct_drafts=accepted - 1, accept_length=accepted, custom_mask=None
        ),
        seq_lens_cpu=lengths.cpu(),
    )
    told = backend.qo_indptr.tolist()
    packed = [0, *torch.cumsum(accepted, 0).tolist()]
    owners = [request for request, count in enumerate(ACCEPTED) for _ in range(count)]
    print(f"rows in the batch: {len(owners)}, of requests {owners}")
    print(f"qo_indptr as told to the kernel:   {told}")
    print(f"qo_indptr that describes the rows: {packed}")
    for request in range(requests):
        reads = owners[told[request] : told[request + 1]]
        if reads and set(reads) != {request}:
            print(f"the queries that attend to request {request}'s KV belong to requests {reads}")
        elif not reads:
            print(f"no query of the batch attends to request {request}'s KV")
    return int(told != packed)


if __name__ == "__main__":
    sys.exit(main())
