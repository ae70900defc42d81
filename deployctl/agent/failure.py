"""The one exception of the agent (a step failed: why, and what to type next) and the words that messages share."""

# Exit codes of the contract that the agent itself decides (the client has the full table in errors.py).
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOCKED = 4
EXIT_NOT_READY = 5
EXIT_CRASHED = 6
EXIT_SMOKE = 7
EXIT_NEEDS_RECOVERY = 8
EXIT_DRIFT = 9
EXIT_NOT_CLEAN = 10
EXIT_INTERRUPTED = 130


def counted(number, one, many=None):
    """`1 file`, `2 files`."""
    return "%d %s" % (number, one if number == 1 else many or one + "s")


class Failure(Exception):
    """What happened (`message`), the next command (`hint`), the exit code, and fields for the host's result.

    Args:
        message: One sentence, naming file, pid or path.
        kind: A short word for programs, such as `drift` or `disk-full`.
        hint: The next command to type, or how to mend it.
        exit_code: The contract's exit code for it.
        status: The host's `status` in the result; `failed` unless something better fits.
        fields: Further fields of the host's result (JSON values).
    """

    def __init__(self, message, kind="failed", hint="", exit_code=EXIT_FAILED, status="failed", **fields):
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.hint = hint
        self.exit_code = exit_code
        self.status = status
        self.fields = fields

    def as_result(self):
        """The host's result, as the verdict carries it."""
        result = dict(self.fields)
        result.update(
            status=self.status,
            exit=self.exit_code,
            error={"kind": self.kind, "message": self.message, "hint": self.hint},
        )
        return result


class Cancelled(Failure):
    """The client went away or asked to stop; whatever had been begun must be undone."""

    def __init__(self, message="cancelled by the client", **fields):
        super().__init__(message, kind="interrupted", exit_code=EXIT_INTERRUPTED, **fields)
