"""v2: the lengths of the next step's requests, without waiting for the GPU.

The overlap scheduler prepares a step while the GPU is still at the one before. Under speculation it cannot: only the
GPU knows how many tokens it accepted, so the engine waits for the verification before it prepares the next step, and
the GPU idles meanwhile. A step without speculation adds one token to every request, which needs no asking: its draft
input carries the lengths, and as long as the batch stays as it is, the next step is prepared from them.

A batch that loses or gains requests goes the engine's way, with the engine's wait: what is filtered and merged lies on
the GPU. Everything else the scheduler does stays in the order it had: the results of step n-1 are still processed after
step n was launched.
"""

import functools

FIELD = "dynspec_lengths"  # of EagleDraftInput: int64 on the host, a row for each request, or None where not known


class OnHost:
    """Stands for a batch's seq_lens while a step is prepared, whose only use of it is to have it on the host."""

    def __init__(self, lengths):
        self._lengths = lengths

    def cpu(self):
        """The lengths."""
        return self._lengths


def remember(draft_input, lengths_before):
    """Note on what a step without speculation leaves behind that every request is one token longer.

    Args:
        draft_input: EagleDraftInput of the next step; None in an idle step.
        lengths_before: seq_lens_cpu with which the step was launched.
    """
    from sglang.srt.speculative import spec_utils

    # A number of accepted tokens that is made up, for measurements, is not always one.
    if draft_input is not None and lengths_before is not None and not spec_utils.SIMULATE_ACC_LEN > 0:
        setattr(draft_input, FIELD, lengths_before + 1)


def install(draft_input_class, batch_class):
    """Let EagleDraftInput and ScheduleBatch use what remember() noted. Where nothing was noted all stays the engine's."""
    engine_prepare = draft_input_class.prepare_for_decode
    engine_filter = draft_input_class.filter_batch
    engine_merge = draft_input_class.merge_batch
    engine_filter_batch = batch_class.filter_batch

    @functools.wraps(engine_prepare)
    def prepare_for_decode(self, batch):
        lengths = getattr(self, FIELD)
        if lengths is None or len(lengths) != len(batch.reqs):
            return engine_prepare(self, batch)
        kept = batch.seq_lens, self.verify_done
        batch.seq_lens, self.verify_done = OnHost(lengths), None
        try:
            return engine_prepare(self, batch)
        finally:
            batch.seq_lens, self.verify_done = kept

    @functools.wraps(engine_filter)
    def filter_batch(self, *args, **kwargs):
        setattr(self, FIELD, None)
        return engine_filter(self, *args, **kwargs)

    @functools.wraps(engine_merge)
    def merge_batch(self, spec_info):
        setattr(self, FIELD, None)
        return engine_merge(self, spec_info)

    @functools.wraps(engine_filter_batch)
    def filter_requests(self, chunked_req_to_exclude=None, keep_indices=None, *args, **kwargs):
        known = getattr(self.spec_info, FIELD, None) is not None
        asks_who_finished = keep_indices is None and not chunked_req_to_exclude
        if known and asks_who_finished and self.reqs and not any(request.finished() for request in self.reqs):
            return None  # the engine would find that too, after waiting
        return engine_filter_batch(self, chunked_req_to_exclude, keep_indices, *args, **kwargs)

    setattr(draft_input_class, FIELD, None)
    draft_input_class.prepare_for_decode = prepare_for_decode
    draft_input_class.filter_batch = filter_batch
    draft_input_class.merge_batch = merge_batch
    batch_class.filter_batch = filter_requests
