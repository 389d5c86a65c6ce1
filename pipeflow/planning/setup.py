"""Setup: how the stages of a GPT are laid out over devices, and what of their work is kept. Must not contain: what
that costs.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from pipeflow.core.errors import UsageError, names_of, require_type
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.planning.attention import KERNELS, Kernel
from pipeflow.planning.blocks import near_divisors
from pipeflow.planning.engines import ENGINES, engine_named

Checkpoint = Literal["none", "full", "selective", "op"]
ContextKind = Literal["ring", "all-to-all", "gather"]
Dispatcher = Literal["all-to-all", "deepep", "hybridep"]
FEW_BITS = ("fp8", "fp4")  # precisions of products whose operands are scaled and rounded first
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linears of a layer that may have an adapter, by Megatron-LM's names: those of query, key and value, of the output
of attention, and the wide and the output linears of MLPs and experts.
"""
GRAPHS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "attn": (0.5, 0.4),
        "mlp": (0.5, 0.0),
        "moe_router": (0.0, 0.15),
        "moe_preprocess": (0.0, 0.15),
        "moe": (0.0, 0.6),
        "full_iteration": (1.0, 1.0),
    }
)
"""By the scope of a CUDA graph, as Megatron-LM names it: the share of a layer's launches that are in it, without
experts and with them. They are rough counts of kernels: layers with experts have routers and sort tokens besides.
"""


@dataclass(frozen=True, slots=True)
class Precision:
    """The bytes that training keeps per parameter, and the rate at which it computes.

    Half precision takes 2 + 2 + 4 + 8 bytes (arXiv 1910.02054, section 3.1); gradients have the type of their weights,
    as in torch. The "mixed" precisions add up gradients in float32, as Megatron-LM does, and so take 18 bytes.

    In 8 or 4 bits, only the products of the layers' linears are computed, whose inputs are kept so. Attention, norms,
    tables, the head and all communication stay in 16 bits, and so do weights, gradients and everything else that is
    kept. The names are those of Transformer Engine's recipes, by what a scale is for: "fp8" a tensor, from its history
    (arXiv 2209.05433), "fp8-current" a tensor, from its values, "fp8-block" a block of 128 x 128 numbers (arXiv
    2412.19437, section 3.3), "mxfp8" 32 numbers (arXiv 2310.10537), and "nvfp4" 16 numbers of 4 bits (arXiv
    2509.25149).

    Attributes:
        name: as `pipeflow plan --precision` takes it.
        weight: bytes of a weight, and of a number in an activation.
        gradient: bytes of its gradient.
        master: bytes of its float32 master weight, 0 without one.
        moments: bytes of Adam's two moments together.
        products: the rate of `Device.flops` at which products are computed.
        input: bytes of a number in a linear's input, as it is kept for the backward; as a weight unless given.
        needs: a rate of `Device.flops` that only devices with units for these scales have; "" for none.
        learned: the precision of adapters, where the other weights do not learn.
    """

    name: str
    weight: int
    gradient: int
    master: int
    moments: int
    products: str = "bf16"
    needs: str = ""
    input: float | None = None
    learned: Precision | None = None

    @property
    def kept_input(self) -> float:
        """Bytes of a number in a linear's input, as it is kept."""
        return self.weight if self.input is None else self.input


_FP8 = Precision("fp8", weight=2, gradient=2, master=4, moments=8, products="fp8", input=1)
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32": Precision("float32", weight=4, gradient=4, master=0, moments=8, products="float32"),
        "bf16": Precision("bf16", weight=2, gradient=2, master=4, moments=8, products="bf16"),
        "fp16": Precision("fp16", weight=2, gradient=2, master=4, moments=8, products="fp16"),
        "bf16-mixed": Precision("bf16-mixed", weight=2, gradient=4, master=4, moments=8, products="bf16"),
        "fp16-mixed": Precision("fp16-mixed", weight=2, gradient=4, master=4, moments=8, products="fp16"),
        "fp8": _FP8,
        "fp8-current": replace(_FP8, name="fp8-current"),
        "fp8-block": replace(_FP8, name="fp8-block"),
        "mxfp8": replace(_FP8, name="mxfp8", needs="fp4", input=1 + 1 / 32),
        "nvfp4": replace(_FP8, name="nvfp4", products="fp4", needs="fp4", input=1 / 2 + 1 / 16),
    }
)


WORDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "zero": (0, 1, 2, 3),
        "engine": tuple(ENGINES),
        "checkpoint": get_args(Checkpoint),
        "attention": KERNELS,
        "context_kind": get_args(ContextKind),
        "dispatcher": get_args(Dispatcher),
        "recompute_modules": ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
        "cuda_graphs": tuple(GRAPHS),
        "lora_targets": LORA_TARGETS,
    }
)
"""The words and numbers that fields of `Setup` take; the last three fields take several."""
CHOICES = {**WORDS, "precision": tuple(PRECISIONS)}
"""The same, and the names of precisions."""
SEVERAL = ("recompute_modules", "cuda_graphs", "lora_targets")


# Each entry under "Attributes:" is also the help of an option of `pipeflow plan`, and of a control of the explorer.
@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the work of one pipeline rank is divided among devices, and what is kept for backwards.

    Attributes:
        tensor: number of tensor ranks, which share every layer of a stage.
        data: number of replicas of the pipeline, each with its own part of the batch.
        microbatch_size: sequences per microbatch.
        sequence: tokens per sequence; the model's `positions` unless given.
        document: tokens of each document of a sequence, within which fused attention stays; by default there is one.
        precision: types of weights, gradients, optimizer states and activations.
        zero: what replicas divide (ZeRO, arXiv 1910.02054). 1: master weights, moments; 2: gradients; 3: weights, too.
        shard_ranks: the replicas that together hold what `zero` divides, such as those of a node; all unless given.
        prefetch: with `zero` 3, a backward gathers a layer while another one computes, not after it.
        reduce_once: with `zero` 3, gradients stay whole until the last microbatch has been computed (FSDP's no_sync).
        engine: the program as which layers compute, and whose own buffers memory counts; none unless given.
        overlap: reductions and gathers run while layers compute, as with `zero` 3; sums of tensor ranks may, too.
        checkpoint: what is recomputed. full: a layer; selective: scores; op: all but attention and every other product.
        early_stop: recomputing a layer stops before its last product, as in torch since 2.1; by default as in `engine`.
        sequence_parallel: tensor ranks divide the activations of norms, too (arXiv 2205.05198); a search tries it.
        eager: norms, rotary positions and gates are computed one operation after the other, not in a kernel for each.
        keep_scores: attention writes its scores to memory, as without scaled_dot_product_attention.
        attention: its kernel: unfused stores scores; FlashAttention 1 to 3, or cuDNN as 3; the device's unless given.
        context: number of context ranks, which share the tokens of each sequence; each has all weights of its stage.
        context_kind: ring: keys and values go around; all-to-all: a rank has heads of all tokens; gather: all keys.
        expert: expert ranks, which share the experts of a layer; they are devices of a stage (arXiv 2504.14960).
        expert_tensor: devices that share each expert; as many as `tensor` unless given.
        imbalance: tokens of the fullest expert rank, as a multiple of the mean (arXiv 2408.15664, table 2).
        dispatcher: all-to-all sends a token once to each expert, deepep and hybridep once to each node of its experts.
        overlap_experts: the exchange between experts is hidden behind another microbatch (arXiv 2412.19437, 3.2.1).
        recompute_modules: modules of a layer that its backward computes again.
        checkpoint_layers: with a `checkpoint`, how many layers of each stage have it; all unless given.
        offload_layers: how many layers of each stage copy what they keep to the host; two of them are on their way.
        offload_optimizer: share of the optimizer that the host keeps and steps (arXiv 2101.06840), from 0 to 1.
        cuda_graphs: scopes of CUDA graphs; what is in them is not launched by the host.
        head_slices: in how many slices of tokens the last stage computes logits and their loss; 1: all at once.
        frozen: weights do not learn: no gradients, no optimizer, no inputs of linears. Always with `lora_rank`.
        lora_rank: rank of the adapters that learn beside frozen linears (LoRA, arXiv 2106.09685); 0 for none.
        lora_targets: the linears with an adapter; all unless given.

    `zero` and `checkpoint` may be a bool: True is 1 and "full". Raises UsageError for values that cannot be.
    """

    tensor: int = 1
    data: int = 1
    microbatch_size: int = 1
    sequence: int | None = None
    document: int | None = None
    precision: Precision = PRECISIONS["bf16"]
    zero: int = 0
    checkpoint: Checkpoint | bool = "none"
    early_stop: bool | None = None
    sequence_parallel: bool = False
    eager: bool = False
    keep_scores: bool = False
    attention: Kernel | None = None
    context: int = 1
    context_kind: ContextKind = "ring"
    expert: int = 1
    expert_tensor: int | None = None
    imbalance: float = 1.0
    shard_ranks: int | None = None
    overlap: bool | None = None
    prefetch: bool = False
    reduce_once: bool = False
    engine: str | None = None
    dispatcher: Dispatcher = "all-to-all"
    overlap_experts: bool = False
    recompute_modules: tuple[str, ...] = ()
    checkpoint_layers: int | None = None
    offload_layers: int = 0
    offload_optimizer: float = 0.0
    cuda_graphs: tuple[str, ...] = ()
    head_slices: int = 1
    frozen: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        require_type("precision", self.precision, Precision, f"PRECISIONS[{self.precision!r}] has one by its name")
        require_type("checkpoint", self.checkpoint, (str, bool))
        if isinstance(self.checkpoint, bool):
            object.__setattr__(self, "checkpoint", "full" if self.checkpoint else "none")
        for name in SEVERAL:
            object.__setattr__(self, name, names_of(name, getattr(self, name)))
        for name in WORDS:
            self._require_choice(name)
        object.__setattr__(self, "zero", int(self.zero))
        sizes = {"sequence": self.sequence, "document": self.document, "shard_ranks": self.shard_ranks}
        require_positive(**{name: size for name, size in sizes.items() if size is not None})
        require_positive(tensor=self.tensor, data=self.data, microbatch_size=self.microbatch_size)
        require_positive(context=self.context, expert=self.expert, expert_tensor=self.expert_split)
        require_positive(head_slices=self.head_slices)
        require_at_least(0, lora_rank=self.lora_rank, offload_layers=self.offload_layers)
        require_at_least(0, checkpoint_layers=self.checkpoint_layers or 0)
        share = self.offload_optimizer
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UsageError(f"offload_optimizer must be a share from 0 to 1, got {share!r}: 1 offloads all of it")
        self._require_experts()
        self._require_shards()
        self._require_recomputation()
        self._require_kernel()
        self._freeze()

    def _require_choice(self, name: str) -> None:
        words, given = CHOICES[name], getattr(self, name)
        for word in given if name in SEVERAL else (given,):
            if word is not None and word not in words:
                one = "" if name in SEVERAL else "one "
                raise UsageError(f"{name} must be {one}of {', '.join(map(str, words))}; got {word!r}")

    def _require_experts(self) -> None:
        require_type("imbalance", self.imbalance, (int, float))
        if not 1 <= self.imbalance <= self.expert:
            raise UsageError(
                f"imbalance must be between 1 and the number of expert ranks, {self.expert}; got {self.imbalance!r}"
            )
        devices, asked = self.tensor * self.replicas, self.expert * self.expert_split
        if devices % asked:
            raise UsageError(
                f"{self.expert} expert ranks of {self.expert_split} devices do not divide the {devices} devices of a "
                f"stage (tensor {self.tensor} x context {self.context} x data {self.data}): use sizes that do"
            )

    def _require_shards(self) -> None:
        ranks = self.shard_ranks
        if ranks is not None and not self.zero:
            raise UsageError(f"shard_ranks={ranks} divides nothing with zero=0: give zero 1, 2 or 3, too")
        if ranks is not None and self.replicas % ranks:
            near = near_divisors(self.replicas, ranks)
            raise UsageError(f"shard_ranks={ranks} does not divide the {self.replicas} replicas: {near}")
        if self.reduce_once and self.zero != 3:
            raise UsageError(f"reduce_once is for zero=3, got zero={self.zero}: zero 0 and 1 always reduce once")

    def _require_recomputation(self) -> None:
        if self.checkpoint_layers is not None and self.checkpoint == "none":
            raise UsageError("checkpoint_layers says how many layers have a checkpoint: give checkpoint, too")
        if self.recompute_modules and self.checkpoint in ("full", "op") and self.checkpoint_layers is None:
            raise UsageError(
                f"checkpoint {self.checkpoint!r} recomputes all modules of a layer: leave out recompute_modules"
            )

    def _require_kernel(self) -> None:
        if self.checkpoint == "op" and (self.keep_scores or self.attention == "unfused"):
            raise UsageError("checkpoint 'op' keeps the output of fused attention, which stores no scores: use one")
        stores = "keep_scores" if self.keep_scores else f"checkpoint {self.checkpoint!r}"
        if self.attention not in (None, "unfused") and (self.keep_scores or self.checkpoint == "selective"):
            raise UsageError(
                f"{stores} is for attention that stores its scores, and {self.attention} does not: use 'unfused'"
            )

    def _freeze(self) -> None:
        """Frozen weights have no gradients and no states; adapters have those of the precision that was given."""
        if self.lora_targets != LORA_TARGETS and not self.lora_rank:
            raise UsageError("lora_targets says which linears have adapters: give lora_rank, too")
        if len({*self.lora_targets}) != len(self.lora_targets):
            raise UsageError(f"lora_targets has a linear twice: {', '.join(self.lora_targets)}")
        if self.lora_rank:
            object.__setattr__(self, "frozen", True)
        if self.frozen and self.precision.learned is None:
            given = self.precision
            frozen = replace(given, gradient=0, master=0, moments=0, input=None, learned=given)
            object.__setattr__(self, "precision", frozen)

    @property
    def shards(self) -> int:
        """The number of parts of what `zero` divides, but for experts."""
        return (self.shard_ranks or self.replicas) if self.zero else 1

    @property
    def expert_shards(self) -> int:
        """The number of parts of experts that `zero` divides."""
        return math.gcd(self.shards, self.expert_replicas) if self.zero else 1

    @property
    def overlaps(self) -> bool:
        """Whether reductions and gathers run while layers compute."""
        if self.overlap is not None:
            return self.overlap
        precision = self.precision
        is_megatron = precision.products in FEW_BITS or precision.gradient > precision.weight
        return self.zero == 3 or (is_megatron and not self.stores_scores)

    @property
    def hides_tensor(self) -> bool:
        """Whether the collectives of tensor ranks run while the products beside them compute."""
        return self.overlaps and self.sequence_parallel and self.zero < 3

    @property
    def stores_scores(self) -> bool:
        """Whether attention writes its scores to memory, as it does without a fused kernel."""
        return self.kernel == "unfused"

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of attention; None for the fastest one of the device."""
        if self.attention is not None:
            return self.attention
        # Scores are stored with keep_scores and selective checkpoints, and in fp16. torchtitan has torch's own kernel.
        is_old = self.precision.products == "fp16" and self.checkpoint != "op"
        if self.keep_scores or self.checkpoint == "selective" or is_old:
            return "unfused"
        return "flash2" if self.engine in ("torchtitan", "torchtitan-compiled") else None

    @property
    def replicas(self) -> int:
        """The devices that hold the same weights, but for experts: `data` x `context`."""
        return self.data * self.context

    @property
    def expert_split(self) -> int:
        """The devices that share an expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_replicas(self) -> int:
        """The devices that hold the same experts."""
        return self.tensor * self.replicas // (self.expert * self.expert_split)


def is_plain(setup: Setup) -> bool:
    """Whether checkpoints and the loss are those of plain PyTorch, as in torchtitan. Unless `engine` says it, they are,
    but in fp16 and where gradients are added up in float32, as in Megatron-LM.
    """
    if setup.engine is not None:
        return setup.engine.startswith("torchtitan")
    return setup.precision.products != "fp16" and setup.precision.gradient <= setup.precision.weight


def stops_early(setup: Setup) -> bool:
    """Whether a layer is recomputed only up to the input of its last product, the last that its backward needs. So does
    torch.utils.checkpoint since torch 2.1 (`set_checkpoint_early_stop`), but for `use_reentrant=True`.
    """
    return is_plain(setup) if setup.early_stop is None else setup.early_stop


def reduced_gradient(setup: Setup) -> int:
    """Bytes of a divided gradient while it is reduced: in torchtitan float32 (`mixed_precision_reduce`)."""
    gradient = setup.precision.gradient
    return 4 if gradient and engine_named(setup.engine).float32_sums else gradient


def meanings(kind: type) -> dict[str, str]:
    """Per field of a class its entry under `Attributes:` in the docstring, without sources; "" where Python has left
    docstrings out (-OO).

    >>> meanings(Setup)["zero"][:61]
    'what replicas divide (ZeRO). 1: master weights, moments; 2: g'
    """
    if "Attributes:" not in (kind.__doc__ or ""):
        return defaultdict(str)
    lines = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", lines, re.MULTILINE)
    texts = {names: _without_sources(" ".join(text.split())) for names, text in entries}
    return {name: text for names, text in texts.items() for name in names.split(", ")}


def _without_sources(text: str) -> str:
    return re.sub(r",? arXiv [^()]*", "", re.sub(r" \(arXiv [^()]*\)", "", text))
