"""GPT and ViT: the sizes of transformers, and what precedes and follows their layers. Must not contain: bytes, times
and layouts; `blocks.py` has the layers, `presets.py` and `catalog.py` the models that have names.

Before the blocks of a GPT there are a word table and, unless positions are rotary, a position table. After the blocks
there are a last norm and the head. With `tied`, the head has the weight of the word table. A tensor split by t cuts the
word table and the head by words, and the position table by hidden. Each rank has vocabulary / t rows of the word table,
rounded up. Sources: arXiv 1909.08053 (Megatron-LM), section 3; the position table by hidden is pipeflow's own.

Before the blocks of a ViT (arXiv 2010.11929) there are a linear that makes a token of each patch of the image, a class
token, and a position table. After the blocks there are a last norm and a head, a linear that reads the class token. A
tensor split leaves all of these whole.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.planning.blocks import Transformer, near_divisors


@dataclass(frozen=True, slots=True)
class GPT(Transformer):
    """The sizes of a GPT, a LLaMA, or a mixture of experts.

    >>> GPT.named("gpt2-small").parameters
    124475904
    >>> GPT.named("llama3-8b").parameters
    8030261248

    Raises UsageError for sizes below 1 and as `Transformer`.

    Attributes:
        layers: number of transformer layers.
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
        kv_rank: width of the latent vector of key and value (MLA); by default heads have their own.
        q_rank: width of the latent vector of the query (MLA); by default there is none.
        rope_size: the part of a head that has positions (MLA).
        value_size: width of a head of value; by default that of a head of query.
        window: the tokens that a query sees, its own included; by default all before it.
        full_every: every N-th layer sees all tokens despite `window`; 0 for none.
        parallel_block: whether attention and the MLP of a block read the same norm.
        dense_layers: how many of the first layers have one MLP instead of experts.
        expert_layers: which layers have experts: N for layer N, 2N and so on, or 0 or 1 for each layer; by default all
            but the first `dense_layers`.
        dense_ffn: width of the MLP of layers without experts; by default that of all experts that a token uses.
        expert_groups: equal groups of experts (arXiv 2412.19437, part 2.1.2).
        groups_per_token: groups whose experts a token uses.
        pattern: a letter for each layer: M for a scan (Mamba) in the place of attention, * for attention; with
            `parts_alone` also - for an MLP and E for experts. By default all layers have attention.
        parts_alone: each layer has one part alone, as in Nemotron-H (arXiv 2504.03624).
        scan_width: channels of a scan; by default 2 x `hidden`.
        scan_heads: heads of a scan by chunks (Mamba-2, arXiv 2405.21060).
        scan_state: numbers in the state of a channel.
        scan_groups: groups of channels that share what reads and writes their states.
        scan_rank: width through which a scan of single channels makes their steps (Mamba, arXiv 2312.00752).
        scan_conv: tokens that the convolution before a scan reads.
        scan_chunk: tokens that a scan by chunks computes together.
        positions: tokens per sequence; with a position table, the most that there can be.
        vocabulary: number of tokens in the vocabulary.
        mlp_ratio: width of a layer's MLP, as a multiple of `hidden`, unless `ffn` is given.
        tied: whether the head shares the weight of the word table.
        position_table: whether positions are learned; rotary positions have no parameters.
        mtp: layers that predict further tokens (arXiv 2412.19437, section 2.2). Each has a linear that reads a hidden
            state and the next token, a layer like the last, and the common head.
    """

    positions: int = 1024
    vocabulary: int = 50304
    mlp_ratio: int = 4
    _: KW_ONLY
    tied: bool = True
    position_table: bool = True
    mtp: int = 0

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        require_positive(positions=self.positions, vocabulary=self.vocabulary, mlp_ratio=self.mlp_ratio)
        require_at_least(0, mtp=self.mtp)

    @classmethod
    def named(cls, name: str) -> GPT:
        """The model `name` of GPT_PRESETS. Raises UsageError for an unknown name, with the nearest known one."""
        from pipeflow.planning.presets import GPT_PRESETS  # which are made of this class

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
        """Operations per token in the forward of the head: 2hV, and as many for each layer of `mtp` with its linear."""
        return 2 * self.hidden * (self.vocabulary * (1 + self.mtp) + 2 * self.hidden * self.mtp)

    @property
    def further_layers(self) -> int:
        """Layers behind all others, which predict further tokens: `mtp`."""
        return self.mtp

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
        further = self.of_kind(self.kinds[-1])._block(tensor) + 2 * self.hidden**2 // tensor + 3 * self.norm_parameters
        return tables * table + positions + last * (self.norm_parameters + self.mtp * further)


@dataclass(frozen=True, slots=True)
class ViT(Transformer):
    """The sizes of a vision transformer.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden state.
        heads: attention heads per layer.
        kv_heads, head_size, ffn, gated: attention and MLP as in `GPT`; by default plain, with an MLP of 4 x `hidden`.
        experts, experts_per_token, shared_experts, biases, norm, head_norms: as in `GPT`.
        kv_rank, q_rank, rope_size, value_size, window, full_every, parallel_block: likewise.
        dense_layers, expert_layers, dense_ffn, expert_groups, groups_per_token: likewise.
        pattern, parts_alone, scan_width, scan_heads, scan_state, scan_groups: likewise.
        scan_rank, scan_conv, scan_chunk: likewise.
        dropout: whether there is dropout, whose masks are kept in training.
        image: height and width of an image with three channels, in pixels.
        patch: height and width of a patch.
        classes: number of classes of the head.

    >>> ViT.named("vit-b16").parameters
    86567656

    Raises UsageError as `Transformer`, for sizes below 1, and for a patch that does not divide the image.
    """

    image: int = 224
    patch: int = 16
    classes: int = 1000
    _: KW_ONLY
    dropout: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        require_positive(image=self.image, patch=self.patch, classes=self.classes)
        if self.image % self.patch:
            near = near_divisors(self.image, self.patch)
            raise UsageError(f"an image of {self.image} does not divide into patches of {self.patch}: {near}")

    @classmethod
    def named(cls, name: str) -> ViT:
        """The model `name` of VIT_PRESETS. Raises UsageError for an unknown name, with the nearest known one."""
        from pipeflow.planning.catalog import VIT_PRESETS  # which are made of this class

        if name not in VIT_PRESETS:
            raise unknown("model", name, VIT_PRESETS)
        return VIT_PRESETS[name]

    @property
    def tokens(self) -> int:
        """Tokens per image: one for each patch, and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def embedding_flops(self) -> float:
        """Operations per token in the forward of the linear that reads the patches."""
        return 2 * self._patch_weights * (self.tokens - 1) / self.tokens

    @property
    def head_flops(self) -> float:
        """Operations per token in the forward of the head, which reads only the class token."""
        return 2 * self.hidden * self.classes / self.tokens

    def head_outputs(self, tensor: int = 1) -> float:
        """Logits per token: the logits of an image divided by its number of tokens."""
        return self.classes / self.tokens

    def require_sequence(self, sequence: int) -> None:
        """Raises UsageError unless `sequence` is the number of tokens of an image."""
        if sequence != self.tokens:
            raise UsageError(
                f"a sequence of {sequence} tokens is no image of {self.image} in patches of {self.patch}, "
                f"which has {self.tokens}: change image or patch instead"
            )

    @property
    def _patch_weights(self) -> int:
        return 3 * self.patch**2 * self.hidden

    def _ends(self, tensor: int, *, first: bool, last: bool) -> int:
        before = self._patch_weights + self.hidden + self.hidden + self.tokens * self.hidden
        after = self.norm_parameters + (self.hidden + 1) * self.classes
        return first * before + last * after
