"""Tiny LTX pipelines built offline from config: real classes, real call pattern, random weights.

Geometry as released: VAEs compress 32×32×8, video heads of 128, audio heads of 64, split rotary embeddings in
LTX-2.x, gates and perturbation in 2.3 and 2.5, learnable registers in the connectors.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    T5Config,
    T5EncoderModel,
)

PROMPT = "a red ball rolls to the left"
NEGATIVE_PROMPT = "a blue square"
SIZE = {"width": 128, "height": 96, "num_frames": 17}
GUIDANCE_OFF = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
GUIDANCE_ON = {
    "guidance_scale": 3.0,
    "stg_scale": 1.0,
    "modality_scale": 3.0,
    "guidance_rescale": 0.7,
    "audio_guidance_scale": 7.0,
    "audio_stg_scale": 1.0,
    "audio_modality_scale": 3.0,
    "audio_guidance_rescale": 0.7,
    "spatio_temporal_guidance_blocks": [1],
}
TEXT_LENGTH = 32
LATENT_CHANNELS = 16
MEL_BINS = 16
AUDIO_CHANNELS = 32
LTX2_VERSIONS = ("2.0", "2.3", "2.5")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """A Unigram tokenizer over single characters and a few words, padded on the right like T5's."""
    characters = [(c, -6.0) for c in "▁abcdefghijklmnopqrstuvwxyz0123456789.,!-'"]
    words = [
        (f"▁{word}", -3.0)
        for word in [
            "a",
            "the",
            "red",
            "blue",
            "green",
            "ball",
            "square",
            "rolls",
            "moves",
            "left",
            "right",
            "to",
            "on",
        ]
    ]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *characters, *words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_LENGTH,
        padding_side="right",
    )


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges, padded on the left like Gemma's."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        model_max_length=TEXT_LENGTH,
        padding_side="left",
    )


def ltx_transformer(*, layers: int = 2, head_dim: int = 64, seed: int = 0) -> LTXVideoTransformer3DModel:
    """An LTX-Video 0.9.x transformer with 2 heads; `head_dim` is 64 in the 2B model, 128 in the 13B."""
    torch.manual_seed(seed)
    return LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=head_dim,
        cross_attention_dim=2 * head_dim,
        num_layers=layers,
        caption_channels=32,
    ).eval()


def ltx_pipeline(*, layers: int = 2, head_dim: int = 64, seed: int = 0) -> LTXPipeline:
    """An LTX-Video 0.9.x pipeline."""
    transformer = ltx_transformer(layers=layers, head_dim=head_dim, seed=seed)
    vae = AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 16, 16, 16),
        decoder_block_out_channels=(8, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    ).eval()
    text_encoder = T5EncoderModel(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, is_encoder_decoder=False
        )
    ).eval()
    pipe = LTXPipeline(FlowMatchEulerDiscreteScheduler(), vae, text_encoder, t5_tokenizer(), transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ltx2_transformer(
    version: str = "2.3", *, layers: int = 2, heads: int = 2, seed: int = 0
) -> LTX2VideoTransformer3DModel:
    """An LTX-2 transformer of version 2.0, 2.3 or 2.5: video heads of 128, as many audio heads of 64."""
    torch.manual_seed(seed)
    later = version != "2.0"
    return LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=128,
        cross_attention_dim=128 * heads,
        audio_in_channels=AUDIO_CHANNELS,
        audio_out_channels=AUDIO_CHANNELS,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=64,
        audio_cross_attention_dim=64 * heads,
        num_layers=layers,
        caption_channels=32,
        rope_type="split",
        gated_attn=later,
        audio_gated_attn=later,
        cross_attn_mod=later,
        audio_cross_attn_mod=later,
        use_prompt_embeddings=not later,
        perturbed_attn=later,
        ff_bias=version != "2.5",
        use_keyframes_abs_pos_embedding=version == "2.5",
    ).eval()


def ltx2_connectors(version: str = "2.3", *, registers: bool = True, seed: int = 1) -> LTX2TextConnectors:
    """Text connectors of two blocks each; without `registers` the padding mask stays a mask."""
    torch.manual_seed(seed)
    later = version != "2.0"
    count = 8 if registers else None
    # LTX-2.0 feeds connectors of the caption's width; later versions project to each modality's width.
    video, audio = ((2, 128), (2, 64)) if later else ((2, 16), (2, 16))
    return LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=video[0],
        video_connector_attention_head_dim=video[1],
        video_connector_num_layers=2,
        video_connector_num_learnable_registers=count,
        video_gated_attn=later,
        audio_connector_num_attention_heads=audio[0],
        audio_connector_attention_head_dim=audio[1],
        audio_connector_num_layers=2,
        audio_connector_num_learnable_registers=count,
        audio_gated_attn=later,
        rope_type="split",
        per_modality_projections=later,
        video_hidden_dim=256,
        audio_hidden_dim=128,
        proj_bias=later,
    ).eval()


