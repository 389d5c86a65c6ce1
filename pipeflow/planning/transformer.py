"""GPT: the sizes of a decoder-only transformer, and what precedes and follows its layers. Must not contain: bytes,
times and layouts; `blocks.py` has the layers.

Before the blocks there are a word table and, unless positions are rotary, a position table. After the blocks there are
a last norm and the head. With `tied`, the head has the weight of the word table.

A tensor split by t cuts the word table and the head by words, and the position table by hidden. Each rank has
vocabulary / t rows of the word table, rounded up. Sources: arXiv 1909.08053 (Megatron-LM), section 3; the position
table by hidden is pipeflow's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_positive
from pipeflow.planning.blocks import Part as Part  # as before there was a file of blocks
from pipeflow.planning.blocks import Transformer


@dataclass(frozen=True, slots=True)
class GPT(Transformer):
    """The sizes of a GPT, a LLaMA, or a mixture of experts.

    >>> GPT.named("gpt2-small").parameters
    124475904
    >>> GPT.named("llama3-8b").parameters
    8030261248

    Raises UsageError for sizes below 1 and as `Transformer`.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden state.
        heads: attention heads per layer.
        kv_heads: heads of key and value; by default as many as `heads`.
        head_size: width of a head; by default `hidden` / `heads`.
        ffn: width of the MLP, or of one expert; by default `mlp_ratio` x `hidden`.
        gated: whether the MLP has three matrices (SwiGLU) instead of two.
        experts: MLPs per layer; 1 for no mixture of experts.
        experts_per_token: experts that a token uses.
        shared_experts: additional MLPs that every token uses.
        biases: linear layers with a bias: "all", "qkv" or "none".
        norm: "layer" (LayerNorm, with a bias) or "rms" (RMSNorm, without).
        head_norms: whether query and key have a norm over `head_size`.
        dropout: whether there is dropout, whose masks are kept in training.
        kv_rank, q_rank, rope_size, value_size, window, full_every: sizes of latent attention and of windows, as in
            `linears.py`; by default there are none.
        parallel_block: whether attention and the MLP of a block read the same norm.
        dense_layers, dense_ffn: how many of the first layers have one MLP instead of experts, and its width.
        positions: tokens per sequence; with a position table, the most that there can be.
        vocabulary: number of tokens in the vocabulary.
        mlp_ratio: width of a layer's MLP, as a multiple of `hidden`, unless `ffn` is given.
        tied: whether the head shares the weight of the word table.
        position_table: whether positions are learned; rotary positions have no parameters.
    """

    positions: int = 1024
    vocabulary: int = 50304
    mlp_ratio: int = 4
    _: KW_ONLY
    tied: bool = True
    position_table: bool = True

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        require_positive(positions=self.positions, vocabulary=self.vocabulary, mlp_ratio=self.mlp_ratio)

    @classmethod
    def named(cls, name: str) -> GPT:
        """The model `name` of GPT_PRESETS. Raises UsageError for an unknown name, with the nearest known one."""
        if name not in GPT_PRESETS:
            raise unknown("model", name, GPT_PRESETS)
        return GPT_PRESETS[name]

    @property
    def wide(self) -> int:
        """Width of the MLP, or of one expert if there are several."""
        return self.mlp_ratio * self.hidden if self.ffn is None else self.ffn

    @property
    def tokens(self) -> int:
        """Tokens per sequence unless a setup says otherwise: `positions`."""
        return self.positions

    @property
    def embedding_flops(self) -> float:
        """0, because looking up a row is no matrix product."""
        return 0

    @property
    def head_flops(self) -> float:
        """Operations per token in the forward of the head: 2hV."""
        return 2 * self.hidden * self.vocabulary

    def head_outputs(self, tensor: int = 1) -> float:
        """Logits per token on one of `tensor` ranks."""
        return self.vocabulary_rows(tensor)

    def require_sequence(self, sequence: int) -> None:
        """Raises UsageError for more tokens than the position table has."""
        if self.position_table and sequence > self.positions:
            raise UsageError(f"a sequence of {sequence} tokens is too long for a model with {self.positions} positions")

    def vocabulary_rows(self, tensor: int = 1) -> int:
        """The rows of the word table on one of `tensor` ranks, including padding."""
        return -(-self.vocabulary // tensor)

    def _ends(self, tensor: int, *, first: bool, last: bool) -> int:
        table = self.vocabulary_rows(tensor) * self.hidden
        tables = max(first, last) if self.tied else first + last
        positions = self.positions * self.hidden // tensor if first and self.position_table else 0
        return tables * table + positions + last * self.norm_parameters


def _llama(layers: int, hidden: int, heads: int, ffn: int, positions: int, vocabulary: int, **given: Any) -> GPT:
    """The shape that LLaMA, Mistral and Qwen have in common: arXiv 2307.09288, 2407.21783, 2310.06825, 2412.15115."""
    usual: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
    return GPT(layers, hidden, heads, positions, vocabulary, ffn=ffn, position_table=False, **usual | given)


_TINY = GPT(layers=8, hidden=128, heads=4, positions=256, vocabulary=2048)
_GPT3 = GPT(layers=96, hidden=12288, heads=96, positions=2048)
_MEGATRON = replace(_GPT3, vocabulary=51200)
_MISTRAL = _llama(32, 4096, 32, 14336, 8192, 32000, kv_heads=8)

GPT_PRESETS: Mapping[str, GPT] = MappingProxyType(
    {
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
        "llama2-7b": _llama(32, 4096, 32, 11008, 4096, 32000),
        "llama2-13b": _llama(40, 5120, 40, 13824, 4096, 32000),
        "llama2-70b": _llama(80, 8192, 64, 28672, 4096, 32000, kv_heads=8),
        "llama3-8b": _llama(32, 4096, 32, 14336, 8192, 128256, kv_heads=8),
        "llama3-70b": _llama(80, 8192, 64, 28672, 8192, 128256, kv_heads=8),
        "llama3.1-405b": _llama(126, 16384, 128, 53248, 8192, 128256, kv_heads=8),
        "mistral-7b": _MISTRAL,
        "mixtral-8x7b": replace(_MISTRAL, experts=8, experts_per_token=2),
        "qwen2.5-7b": _llama(28, 3584, 28, 18944, 4096, 152064, kv_heads=4, biases="qkv"),
        "qwen2.5-32b": _llama(64, 5120, 40, 27648, 4096, 152064, kv_heads=8, biases="qkv"),
        "qwen3-30b-a3b": _llama(
            *(48, 2048, 32, 768, 4096, 151936),
            kv_heads=4,
            head_size=128,
            head_norms=True,
            experts=128,
            experts_per_token=8,
        ),
    }
)
"""Models by name, with `positions` that they are mostly trained with. The GPT-3 of 1.3 billion parameters has 16 heads,
which make its width; its paper (arXiv 2005.14165, table 2.1) prints 24, and 5140 for the width of 13 billion.
"""
