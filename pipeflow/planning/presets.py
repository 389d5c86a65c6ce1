"""Presets: the language models that have a name, with the sizes of their published configurations. Must not contain:
what follows from sizes.

Sizes are those of `config.json` of the released weights, and of the papers for models without. `positions` is the
length that a model is mostly trained with, not the longest that it takes. Of models that also see images, these are the
language models alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipeflow.planning.transformer import GPT


def _llama(layers: int, hidden: int, heads: int, ffn: int, positions: int, vocabulary: int, **given: Any) -> GPT:
    """The shape that LLaMA, Mistral and Qwen have in common: arXiv 2307.09288, 2407.21783, 2310.06825, 2412.15115."""
    usual: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
    return GPT(layers, hidden, heads, positions, vocabulary, ffn=ffn, position_table=False, **usual | given)


def _mixture(
    shape: GPT, experts: int, each: int, shared: int = 0, dense: tuple[int, int] = (0, 0), groups: int = 0
) -> GPT:
    """The shape with experts, of which a token uses `each` and all `shared` ones. `dense` has the number of the first
    layers with one MLP, and its width. With `groups`, a token uses experts of so many of 8 groups.
    """
    sizes: dict[str, Any] = {"experts": experts, "experts_per_token": each, "shared_experts": shared}
    sizes |= {"expert_groups": 8, "groups_per_token": groups} if groups else {}
    sizes |= {"dense_layers": dense[0], "dense_ffn": dense[1]} if dense[0] else {}
    return replace(shape, **sizes)


def _latent(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, q_rank: int | None) -> GPT:
    """The shape of DeepSeek-V2 and V3 with latent attention: arXiv 2405.04434 and 2412.19437."""
    sizes: dict[str, Any] = {"head_size": 192, "rope_size": 64, "value_size": 128, "kv_rank": 512, "q_rank": q_rank}
    return _llama(layers, hidden, heads, ffn, 4096, vocabulary, **sizes)


_TINY = GPT(layers=8, hidden=128, heads=4, positions=256, vocabulary=2048)
_GPT3 = GPT(layers=96, hidden=12288, heads=96, positions=2048)
_MEGATRON = replace(_GPT3, vocabulary=51200)
_ROTARY: dict[str, Any] = {"position_table": False, "dropout": False, "tied": False}
_QWEN3: dict[str, Any] = {"head_size": 128, "head_norms": True}
_LLAMA3_8B = _llama(32, 4096, 32, 14336, 8192, 128256, kv_heads=8)
_LLAMA3_70B = _llama(80, 8192, 64, 28672, 8192, 128256, kv_heads=8)
_MISTRAL = _llama(32, 4096, 32, 14336, 8192, 32000, kv_heads=8)
_PARALLEL: dict[str, Any] = {"parallel_block": True, "tied": True}
_GEMMA2: dict[str, Any] = {"tied": True, "window": 4096, "full_every": 2}
_GEMMA3: dict[str, Any] = {"tied": True, "window": 1024, "full_every": 6, "head_norms": True}
_GLM: dict[str, Any] = {"kv_heads": 8, "biases": "qkv"}
_GPT_OSS = _mixture(
    _llama(24, 2880, 64, 2880, 4096, 201088, kv_heads=8, head_size=64, biases="all", window=128, full_every=2), 32, 4
)
_SCOUT = _mixture(_llama(48, 5120, 40, 8192, 8192, 202048, kv_heads=8), 16, 1, 1)
_NEMOTRON: dict[str, Any] = {"gated": False, "norm": "layer"}

_GPTS = {
    "tiny": _TINY,
    "gpt2-small": GPT(layers=12, hidden=768, heads=12),
    "gpt2-medium": GPT(layers=24, hidden=1024, heads=16),
    "gpt2-large": GPT(layers=36, hidden=1280, heads=20),
    "gpt2-xl": GPT(layers=48, hidden=1600, heads=32),
    "gpt2-8b": GPT(layers=72, hidden=3072, heads=24),
    "gpt2-10b": GPT(layers=50, hidden=4096, heads=16),
    "gpt3-1.3b": replace(_GPT3, layers=24, hidden=2048, heads=16),
    "gpt3-2.7b": replace(_GPT3, layers=32, hidden=2560, heads=32),
    "gpt3-6.7b": replace(_GPT3, layers=32, hidden=4096, heads=32),
    "gpt3-13b": replace(_GPT3, layers=40, hidden=5120, heads=40),
    "gpt3-175b": _GPT3,
    "gpt3": _GPT3,
    "megatron-22b": replace(_MEGATRON, layers=48, hidden=6144, heads=64),
    "turing-530b": replace(_MEGATRON, layers=105, hidden=20480, heads=128),
    "megatron-1t": replace(_MEGATRON, layers=128, hidden=25600, heads=160),
    "bloom-176b": GPT(70, 14336, 112, 2048, 250880, position_table=False, dropout=False),
    "gpt-j-6b": GPT(28, 4096, 16, 2048, 50400, parallel_block=True, **_ROTARY),
    "gpt-neox-20b": GPT(44, 6144, 64, 2048, 50432, parallel_block=True, **_ROTARY),
    "palm-540b": _llama(118, 18432, 48, 73728, 2048, 256000, kv_heads=1, head_size=256, **_PARALLEL),
    "falcon-7b": _llama(32, 4544, 71, 18176, 2048, 65024, kv_heads=1, **_PARALLEL, **_NEMOTRON),
    "command-r-35b": _llama(40, 8192, 64, 22528, 8192, 256000, **_PARALLEL),
    "nemotron4-15b": _llama(32, 6144, 48, 24576, 4096, 256000, kv_heads=8, **_NEMOTRON),
    "nemotron4-340b": _llama(96, 18432, 96, 73728, 4096, 256000, kv_heads=8, **_NEMOTRON),
}

_DENSE = {
    "llama2-7b": _llama(32, 4096, 32, 11008, 4096, 32000),
    "llama2-13b": _llama(40, 5120, 40, 13824, 4096, 32000),
    "llama2-70b": _llama(80, 8192, 64, 28672, 4096, 32000, kv_heads=8),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": _LLAMA3_70B,
    "llama3.1-8b": _LLAMA3_8B,
    "llama3.1-70b": _LLAMA3_70B,
    "llama3.1-405b": _llama(126, 16384, 128, 53248, 8192, 128256, kv_heads=8),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 8192, 128256, kv_heads=8, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, 8192, 128256, kv_heads=8, tied=True),
    "llama3.3-70b": _LLAMA3_70B,
    "tinyllama-1.1b": _llama(22, 2048, 32, 5632, 2048, 32000, kv_heads=4),
    "codellama-34b": _llama(48, 8192, 64, 22016, 4096, 32000, kv_heads=8),
    "yi-34b": _llama(60, 7168, 56, 20480, 4096, 64000, kv_heads=8),
    "mistral-7b": replace(_MISTRAL, window=4096),
    "ministral-8b": _llama(36, 4096, 32, 12288, 8192, 131072, kv_heads=8, head_size=128),
    "mistral-nemo-12b": _llama(40, 5120, 32, 14336, 8192, 131072, kv_heads=8, head_size=128),
    "mistral-small-24b": _llama(40, 5120, 32, 32768, 8192, 131072, kv_heads=8, head_size=128),
    "mistral-large-123b": _llama(88, 12288, 96, 28672, 8192, 32768, kv_heads=8),
    "qwen2.5-0.5b": _llama(24, 896, 14, 4864, 4096, 151936, kv_heads=2, biases="qkv", tied=True),
    "qwen2.5-1.5b": _llama(28, 1536, 12, 8960, 4096, 151936, kv_heads=2, biases="qkv", tied=True),
    "qwen2.5-3b": _llama(36, 2048, 16, 11008, 4096, 151936, kv_heads=2, biases="qkv", tied=True),
    "qwen2.5-7b": _llama(28, 3584, 28, 18944, 4096, 152064, kv_heads=4, biases="qkv"),
    "qwen2.5-14b": _llama(48, 5120, 40, 13824, 4096, 152064, kv_heads=8, biases="qkv"),
    "qwen2.5-32b": _llama(64, 5120, 40, 27648, 4096, 152064, kv_heads=8, biases="qkv"),
    "qwen2.5-72b": _llama(80, 8192, 64, 29568, 4096, 152064, kv_heads=8, biases="qkv"),
    "qwen3-0.6b": _llama(28, 1024, 16, 3072, 4096, 151936, kv_heads=8, tied=True, **_QWEN3),
    "qwen3-1.7b": _llama(28, 2048, 16, 6144, 4096, 151936, kv_heads=8, tied=True, **_QWEN3),
    "qwen3-4b": _llama(36, 2560, 32, 9728, 4096, 151936, kv_heads=8, tied=True, **_QWEN3),
    "qwen3-8b": _llama(36, 4096, 32, 12288, 4096, 151936, kv_heads=8, **_QWEN3),
    "qwen3-14b": _llama(40, 5120, 40, 17408, 4096, 151936, kv_heads=8, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 25600, 4096, 151936, kv_heads=8, **_QWEN3),
    "gemma-2b": _llama(18, 2048, 8, 16384, 8192, 256000, kv_heads=1, head_size=256, tied=True),
    "gemma-7b": _llama(28, 3072, 16, 24576, 8192, 256000, head_size=256, tied=True),
    "gemma2-2b": _llama(26, 2304, 8, 9216, 8192, 256000, kv_heads=4, head_size=256, **_GEMMA2),
    "gemma2-9b": _llama(42, 3584, 16, 14336, 8192, 256000, kv_heads=8, head_size=256, **_GEMMA2),
    "gemma2-27b": _llama(46, 4608, 32, 36864, 8192, 256000, kv_heads=16, head_size=128, **_GEMMA2),
    "gemma3-12b": _llama(48, 3840, 16, 15360, 8192, 262208, kv_heads=8, head_size=256, **_GEMMA3),
    "gemma3-27b": _llama(62, 5376, 32, 21504, 8192, 262208, kv_heads=16, head_size=128, **_GEMMA3),
    "phi-2": GPT(32, 2560, 32, 2048, 51200, parallel_block=True, **_ROTARY),
    "phi3-mini-4b": _llama(32, 3072, 32, 8192, 4096, 32064),
    "phi3-medium-14b": _llama(40, 5120, 40, 17920, 4096, 32064, kv_heads=10),
    "phi4-14b": _llama(40, 5120, 40, 17920, 4096, 100352, kv_heads=10),
}

_MIXTURES = {
    "mixtral-8x7b": _mixture(_MISTRAL, 8, 2),
    "mixtral-8x22b": _mixture(_llama(56, 6144, 48, 16384, 4096, 32768, kv_heads=8), 8, 2),
    "dbrx-132b": _mixture(_llama(40, 6144, 48, 10752, 4096, 100352, kv_heads=8, norm="layer"), 16, 4),
    "phi3.5-moe-42b": _mixture(_llama(32, 4096, 32, 6400, 4096, 32064, kv_heads=8, norm="layer"), 16, 2),
    "qwen2-57b-a14b": _mixture(_llama(28, 3584, 28, 2560, 4096, 151936, kv_heads=4, biases="qkv"), 64, 8, 8),
    "qwen3-30b-a3b": _mixture(_llama(48, 2048, 32, 768, 4096, 151936, kv_heads=4, **_QWEN3), 128, 8),
    "qwen3-235b-a22b": _mixture(_llama(94, 4096, 64, 1536, 4096, 151936, kv_heads=4, **_QWEN3), 128, 8),
    "llama4-scout-17b-16e": _SCOUT,
    "llama4-maverick-17b-128e": replace(_SCOUT, experts=128, expert_layers=2, dense_ffn=16384),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": replace(_GPT_OSS, layers=36, experts=128),
    "glm4.5-air-106b": _mixture(_llama(46, 4096, 96, 1408, 4096, 151552, head_size=128, **_GLM), 128, 8, 1, (1, 10944)),
    "glm4.5-355b": _mixture(_llama(92, 5120, 96, 1536, 4096, 151552, **_GLM, **_QWEN3), 160, 8, 1, (3, 12288)),
    "deepseek-v2-lite": _mixture(_latent(27, 2048, 16, 1408, 102400, None), 64, 6, 2, (1, 10944)),
    "deepseek-v2": _mixture(_latent(60, 5120, 128, 1536, 102400, 1536), 160, 6, 2, (1, 12288), groups=3),
    "deepseek-v3": _mixture(_latent(61, 7168, 128, 2048, 129280, 1536), 256, 8, 1, (3, 18432), groups=4),
    "moonlight-16b-a3b": _mixture(_latent(27, 2048, 16, 1408, 163840, None), 64, 6, 2, (1, 11264)),
    "kimi-k2": _mixture(_latent(61, 7168, 64, 2048, 163840, 1536), 384, 8, 1, (1, 18432)),
}


def _attending(layers: int, *attends: int) -> str:
    """A pattern of scans, in which these layers have attention."""
    return "".join("*" if layer in attends else "M" for layer in range(layers))


_MAMBA2: dict[str, Any] = {"scan_state": 128, "scan_heads": 128}
_GRANITE4: dict[str, Any] = _MAMBA2 | {"pattern": _attending(40, 5, 15, 25, 35), "tied": True}
_NEMOTRON_H: dict[str, Any] = _MAMBA2 | {"gated": False, "parts_alone": True, "scan_groups": 8, "scan_chunk": 128}

_HYBRIDS = {  # arXiv 2403.19887, 2504.03624, and the configurations of IBM's Bamba and Granite 4
    "jamba-52b": _mixture(
        _llama(32, 4096, 32, 14336, 4096, 65536, kv_heads=8, pattern="MMMM*MMM" * 4, scan_state=16, scan_rank=256),
        16,
        2,
    ),
    "bamba-9b": _llama(32, 4096, 32, 14336, 4096, 128256, kv_heads=8, pattern=_attending(32, 9, 18, 27), **_MAMBA2),
    "granite4-h-micro-3b": _llama(40, 2048, 32, 8192, 4096, 100352, kv_heads=8, **_GRANITE4 | {"scan_heads": 64}),
    "granite4-h-tiny-7b": _mixture(
        _llama(40, 1536, 12, 512, 4096, 100352, kv_heads=4, **_GRANITE4 | {"scan_heads": 48}), 64, 6, 2
    ),
    "granite4-h-small-32b": _mixture(_llama(40, 4096, 32, 768, 4096, 100352, kv_heads=8, **_GRANITE4), 72, 10, 2),
    "nemotron-h-8b": _llama(
        52,
        4096,
        32,
        21504,
        8192,
        131072,
        kv_heads=8,
        head_size=128,
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        **_NEMOTRON_H,
    ),
    "nemotron-h-56b": _llama(
        118,
        8192,
        64,
        32768,
        8192,
        131072,
        kv_heads=8,
        head_size=128,
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        **_NEMOTRON_H | {"scan_heads": 256, "scan_state": 256},
    ),
}
_HYBRIDS["jamba-52b"] = replace(_HYBRIDS["jamba-52b"], expert_layers=2, dense_ffn=14336)

GPT_PRESETS: Mapping[str, GPT] = MappingProxyType(_GPTS | _DENSE | _MIXTURES | _HYBRIDS)
"""Models by name. The GPT-3 of 1.3 billion parameters has 16 heads, which make its width; its paper (arXiv 2005.14165,
table 2.1) prints 24, and 5140 for the width of 13 billion.
"""
