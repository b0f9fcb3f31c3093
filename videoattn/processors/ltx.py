"""The processor for LTX-Video 0.9.x."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers import transformer_ltx as stock

from videoattn.processors.base import Processor
from videoattn.processors.projections import project


class LTXVideoProcessor(Processor):
    """Serves the calls of `LTXVideoAttnProcessor`."""

    replaces = stock.LTXVideoAttnProcessor

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of `(batch, seq, channels)` hidden states, as the stock processor computes it."""
        self.refuse(attn)
        if encoder_hidden_states is None:
            encoder_hidden_states = hidden_states
        together = self.fusion is not None
        query, key, value, _ = project(attn, hidden_states, encoder_hidden_states, together=together)
        if self.fusion is not None:
            query, key = self.fusion.query_and_key(attn, query, key, image_rotary_emb)
        else:
            query, key = attn.norm_q(query), attn.norm_k(key)
            if image_rotary_emb is not None:
                query = stock.apply_rotary_emb(query, image_rotary_emb)
                key = stock.apply_rotary_emb(key, image_rotary_emb)
        out = self.attend(attn, query, key, value, attention_mask)
        return attn.to_out[1](attn.to_out[0](out))
