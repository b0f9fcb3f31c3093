"""Times attention calls at the one place where kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall, Choice

Launch = Callable[[str], tuple[torch.Tensor, torch.Tensor | None]]


class CallRecorder(Protocol):
    """What the op hands its calls to while a recording is on."""

    def record(
        self, call: AttentionCall, choice: Choice, launch: Launch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `launch(choice.kernel)`, time it and return its result; `launch(name)` runs another arm."""
        ...


_active: CallRecorder | None = None


def active() -> CallRecorder | None:
    """The recording in progress, None outside one."""
    return _active
