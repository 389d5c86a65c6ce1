"""Blocks: the sizes of a transformer's layers, how many parameters they have, and how many operations they take. Must
not contain: what precedes and follows the layers, kernels, bytes, times and layouts.

A block is norm, attention, norm, MLP (pre-LN). The MLP is a wide linear and an output linear. With `gated` it has two
wide linears whose outputs are multiplied (SwiGLU, arXiv 2002.05202). With `experts`, the router, a linear without bias,
sends each token to `experts_per_token` of the MLPs (arXiv 2401.04088). `shared_experts` are further MLPs that get all
tokens (arXiv 2401.06066). Layers may be of two kinds: `layer_kinds.py` says which have experts, and the others have one
MLP. In parallel blocks, one norm feeds both attention and MLP (arXiv 2204.02311). With a `pattern`, some layers
have a scan in the place of attention (`scans.py`), or each layer has one part alone, behind one norm.

There are two kinds of attention. Usually, one linear makes query, key and value, and heads of query may share a head of
key and value (arXiv 2305.13245). Latent attention (MLA, arXiv 2405.04434, section 2.1) first makes a latent vector for
key and value of `kv_rank` numbers, to which it adds `rope_size` numbers with positions that all heads share. A second
linear makes keys without positions and values of it. The query may have a latent vector of `q_rank` numbers, too. These
vectors have a norm each, and every tensor rank has them whole. Both kinds end in an output linear.

A tensor split by t cuts the query-key-value and wide linears by columns (weight and bias / t). It cuts the two output
linears by rows (weight / t, the bias on every rank). Norms and router are whole on every rank. If there are fewer heads
of key and value than ranks, each rank keeps an equal part of their weights and computes with one whole head. Experts
are split like any MLP, so that each rank has a part of all of them. Source: arXiv 1909.08053 (Megatron-LM), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, Self, cast

from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.planning import scans
from pipeflow.planning.layer_kinds import ALONE, ROUTED, ExpertLayers, LayerKind, kinds_of, of_pattern, routed_layers

Biases = Literal["all", "qkv", "none"]
Norm = Literal["layer", "rms"]
SCANS = ("scan_width", "scan_heads", "scan_state", "scan_rank")
OPTIONAL = ("kv_heads", "head_size", "ffn", "kv_rank", "q_rank", "value_size", "window", "dense_ffn", *SCANS)


class Linear(NamedTuple):
    """A linear from `inputs` to `outputs` numbers per token. Tensor ranks split its outputs, its inputs, or nothing."""

    inputs: int
    outputs: int
    split: Literal["inputs", "outputs", "none"]

    @property
    def weights(self) -> int:
        """The number of its weights, on all tensor ranks together if they are split."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Transformer(ABC):
    """The base of all transformers, whose fields `GPT` describes; GPT and ViT add what precedes and follows the layers.

    Raises UsageError for sizes below 1, and for sizes that do not divide: `heads` into `hidden` where no `head_size` is
    given, `kv_heads` into `heads`. Also for sizes that belong to others: `q_rank` without `kv_rank`, `dense_layers`
    without experts, `full_every` without a window; and as `kinds_of`.
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
    expert_layers: ExpertLayers = None
    dense_ffn: int | None = None
    expert_groups: int = 1
    groups_per_token: int = 1
    pattern: str | None = None
    parts_alone: bool = False
    scan_width: int | None = None
    scan_heads: int | None = None
    scan_state: int | None = None
    scan_groups: int = 1
    scan_rank: int | None = None
    scan_conv: int = 4
    scan_chunk: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.expert_layers, Sequence):
            object.__setattr__(self, "expert_layers", tuple(self.expert_layers))
        given = {name: size for name in OPTIONAL if (size := getattr(self, name)) is not None}
        always = ("layers", "hidden", "heads", "experts", "experts_per_token", "expert_groups", "groups_per_token")
        scanning = ("scan_groups", "scan_conv", "scan_chunk")
        require_positive(**{name: getattr(self, name) for name in (*always, *scanning)}, **given)
        maybe_none = ("shared_experts", "rope_size", "full_every", "dense_layers")
        require_at_least(0, **{name: getattr(self, name) for name in maybe_none})
        if self.head_size is None and self.hidden % self.heads:
            near = near_divisors(self.hidden, self.heads)
            raise UsageError(f"hidden {self.hidden} does not divide into {self.heads} heads: {near}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            near = near_divisors(self.heads, self.kv_heads)
            raise UsageError(f"{self.heads} heads do not divide into kv_heads={self.kv_heads} groups: {near}")
        if self.experts_per_token > self.experts:
            raise UsageError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        if self.groups_per_token > self.expert_groups or self.experts % self.expert_groups:
            raise UsageError(
                f"{self.experts} experts in {self.expert_groups} equal groups, of which a token uses "
                f"{self.groups_per_token}: these sizes are impossible"
            )
        if self.shared_experts and self.experts == 1:
            raise UsageError(f"shared_experts={self.shared_experts} need other experts, too: set experts to at least 2")
        self._require_owners()
        scans.require_scans(self)
        for name, value, known in (
            ("biases", self.biases, ("all", "qkv", "none")),
            ("norm", self.norm, ("layer", "rms")),
        ):
            if value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}; got {value!r}")

    def _require_owners(self) -> None:
        """Raises UsageError for sizes that say nothing without another one."""
        has_dense = self.dense_layers > 0 or self.expert_layers is not None or "-" in (self.pattern or "")
        owned = {
            "q_rank": (self.q_rank is not None, self.kv_rank is not None, "kv_rank"),
            "rope_size": (self.rope_size > 0, self.kv_rank is not None, "kv_rank"),
            "full_every": (self.full_every > 0, self.window is not None, "window"),
            "dense_layers": (self.dense_layers > 0, self.experts > 1, "experts of at least 2"),
            "expert_layers": (self.expert_layers is not None, self.experts > 1, "experts of at least 2"),
            "dense_ffn": (self.dense_ffn is not None, has_dense, "dense_layers or expert_layers, or a pattern with -"),
        }
        for name, (is_given, has_owner, owner) in owned.items():
            if is_given and not has_owner:
                raise UsageError(f"{name}={getattr(self, name)} needs {owner}: give it too, or leave out {name}")
        if self.experts > 1:
            kinds_of(self.layers, self.expert_layers, self.dense_layers)
        if self.kv_rank is not None and self.head_width <= self.rope_size:
            raise UsageError(f"rope_size={self.rope_size} must be less than head_size={self.head_width}")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Per layer, its kind: with "experts", "dense", or one of those of a pattern."""
        dense: LayerKind = "dense"
        kinds = (dense,) * self.layers
        if self.experts > 1:
            kinds = kinds_of(self.layers, self.expert_layers, self.dense_layers)
        return kinds if self.pattern is None else of_pattern(self.pattern, kinds, self.parts_alone)

    @property
    def mixer(self) -> str:
        """What mixes the tokens of a layer, where all are of one kind: "attention", "scan", or "" for nothing."""
        return {"M": "scan", "*": "attention"}.get((self.pattern or "*")[0], "")

    @property
    def has_mlp(self) -> bool:
        """Whether a layer has an MLP or experts, where all layers are of one kind."""
        return not self.parts_alone or (self.pattern or "*")[0] in "-E"

    @property
    def norms(self) -> int:
        """The norms over `hidden` of a layer."""
        return 1 if self.parallel_block or self.parts_alone else 2

    @property
    def scan_channels(self) -> int:
        """The channels of a scan: `scan_width`, by default 2 x `hidden`."""
        return 2 * self.hidden if self.scan_width is None else self.scan_width

    @property
    def further_kinds(self) -> tuple[LayerKind, ...]:
        """Per layer that predicts a further token, its kind: that of the last layer."""
        return self.kinds[-1:] * self.further_layers

    def of_kind(self, kind: LayerKind) -> Self:
        """The model if all its layers were of one kind."""
        return self if self.experts == 1 and self.pattern is None else cast(Self, _of_kind(self, kind))

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
        return self.experts_per_token + self.shared_experts if self.has_mlp else 0

    @property
    def always_used(self) -> int:
        """The MLPs of a layer that get all tokens: shared experts, or the only MLP."""
        return self.shared_experts if self.experts > 1 else int(self.has_mlp)

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
        return self.parameters - idle * routed_layers(self.kinds + self.further_kinds) * self._mlps(1, 1)

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
        every = self.kinds
        kinds = [kind for start, end in parts for kind in every[start:end]]
        routed = routed_layers([*kinds, *self.further_kinds * last])
        held = self.parameters_held(kinds, tensor, first=first, last=last)
        return held + routed * self.expert_parameters(1, tensor)

    def parameters_held(self, kinds: Sequence[LayerKind], tensor: int, *, first: bool, last: bool) -> int:
        """Parameters of one of `tensor` ranks that holds layers of these kinds, without those of experts that tokens
        are sent to. With `first` and `last`, it also holds the parts before and after the layers. Raises UsageError as
        `require_tensor` does.
        """
        layers = sum(kinds.count(kind) * _block_of(self.of_kind(kind), tensor) for kind in {*kinds})
        return layers + _ends_of(self, tensor, first, last)

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
        return 2 * (self._attention + self._router + self.active_experts * self.mlp_weights)

    def attention_flops(self, sequence: int) -> int:
        """Operations per token in the forward of one layer's scores and of their product with the values: 4sh. What a
        causal mask or a window leaves out is counted, too. A layer with a scan has the operations of it, and one with
        neither has none.
        """
        if self.mixer != "attention":
            return scans.scan_flops(self) if self.mixer else 0
        return 2 * sequence * self.heads * (self.head_width + self.value_width)

    def flops_per_sample(self, sequence: int | None = None) -> int:
        """Floating-point operations of the forward and the backward of one sequence, by default of `tokens` tokens,
        without what is computed again: three times those of the products in the forward, but for the first linear of
        images, whose backward has one half.
        """
        tokens, kinds = self.tokens if sequence is None else sequence, self.kinds + self.further_kinds
        each = {self.of_kind(kind): count for kind, count in Counter(kinds).items()}
        layers = sum(count * (kind.linear_flops + kind.attention_flops(tokens)) for kind, count in each.items())
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
        scans.require_scan_ranks(self, tensor)
        plain = next((kind for kind in self.kinds if kind in ("dense", "scan", "MLP alone")), None)
        wide = tensor if plain is None else self.of_kind(plain).wide
        if wide % tensor:
            near = near_divisors(wide, tensor)
            raise UsageError(f"tensor={tensor} does not divide the MLP width of {wide}: {near}")

    @property
    def attention_linears(self) -> tuple[Linear, ...]:
        """The linears of one layer's attention, in their order, or of the scan in its place."""
        hidden, heads = self.hidden, self.heads
        if self.mixer != "attention":
            return self._scan_linears if self.mixer else ()
        out = Linear(heads * self.value_width, hidden, "inputs")
        if self.kv_rank is None:
            return Linear(hidden, self.query_width + 2 * self.key_width, "outputs"), out
        made = heads * (self.head_width - self.rope_size + self.value_width)
        values = Linear(hidden, self.kv_rank + self.rope_size, "none"), Linear(self.kv_rank, made, "outputs")
        if self.q_rank is None:
            return Linear(hidden, self.query_width, "outputs"), *values, out
        queries = Linear(hidden, self.q_rank, "none"), Linear(self.q_rank, self.query_width, "outputs")
        return *queries, *values, out

    @property
    def _scan_linears(self) -> tuple[Linear, ...]:
        width, _, vectors, steps, _, by_chunks = scans.scan_sizes(self)
        first, out = Linear(self.hidden, scans.scan_made(self, 1), "outputs"), Linear(width, self.hidden, "inputs")
        if by_chunks:
            return first, out
        return first, Linear(width, steps + vectors, "inputs"), Linear(steps, width, "outputs"), out

    @property
    def from_latent(self) -> list[Linear]:
        """Those of the linears of attention that read a latent vector."""
        latent, linears = (self.q_rank, self.kv_rank), self.attention_linears
        return [linear for linear in linears if linear.inputs in latent and linear.split == "outputs"]

    @property
    def latent_normed(self) -> int:
        """Numbers per token in latent vectors that a norm reads, which has as many parameters."""
        return 0 if self.kv_rank is None else self.kv_rank + (self.q_rank or 0)

    @property
    def latent_values(self) -> int:
        """Numbers per token in latent vectors: before and after their norms, and the positions of the key."""
        return 2 * self.latent_normed + self.rope_size

    def seen(self, sequence: int) -> float:
        """The part of the scores under a causal mask that the windows of the layers leave, as the mean of all layers. A
        query sees itself and `window` - 1 tokens before it; in each `full_every`th layer it sees all.
        """
        if self.window is None or self.window >= sequence:
            return 1.0
        part = self.window / sequence
        in_window, full = part * (2 - part), 1 / self.full_every if self.full_every else 0.0
        return full + (1 - full) * in_window

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm over `hidden`."""
        return (2 if self.norm == "layer" else 1) * self.hidden

    @property
    def mlp_weights(self) -> int:
        """Weights of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.wide

    @property
    def _attention(self) -> int:
        return sum(linear.weights for linear in self.attention_linears)

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    def _mlps(self, count: int, tensor: int) -> int:
        """Parameters of `count` MLPs on one of `tensor` ranks, which have the output's bias whole."""
        inner = (2 if self.gated else 1) * self.wide if self.biases == "all" else 0
        return count * (self.mlp_weights + inner) // tensor + (count * self.hidden if self.biases == "all" else 0)

    def _block(self, tensor: int) -> int:
        """Parameters of a layer on one of `tensor` ranks, without experts that tokens are sent to."""
        latent = sum(linear.weights for linear in self.attention_linears if linear.split == "none")
        split = self._attention - latent
        whole = self._router + self.norms * self.norm_parameters + latent
        if self.mixer == "attention":
            whole += self.latent_normed
            if self.head_norms:
                whole += 2 * self.norm_parameters // self.hidden * self.head_width
            if self.biases != "none":
                split += self.query_width + 2 * self.key_width
            if self.biases == "all":
                whole += self.hidden
        if self.mixer == "scan":
            whole += scans.scan_parameters(self, tensor)
        return split // tensor + whole + self._mlps(self.always_used, tensor)


