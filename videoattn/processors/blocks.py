"""LTX blocks whose residuals, norms, modulations and feed-forward run fused: what level "block" swaps in.

A block keeps its weights and its class's name, by which diffusers finds the blocks it compiles; only its
class is exchanged. One class for all blocks, and not a function for each, is what lets them share one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.activations import GELU
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers import transformer_ltx, transformer_ltx2

from videoattn.processors.fused import Fusion, Modulation, Parameter, Residual, Rotary, parameter
from videoattn.processors.overlap import both
from videoattn.processors.sites import unwrap
from videoattn.processors.untouched import has_no_forward_but, hooked, plain_linear, untouched

ATTRIBUTE = "_videoattn_fusion"
# Numbers of a layer's modulation parameters, in the order of its table.
SHIFT_ATTN, SCALE_ATTN, GATE_ATTN, SHIFT_FF, SCALE_FF, GATE_FF, SHIFT_TEXT, SCALE_TEXT, GATE_TEXT = range(9)
# Numbers of the normed tensors that `before_meeting` asks for: the first and the last, since with one
# direction off there is only the other's.
FOR_AUDIO_TO_VIDEO, FOR_VIDEO_TO_AUDIO = 0, -1


def _while_installed(stock: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A hook put around a block's forward keeps it after uninstall(): from then on it must be stock's."""

    unfused = stock.forward  # read here: Dynamo traces no attribute of a class

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (forward if hasattr(self, ATTRIBUTE) else unfused)(self, *args, **kwargs)

        return call

    return decorate


