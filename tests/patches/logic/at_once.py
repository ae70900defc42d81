"""Engines where the draft extend cannot wait."""

from bookkeeping import state_with
from fakes import Decoding
from sglang.srt.speculative import eagle_info
from sglang.srt.speculative.dynspec import engine, worker_v1


def check_nothing_waits():
    """Such an engine is told by its classes, and gets its own tree."""
    assert not engine.draft_extend_can_wait()
    decoding = Decoding(lengths=[5], most=[4], first=[11])
    assert type(worker_v1.root_input(state_with(), decoding.batch)) is eagle_info.EagleVerifyInput