@lru_cache(maxsize=256)
def _of_kind(model: Transformer, kind: LayerKind) -> Transformer:
    """As `Transformer.of_kind`, for layers that may differ."""
    alike: dict[str, Any] = {"dense_layers": 0, "expert_layers": None, "dense_ffn": None}
    if model.pattern is not None:
        letters: dict[LayerKind, str] = {kind: letter for letter, kind in ALONE.items()}
        letter = letters.get(kind, "M" if kind.startswith("scan") else "*")
        alike |= {"pattern": letter * model.layers}
        if letter != "M":
            alike |= {"scan_state": None, "scan_heads": None, "scan_rank": None}
    if model.experts > 1 and kind not in ROUTED:
        active = model.experts_per_token + model.shared_experts
        wide = active * model.wide if model.dense_ffn is None else model.dense_ffn
        alike |= {"ffn": wide, "experts": 1, "experts_per_token": 1, "shared_experts": 0}
        alike |= {"expert_groups": 1, "groups_per_token": 1}
    return replace(model, **alike)


@lru_cache(maxsize=256)
def _block_of(model: Transformer, tensor: int) -> int:
    """As `Transformer._block`: a search asks for the same layer a hundred thousand times."""
    return model._block(tensor)


@lru_cache(maxsize=256)
def _ends_of(model: Transformer, tensor: int, first: bool, last: bool) -> int:
    """As `Transformer._ends`, which a search asks for as often. Raises UsageError as `require_tensor` does."""
    model.require_tensor(tensor)
    return model._ends(tensor, first=first, last=last)


@cache
def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def near_divisors(whole: int, part: int) -> str:
    """Which divisors of `whole` are next to `part`, which is none."""
    below = [number for number in divisors(whole) if number < part]
    near = below[-1:] + [number for number in divisors(whole) if number > part][:1]
    return f"the nearest that work{'s is' if len(near) == 1 else ' are'} {' and '.join(map(str, near))}"
