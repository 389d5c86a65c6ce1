"""ColossalAI's `colossalai.shardformer.policies.base_policy`: a policy of one's own, as values. Must not contain: how
it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipeflow.colossalai.shardformer.policies.descriptions import (
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)

if TYPE_CHECKING:
    from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig

__all__ = ["ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"]


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
        """Sets the model to shard."""
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
