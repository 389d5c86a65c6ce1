"""Setup: how the stages of a GPT are laid out over devices, and what of their work is kept. Must not contain: what
that costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from pipeflow.core.errors import UsageError, names_of, require_type
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.planning.attention import KERNELS, Kernel
from pipeflow.planning.block_sizes import near_divisors
from pipeflow.planning.engines import ENGINES

Checkpoint = Literal["none", "full", "selective", "op"]
CHECKPOINTS: tuple[Checkpoint, ...] = ("none", "full", "selective", "op")
ContextKind = Literal["ring", "all-to-all"]
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "all-to-all")
ZERO = (0, 1, 2, 3)
Dispatcher = Literal["all-to-all", "deepep", "hybridep"]
DISPATCHERS: tuple[Dispatcher, ...] = ("all-to-all", "deepep", "hybridep")
FEW_BITS = ("fp8", "fp4")  # precisions of products whose operands are scaled and rounded first
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the work of one pipeline rank is divided among devices, and what is kept for backwards.

    Attributes:
        tensor: devices that share every layer of a stage.
        data: copies of the pipeline, each with its own part of the batch.
        microbatch_size: sequences per microbatch.
        sequence: tokens per sequence; the model's `positions` unless given.
        precision: of weights, gradients, optimizer and activations.
        zero: what is divided among the `replicas` (ZeRO, arXiv 1910.02054). 0: nothing; 1: master weights and moments;
            2: gradients, too; 3: weights, too, gathered for use (FSDP, arXiv 2304.11277). True and False: 1 and 0.
        shard_ranks: the replicas that together hold what `zero` divides; others hold copies. By default all of them.
        prefetch: with `zero` 3, a backward gathers a layer while another one computes, not after it.
        reduce_once: with `zero` 3, gradients stay whole until the last microbatch has been computed (FSDP's no_sync).
        engine: the program, of `engines.ENGINES`, whose own buffers memory counts; unless given, only what all keep.
        overlap: gradients are reduced, and weights gathered, while layers compute; tensor ranks, too, communicate then
            with `sequence_parallel` and `zero` below 3. By default with `zero` 3, and as in Megatron-Core with fused
            attention in 8 bits or with gradients in float32.
        checkpoint: what a backward recomputes. "full" (True): a layer but for its input; "selective": scores (arXiv
            2205.05198, section 5); "op": all but attention and every other product, as in torchtitan; "none" (False).
        early_stop: recomputing a whole layer stops before its last product; by default as in the program.
        sequence_parallel: activations that tensor ranks would have whole are split by the sequence (arXiv 2205.05198).
        keep_scores: attention writes its scores to memory, as before FlashAttention. See `stores_scores`.
        attention: the kernel that computes attention, of `attention.KERNELS`; that of `kernel` unless given.
        context: devices that share the tokens of each sequence; each has all weights of its stage.
        context_kind: how attention sees the tokens of other context ranks. "ring": keys and values go around, hidden
            behind attention (arXiv 2310.01889). "all-to-all": a rank has some heads of all tokens (arXiv 2309.14509).
        expert: ranks among which the experts of a layer are divided. They are some of the `tensor` x `context` x `data`
            devices of a stage (arXiv 2504.14960), which exchange tokens twice in a forward.
        expert_tensor: devices that share each expert; as many as `tensor` unless given.
        imbalance: tokens of the fullest expert rank, as a multiple of the mean (arXiv 2408.15664, table 2).
        dispatcher: how tokens go to experts. "all-to-all": once for each expert. "deepep" and "hybridep": once to each
            node of these experts, and there over the node's links to each device.
        overlap_experts: that way is hidden behind another microbatch (arXiv 2412.19437, section 3.2.1).
        recompute_modules: modules of a layer, of MODULES, that its backward computes again.
        checkpoint_layers: with a `checkpoint`, how many layers of each stage have it; all unless given.
        offload_layers: how many layers of each stage copy what they keep to the host; two of them are on their way.
        cuda_graphs: scopes of CUDA graphs, of GRAPHS; what is in them is not launched by the host.
        frozen: weights do not learn; they have no gradients and no optimizer. Always with `lora_rank`.
        lora_rank: rank of the adapters that learn beside frozen linears (LoRA, arXiv 2106.09685); 0 for none.
        lora_targets: the linears with an adapter, of LORA_TARGETS.

    Raises UsageError for sizes below 1 or that do not divide, for an unknown `zero`, `checkpoint`, `attention` or
    `context_kind`, for a fused kernel that should keep or recompute scores, and for `shard_ranks` without `zero`.
    """

    tensor: int = 1
    data: int = 1
    microbatch_size: int = 1
    sequence: int | None = None
    precision: Precision = PRECISIONS["bf16"]
    zero: int = 0
    checkpoint: Checkpoint | bool = "none"
    early_stop: bool | None = None
    sequence_parallel: bool = False
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
    cuda_graphs: tuple[str, ...] = ()
    frozen: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        require_type("precision", self.precision, Precision, f"PRECISIONS[{self.precision!r}] has one by its name")
        require_type("checkpoint", self.checkpoint, (str, bool))
        if self.engine is not None:
            require_type("engine", self.engine, str)
        require_positive(tensor=self.tensor, data=self.data, microbatch_size=self.microbatch_size)
        self._freeze()
        require_positive(context=self.context, expert=self.expert, expert_tensor=self.expert_split)
        if self.context_kind not in CONTEXT_KINDS:
            raise UsageError(f"context_kind must be one of {', '.join(CONTEXT_KINDS)}; got {self.context_kind!r}")
        require_type("imbalance", self.imbalance, (int, float))
        if not 1 <= self.imbalance <= self.expert:
            raise UsageError(
                f"imbalance must be between 1 and the number of expert ranks, {self.expert}; got {self.imbalance!r}"
            )
        self._require_named()
        devices, asked = self.tensor * self.replicas, self.expert * self.expert_split
        if devices % asked:
            raise UsageError(
                f"{self.expert} expert ranks of {self.expert_split} devices do not divide the {devices} devices of a "
                f"stage (tensor {self.tensor} x context {self.context} x data {self.data}): use sizes that do"
            )
        if self.sequence is not None:
            require_positive(sequence=self.sequence)
        if self.zero not in ZERO:
            raise UsageError(f"zero must be one of {', '.join(map(str, ZERO))}; got {self.zero!r}")
        if self.shard_ranks is not None:
            require_positive(shard_ranks=self.shard_ranks)
            self._require_shards(self.shard_ranks)
        if self.reduce_once and self.zero != 3:
            raise UsageError(f"reduce_once is for zero=3, got zero={self.zero}: zero 0 and 1 always reduce once")
        if self.engine is not None and self.engine not in ENGINES:
            raise UsageError(f"engine must be one of {', '.join(ENGINES)}; got {self.engine!r}")
        if not isinstance(self.checkpoint, bool) and self.checkpoint not in CHECKPOINTS:
            raise UsageError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}; got {self.checkpoint!r}")
        self._require_kernel()
        object.__setattr__(self, "zero", int(self.zero))
        if isinstance(self.checkpoint, bool):
            object.__setattr__(self, "checkpoint", "full" if self.checkpoint else "none")

    def _freeze(self) -> None:
        """Frozen weights have no gradients and no states; adapters have those of the precision that was given. Raises
        UsageError for a negative `lora_rank`, and for `lora_targets` without one.
        """
        require_at_least(0, lora_rank=self.lora_rank)
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

    def _require_named(self) -> None:
        """Raises UsageError for unknown modules, scopes and dispatchers, and for layers of what there is none."""
        known = {"recompute_modules": MODULES, "cuda_graphs": tuple(GRAPHS), "dispatcher": DISPATCHERS}
        known["lora_targets"] = LORA_TARGETS
        for name in ("recompute_modules", "cuda_graphs", "lora_targets"):
            object.__setattr__(self, name, names_of(name, getattr(self, name)))
        for name, words in known.items():
            for word in names_of(name, getattr(self, name)):
                if word not in words:
                    raise UsageError(f"{name} must be of {', '.join(words)}; got {word!r}")
        require_at_least(0, offload_layers=self.offload_layers, checkpoint_layers=self.checkpoint_layers or 0)
        kind = "full" if self.checkpoint is True else self.checkpoint
        if self.recompute_modules and kind in ("full", "op") and self.checkpoint_layers is None:
            raise UsageError(f"checkpoint {kind!r} recomputes all modules of a layer: leave out recompute_modules")
        if self.checkpoint_layers is not None and self.checkpoint in (False, "none"):
            raise UsageError("checkpoint_layers says how many layers have a checkpoint: give checkpoint, too")

    def _require_kernel(self) -> None:
        if self.checkpoint == "op" and (self.keep_scores or self.attention == "unfused"):
            raise UsageError("checkpoint 'op' keeps the output of fused attention, which stores no scores: use one")
        if self.attention is None or self.attention == "unfused":
            return
        if self.attention not in KERNELS:
            raise UsageError(f"attention must be one of {', '.join(KERNELS)}; got {self.attention!r}")
        if self.keep_scores or self.checkpoint == "selective":
            what = "keep_scores" if self.keep_scores else "checkpoint 'selective'"
            raise UsageError(
                f"{what} is for attention that stores its scores, and {self.attention} does not: use 'unfused'"
            )

    def _require_shards(self, ranks: int) -> None:
        if not self.zero:
            raise UsageError(f"shard_ranks={ranks} divides nothing with zero=0: give zero 1, 2 or 3, too")
        if self.replicas % ranks:
            near = near_divisors(self.replicas, ranks)
            raise UsageError(f"shard_ranks={ranks} does not divide the {self.replicas} replicas: {near}")

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
