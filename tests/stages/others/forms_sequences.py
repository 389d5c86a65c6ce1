"""Forms that take words, signals or graphs: of x-transformers, torchaudio, PyG and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeflow import Whole
from tests.stages.others.form import SAMPLES, Form, image, named, normal, several, words


def _words(name: str, make: Callable[[Any], nn.Module], inputs: Any = None) -> Form:
    return Form("x_transformers", name, make, words(12) if inputs is None else inputs)


def _decoder(it: Any, kind: str = "Decoder", wrapper: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    layers = getattr(it, kind)(dim=32, depth=4, heads=4, attn_dim_head=8, **more)
    made: nn.Module = it.TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers, **(wrapper or {}))
    return made


X_TRANSFORMERS = [
    _words("Decoder", _decoder),
    _words("Encoder", lambda it: _decoder(it, "Encoder")),
    _words(
        "Decoder, rotary, RMSNorm, SwiGLU",
        lambda it: _decoder(it, rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True),
    ),
    _words("Decoder, ALiBi, grouped heads", lambda it: _decoder(it, alibi_pos_bias=True, attn_kv_heads=2)),
    _words(
        "Decoder, T5 bias, memory tokens", lambda it: _decoder(it, wrapper={"num_memory_tokens": 2}, rel_pos_bias=True)
    ),
    _words("Decoder, macaron, gated residual", lambda it: _decoder(it, macaron=True, gate_residual=True)),
    _words("Decoder, hyper-connections", lambda it: _decoder(it, num_residual_streams=2)),
    _words(
        "Decoder, RMSNorm without weights",
        lambda it: _decoder(it, use_simple_rmsnorm=True),
    ),
    _words("AutoregressiveWrapper", lambda it: it.AutoregressiveWrapper(_decoder(it))),
    _words(
        "XTransformer",
        lambda it: it.XTransformer(
            dim=32,
            enc_num_tokens=32,
            enc_depth=4,
            enc_heads=4,
            enc_max_seq_len=16,
            dec_num_tokens=32,
            dec_depth=4,
            dec_heads=4,
            dec_max_seq_len=16,
        ),
        several(words(12), words(10)),
    ),
    _words(
        "ViTransformerWrapper",
        lambda it: it.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=5, attn_layers=it.Encoder(dim=32, depth=4, heads=4)
        ),
        image(),
    ),
    _words(
        "ContinuousTransformerWrapper",
        lambda it: it.ContinuousTransformerWrapper(
            dim_in=8, dim_out=8, max_seq_len=16, attn_layers=it.Encoder(dim=32, depth=4, heads=4)
        ),
        normal(12, 8),
    ),
    _words(
        "Decoder with cross-attention",
        lambda it: _decoder(it, cross_attend=True),
        named(x=words(12), context=normal(6, 32)),
    ),
]

AUDIO = [
    Form(
        "torchaudio.models",
        "Conformer",
        lambda it: it.Conformer(16, 4, 32, 4, 3),
        several(normal(12, 16), lambda g: torch.full((SAMPLES,), 12)),
    ),
    Form(
        "torchaudio.models",
        "Emformer",
        lambda it: it.Emformer(16, 4, 32, 4, 4, right_context_length=2),
        several(normal(14, 16), lambda g: torch.full((SAMPLES,), 12)),
    ),
    Form("torchaudio.models", "ConvTasNet", lambda it: it.ConvTasNet(2, 4, 8, 3, 8, 8, 2, 2), normal(1, 64)),
    Form("torchaudio.models", "DeepSpeech", lambda it: it.DeepSpeech(8, 16, 5), normal(1, 12, 8)),
    Form(
        "torchaudio.models",
        "WaveRNN",
        lambda it: it.WaveRNN([2, 2, 2], 8, 8, 4, 8, 8, 5, 8, 8, 8),
        several(normal(1, 32), normal(1, 8, 8)),
    ),
    Form(
        "torchaudio.models",
        "wav2vec2_model",
        lambda it: it.wav2vec2_model(
            "group_norm", [(8, 10, 5), (8, 3, 2)], False, 16, 0.0, 8, 4, 4, 4, 0.0, 32, 0.0, 0.0, False, 0.0, 5
        ),
        normal(400),
    ),
    Form("torchaudio.models", "HDemucs", lambda it: it.HDemucs(["a", "b"], 1, 8, nfft=64, depth=4), normal(1, 1024)),
    Form(
        "torchaudio.models",
        "Tacotron2",
        lambda it: it.Tacotron2(
            n_mels=8,
            n_symbol=32,
            symbol_embedding_dim=16,
            encoder_embedding_dim=16,
            decoder_rnn_dim=16,
            attention_rnn_dim=16,
            attention_hidden_dim=8,
            attention_location_n_filter=4,
            prenet_dim=8,
            postnet_embedding_dim=16,
            decoder_dropout=0.0,
            attention_dropout=0.0,
        ),
        several(words(6), lambda g: torch.full((SAMPLES,), 6), normal(8, 10), lambda g: torch.full((SAMPLES,), 10)),
    ),
]

LUCIDRAINS = [
    Form(
        "linear_attention_transformer",
        "LinearAttentionTransformerLM",
        lambda it: it.LinearAttentionTransformerLM(
            num_tokens=32, dim=32, heads=4, depth=4, max_seq_len=16, n_local_attn_heads=2, local_attn_window_size=8
        ),
        words(16),
    ),
    Form(
        "linear_attention_transformer",
        "LinearAttentionTransformerLM, reversible",
        lambda it: it.LinearAttentionTransformerLM(
            num_tokens=32, dim=32, heads=4, depth=4, max_seq_len=16, reversible=True
        ),
        words(16),
    ),
    Form(
        "performer_pytorch",
        "PerformerLM",
        lambda it: it.PerformerLM(num_tokens=32, max_seq_len=16, dim=32, depth=4, heads=4, dim_head=8),
        words(16),
    ),
    Form(
        "performer_pytorch",
        "PerformerLM, reversible",
        lambda it: it.PerformerLM(num_tokens=32, max_seq_len=16, dim=32, depth=4, heads=4, dim_head=8, reversible=True),
        words(16),
    ),
    Form(
        "reformer_pytorch",
        "ReformerLM",
        lambda it: it.ReformerLM(
            num_tokens=32, dim=32, depth=4, max_seq_len=16, heads=4, bucket_size=4, n_hashes=2, causal=True
        ),
        words(16),
        microbatches=1,  # its blocks keep the random state of their last forward for their backward
    ),
    Form(
        "perceiver_pytorch",
        "Perceiver",
        lambda it: it.Perceiver(
            num_freq_bands=2,
            depth=4,
            max_freq=4.0,
            input_channels=3,
            num_latents=8,
            latent_dim=16,
            num_classes=5,
            latent_heads=2,
            cross_dim_head=8,
            latent_dim_head=8,
        ),
        lambda g: normal(8, 8, 3)(g),
    ),
    Form(
        "mlp_mixer_pytorch",
        "MLPMixer",
        lambda it: it.MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=4, num_classes=5),
        image(),
    ),
    Form("g_mlp_pytorch", "gMLP", lambda it: it.gMLP(num_tokens=32, dim=32, depth=4, seq_len=12), words(12)),
    Form(
        "nystrom_attention",
        "Nystromformer",
        lambda it: it.Nystromformer(dim=32, dim_head=8, heads=4, depth=4, num_landmarks=4, pinv_iterations=2),
        normal(12, 32),
    ),
    Form(
        "axial_attention",
        "AxialImageTransformer",
        lambda it: it.AxialImageTransformer(dim=16, depth=4, reversible=False),
        image(8, 16),
    ),
    Form(
        "axial_attention",
        "AxialImageTransformer, reversible",
        lambda it: it.AxialImageTransformer(dim=16, depth=4, reversible=True),
        lambda g: image(8, 16)(g).requires_grad_(),
    ),
    Form(
        "linformer",
        "LinformerLM",
        lambda it: it.LinformerLM(num_tokens=32, dim=32, seq_len=12, depth=4, heads=4, k=4),
        words(12),
    ),
    Form(
        "local_attention",
        "LocalTransformer",
        lambda it: it.LocalTransformer(
            num_tokens=32, dim=32, depth=4, max_seq_len=16, local_attn_window_size=8, heads=4, dim_head=8
        ),
        words(16),
    ),
    Form("minGRU_pytorch", "minGRU", lambda it: nn.Sequential(*(it.minGRU(16) for _ in range(4))), normal(12, 16)),
]

OTHERS = [
    Form("mambapy.mamba", "Mamba", lambda it: it.Mamba(it.MambaConfig(d_model=16, n_layers=4)), normal(8, 16)),
    Form(
        "rtdl_revisiting_models",
        "FTTransformer",
        lambda it: it.FTTransformer(
            n_cont_features=4,
            cat_cardinalities=[],
            d_out=3,
            n_blocks=4,
            d_block=32,
            attention_n_heads=4,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        several(normal(4), lambda g: None),
    ),
    Form(
        "rtdl_revisiting_models",
        "ResNet",
        lambda it: it.ResNet(
            d_in=4, d_out=3, n_blocks=4, d_block=16, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0
        ),
        normal(4),
    ),
    Form(
        "revtorch",
        "ReversibleSequence",
        lambda it: it.ReversibleSequence(
            nn.ModuleList(
                [it.ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4), fix_random_seed=False) for _ in range(4)]
            )
        ),
        lambda g: normal(8)(g).requires_grad_(),
    ),
]

_EDGES = Whole(torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0, 4, 0, 4, 5], [1, 0, 2, 1, 3, 2, 0, 3, 0, 4, 5, 4]]))


def _graph(name: str, **more: Any) -> Form:
    def make(it: Any) -> nn.Module:
        made: nn.Module = getattr(it.models, name)(8, 16, 4, 5, **more)
        return made

    return Form("torch_geometric.nn", name, make, several(normal(6, 8), lambda g: _EDGES))


PYG = [
    _graph("GCN"),
    _graph("GIN"),
    _graph("GraphSAGE"),
    _graph("EdgeCNN"),
    _graph("GCN", jk="cat")._replace(name="GCN, jumping knowledge"),
    _graph("GAT", v2=False)._replace(
        inputs=several(lambda g: Whole(torch.randn(6, 8, generator=g, dtype=torch.float64)), lambda g: _EDGES),
        microbatches=1,
    ),
    _graph("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 2, 4])),
    Form("torch_geometric.nn", "MLP", lambda it: it.models.MLP([8, 16, 16, 16, 5]), normal(8)),
    Form(
        "torch_geometric.nn",
        "GraphUNet",
        lambda it: it.models.GraphUNet(8, 16, 5, 3),
        several(lambda g: Whole(torch.randn(6, 8, generator=g, dtype=torch.float64)), lambda g: _EDGES),
        microbatches=1,
    ),
]

SEQUENCES = [*X_TRANSFORMERS, *AUDIO, *LUCIDRAINS, *OTHERS, *PYG]
