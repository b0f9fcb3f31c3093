"""Which kernel serves an attention call, and why the others do not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args

import torch

from videoattn import kernels
from videoattn.again import Again

Kind = Literal[
    "video_self",
    "video_text",
    "audio_self",
    "audio_text",
    "audio_to_video",
    "video_to_audio",
    "video_connector",
    "audio_connector",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MaskForm = Literal["none", "kv_lengths", "dense"]


class KernelUnavailable(RuntimeError):
    """A kernel was asked for by name and cannot serve the call; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything about one attention call that decides which kernel may serve it.

    Lengths are in tokens; `capability` is the CUDA compute capability of the inputs' device, None elsewhere.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int] | None = None
    mask: MaskForm = "none"
    return_lse: bool = False
    kind: str | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        mask: MaskForm = "none",
        return_lse: bool = False,
        kind: str | None = None,
    ) -> AttentionCall:
        """Describe a call from its query and key, both `(batch, seq, heads, head_dim)`."""
        batch, q_len, heads, head_dim = q.shape
        return cls(
            batch,
            heads,
            q_len,
            k.shape[1],
            head_dim,
            q.dtype,
            q.device.type,
            device_capability(q.device),
            mask,
            return_lse,
            kind,
        )

    @property
    def flops(self) -> int:
        """Matrix FLOPs of the call, 4·B·H·Sq·Skv·D; softmax and padding are not counted."""
        return 4 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for any other device."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_capability(index)


@cache
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# The project's own kernels, then PyTorch's: `auto` never picks a third party's kernel on its own.
AUTO_ORDER = ("blackwell", "hopper", "sdpa")
# Bounds what choices are kept for; a render meets a few dozen shapes.
REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel bound to a call, and for every other kernel the reason it was not."""

    kernel: str
    requested: str
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """A call, what was chosen for it, and the chosen kernel's module."""

    call: AttentionCall
    choice: Choice
    kernel: kernels.Kernel


class Chooser:
    """Picks kernels for calls, and remembers: by call, and by the tensors' shapes for the op's own use.

    `again` holds eager calls made ready, which end with the choices they were made by.
    """

    # `again` is replaced and never cleared: a call under way in another thread keeps to the old one.
    def __init__(self) -> None:
        self._choices: dict[tuple, Choice] = {}
        self._bound: dict[tuple, Bound] = {}
        self.again = Again()

    def __call__(self, call: AttentionCall, requested: str = "auto") -> Choice:
        """Pick the kernel for a call.

        `requested` is a kernel's name or `auto`. A named kernel is bound, with a warning if it has not passed
        its self-check, or `KernelUnavailable` is raised; `auto` takes the first of `AUTO_ORDER` that supports
        the call and has passed its self-check.
        Verdicts are cached, apart for each precision of fp32 products, which the reference looks at;
        `choose.cache_clear()` after a kernel was built or verified.
        """
        # Asking a kernel whether it is trusted reads a file, and no verdict depends on where a call sits.
        key = (replace(call, kind=None), requested, torch.backends.cuda.matmul.fp32_precision)
        choice = self._choices.get(key)
        if choice is None:
            choice = _choose(call, requested)
            _keep(self._choices, key, choice)
        return choice

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        kv_lengths: torch.Tensor | None,
        mask: torch.Tensor | None,
        return_lse: bool,
        requested: str,
        kind: str,
    ) -> Bound:
        """The call these arguments make, and the kernel chosen for it; cheap for shapes seen before."""
        key = (
            q.shape,
            k.shape,
            q.dtype,
            q.device,
            mask is None,
            None if kv_lengths is None else kv_lengths.shape,
            return_lse,
            requested,
            kind,
            # Asked on every call, so only for the one kernel that is refused for it.
            requested == "reference" and torch.backends.cuda.matmul.fp32_precision,
        )
        bound = self._bound.get(key)
        if bound is None:
            # Kernels read a length for every entry.
            if kv_lengths is not None and kv_lengths.shape != q.shape[:1]:
                raise ValueError(
                    f"kv_lengths must be of shape ({q.shape[0]},), one for each entry of the batch, not "
                    f"{tuple(kv_lengths.shape)}"
                )
            form: MaskForm = (
                "dense" if mask is not None else "kv_lengths" if kv_lengths is not None else "none"
            )
            call = AttentionCall.of(q, k, mask=form, return_lse=return_lse, kind=kind or None)
            choice = self(call, requested)
            bound = Bound(call, choice, kernels.get(choice.kernel))
            _keep(self._bound, key, bound)
        return bound

    def cache_clear(self) -> None:
        """Forget every choice, after a kernel was built or verified."""
        self._choices.clear()
        self._bound.clear()
        self.again = Again()


def _keep(cache: dict, key: Any, value: Any) -> None:
    if len(cache) >= REMEMBERED:
        cache.clear()
    cache[key] = value


choose = Chooser()


def _choose(call: AttentionCall, requested: str) -> Choice:
    if requested != "auto":
        kernel = kernels.get(requested)
        reason = kernel.supports(call)
        if reason is not None:
            raise KernelUnavailable(f"attention kernel '{requested}' cannot serve {describe(call)}: {reason}")
        if (doubt := kernel.untrusted(call)) is not None:
            warnings.warn(
                f"attention kernel '{requested}' serves because it was asked for by name, but {doubt}",
                RuntimeWarning,
                stacklevel=2,
            )
        others = {name: f"'{requested}' was asked for" for name in kernels.NAMES if name != requested}
        return Choice(requested, requested, others)

    bound: str | None = None
    reasons: dict[str, str] = {}
    for name in AUTO_ORDER:
        kernel = kernels.get(name)
        reason = kernel.supports(call) or kernel.untrusted(call)
        if reason is None and bound is None:
            bound = name
        else:
            reasons[name] = reason or f"'{bound}' comes first"
    for name in kernels.NAMES:
        if name not in AUTO_ORDER:
            reasons[name] = kernels.get(name).supports(call) or "used only when asked for by name"
    if bound is None:
        raise KernelUnavailable(f"no attention kernel can serve {describe(call)}: {reasons['sdpa']}")
    return Choice(bound, "auto", reasons)


def describe(call: AttentionCall) -> str:
    """One short phrase naming a call in messages."""
    dtype = str(call.dtype).removeprefix("torch.")
    mask = {"none": "", "kv_lengths": ", key lengths", "dense": ", a dense mask"}[call.mask]
    return (
        f"{call.kind or 'a call'} with q_len {call.q_len}, kv_len {call.kv_len}, {call.heads} heads of "
        f"{call.head_dim}, {dtype} on {call.device}{mask}"
    )


@dataclass(frozen=True, slots=True)
class Receipt:
    """For each kind of call the kernel that serves it and why the others do not.

    `around` says what else is on, empty where nothing is.
    """

    choices: Mapping[str, Choice]
    around: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, kinds in their fixed order."""
        return {kind: asdict(choice) for kind, choice in self.choices.items()}

    def __str__(self) -> str:
        width = max((len(kind) for kind in self.choices), default=0)
        lines = [f"{kind:<{width}}  {choice.kernel}" for kind, choice in self.choices.items()]
        grouped: dict[tuple[str, str], list[str]] = {}
        for kind, choice in self.choices.items():
            for name, reason in choice.reasons.items():
                grouped.setdefault((name, reason), []).append(kind)
        for (name, reason), kinds in grouped.items():
            where = "" if len(kinds) == len(self.choices) else f" ({', '.join(kinds)})"
            lines.append(f"not {name}{where}: {reason}")
        if self.around:
            lines.append(self.around)
        return "\n".join(lines)
