"""Attention for steps of one token a request.

Backends serve TARGET_VERIFY and DRAFT_EXTEND with the kernel they have for prompts. For Triton that is ruinous at one
token: one program walks the whole KV of a request, its query tile almost empty (H200, 40 layers, 64 requests: 9 ms a
step more than plain decoding). One token a request is a decode step over one token more, so such a backend is given
its own split-KV decode kernels. FlashInfer, FlashAttention and others keep the kernel they have: at a query length of
one it is meant to be good, which has not been measured here.
"""

import copy
import functools


def is_decode_view(backend):
    """Whether `backend` went through decode_view() and decodes; it then reads no mask."""
    return getattr(backend, "dynspec_decode_view", False)


def decode_view(backend, uncounted):
    """Make `backend`, which must serve nothing else, run its steps as decode steps where that is known to be faster.

    Args:
        backend: An attention backend of our own; changed in place.
        uncounted: Tokens a request that this step attends to and seq_lens does not count yet: 1 when the target
            verifies a root, 0 when the draft catches up, since verify() has added the token by then.

    Returns:
        `backend`, whether changed or not.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    # Exactly that class: subclasses and wrappers do other things. MLA has another decode layout.
    if type(backend) is TritonAttnBackend and not backend.use_mla:
        backend.__class__ = _triton_decode_view()
        backend.dynspec_uncounted = uncounted
    return backend


@functools.lru_cache(maxsize=None)
def _triton_decode_view():
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    class TritonOneTokenDecode(TritonAttnBackend):
        """TritonAttnBackend that sees every batch as a decode batch over `dynspec_uncounted` tokens more."""

        dynspec_decode_view = True
        dynspec_uncounted = 0

        def init_forward_metadata(self, forward_batch):
            if not forward_batch.forward_mode.is_idle():
                forward_batch = copy.copy(forward_batch)
                forward_batch.forward_mode, forward_batch.spec_info = ForwardMode.DECODE, None
                forward_batch.seq_lens = forward_batch.seq_lens + self.dynspec_uncounted
                forward_batch.seq_lens_sum = (
                    int(forward_batch.seq_lens_sum) + self.dynspec_uncounted * forward_batch.batch_size
                )
            return super().init_forward_metadata(forward_batch)

        def init_forward_metadata_capture_cuda_graph(
            self,
            bs,
            num_tokens,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            forward_mode,  # noqa: ARG002
            spec_info,  # noqa: ARG002
        ):
            return super().init_forward_metadata_capture_cuda_graph(
                bs,
                num_tokens,
                req_pool_indices,
                seq_lens + self.dynspec_uncounted,
                encoder_lens,
                ForwardMode.DECODE,
                None,
            )

        def init_forward_metadata_replay_cuda_graph(
            self,
            bs,
            req_pool_indices,
            seq_lens,
            seq_lens_sum,
            encoder_lens,
            forward_mode,  # noqa: ARG002
            spec_info,  # noqa: ARG002
            seq_lens_cpu,
        ):
            return super().init_forward_metadata_replay_cuda_graph(
                bs,
                req_pool_indices,
                seq_lens[:bs] + self.dynspec_uncounted,
                seq_lens_sum + self.dynspec_uncounted * bs,
                encoder_lens,
                ForwardMode.DECODE,
                None,
                seq_lens_cpu,
            )

        def forward_extend(self, *args, **kwargs):
            return self.forward_decode(*args, **kwargs)

    return TritonOneTokenDecode
