"""When speculation is off: a pure function of the batch sizes seen, and so the same on every tensor-parallel rank."""

import logging

logger = logging.getLogger(__name__)


class Policy:
    """Decides before every decode step.

    Args:
        thresholds: See arguments.Thresholds. A resume below the limit keeps a load that hovers around the limit from
            switching at every step.
        speaks: Whether this rank writes the transitions to the log.
    """

    def __init__(self, thresholds, *, speaks=True):
        self.thresholds = thresholds
        self.off = False
        self._speaks = speaks
        self._steps = 0  # decode steps in the present state

    def decide(self, batch_size):
        """Whether the decode step of a batch of this size goes without speculation."""
        limit, resume = self.thresholds
        off = batch_size > (resume if self.off else limit)
        if off != self.off:
            if self._speaks:
                logger.info(
                    "[dynspec] speculation %s: batch=%d limit=%d resume=%d, after %d steps",
                    "OFF" if off else "ON",
                    batch_size,
                    limit,
                    resume,
                    self._steps,
                )
            self.off, self._steps = off, 0
        self._steps += 1
        return off
