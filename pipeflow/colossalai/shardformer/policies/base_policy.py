"""ColossalAI's `colossalai.shardformer.policies.base_policy`: a policy of one's own, as values. What must not live
here: how it is carried out.
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
    """What is replaced in a model. Write `module_policy`, and what else differs. Stages need nothing from it: they run
    the model's own forward.

    Attributes:
        model: what is sharded, or this rank's stage of it.
        shard_config: as of the ShardFormer, or of the plugin.
    """

    model: nn.Module
    shard_config: ShardConfig

    def set_model(self, model: nn.Module) -> None:
        """Says what is sharded."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Says how, and checks it."""
        self.shard_config = shard_config
        self.config_sanity_check()

    @property
    def pipeline_stage_manager(self) -> None:
        """None: a policy has nothing to do with stages here."""
        return

    def config_sanity_check(self) -> None:
        """Raises for a configuration that the policy cannot work with."""

    def preprocess(self) -> nn.Module:
        """The model, before anything is replaced."""
        return self.model

    def module_policy(self) -> Table:
        """What becomes of modules, by their class or its name."""
        raise NotImplementedError(f"{type(self).__name__} needs a module_policy")

    def postprocess(self) -> nn.Module:
        """The model, after all was replaced."""
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        """Not asked: which layers a stage holds is found by following the model's tensors."""
        return []

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Not asked: weights that several stages need are tied by themselves."""
        return []

    def append_or_create_submodule_replacement(
        self,
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: Table,
        target_key: Kind,
    ) -> Table:
        """`policy`, in which modules of `target_key` have these submodules replaced, too."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        more = description if isinstance(description, list) else [description]
        entry.sub_module_replacement = [*(entry.sub_module_replacement or []), *more]
        return policy

    def append_or_create_method_replacement(
        self, description: dict[str, Callable[..., Any]], policy: Table, target_key: Kind
    ) -> Table:
        """`policy`, in which modules of `target_key` have these methods replaced, too."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.method_replacement = {**(entry.method_replacement or {}), **description}
        return policy