class LTXVideoTransformerBlock(transformer_ltx.LTXVideoTransformerBlock):
    """LTX-Video's block."""

    @_while_installed(transformer_ltx.LTXVideoTransformerBlock)
    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Rotary | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states `(batch, seq, channels)` after the block, as the stock block computes them."""
        fusion: Fusion = getattr(self, ATTRIBUTE)
        own = partial(parameter, self.scale_shift_table, temb)
        x = hidden_states
        (normed,) = fusion.residual_norm(
            x, norm=self.norm1, modulations=(Modulation(own(SCALE_ATTN), own(SHIFT_ATTN)),)
        )
        branch = self.attn1(
            hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
        )
        (x,) = fusion.residual_norm(x, branch, own(GATE_ATTN))
        branch = self.attn2(
            x,
            encoder_hidden_states=encoder_hidden_states,
            image_rotary_emb=None,
            attention_mask=encoder_attention_mask,
        )
        x, normed = fusion.residual_norm(
            x, branch, None, self.norm2, (Modulation(own(SCALE_FF), own(SHIFT_FF)),)
        )
        return fusion.residual_norm(x, feed_forward(fusion, self.ff, normed), own(GATE_FF))[0]


class LTX2VideoTransformerBlock(transformer_ltx2.LTX2VideoTransformerBlock):
    """The block of LTX-2, 2.3 and 2.5."""

    @_while_installed(transformer_ltx2.LTX2VideoTransformerBlock)
    def forward(
        self,
        hidden_states: torch.Tensor,
        audio_hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        audio_encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        temb_audio: torch.Tensor,
        temb_ca_scale_shift: torch.Tensor,
        temb_ca_audio_scale_shift: torch.Tensor,
        temb_ca_gate: torch.Tensor,
        temb_ca_audio_gate: torch.Tensor,
        temb_prompt: torch.Tensor | None = None,
        temb_prompt_audio: torch.Tensor | None = None,
        video_rotary_emb: Rotary | None = None,
        audio_rotary_emb: Rotary | None = None,
        ca_video_rotary_emb: Rotary | None = None,
        ca_audio_rotary_emb: Rotary | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        audio_encoder_attention_mask: torch.Tensor | None = None,
        self_attention_mask: torch.Tensor | None = None,
        audio_self_attention_mask: torch.Tensor | None = None,
        a2v_cross_attention_mask: torch.Tensor | None = None,
        v2a_cross_attention_mask: torch.Tensor | None = None,
        use_a2v_cross_attention: bool = True,
        use_v2a_cross_attention: bool = True,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video and audio hidden states `(batch, seq, channels)` after the block, as the stock block computes
        them."""
        perturbation = (
            {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
            if self.perturbed_attn
            else {}
        )
        video = _Stream(self, False, hidden_states, temb, temb_ca_scale_shift, temb_ca_gate)
        audio = _Stream(
            self, True, audio_hidden_states, temb_audio, temb_ca_audio_scale_shift, temb_ca_audio_gate
        )
        streams = video, audio
        _settle(video.before_self_attention(), audio.before_self_attention(), streams)
        both(
            partial(video.self_attention, video_rotary_emb, self_attention_mask, perturbation),
            partial(audio.self_attention, audio_rotary_emb, audio_self_attention_mask, perturbation),
        )
        texts = _modulated_texts(
            streams, (encoder_hidden_states, audio_encoder_hidden_states), (temb_prompt, temb_prompt_audio)
        )
        _settle(video.before_text_attention(), audio.before_text_attention(), streams)
        both(
            partial(video.text_attention, texts[0], encoder_attention_mask),
            partial(audio.text_attention, texts[1], audio_encoder_attention_mask),
        )
        meets = use_a2v_cross_attention, use_v2a_cross_attention
        if any(meets):
            _settle(video.before_meeting(*meets), audio.before_meeting(*meets), streams)
            a2v = ca_video_rotary_emb, ca_audio_rotary_emb, a2v_cross_attention_mask
            v2a = ca_audio_rotary_emb, ca_video_rotary_emb, v2a_cross_attention_mask
            both(
                partial(video.meet, audio, FOR_AUDIO_TO_VIDEO, *a2v) if meets[0] else _nothing,
                partial(audio.meet, video, FOR_VIDEO_TO_AUDIO, *v2a) if meets[1] else _nothing,
            )
        _settle(video.before_feed_forward(), audio.before_feed_forward(), streams)
        ends = both(video.feed_forward, audio.feed_forward)
        (end,), (audio_end,) = video.fusion.residual_norms(*ends)
        return end, audio_end


class _Stream:
    """One modality on its way through an LTX-2 block.

    `branch` waits to be added to `x`, with its gate; `normed` is what the next layer reads, and stays
    referenced until that is done, as `overlap.CudaLane` asks.
    """

    def __init__(
        self,
        block: Any,
        audio: bool,
        x: torch.Tensor,
        temb: torch.Tensor,
        meeting_temb: torch.Tensor,
        meeting_gate_temb: torch.Tensor,
    ) -> None:
        self.block = block
        self.fusion: Fusion = getattr(block, ATTRIBUTE)
        self.x = x
        self.temb = temb
        self.meeting_temb = meeting_temb
        self.branch: torch.Tensor | None = None
        self.gate: Parameter | None = None
        self.normed: list[torch.Tensor] = []
        if audio:
            self.table, self.meeting_table = (
                block.audio_scale_shift_table,
                block.audio_a2v_cross_attn_scale_shift_table,
            )
            self.norms = (
                block.audio_norm1,
                block.audio_norm2,
                block.video_to_audio_norm,
                block.audio_norm3,
            )
            self.attentions = block.audio_attn1, block.audio_attn2, block.video_to_audio_attn
            self.ff, self.modulates_text_query = block.audio_ff, block.audio_cross_attn_adaln
            self.text_table = block.audio_prompt_scale_shift_table if block.cross_attn_adaln else None
        else:
            self.table, self.meeting_table = (
                block.scale_shift_table,
                block.video_a2v_cross_attn_scale_shift_table,
            )
            self.norms = block.norm1, block.norm2, block.audio_to_video_norm, block.norm3
            self.attentions = block.attn1, block.attn2, block.audio_to_video_attn
            self.ff, self.modulates_text_query = block.ff, block.video_cross_attn_adaln
            self.text_table = block.prompt_scale_shift_table if block.cross_attn_adaln else None
        self.meeting_gate = parameter(self.meeting_table[4:], meeting_gate_temb, 0)

    def _own(self, index: int) -> Parameter:
        return parameter(self.table, self.temb, index)

    def _waiting(self, norm: Any, modulations: tuple[Modulation, ...]) -> Residual:
        """The waiting branch added, then norm and modulations."""
        return Residual(self.x, self.branch, self.gate, norm, modulations)

    def before_self_attention(self) -> Residual:
        """Norm, modulation."""
        return self._waiting(self.norms[0], (Modulation(self._own(SCALE_ATTN), self._own(SHIFT_ATTN)),))

    def self_attention(
        self, rotary_emb: Rotary | None, mask: torch.Tensor | None, perturbation: dict[str, Any]
    ) -> None:
        """Self-attention."""
        self.branch = self.attentions[0](
            hidden_states=self.normed[0],
            encoder_hidden_states=None,
            query_rotary_emb=rotary_emb,
            attention_mask=mask,
            **perturbation,
        )
        self.gate = self._own(GATE_ATTN)

    def before_text_attention(self) -> Residual:
        """Norm; the query is modulated in LTX-2.3 and later."""
        modulations = ()
        if self.modulates_text_query:
            modulations = (Modulation(self._own(SCALE_TEXT), self._own(SHIFT_TEXT)),)
        return self._waiting(self.norms[1], modulations)

    def text_attention(self, text: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Attention to the text; the result is modulated in LTX-2.3 and later."""
        self.branch = self.attentions[1](
            self.normed[0], encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask
        )
        self.gate = self._own(GATE_TEXT) if self.modulates_text_query else None

    def before_meeting(self, a2v: bool, v2a: bool) -> Residual:
        """Normed for the attention between the modalities: modulated for audio to video, video to audio."""
        table = self.meeting_table[:4]
        first = tuple(index for index, wanted in ((0, a2v), (2, v2a)) if wanted)
        modulations = tuple(
            Modulation(
                parameter(table, self.meeting_temb, index), parameter(table, self.meeting_temb, index + 1)
            )
            for index in first
        )
        return self._waiting(self.norms[2], modulations)

    def meet(
        self,
        other: _Stream,
        direction: int,
        rotary_emb: Rotary | None,
        other_rotary_emb: Rotary | None,
        mask: torch.Tensor | None,
    ) -> None:
        """Attention to the other modality, of both modalities' normed tensors for that direction."""
        self.branch = self.attentions[2](
            self.normed[direction],
            encoder_hidden_states=other.normed[direction],
            query_rotary_emb=rotary_emb,
            key_rotary_emb=other_rotary_emb,
            attention_mask=mask,
        )
        self.gate = self.meeting_gate

    def before_feed_forward(self) -> Residual:
        """Norm, modulation."""
        return self._waiting(self.norms[3], (Modulation(self._own(SCALE_FF), self._own(SHIFT_FF)),))

    def feed_forward(self) -> Residual:
        """Feed-forward, and how it is added: the block's result."""
        return Residual(self.x, feed_forward(self.fusion, self.ff, self.normed[0]), self._own(GATE_FF))


def _settle(first: Residual, second: Residual, streams: tuple[_Stream, _Stream]) -> None:
    """Both streams' waiting branches added, then their norms and modulations, in one launch."""
    for stream, results in zip(streams, streams[0].fusion.residual_norms(first, second), strict=True):
        if stream.branch is not None:
            stream.x, *results = results
            stream.branch = stream.gate = None
        stream.normed = results


def _nothing() -> None:
    """In place of an attention that is off."""


def _modulated_texts(
    streams: tuple[_Stream, _Stream],
    texts: tuple[torch.Tensor, torch.Tensor],
    tembs: tuple[torch.Tensor | None, torch.Tensor | None],
) -> list[torch.Tensor]:
    """What the streams attend to as text: modulated in LTX-2.3 and later."""
    pairs = []
    modulated = list(texts)
    for index, (stream, text, temb) in enumerate(zip(streams, texts, tembs, strict=True)):
        if stream.text_table is not None and temb is not None:
            shift, scale = (parameter(stream.text_table, temb, number) for number in (0, 1))
            pairs.append(Residual(text, modulations=(Modulation(scale, shift),)))
        elif stream.text_table is not None:
            # The text's modulation does not depend on the timestep.
            shift, scale = stream.text_table.to(text).unbind(0)
            modulated[index] = text * (1 + scale) + shift
    if len(pairs) == 2:
        modulated = [results[0] for results in streams[0].fusion.residual_norms(*pairs)]
    return modulated


def feed_forward(fusion: Fusion, ff: Any, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward; its first layer and GELU in one where no more than these would run.

    Adapters, quantised weights and hooks, on it or on what it is made of, bring a forward of their own, which
    then runs.
    """
    first = ff.net[0]
    if type(first) is not GELU or first.approximate != "tanh" or not plain_linear(first.proj, x):
        return ff(x)
    if not (untouched(ff) and untouched(first)):
        return ff(x)
    x = fusion.linear_gelu(x, first.proj)
    for module in ff.net[1:]:
        x = module(x)
    return x


FUSED_CLASSES: dict[type, type] = {
    transformer_ltx.LTXVideoTransformerBlock: LTXVideoTransformerBlock,
    transformer_ltx2.LTX2VideoTransformerBlock: LTX2VideoTransformerBlock,
}
STOCK_CLASSES = {fused: stock for stock, fused in FUSED_CLASSES.items()}
_CLASSES = (*FUSED_CLASSES, *STOCK_CLASSES)


def blocks_of(model: Any) -> list[Any]:
    """The transformer's blocks, inside torch.compile's wrappers; none of text connectors."""
    return [unwrap(block) for block in getattr(model, "transformer_blocks", ())]


def require(model: Any) -> None:
    """Raise for a model whose blocks level "block" does not know.

    Raises:
        ValueError: a block or a norm of another class, or modulation tables of another dtype.
        RuntimeError: a block's forward is wrapped already.
    """
    for block in blocks_of(model):
        if type(block) not in _CLASSES:
            kind = type(block)
            raise ValueError(
                f"level='block' does not know {kind.__module__}.{kind.__qualname__}: use level='attention'"
            )
        if hooked(block) or not has_no_forward_but(block, _CLASSES):
            raise RuntimeError(
                "something wraps the forward of the model's blocks already (offloading, casting, a cache, "
                "layer skipping): undo that, install(level='block'), then do it again"
            )
        if block.scale_shift_table.dtype != model.dtype:
            raise ValueError(
                f"the modulation tables are {block.scale_shift_table.dtype}, the model {model.dtype}: "
                "use level='attention'"
            )
        for name, module in block.named_children():
            if "norm" in name and (type(module) is not RMSNorm or module.bias is not None):
                raise ValueError(f"level='block' does not know the block's {name}: use level='attention'")


def apply(block: Any, fusion: Fusion | None) -> None:
    """Make a block run fused, or, without `fusion`, as diffusers has it."""
    if has_no_forward_but(block, _CLASSES):
        vars(block).pop("forward", None)
    if fusion is not None:
        block.__class__ = FUSED_CLASSES.get(type(block), type(block))
        setattr(block, ATTRIBUTE, fusion)
        _register(type(block))
    elif hasattr(block, ATTRIBUTE):
        block.__class__ = STOCK_CLASSES.get(type(block), type(block))
        delattr(block, ATTRIBUTE)


def _register(fused: type) -> None:
    """Tell diffusers' hooks around blocks (caches, layer skipping) where a block has its hidden states."""
    try:
        known = TransformerBlockRegistry.get(STOCK_CLASSES[fused])
    except ValueError:
        return  # no such hook serves these blocks in stock diffusers
    TransformerBlockRegistry.register(fused, replace(known))
