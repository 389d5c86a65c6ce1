"""Models of transformers, tiny and of random weights, with a batch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]
WORDS = 64


def _text(length: int = 8) -> dict[str, Any]:
    words = torch.randint(3, 50, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(words)
    mask[0, length - 2 :] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def _image() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(3)}


def _sound() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 8, 32, dtype=torch.float64, generator=generator)
    return {"input_features": features, "labels": _text(6)["labels"]}


def _pair() -> dict[str, Any]:
    return {**_text(), "labels": _text(6)["labels"]}


_SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_DENSE = {**_SIZES, "intermediate_size": 48}
_GROUPED = {**_DENSE, "num_key_value_heads": 2, "use_cache": False}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
_GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TALL: dict[str, Any] = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_TALL |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": WORDS, "dropout": 0.0}
_SIGHT = {**_DENSE, **_STILL, "image_size": 16, "patch_size": 4, "num_labels": 5}
del _SIGHT["vocab_size"]
_WINDOWS: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_WINDOWS |= {"num_labels": 5, "drop_path_rate": 0.0}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
_T5 |= {"decoder_start_token_id": 0, "use_cache": False}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
_WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}

FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _text),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}, _text),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT, _text),
    "bert": ("BertForMaskedLM", "BertConfig", {**_DENSE, **_STILL}, _text),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "use_cache": False},
        _text,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False},
        _text,
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5, _pair),
    "vit": ("ViTForImageClassification", "ViTConfig", _SIGHT, _image),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**_TALL, **_WHISPER}, _sound),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_GROUPED, "head_dim": 8, "pad_token_id": 0}, _text),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED, _text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, _text),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_GROUPED, "head_dim": 8, "pad_token_id": 0}, _text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8}, _text),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}, _text),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_DENSE, **_STILL, "max_position_embeddings": 32}, _text),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_DENSE, **_STILL, "embedding_size": 16}, _text),
    "ernie": ("ErnieForMaskedLM", "ErnieConfig", {**_DENSE, **_STILL}, _text),
    "beit": (
        "BeitForImageClassification",
        "BeitConfig",
        {**_SIGHT, "drop_path_rate": 0.0, "use_relative_position_bias": True},
        _image,
    ),
    "swin": ("SwinForImageClassification", "SwinConfig", _WINDOWS, _image),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", _WINDOWS, _image),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**_TALL, "use_cache": False}, _text),
    "t5-classifier": (
        "T5ForSequenceClassification",
        "T5Config",
        {**_T5, "num_labels": 3},
        lambda: {"input_ids": torch.cat([_text()["input_ids"], torch.ones(3, 1).long()], 1), "labels": torch.arange(3)},
    ),
}
"""By name: the model's class, that of its configuration, its sizes, and a batch."""


def make(transformers: Any, name: str) -> Made:
    """A model in float64 all of whose weights are random, and a batch for it."""
    model, config, sizes, batch = FAMILIES[name]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    return made, batch()
