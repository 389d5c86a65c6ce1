"""ColossalAI's ShardConfig and policies: settings for sharding a model, and what is replaced in it, as values. Options
that have no effect here are accepted with their defaults only. Must not contain: how a policy is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeflow.core.errors import UsageError, unknown
from pipeflow.engine.parallel.context import current_context, is_launched


class Elsewhere(NamedTuple):
    """An option without effect.

    Attributes:
        default: the value that has no effect, and is accepted.
        instead: what to do instead of another value.
    """

    default: Any
    instead: str


def require_nothing_else(
    owner: type, others: Mapping[str, Any], elsewhere: Mapping[str, Elsewhere], own: Collection[str]
) -> dict[str, Any]:
    """Checks the options `others` that the class `owner` got besides its `own`. Returns the values of all options in
    `elsewhere`, which are their defaults.

    Raises UsageError for an unknown option (with the nearest name), and for a value that is not the default.
    """
    for name, value in others.items():
        if name not in elsewhere:
            raise unknown(f"option of {owner.__name__}", name, [*own, *elsewhere])
        if value != elsewhere[name].default:
            raise UsageError(f"{owner.__name__} does not support {name}={value!r}: {elsewhere[name].instead}")
    return {name: each.default for name, each in elsewhere.items()}


MODE = "split_gather"
_OTHERS = {"all_to_all": "all_to_all", "ring": "ring", "ring_attn": "ring"}
"""Modes in which tensor ranks would share the tokens of attention, and how context ranks exchange them."""


def mode_of(mode: str | None, *, is_enabled: bool, overlaps: bool) -> str | None:
    """Returns the mode of a ShardConfig: "split_gather", or None if sequences stay whole.

    Raises UsageError for another mode, and for a mode or an overlap if it is not enabled.
    """
    if mode in _OTHERS:
        raise UsageError(
            f"sequence_parallelism_mode={mode!r} is not supported: it splits the context of an attention, which is "
            f"whole on tensor ranks; use {MODE!r}, or context ranks, as in "
            f'pipeflow.launch(context=2, context_attention="{_OTHERS[mode]}")'
        )
    if mode not in (None, MODE):
        raise UsageError(f"sequence_parallelism_mode must be {MODE!r}, got {mode!r}")
    if not is_enabled and (mode or overlaps):
        raise UsageError("sequence_parallelism_mode and enable_sequence_overlap need enable_sequence_parallelism=True")
    return MODE if is_enabled else None


def require_whole(mode: str | None) -> None:
    """Raises UsageError if sequences should be split, for models without a policy."""
    if mode is not None:
        raise UsageError(
            "enable_sequence_parallelism=True needs a policy: a model's own attention computes with the length of its "
            "input, so rules cannot split sequences without changing results. Let a policy replace layers by those of "
            f"shardformer.layer with seq_parallel_mode={MODE!r}"
        )


_SEQUENCES = "sequences are split over the tensor ranks, with enable_sequence_parallelism=True; remove it"
_EXPERTS = "pipeflow.launch(experts=...) divides experts over ranks; remove it"
ELSEWHERE = {
    "pipeline_stage_manager": Elsewhere(None, "for a pipeline use Booster with HybridParallelPlugin(pp_size=...)"),
    "sequence_parallel_process_group": Elsewhere(None, _SEQUENCES),
    "gradient_checkpoint_config": Elsewhere(None, "call model.gradient_checkpointing_enable()"),
    "sp_axis": Elsewhere(None, _SEQUENCES),
    "pg_mesh": Elsewhere(None, "pass tensor_parallel_process_group"),
    "inner_ring_size": Elsewhere(None, "a ring is that of pipeflow.launch(context_attention='ring'); remove it"),
    "moe_dp_group": Elsewhere(None, _EXPERTS),
    "ep_group": Elsewhere(None, _EXPERTS),
    "fp8_communication": Elsewhere(False, "tensors are sent in their own dtype; remove it"),
    "extra_kwargs": Elsewhere({}, "leave it out"),
}
"""Options that have no effect here; only these values are accepted."""


class ShardConfig:
    """Settings for sharding a model.

    Args:
        tensor_parallel_process_group: the ranks that share layers: a group of torch.distributed with neighbouring
            ranks, or a group of pipeflow. By default the launch's tensor ranks, or all ranks if it has none.
        enable_tensor_parallelism: split layers over these ranks.
        enable_all_optimization: fused normalization, and flash attention if the model supports it; no compilation.
        enable_fused_normalization: RMS norms use torch's own function. torch's layer norms are always fused.
        enable_flash_attention: attention uses torch's scaled_dot_product_attention.
        enable_jit_fused: compile the model's blocks with torch.compile.
        parallel_output: has no effect; logits are always whole.
        enable_sequence_parallelism: the policy's layers split sequences over the tensor ranks, which halves activations
            between layers on two ranks. Needs a policy; rules keep sequences whole.
        sequence_parallelism_mode: must be "split_gather", the default.
        enable_sequence_overlap: has no effect: a layer's collectives always overlap its products.
        make_vocab_size_divisible_by: has no effect: a vocabulary of any size is split without padding.
        others: options in `ELSEWHERE` with the value that has no effect.

    Raises UsageError for an unknown option, for an option in `ELSEWHERE` with another value, and for a number below 1.
    """

    pipeline_stage_manager: Any  # a plugin sets it, for policies

    def __init__(
        self,
        tensor_parallel_process_group: Any = None,
        enable_tensor_parallelism: bool = True,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        parallel_output: bool = True,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        enable_sequence_overlap: bool = False,
        make_vocab_size_divisible_by: int = 64,
        **others: Any,
    ) -> None:
        vars(self).update(
            require_nothing_else(ShardConfig, others, ELSEWHERE, signature(ShardConfig).parameters)
        )  # policies may ask for them
        self.tensor_parallel_process_group = tensor_parallel_process_group
        self.enable_tensor_parallelism = enable_tensor_parallelism
        self.enable_all_optimization = enable_all_optimization
        self.enable_fused_normalization = enable_fused_normalization or enable_all_optimization
        self.enable_flash_attention = enable_flash_attention
        self.enable_jit_fused = enable_jit_fused
        self.parallel_output = parallel_output
        if make_vocab_size_divisible_by < 1:
            raise UsageError(
                f"make_vocab_size_divisible_by must be at least 1, got {make_vocab_size_divisible_by}; it has no effect"
            )
        self.enable_sequence_parallelism = enable_sequence_parallelism
        self.enable_sequence_overlap = enable_sequence_overlap
        self.sequence_parallelism_mode = mode_of(
            sequence_parallelism_mode, is_enabled=enable_sequence_parallelism, overlaps=enable_sequence_overlap
        )
        self.make_vocab_size_divisible_by = make_vocab_size_divisible_by

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share layers."""
        group = self.tensor_parallel_process_group
        if not self.enable_tensor_parallelism:
            return 1
        if group is None:
            return current_context().tensor_size if is_launched() else 1
        return int(group.size() if callable(group.size) else group.size)


