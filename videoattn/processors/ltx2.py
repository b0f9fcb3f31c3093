"""The processors for LTX-2, 2.3 and 2.5 and for their text connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers import transformer_ltx2 as stock

from videoattn.processors.base import Processor
from videoattn.processors.projections import project

if TYPE_CHECKING:
    from videoattn.processors.fused import Fusion

Rotary = tuple[torch.Tensor, torch.Tensor]


class LTX2Processor(Processor):
    """Serves the calls of `LTX2AudioVideoAttnProcessor`: LTX-2.0, and the connectors of every version."""

    replaces: type = stock.LTX2AudioVideoAttnProcessor

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attention of `(batch, seq, channels)` hidden states, as the stock processor computes it."""
        self.refuse(attn)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value, gate = project(attn, hidden_states, source, together=self.fusion is not None)
        query, key = norm_and_rotate(attn, query, key, query_rotary_emb, key_rotary_emb, self.fusion)
        return project_out(attn, self.attend(attn, query, key, value, attention_mask, gate))


class LTX2PerturbedProcessor(Processor):
    """Serves the calls of `LTX2PerturbedAttnProcessor`: LTX-2.3 and 2.5, with spatio-temporal guidance."""

    replaces = stock.LTX2PerturbedAttnProcessor

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: Rotary | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> torch.Tensor:
        """Attention of `(batch, seq, channels)` hidden states, as the stock processor computes it.

        Where `perturbation_mask` is 0 the values pass through in place of the attention's output.
        """
        self.refuse(attn)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and bool(torch.all(perturbation_mask == 0))
        if all_perturbed:
            gates = attn.to_gate_logits
            gate = None if gates is None else gates(hidden_states)
            return project_out(attn, self.gate(attn.to_v(source), gate))
        query, key, value, gate = project(attn, hidden_states, source, together=self.fusion is not None)
        query, key = norm_and_rotate(attn, query, key, query_rotary_emb, key_rotary_emb, self.fusion)
        if perturbation_mask is None:
            return project_out(attn, self.attend(attn, query, key, value, attention_mask, gate))
        out = torch.lerp(value, self.attend(attn, query, key, value, attention_mask), perturbation_mask)
        return project_out(attn, self.gate(out, gate))


def norm_and_rotate(
    attn: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    query_rotary_emb: Rotary | None,
    key_rotary_emb: Rotary | None,
    fusion: Fusion | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised and rotated query and key, `(batch, seq, heads · head_dim)`."""
    if fusion is not None:
        return fusion.query_and_key(attn, query, key, query_rotary_emb, key_rotary_emb)
    query, key = attn.norm_q(query), attn.norm_k(key)
    if query_rotary_emb is None:
        return query, key
    if key_rotary_emb is None:
        key_rotary_emb = query_rotary_emb
    rotate = stock.apply_split_rotary_emb if attn.rope_type == "split" else stock.apply_interleaved_rotary_emb
    return rotate(query, query_rotary_emb), rotate(key, key_rotary_emb)


def project_out(attn: Any, out: torch.Tensor) -> torch.Tensor:
    """The output projection and its dropout."""
    return attn.to_out[1](attn.to_out[0](out))
