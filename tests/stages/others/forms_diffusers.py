"""Forms of diffusers, which take noise, a time and a condition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeflow import Whole
from tests.stages.others.form import SAMPLES, Form, image, named, normal, several

_CHANNELS: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def times(generator: torch.Generator) -> Tensor:
    """Makes a batch of time steps."""
    return torch.randint(10, (SAMPLES,), generator=generator)


def _diffusers(name: str, inputs: Any, **sizes: Any) -> Form:
    return Form("diffusers", name, lambda it: getattr(it, name)(**sizes), inputs)


_NOISE = named(hidden_states=normal(4, 8, 8), timestep=times, encoder_hidden_states=normal(5, 16))
DIFFUSERS = [
    _diffusers(
        "UNet2DModel",
        several(image(16), times),
        sample_size=16,
        **_CHANNELS,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusers(
        "UNet2DConditionModel",
        several(image(16, 4), times, normal(5, 8)),
        sample_size=16,
        **_CHANNELS,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusers(
        "UVit2DModel",
        named(
            input_ids=lambda g: torch.randint(30, (SAMPLES, 4, 4), generator=g),
            encoder_hidden_states=normal(5, 16),
            pooled_text_emb=normal(16),
            micro_conds=normal(6),
        ),
        hidden_size=32,
        cond_embed_dim=16,
        encoder_hidden_size=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=48,
        block_out_channels=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        codebook_size=30,
        vocab_size=31,
        block_num_heads=4,
        in_channels=32,
        num_res_blocks=1,
    )._replace(tolerance=1e-6),  # its norms compute in float32, where another order of a sum makes a difference
    _diffusers(
        "AutoencoderKL",
        image(16),
        **_CHANNELS,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "VQModel",
        image(16),
        **_CHANNELS,
        latent_channels=4,
        num_vq_embeddings=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "AutoencoderDC",
        image(16),
        in_channels=3,
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
    ),
    _diffusers(
        "DiTTransformer2DModel",
        named(hidden_states=normal(4, 8, 8), timestep=times, class_labels=times),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        named(
            hidden_states=normal(4, 8, 8),
            encoder_hidden_states=normal(5, 16),
            pooled_projections=normal(16),
            timestep=times,
        ),
        sample_size=8,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        named(
            hidden_states=normal(4, 8, 8),
            encoder_hidden_states=normal(5, 16),
            timestep=times,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
        sample_size=8,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=32,
        in_channels=4,
        out_channels=4,
        caption_channels=16,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        named(
            hidden_states=normal(16, 4),
            encoder_hidden_states=normal(5, 16),
            pooled_projections=normal(16),
            timestep=normal(),
            img_ids=Whole(torch.zeros(16, 3)),
            txt_ids=Whole(torch.zeros(5, 3)),
        ),
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 2, 2),
    ),
    _diffusers(
        "AuraFlowTransformer2DModel",
        named(hidden_states=normal(4, 8, 8), encoder_hidden_states=normal(5, 16), timestep=normal()),
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    ),
    _diffusers(
        "SanaTransformer2DModel",
        _NOISE,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    ),
    _diffusers(
        "CogVideoXTransformer3DModel",
        named(hidden_states=normal(1, 4, 8, 8), timestep=times, encoder_hidden_states=normal(5, 16)),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=4,
        sample_width=8,
        sample_height=8,
        sample_frames=1,
        max_text_seq_length=5,
    ),
    _diffusers(
        "PriorTransformer",
        named(hidden_states=normal(16), timestep=times, proj_embedding=normal(16), encoder_hidden_states=normal(5, 16)),
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=4,
        embedding_dim=16,
        num_embeddings=5,
    ),
    _diffusers(
        "TransformerTemporalModel",
        named(hidden_states=normal(8), num_frames=2),
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=8,
        num_layers=4,
        norm_num_groups=4,
    )._replace(inputs=named(hidden_states=normal(8, 4, 4), num_frames=2)),
]
