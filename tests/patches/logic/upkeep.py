"""The draft extend that is owed: paid in time, once, and its results put where they belong."""

from types import SimpleNamespace

import torch
import workers
from fakes import HIDDEN, Sampling, draft_input, python_kernels
from sglang.srt.speculative import eagle_info, eagle_worker
from sglang.srt.speculative.dynspec import deferred, engine, resources, worker_v1
from sglang.srt.speculative.dynspec.arguments import Thresholds
from sglang.srt.speculative.dynspec.policy import Policy


class Request:
    def __init__(self, name):
        self.name, self.done, self.decode_batch_idx, self.time_stats = name, False, 0, SimpleNamespace()

    def finished(self):
        return self.done


def requests(*names):
    return [Request(name) for name in names]


def state_of(of):
    """Draft state that tells whose it is: 900 + name."""
    return draft_input(
        [request.name for request in of],
        topk_p=torch.ones(len(of), 1),
        topk_index=torch.tensor([[900 + request.name] for request in of]),
        hidden_states=torch.ones(len(of), HIDDEN),
    )


def make_batch(of, spec_info, *, extend=False):
    batch = SimpleNamespace(
        reqs=of,
        spec_info=spec_info,
        seq_lens=torch.full((len(of),), 7),
        seq_lens_cpu=torch.full((len(of),), 7),
        sampling_info=Sampling(len(of)),
        maybe_evict_swa=lambda: None,
        is_extend_in_batch=False,
        forward_mode=SimpleNamespace(is_extend=lambda: extend, is_idle=lambda: False),
        return_hidden_states=True,
    )
    batch.batch_size = lambda: len(of)
    return batch


def make(limit=2):
    """(worker, log): v1 whose draft extend, draft and verify write to the log. A draft extend leaves 100 + name."""
    worker, target, _ = workers.make_v1()
    log = []

    class Worker(type(worker)):
        forward_batch_generation = eagle_worker.EAGLEWorker.forward_batch_generation.__wrapped__

        def forward_draft_extend_after_decode(self, batch):
            ids = batch.spec_info.input_ids
            log.append(("extend", ids.tolist(), self.speculative_num_steps))
            values = ids.float()[:, None]
            return eagle_info.EagleDraftInput(
                bonus_tokens=ids.to(torch.int32),
                topk_p=values * 0.01,
                topk_index=ids.long()[:, None] + 100,
                hidden_states=values.expand(-1, HIDDEN).clone(),
            )

        def draft(self, batch):
            log.append(("draft", batch.spec_info.topk_index.flatten().tolist(), self.speculative_num_steps))
            return SimpleNamespace(drafted=True)

        def verify(self, batch):
            drafted = hasattr(batch.spec_info, "drafted")
            if not drafted:
                batch.spec_info.deferred.pay()  # what the tree's own verify() does first
            live = [request for request in batch.reqs if not request.finished()]
            log.append(("verify", [request.name for request in batch.reqs], self.speculative_num_steps))
            extend = eagle_info.EagleDraftExtendInput(
                input_ids=torch.tensor([request.name for request in live], dtype=torch.int32),
                num_correct_drafts=torch.zeros(len(live)),
                num_accept_tokens=torch.ones(len(live)),
                num_accept_tokens_cpu=[1] * len(live),
            )
            drafts = [0] * len(batch.reqs)
            result = SimpleNamespace(
                draft_extend_input=extend, accept_tokens=None, num_correct_drafts_per_req_cpu=drafts
            )
            return SimpleNamespace(), result, False

        def forward_target_extend(self, batch):
            return SimpleNamespace(hidden_states=None, mm_input_embeds=None), None, None, False

        def forward_draft_extend(self, *_args):
            log.append(("prefill",))

    engine_draft_extend = Worker.forward_draft_extend_after_decode
    worker_v1.install(Worker)
    worker.__class__ = Worker
    config = SimpleNamespace(spec_hidden_size=HIDDEN, dtype=torch.float32)
    worker._model_runner = SimpleNamespace(tp_group=None, model_config=config)

    def run(batch):
        with engine.draft_contexts(worker):
            return engine_draft_extend(worker, batch)

    one_token = resources.for_workers(target, [worker], ("attention 1", "draft 1"), ("graphs 1", "draft graphs 1"))
    worker.dynspec = worker_v1.DynamicSpeculation(
        Policy(Thresholds(limit, limit)), one_token, deferred.DeferredDraftExtend(run)
    )
    return worker, log


