"""The element-wise work around attention in few passes over memory: Triton kernels, each with a torch twin.

Of an attention module: QK RMSNorm with rotary embedding, and the gates of heads. Of a block around it: a
residual with the norm and modulation that follow it, and the feed-forward's first layer with its GELU. A twin
is what diffusers computes, operation by operation; it serves devices without Triton, and torch.compile where
`under_compile` is "torch". A kernel rounds where its twin does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx2 import (
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)

Rotary = tuple[torch.Tensor, torch.Tensor]
Engine = Literal["triton", "torch"]
ENGINES: tuple[Engine, ...] = ("triton", "torch")
NO_TRITON = "levels above 'call' need Triton on a GPU: pip install triton, or use level='call'"


class Parameter(NamedTuple):
    """One modulation parameter, the sum of the layer's own and the timestep's.

    They are `(channels,)` and `(batch, 1 or seq, channels)`.
    """

    table: torch.Tensor
    embedding: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        """Their sum, as diffusers rounds it."""
        return self.table + self.embedding


def parameter(table: torch.Tensor, embedding: torch.Tensor, index: int) -> Parameter:
    """Number `index` of the parameters in `(count, channels)` and `(batch, 1 or seq, count · channels)`."""
    channels = table.shape[1]
    return Parameter(table[index], embedding[:, :, index * channels : (index + 1) * channels])


class Modulation(NamedTuple):
    """Of a normed tensor: times (1 + scale), plus shift."""

    scale: Parameter
    shift: Parameter


class Residual(NamedTuple):
    """The arguments of `Fusion.residual_norm`."""

    x: torch.Tensor
    branch: torch.Tensor | None = None
    gate: Parameter | None = None
    norm: Any = None
    modulations: tuple[Modulation, ...] = ()


class Fusion:
    """Runs the fused work of one install: by Triton on a GPU, by the twins elsewhere.

    Args:
        under_compile: what torch.compile is given: the Triton kernels as they are, or the twins, which it
            fuses itself with what is around them.

    Raises:
        ValueError: `under_compile` is neither.
    """

    def __init__(self, under_compile: Engine = "triton") -> None:
        if under_compile not in ENGINES:
            raise ValueError(f"under_compile is 'triton' or 'torch', not {under_compile!r}")
        self.under_compile = under_compile
        self.available = has_triton()
        self.interpreted = False
        if self.available and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
            from videoattn.processors import fused_kernels, residual_kernels  # noqa: F401

            self.interpreted = fused_kernels.INTERPRETED

    def engine(self, device: torch.device) -> Engine:
        """What runs on that device outside torch.compile."""
        return "triton" if self.available and (device.type == "cuda" or self.interpreted) else "torch"

    def query_and_key(
        self,
        attn: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        query_rotary_emb: Rotary | None,
        key_rotary_emb: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """QK RMSNorm over all heads, then rotary embedding, of `(batch, seq, heads · head_dim)` tensors.

        As in diffusers a key without angles takes the query's, and without the query's none turns. Angles are
        `(batch, heads, seq, head_dim / 2)` where halves of a head are rotated (split) and `(1 or batch, seq,
        heads · head_dim)` where neighbours are (interleaved).
        """
        norm_q, norm_k = attn.norm_q, attn.norm_k
        # Whether both take the same angles is the caller's word, a None: old Dynamos cannot trace `is`
        # between tuples.
        own_angles = query_rotary_emb is not None and key_rotary_emb is not None
        key_angles = key_rotary_emb if own_angles else query_rotary_emb
        if not self._use_triton(query):
            return (
                norm_rotate_twin(query, norm_q.weight, norm_q.eps, query_rotary_emb),
                norm_rotate_twin(key, norm_k.weight, norm_k.eps, key_angles),
            )
        if _in_one_launch(query, key, norm_q, norm_k, query_rotary_emb, key_angles):
            turns = key_angles if own_angles else None
            first, second = _norm_rotate(query, key, norm_q, norm_k, query_rotary_emb, turns)
            return first, second
        (first,) = _norm_rotate(query, None, norm_q, None, query_rotary_emb)
        (second,) = _norm_rotate(key, None, norm_k, None, key_angles)
        return first, second

    def gate(self, out: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Every head of `(batch, seq, heads · head_dim)` times twice the sigmoid of its logit.

        `logits` is `(batch, seq, heads)`.
        """
        if not self._use_triton(out):
            return gate_twin(out, logits)
        _same_device(out, logits)
        return _launched(torch.ops.videoattn.gate.default, out.device, out, logits)

    def gates_in_attention(self, query: torch.Tensor, value: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether an attention call may do what `gate` does to its output: with no other rounding."""
        if not self._use_triton(value):
            return False
        _same_device(value, logits)
        # Under autocast they may differ; the output, in the query's dtype, is then gated in another than V's.
        return query.dtype == value.dtype == logits.dtype

    def residual_norm(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        gate: Parameter | None = None,
        norm: Any = None,
        modulations: tuple[Modulation, ...] = (),
    ) -> list[torch.Tensor]:
        """`x + gate · branch`, then its RMSNorm, then up to two modulations of that.

        All tensors are `(batch, seq, channels)`. Without `branch` nothing is added, without `norm` nothing is
        normed. Returns the sum if there is a branch, then a tensor for each modulation, or without any the
        normed one if there is a norm. Modulations of one call come from one timestep embedding.
        """
        if not self._use_triton(x):
            return residual_norm_twin(x, branch, gate, norm, modulations)
        arguments = _flat(Residual(x, branch, gate, norm, modulations))
        return _launched(torch.ops.videoattn.residual_norm.default, x.device, *arguments)

    def residual_norms(self, a: Residual, b: Residual) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`residual_norm` of two tensors, whose lengths and widths may differ, in one launch."""
        if not self._use_triton(a.x) or a.x.shape[0] != b.x.shape[0]:
            return self.residual_norm(*a), self.residual_norm(*b)
        _same_device(a.x, b.x)
        op = torch.ops.videoattn.residual_norm_pair.default
        results = _launched(op, a.x.device, *_flat(a), *_flat(b))
        count = (a.branch is not None) + max(int(a.norm is not None), len(a.modulations))
        return results[:count], results[count:]

    def linear_gelu(self, x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
        """GELU (tanh form) of a linear layer, in the matrix product's epilogue on a GPU.

        There GELU is of the unrounded sum, one rounding less than diffusers has.
        """
        if not (x.is_cuda and self._use_triton(x)):
            return F.gelu(linear(x), approximate="tanh")
        _same_device(x, linear.weight)
        return torch.ops.videoattn.linear_gelu.default(x, linear.weight, linear.bias)

    def _use_triton(self, x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() and self.under_compile == "torch":
            return False
        if x.is_cuda and not self.available:
            raise RuntimeError(NO_TRITON)
        return self.available and (x.is_cuda or self.interpreted)


def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def norm_rotate_twin(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, rotary_emb: Rotary | None
) -> torch.Tensor:
    """RMSNorm over the channels of `(batch, seq, channels)`, rounded, then rotary embedding in fp32."""
    normed = F.rms_norm(x, (x.shape[-1],), weight, eps)
    if rotary_emb is None:
        return normed
    rotate = apply_split_rotary_emb if rotary_emb[0].dim() == 4 else apply_interleaved_rotary_emb
    return rotate(normed, rotary_emb)


def gate_twin(out: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`Fusion.gate` by torch."""
    gates = 2.0 * torch.sigmoid(logits)
    return (out.unflatten(2, (logits.shape[2], -1)) * gates.unsqueeze(-1)).flatten(2, 3)


def residual_norm_twin(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: Parameter | None,
    norm: Any,
    modulations: tuple[Modulation, ...],
) -> list[torch.Tensor]:
    """`Fusion.residual_norm` by torch and the norm's own module."""
    results = []
    if branch is not None:
        x = x + (branch if gate is None else branch * gate.value)
        results.append(x)
    normed = x if norm is None else norm(x)
    if norm is not None and not modulations:
        return [*results, normed]
    return results + [normed * (1 + scale.value) + shift.value for scale, shift in modulations]


def _flat(one: Residual) -> tuple[Any, ...]:
    """The op's arguments."""
    modulation = [part for each in one.modulations for parameter in each for part in parameter]
    gate = [] if one.gate is None else [one.gate.table, one.gate.embedding]
    weight = None if one.norm is None else one.norm.weight
    _same_device(one.x, one.branch, weight, *gate, *modulation)
    eps = 0.0 if one.norm is None else one.norm.eps
    return one.x, one.branch, gate, one.norm is not None, weight, eps, modulation


def _in_one_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    norm_q: Any,
    norm_k: Any,
    query_angles: Rotary | None,
    key_angles: Rotary | None,
) -> bool:
    """Whether query and key, each of its own length, have what a launch's programs have in common."""
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        return False
    if (norm_q.weight is None) != (norm_k.weight is None):
        return False
    if query_angles is None or key_angles is None:
        return True
    cos, key_cos = query_angles[0], key_angles[0]
    return cos.dim() == key_cos.dim() and (cos.dim() != 4 or cos.shape[3] == key_cos.shape[3])


def _norm_rotate(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm_x: Any,
    norm_y: Any,
    rotary_emb: Rotary | None,
    y_rotary_emb: Rotary | None = None,
) -> list[torch.Tensor]:
    """`y`, where there is one, takes the angles of `x` unless it brings its own."""
    cos, sin = (None, None) if rotary_emb is None else rotary_emb
    y_cos, y_sin = (None, None) if y_rotary_emb is None else y_rotary_emb
    if cos is not None:
        _check_angles(x, cos)
        if y is not None:
            _check_angles(y, cos if y_cos is None else y_cos)
    y_weight = None if norm_y is None else norm_y.weight
    _same_device(x, y, cos, y_cos, norm_x.weight, y_weight)
    return _launched(
        torch.ops.videoattn.norm_rotate.default,
        x.device,
        x,
        y,
        norm_x.weight,
        y_weight,
        _eps(norm_x),
        0.0 if norm_y is None else _eps(norm_y),
        cos,
        sin,
        y_cos,
        y_sin,
    )


def _eps(norm: Any) -> float:
    # Torch takes that of the dtype it computes in, fp32, not of the tensor's.
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps


def _check_angles(x: torch.Tensor, cos: torch.Tensor) -> None:
    batch, length, channels = x.shape
    if cos.dim() == 4:
        fits = cos.shape[0] in (1, batch) and cos.shape[1] * cos.shape[3] * 2 == channels
        fits = fits and cos.shape[2] == length and cos.stride(3) == 1
    else:
        fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1:] == x.shape[1:]
        fits = fits and cos.stride(2) == 1
    if not fits:
        raise ValueError(
            f"rotary angles {tuple(cos.shape)} do not fit {tuple(x.shape)}: (batch, heads, seq, "
            "head_dim / 2) or (batch, seq, channels) would, side by side in memory"
        )


def _launched(op: Any, device: torch.device, *arguments: Any) -> Any:
    """What the op returns, launched on its tensors' device: Triton launches on the current one."""
    if torch.compiler.is_compiling() or device.type != "cuda" or device.index == torch.cuda.current_device():
        return op(*arguments)
    with torch.cuda.device(device):
        return op(*arguments)


def _same_device(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    # A kernel handed an address of another memory would not say so.
    for other in others:
        if other is not None and other.device != x.device:
            raise RuntimeError(
                f"a weight or an input is on {other.device}, the hidden states on {x.device}: use "
                "level='call' with offloading that moves single layers"
            )


@torch.library.custom_op("videoattn::linear_gelu", mutates_args=())
def _linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    # cuBLASLt's epilogue has the tanh form; on a CPU the same function computes the exact one.
    out = torch.ops.aten._addmm_activation.default(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.unflatten(0, x.shape[:-1])


@_linear_gelu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
