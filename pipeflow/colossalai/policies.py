"""ColossalAI's policies: what is replaced in a model, as values. Must not contain: how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from pipeflow.colossalai.shard_config import ShardConfig
from pipeflow.core.errors import UsageError


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


@dataclass(frozen=True)
class PolicyLocation:
    """The place of a policy, whose module is imported when a model of its class is sharded.

    Attributes:
        file_name: the Python module, such as "my_project.policies".
        class_name: the policy's class in it.
    """

    file_name: str
    class_name: str


_POLICY_LIST: dict[str, PolicyLocation] = {}
"""Policies by the full name of a model's class, such as "transformers.models.bert.modeling_bert.BertModel"."""


def import_policy(policy_location: PolicyLocation) -> type[Policy]:
    """Imports a policy's class. Raises UsageError if it does not exist."""
    try:
        found: type[Policy] = getattr(import_module(policy_location.file_name), policy_location.class_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"there is no policy {policy_location.class_name} in the module {policy_location.file_name}: {error}"
        ) from error
    return found


def listed_policy(model: nn.Module) -> Policy | None:
    """Makes the policy listed for the model's class; None if there is none."""
    location = _POLICY_LIST.get(_full_name(model))
    return None if location is None else import_policy(location)()


def get_autopolicy(model: nn.Module, shard_config: ShardConfig | None = None) -> Policy:
    """Makes the policy listed for the model's class, for this model and configuration.

    Raises UsageError if there is none.
    """
    policy = listed_policy(model)
    if policy is None:
        raise UsageError(
            f"there is no policy for {_full_name(model)}: shard it without one, by rules, or add a PolicyLocation to "
            f"_POLICY_LIST, which has {', '.join(_POLICY_LIST) or 'no entries'}"
        )
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(enable_tensor_parallelism=False) if shard_config is None else shard_config)
    return policy


def _full_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