def ran(worker, log, batch):
    """What one step wrote to the log."""
    log.clear()
    worker.forward_batch_generation(batch)
    return list(log)


def check_paid_during_the_next_step():
    """Owed after a step, run with the next one's forward in flight, on the batch as it was, in the one-token set."""
    with python_kernels():
        worker, log = make()
        of = requests(1, 2, 3)
        batch = make_batch(of, state_of(of))
        assert ran(worker, log, batch) == [("verify", [1, 2, 3], 0)]
        assert worker.dynspec.deferred.is_owed
        of.append(Request(9))  # the scheduler merges into the same list
        of.pop()
        assert ran(worker, log, batch) == [("extend", [1, 2, 3], 0), ("verify", [1, 2, 3], 0)]


def check_paid_before_a_prefill_and_filled_in_when_drafting_resumes():
    """Aborts, a prefill and a merge lie between: rows find their own results, new requests keep theirs."""
    with python_kernels():
        worker, log = make()
        a, b, c = of = requests(1, 2, 3)
        new = Request(4)
        batch = make_batch(of, state_of(of))
        ran(worker, log, batch)
        assert ran(worker, log, make_batch([new], None, extend=True)) == [("extend", [1, 2, 3], 0), ("prefill",)]
        state = batch.spec_info
        state.filter_batch(torch.tensor([0, 1]), has_been_filtered=False)  # c is aborted
        state.merge_batch(state_of([new]))
        state.filter_batch(torch.tensor([0, 2]), has_been_filtered=False)  # b leaves too: two are left, so ON
        steps = ran(worker, log, make_batch([a, new], state))
        assert steps[:2] == [("draft", [101, 904], 3), ("verify", [1, 4], 3)]
        assert steps[2] == ("extend", [1, 4], 3)
        assert not worker.dynspec.deferred.is_owed
        assert b.name + c.name == 5


def check_resuming_at_once_in_another_order():
    """Paid at the start of the first step that drafts; rows have been filtered and re-ordered."""
    with python_kernels():
        worker, log = make()
        a, _, c = of = requests(1, 2, 3)
        batch = make_batch(of, state_of(of))
        ran(worker, log, batch)
        batch.spec_info.filter_batch(torch.tensor([2, 0]), has_been_filtered=False)
        steps = ran(worker, log, make_batch([c, a], batch.spec_info))
        assert steps[:2] == [("extend", [1, 2, 3], 0), ("draft", [103, 101], 3)]


def check_finished_requests_owe_nothing():
    """Only rows that go on are in what is owed."""
    with python_kernels():
        worker, log = make()
        a, b, c = of = requests(1, 2, 3)
        b.done = True
        batch = make_batch(of, state_of(of))
        ran(worker, log, batch)
        assert ran(worker, log, make_batch([a, c], batch.spec_info))[0] == ("extend", [1, 3], 0)
        assert (3, 4) == (worker.speculative_num_steps, worker.speculative_num_draft_tokens)


def check_kept_results_are_copies():
    """Graphs own the memory of a draft extend's results and overwrite it at the next replay."""
    buffer = torch.ones(1, 1)
    result = SimpleNamespace(topk_p=buffer, topk_index=buffer, hidden_states=buffer)
    owed = deferred.DeferredDraftExtend(lambda batch: result)
    (request,) = requests(1)
    owed.owe(SimpleNamespace(reqs=[request]))
    owed.pay(keep=True)
    buffer.fill_(7)
    target = SimpleNamespace(topk_p=torch.zeros(2, 1), topk_index=torch.zeros(2, 1), hidden_states=torch.zeros(2, 1))
    owed.fill_in(SimpleNamespace(reqs=[Request(5), request], spec_info=target))
    assert [[0.0], [1.0]] == target.topk_p.tolist() == target.hidden_states.tolist()
