"""Errors that reach a user: one sentence each (what, got, allowed, fix), and the exit code of the command line."""


class PWJaxError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UsageError(PWJaxError):
    """A value that the caller gave cannot be used."""

    exit_code = 2


class BudgetError(PWJaxError):
    """The memory budget is too small; the message and ``smallest_budget_bytes`` (0: unknown) name one that works."""

    def __init__(self, message: str, smallest_budget_bytes: int = 0):
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes


class CheckpointError(PWJaxError):
    """A Hugging Face checkpoint or training checkpoint cannot be read."""


class ArtifactError(PWJaxError):
    """A quantized artifact cannot be read or written."""


class PromptError(PWJaxError):
    """A prompt cannot be served by this model or budget."""

    exit_code = 2


class InterruptedRun(PWJaxError):
    """The user stopped the run; partial results were kept."""

    exit_code = 130
