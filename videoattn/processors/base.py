"""What all processors share: the call into `videoattn`, the mask policy, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from videoattn.attention import attend
from videoattn.processors import masks
from videoattn.processors.fused import gate_twin

if TYPE_CHECKING:
    from videoattn.dispatch import Kind
    from videoattn.processors.fused import Fusion
    from videoattn.processors.parallel.streams import Streams


class Processor:
    """One processor serves every call of its kind in a model, so that compiled blocks share one graph.

    Args:
        kind: where the calls sit.
        kernel: a kernel's name or `auto`.
        text_mask: what is known about the masks these calls meet; None where a mask is always kept whole.
        streams: which tokens this rank computes; None where every rank computes all.
        fusion: runs what else sits inside an attention module; None for diffusers' own operations.
    """

    # diffusers' setters look for these two; what they set is refused when the model runs.
    _attention_backend: Any = None
    _parallel_config: Any = None
    replaces: type

    def __init__(
        self,
        kind: Kind,
        kernel: str,
        text_mask: masks.TextMask | None = None,
        streams: Streams | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        self.kind = kind
        self.kernel = kernel
        self.text_mask = text_mask
        self.streams = streams
        self.fusion = fusion

    def __repr__(self) -> str:
        return f"{type(self).__name__}(kind={self.kind!r}, kernel={self.kernel!r})"

    def refuse(self, attn: Any) -> None:
        """Raise RuntimeError for what this processor would otherwise ignore."""
        if self._parallel_config is not None:
            raise RuntimeError(
                "parallelism was set on videoattn's attention processors behind its back: call the "
                "transformer's own enable_parallelism()"
            )
        if self._attention_backend is not None:
            backend = getattr(self._attention_backend, "value", self._attention_backend)
            raise RuntimeError(
                f"diffusers' attention backend '{backend}' was set while videoattn is installed: "
                "call reset_attention_backend(); to use it, videoattn.uninstall(pipe) and set it again"
            )
        if attn.fused_projections:
            raise RuntimeError(FUSED_PROJECTIONS)

    def attend(
        self,
        attn: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of projected `(batch, seq, heads · head_dim)` tensors, in that layout and query's dtype.

        `attention_mask` is diffusers' additive bias, `(batch, 1 or q_len, kv_len)` or with a head axis. With
        `gate`, logits `(batch, seq, heads)`, every head is multiplied by twice the sigmoid of its own.
        """
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, key, value, gate)
        ):
            raise RuntimeError(
                "videoattn has no backward: run the model under torch.no_grad(), or "
                "videoattn.uninstall(model) to train"
            )
        streams = self.streams
        kv_len = key.shape[1] if streams is None else streams.kv_len(self.kind, key.shape[1])
        mask, kv_lengths = attention_mask, None
        if attention_mask is not None:
            if attention_mask.shape[-1] != kv_len:
                raise ValueError(f"the attention mask covers {attention_mask.shape[-1]} of {kv_len} keys")
            # Key lengths of fewer entries than the batch would be read past their end.
            if attention_mask.shape[0] != query.shape[0]:
                raise ValueError(
                    f"the attention mask has {attention_mask.shape[0]} entries for a batch of "
                    f"{query.shape[0]}: repeat it for every entry of the batch"
                )
            text_mask, form = self.text_mask, "dense"
            # Traced code can't look at the stack: it takes the form that the latest hooks have left.
            if text_mask is not None and (torch.compiler.is_dynamo_compiling() or text_mask.running):
                form = text_mask.form
            mask, kv_lengths = masks.apply(form, attention_mask, kv_len)
        # Under autocast norms return fp32; SDPA would be autocast, an opaque op is not.
        q, k, v = (t.to(value.dtype).unflatten(2, (attn.heads, -1)) for t in (query, key, value))
        gated = False
        if streams is not None and streams.splits(self.kind):
            out = streams.attend(q, k, v, mask, self.kernel, self.kind)
        else:
            mask = mask if streams is None else streams.rows(self.kind, mask)
            fusion = self.fusion
            gated = gate is not None and fusion is not None and fusion.gates_in_attention(query, value, gate)
            inside = gate if gated else None
            out, _ = attend(
                q, k, v, kv_lengths=kv_lengths, mask=mask, kernel=self.kernel, kind=self.kind, gate=inside
            )
        out = out.flatten(2, 3).to(query.dtype)
        return out if gated else self.gate(out, gate)

    def gate(self, out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """`(batch, seq, heads · head_dim)` times its heads' gates, as in `attend`; unchanged without."""
        if gate is None:
            return out
        return gate_twin(out, gate) if self.fusion is None else self.fusion.gate(out, gate)


FUSED_PROJECTIONS = (
    "fuse_qkv_projections() is of no use to LTX models: they never read the fused weights, which "
    "only take memory, and audio-video attention cannot be fused; call unfuse_qkv_projections()"
)
