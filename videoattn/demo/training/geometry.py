"""Sizes of the demo model's parts, all stock diffusers and transformers classes: under 20 MB in fp16."""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import T5Config, T5EncoderModel

from videoattn.demo.tokenizer import word_ids

LATENT_CHANNELS = 32
TEXT_WIDTH = 128
VOCABULARY = 128
# A T5 that starts with its stock relative bias can't tell the order of words, and the diffusion loss alone
# never teaches it: colours and shapes stay unbound (docs/measured/demo_model.md).
RELATIVE_BIAS_GAIN = 25.0


def build_text_encoder() -> T5EncoderModel:
    """T5 encoder with two layers of width 128."""
    assert len(word_ids()) <= VOCABULARY
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=TEXT_WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = T5EncoderModel(config)
    block: Any = model.encoder.block[0]
    block.layer[0].SelfAttention.relative_attention_bias.weight.data.mul_(RELATIVE_BIAS_GAIN)
    return model


def build_vae() -> AutoencoderKLLTXVideo:
    """Video autoencoder, 16 x 16 pixels and 4 frames to a latent: 33 frames of 128 x 128 are 9 x 8 x 8."""
    return AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64),
        down_block_types=("LTXVideoDownBlock3D", "LTXVideoDownBlock3D"),
        layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        downsample_type=("conv", "conv"),
        decoder_block_out_channels=(48, 96),
        decoder_layers_per_block=(2, 2, 1),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        upsample_residual=(True, True),
        upsample_factor=(1, 2),
        patch_size=4,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def build_transformer() -> LTXVideoTransformer3DModel:
    """Transformer of five layers with four heads of 64."""
    return LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=64,
        cross_attention_dim=256,
        num_layers=5,
        caption_channels=TEXT_WIDTH,
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Euler steps over sigmas shifted by 3: a third of the steps does the work of unshifted ones."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0)