def gemma() -> Gemma3ForConditionalGeneration:
    """A Gemma-3 text encoder of two layers, so three hidden states."""
    text = Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    return Gemma3ForConditionalGeneration(config).eval()


def ltx2_pipeline(
    version: str = "2.3", *, layers: int = 2, registers: bool = True, seed: int = 0
) -> LTX2Pipeline:
    """An LTX-2 pipeline of version 2.0, 2.3 or 2.5 with video and audio; no scheduler shift."""
    transformer = ltx2_transformer(version, layers=layers, seed=seed)
    connectors = ltx2_connectors(version, registers=registers)
    vae = AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
        decoder_spatial_padding_mode="reflect" if version == "2.0" else "zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    ).eval()
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=AUDIO_CHANNELS,
        ch_mult=(1, 2, 4),
        num_res_blocks=1,
        latent_channels=8,
        mel_bins=MEL_BINS,
    ).eval()
    vocoder = LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[20, 32],
        upsample_factors=[10, 16],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=16000,
    ).eval()
    pipe = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift_terminal=None),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=gemma(),
        tokenizer=gemma_tokenizer(),
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ltx2_upsample_pipeline(pipe: LTX2Pipeline, *, seed: int = 2) -> LTX2LatentUpsamplePipeline:
    """The latent upsampler (×2 in space) for the two-stage recipe, sharing the pipeline's VAE."""
    torch.manual_seed(seed)
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=LATENT_CHANNELS, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=False
    ).eval()
    result = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=upsampler)
    result.set_progress_bar_config(disable=True)
    return result


def call_ltx(pipe: LTXPipeline, *, seed: int = 0, **arguments: Any) -> torch.Tensor:
    """Run an LTX-Video pipeline for two guided steps; frames `(batch, frames, channels, height, width)`."""
    settings: dict[str, Any] = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "max_sequence_length": TEXT_LENGTH,
        "output_type": "pt",
        **SIZE,
        **arguments,
    }
    return pipe(generator=torch.Generator().manual_seed(seed), **settings).frames


def call_ltx2(pipe: LTX2Pipeline, *, seed: int = 0, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an LTX-2 pipeline for two unguided steps; also returns audio `(batch, channels, samples)`."""
    settings: dict[str, Any] = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "num_inference_steps": 2,
        "frame_rate": 24.0,
        "max_sequence_length": TEXT_LENGTH,
        "output_type": "pt",
        **SIZE,
        **GUIDANCE_OFF,
        **arguments,
    }
    result = pipe(generator=torch.Generator().manual_seed(seed), **settings)
    return result.frames, result.audio


def padding_mask(lengths: list[int], length: int = TEXT_LENGTH) -> torch.Tensor:
    """A multiplicative int64 mask `(batch, length)`, right-padded after each entry's length."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).to(torch.int64)


def ltx_inputs(
    lengths: list[int] | None = None, *, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Any]:
    """Inputs of one `ltx_transformer` forward of 3×3×4 video tokens; all-ones text mask without `lengths`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden_states": draw(batch, 36, LATENT_CHANNELS),
        "encoder_hidden_states": draw(batch, TEXT_LENGTH, 32),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": padding_mask(lengths or [TEXT_LENGTH] * batch).bool(),
        "num_frames": 3,
        "height": 3,
        "width": 4,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }


def ltx2_inputs(
    lengths: list[int] | None = None,
    *,
    version: str = "2.3",
    batch: int = 1,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Inputs of one `ltx2_transformer` forward: 3×3×4 video and 17 audio tokens; masks as in `ltx_inputs`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    video_text, audio_text = (32, 32) if version == "2.0" else (128 * heads, 64 * heads)
    mask = padding_mask(lengths or [TEXT_LENGTH] * batch)
    return {
        "hidden_states": draw(batch, 36, LATENT_CHANNELS),
        "audio_hidden_states": draw(batch, 17, AUDIO_CHANNELS),
        "encoder_hidden_states": draw(batch, TEXT_LENGTH, video_text),
        "audio_encoder_hidden_states": draw(batch, TEXT_LENGTH, audio_text),
        "timestep": torch.full((batch,), 500.0),
        "sigma": torch.full((batch,), 500.0),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 3,
        "width": 4,
        "fps": 24.0,
        "audio_num_frames": 17,
        "return_dict": False,
    }
