"""Eager calls made ready: a later call with tensors of the same layout skips what is settled.

What a call's checks, choice and layout depend on is compared by one of torch.compile's own tensor guards:
type, dispatch keys (with modes, functorch, autocast, tracing, lazy negation and inference mode in them),
dtype, device, sizes, strides and requires_grad. It costs about as much as asking a tensor for its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Of one kind of call: sizes of a clip's stages, batches with and without guidance.
REMEMBERED = 8
KEYS = 1024
Key = tuple[Any, ...]
Call = Callable[..., Any]
Ready = tuple[Any, float, Call]


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether other tensors are as these in all but values and addresses."""
    from torch._C._dynamo.guards import TensorGuards

    # A list for each tensor; torch's stub says one list.
    sizes: Any = [list(tensor.size()) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guard.check


def _guards_hold() -> bool:
    """Whether this torch's guards, which are not public, are what is relied on here."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            one, other = (torch.empty(2, 4, 8, device="cpu") for _ in range(2))
            same = tensor_guard((one, other))
            unlike = (
                other[:1],
                torch.empty(2, 8, 4, device="cpu").mT,
                other.to(torch.float16),
                other.to("meta"),
                torch.empty(2, 4, 8, device="cpu", requires_grad=True),
                torch.nn.Parameter(other, requires_grad=False),
            )
            return (
                same(other, one)
                and same(torch.empty(65, 4, 8, device="cpu")[63:], one)
                and not any(same(one, wrong) or same(wrong, one) for wrong in unlike)
            )
    except Exception:
        return False


AVAILABLE = _guards_hold()


def can_keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor | None = None) -> bool:
    """Whether a call of these can be made ready."""
    return (
        AVAILABLE
        # A guard holds for no tensor that comes twice,
        and not (q is k or q is v or k is v)
        # and not all torch releases' guards look at grad mode, which decides what requires_grad means.
        and not (q.requires_grad or k.requires_grad or v.requires_grad)
        and (gate is None or not gate.requires_grad)
    )


class Again:
    """Calls made ready, by what a caller says besides its tensors.

    A call is kept with what chose it, for a recording, and with its softmax scale.
    """

    def __init__(self) -> None:
        self._calls: dict[Key, tuple[tuple[Callable[..., bool], Ready], ...]] = {}

    def find(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> Ready | None:
        """The call made ready for such tensors, if there is one."""
        for holds, call in self._calls.get(key, ()):
            if holds(*tensors):
                return call
        return None

    def keep(self, key: Key, tensors: tuple[torch.Tensor, ...], call: Ready) -> None:
        """Use `call` for such tensors from now on."""
        if key in self._calls or len(self._calls) < KEYS:
            # A new tuple: other threads may be going through the old one.
            self._calls[key] = ((tensor_guard(tensors), call), *self._calls.get(key, ())[: REMEMBERED - 1])