@dataclass
class SubModuleReplacementDescription:
    """A replacement of a submodule.

    Attributes:
        suffix: path of the submodule in the module, such as `attention.self.query` or `layers[0]`.
        target_module: class whose `from_native_module(module, process_group=..., **kwargs)` makes the replacement.
        kwargs: further arguments of that method.
        ignore_if_not_exist: skip modules without such a submodule, instead of raising an error.
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """The replacements in modules of one class.

    Attributes:
        attribute_replacement: new values by the attribute's path, such as `self.num_heads`; paths that a module lacks
            are skipped.
        param_replacement: functions that are called with the module and replace its own parameters.
        sub_module_replacement: replacements of submodules.
        method_replacement: functions that become methods, by the method's name.
    """

    attribute_replacement: Mapping[str, Any] | None = None
    param_replacement: Sequence[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None


Kind = str | type[nn.Module]
Table = dict[Kind, ModulePolicyDescription]


class Policy:
    """Base class of policies, which say what is replaced in a model. Override `module_policy`, and other methods if
    needed. Pipeline stages need no replaced forwards, because they run the model's own.

    Attributes:
        model: the model to shard, or this rank's stage of it.
        shard_config: the ShardConfig of the ShardFormer or of the plugin.
    """

    model: nn.Module
    shard_config: ShardConfig

    def set_model(self, model: nn.Module) -> None:
        """Sets the model that the policy applies to."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Sets the ShardConfig and checks it."""
        self.shard_config = shard_config
        self.config_sanity_check()

    @property
    def pipeline_stage_manager(self) -> Any:
        """This rank's StageManager under a Booster with a pipeline, else None."""
        return self.shard_config.pipeline_stage_manager

    def config_sanity_check(self) -> None:
        """Raises an error for a configuration that the policy does not support."""

    def preprocess(self) -> nn.Module:
        """Called before anything is replaced; returns the model."""
        return self.model

    def module_policy(self) -> Table:
        """Returns the replacements in modules, by the module's class or its name."""
        raise NotImplementedError(f"{type(self).__name__} needs a module_policy")

    def postprocess(self) -> nn.Module:
        """Called after everything is replaced; returns the model."""
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        """Returns the layers of this rank's stages, for a pipeline. The model is cut after the last block of each
        stage; other layers go where the model's forward calls them. By default blocks are distributed evenly.
        """
        return []

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Returns parameters that several stages share, by rank. They must be one parameter of the model; stages tie it
        also if it is not returned.
        """
        return []

    def append_or_create_submodule_replacement(
        self,
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: Table,
        target_key: Kind,
    ) -> Table:
        """Adds replacements of submodules in modules of `target_key` to `policy`, and returns it."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        more = description if isinstance(description, list) else [description]
        entry.sub_module_replacement = [*(entry.sub_module_replacement or []), *more]
        return policy

    def append_or_create_method_replacement(
        self, description: dict[str, Callable[..., Any]], policy: Table, target_key: Kind
    ) -> Table:
        """Adds replacements of methods in modules of `target_key` to `policy`, and returns it."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.method_replacement = {**(entry.method_replacement or {}), **description}
        return policy
