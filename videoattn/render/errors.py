"""The errors of a render: each message is one line that says what is wrong and what would work."""

from __future__ import annotations


class UsageError(ValueError):
    """The request cannot be rendered as it was asked for; the command ends with status 2."""

    exit_code = 2


class RenderError(RuntimeError):
    """Loading, rendering or writing failed; the command ends with status 1."""

    exit_code = 1


class NonFinite(RenderError):
    """A stage produced NaN or Inf."""

    def __init__(self, what: str, stage: str) -> None:
        self.stage = stage
        super().__init__(f"{what} in stage {stage}: nothing was written")
