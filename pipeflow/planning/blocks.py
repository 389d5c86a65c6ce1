"""Blocks: the sizes of a transformer's layers, how many parameters they have, and how many operations they take. Must
not contain: what precedes and follows the layers, bytes, times and layouts.

A block is norm, attention, norm, MLP (pre-LN). Attention is one linear for query, key and value, and an output linear.
The MLP is a wide linear and an output linear. With `gated` it has two wide linears whose outputs are multiplied
(SwiGLU, arXiv 2002.05202). With `kv_heads`, groups of query heads share a head of key and value (arXiv 2305.13245).
With `experts`, the router, a linear without bias, sends each token to `experts_per_token` of the MLPs (arXiv
2401.04088). `shared_experts` are further MLPs that get all tokens (arXiv 2401.06066). With `dense_layers`, the first
layers have one MLP instead. In parallel blocks, one norm feeds both attention and MLP (arXiv 2204.02311). The kinds
of attention are described in `linears.py`.

A tensor split by t cuts the query-key-value and wide linears by columns (weight and bias / t). It cuts the two output
linears by rows (weight / t, the bias on every rank). Norms and router are whole on every rank. If there are fewer heads
of key and value than ranks, each rank keeps an equal part of their weights and computes with one whole head. Experts
are split like any MLP, so that each rank has a part of all of them. Source: arXiv 1909.08053 (Megatron-LM), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.planning.block_sizes import near_divisors, require_block
from pipeflow.planning.linears import attention_linears, latent_norms

Part = tuple[int, int]  # layers [start, end)
Biases = Literal["all", "qkv", "none"]
Norm = Literal["layer", "rms"]


@dataclass(frozen=True, slots=True)
class Transformer(ABC):
    """The base of all transformers; GPT and ViT add what precedes and follows the layers.

    Attributes:
        layers, hidden, heads: how many layers, how wide they are, and how many heads of attention each has.
        kv_heads: heads of key and value; as many as `heads` unless given.
        head_size: width of a head; `hidden` / `heads` unless given.
        ffn: width of the MLP, of one expert where there are several.
        gated: the MLP has three matrices instead of two.
        experts: MLPs per layer, of which a token uses `experts_per_token`; 1 is no mixture.
        shared_experts: further MLPs, which every token uses.
        biases: which linears of a block have them: all, that for query, key and value, or none.
        norm: LayerNorm, with a bias, or RMSNorm, without.
        head_norms: query and key have a norm each over `head_size`.
        dropout: attention and the MLP end in one, and so does the embedding; its masks are kept in training.
        kv_rank, q_rank: sizes of the latent vectors of latent attention; None for usual attention, and for none of the
            query.
        rope_size: the part of `head_size` that has positions, in latent attention.
        value_size: width of a head of value; as wide as a head of query unless given.
        window: the tokens that a query sees, its own included; all before it unless given.
        full_every: in every N-th layer, a query sees all tokens despite `window`; 0 for no such layer.
        parallel_block: attention and the MLP of a block read the same norm.
        dense_layers: how many of the first layers have no experts but one MLP.
        dense_ffn: width of that MLP; that of all experts that a token uses unless given.
        expert_groups, groups_per_token: equal groups of experts, and of how many of them a token uses experts.

    Raises UsageError for sizes below 1, and for sizes that do not divide: `heads` into `hidden` where no `head_size` is
    given, `kv_heads` into `heads`. Also for sizes that belong to others: `q_rank` without `kv_rank`, `dense_layers`
    without experts, `full_every` without a window.
    """

    layers: int
    hidden: int
    heads: int
    _: KW_ONLY
    kv_heads: int | None = None
    head_size: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    biases: Biases = "all"
    norm: Norm = "layer"
    head_norms: bool = False
    dropout: bool = True
    kv_rank: int | None = None
    q_rank: int | None = None
    rope_size: int = 0
    value_size: int | None = None
    window: int | None = None
    full_every: int = 0
    parallel_block: bool = False
    dense_layers: int = 0
    dense_ffn: int | None = None
    expert_groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        require_block(self)

    @property
    def dense(self) -> Self:
        """The model if all its layers were as its first `dense_layers`."""
        wide = self.active_experts * self.wide if self.dense_ffn is None else self.dense_ffn
        plain = {"experts": 1, "experts_per_token": 1, "shared_experts": 0, "dense_layers": 0, "dense_ffn": None}
        sizes: dict[str, Any] = {"ffn": wide, "expert_groups": 1, "groups_per_token": 1, **plain}
        return replace(self, **sizes)

    @property
    def wide(self) -> int:
        """Width of the MLP, of one expert where there are several."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def head_width(self) -> int:
        """The width of one attention head, in elements."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def key_heads(self) -> int:
        """Heads of key, of which there are as many of value."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.head_width

    @property
    def value_width(self) -> int:
        """The width of one head of value, in elements."""
        return self.head_width if self.value_size is None else self.value_size

    @property
    def active_experts(self) -> int:
        """Perceptrons that a token passes through in a layer."""
        return self.experts_per_token + self.shared_experts

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens per sequence unless a setup says otherwise."""

    @property
    @abstractmethod
    def embedding_flops(self) -> float:
        """Operations per token in the forward of the part before the layers."""

    @property
    @abstractmethod
    def head_flops(self) -> float:
        """Operations per token in the forward of the part after the layers."""

    @abstractmethod
    def head_outputs(self, tensor: int = 1) -> float:
        """Numbers per token that the head puts out on one of `tensor` ranks."""

    @abstractmethod
    def require_sequence(self, sequence: int) -> None:
        """Raises UsageError unless the model takes sequences of so many tokens."""

    @abstractmethod
    def _ends(self, tensor: int, *, first: bool, last: bool) -> int:
        """Parameters before and after the layers on one of `tensor` ranks that has these ends."""

    @property
    def parameters(self) -> int:
        """Of the whole model, a tied word table counted once."""
        return self.parameters_of([(0, self.layers)])

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: all of them but those of the experts that it is not sent to."""
        idle = self.experts - self.experts_per_token
        return self.parameters - idle * (self.layers - self.dense_layers + self.further_layers) * self._mlps(1, 1)

    @property
    def further_layers(self) -> int:
        """Layers behind all others, which predict further tokens."""
        return 0

    def parameters_of(self, parts: Iterable[Part], tensor: int = 1) -> int:
        """Parameters of one of `tensor` ranks that together hold the stages with layers [start, end) of `parts`: a word
        table that is also the head counts once.

        Raises UsageError for parts that the model does not have, and as `require_tensor`.
        """
        parts = list(parts)
        if wrong := [part for part in parts if not 0 <= part[0] < part[1] <= self.layers]:
            raise UsageError(
                f"layers {wrong[0]} are not a part of {self.layers} layers: give (start, end), end excluded"
            )
        first, last = any(start == 0 for start, _ in parts), any(end == self.layers for _, end in parts)
        layers, dense = sum(end - start for start, end in parts), sum(map(self.dense_of, parts))
        ends = self.parameters_held(layers, tensor, first=first, last=last, dense=dense)
        return ends + (layers - dense + last * self.further_layers) * self.expert_parameters(1, tensor)

    def dense_of(self, part: Part) -> int:
        """The number of layers [start, end) that are among the first `dense_layers`."""
        return max(0, min(part[1], self.dense_layers) - part[0])

    def parameters_held(self, layers: int, tensor: int, *, first: bool, last: bool, dense: int = 0) -> int:
        """Parameters of one of `tensor` ranks that holds `layers` layers, of which `dense` are among the first, without
        those of experts that tokens are sent to. With `first` and `last`, it also holds the parts before and after the
        layers. Raises UsageError as `require_tensor` does.
        """
        self.require_tensor(tensor)
        dense_block = _block_of(self.dense, tensor) if dense else 0
        ends = self._ends(tensor, first=first, last=last)
        return (layers - dense) * _block_of(self, tensor) + dense * dense_block + ends

    def expert_parameters(self, expert: int, split: int) -> int:
        """Parameters of a layer's experts, without the shared ones, on one of `expert` ranks of `split` devices. Raises
        UsageError if the experts, or their widths, do not divide.
        """
        if self.experts == 1:
            if expert > 1:
                raise UsageError(f"a model without experts cannot have {expert} expert ranks: leave them out")
            return 0
        if self.experts % expert:
            near = near_divisors(self.experts, expert)
            raise UsageError(f"expert={expert} does not divide {self.experts} experts: {near}")
        if self.wide % split:
            near = near_divisors(self.wide, split)
            raise UsageError(f"expert_tensor={split} does not divide an expert's width of {self.wide}: {near}")
        return self._mlps(self.experts // expert, split)

    @property
    def linear_flops(self) -> int:
        """Operations per token in the forward of one layer's linears, two for each weight that the token uses. With an
        MLP of r times `hidden` and equal heads these are (4 + 2r) 2h^2 (arXiv 2104.04473, appendix).
        """
        return 2 * (self._attention + self._router + self.active_experts * self._expert(1))

    def attention_flops(self, sequence: int) -> int:
        """Operations per token in the forward of one layer's scores and of their product with the values: 4sh. What a
        causal mask or a window leaves out is counted, too.
        """
        return 2 * sequence * self.heads * (self.head_width + self.value_width)

    def flops_per_sample(self, sequence: int | None = None) -> int:
        """Floating-point operations of the forward and the backward of one sequence, by default of `tokens` tokens,
        without what is computed again: three times those of the products in the forward, but for the first linear of
        images, whose backward has one half.
        """
        tokens = self.tokens if sequence is None else sequence
        dense = self.dense_layers * (self.dense.linear_flops - self.linear_flops) if self.dense_layers else 0
        layers = (self.layers + self.further_layers) * (self.linear_flops + self.attention_flops(tokens)) + dense
        return round(tokens * (3 * (layers + self.head_flops) + 2 * self.embedding_flops))

    def require_tensor(self, tensor: int) -> None:
        """Raises UsageError unless heads and MLPs divide into `tensor` equal parts. The heads of key and value must
        divide, too, or each of them must be shared by the same number of ranks.
        """
        require_positive(tensor=tensor)
        if self.heads % tensor:
            near = near_divisors(self.heads, tensor)
            raise UsageError(f"tensor={tensor} does not divide {self.heads} heads and hidden {self.hidden}: {near}")
        shared = tensor % self.key_heads == 0 and self.key_width % tensor == 0
        if self.key_heads % tensor and not shared:
            raise UsageError(
                f"tensor={tensor} neither divides {self.key_heads} heads of key and value nor is a multiple of that"
            )
        if self.experts == 1 and self.wide % tensor:
            near = near_divisors(self.wide, tensor)
            raise UsageError(f"tensor={tensor} does not divide the MLP width of {self.wide}: {near}")

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm over `hidden`."""
        return (2 if self.norm == "layer" else 1) * self.hidden

    @property
    def _attention(self) -> int:
        return sum(linear.weights for linear in attention_linears(self))

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    def _expert(self, tensor: int) -> int:
        """Weights of one MLP on one of `tensor` ranks."""
        return (3 if self.gated else 2) * self.hidden * self.wide // tensor

    def _mlps(self, count: int, tensor: int) -> int:
        """Parameters of `count` MLPs on one of `tensor` ranks, which have the output's bias whole."""
        inner = (2 if self.gated else 1) * self.wide if self.biases == "all" else 0
        return count * (self._expert(1) + inner) // tensor + (count * self.hidden if self.biases == "all" else 0)

    def _block(self, tensor: int) -> int:
        """Parameters of a layer on one of `tensor` ranks, without experts that tokens are sent to."""
        latent = sum(linear.weights for linear in attention_linears(self) if linear.split == "none")
        split = self._attention - latent
        whole = self._router + (1 if self.parallel_block else 2) * self.norm_parameters + latent + latent_norms(self)
        if self.head_norms:
            whole += 2 * self.norm_parameters // self.hidden * self.head_width
        if self.biases != "none":
            split += self.query_width + 2 * self.key_width
        if self.biases == "all":
            whole += self.hidden
        return split // tensor + whole + self._mlps(self.shared_experts + (self.experts == 1), tensor)


@lru_cache(maxsize=256)
def _block_of(model: Transformer, tensor: int) -> int:
    """As `Transformer._block`: a search asks for the same layer a hundred thousand times."""
    return model._block(tensor)
