"""ColossalAI's ModelSharder: applies a user's policy. Everything is found and checked first, so a mistake in a policy
changes nothing.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor, nn

from pipeflow.colossalai.layout import tensor_group
from pipeflow.colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from pipeflow.colossalai.shardformer.shard.places import Place, at, has, is_elsewhere, places_in
from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.core.errors import UsageError


class ModelSharder:
    """Applies a policy to a model.

    Args:
        model: any module, or a stage of one; parameters of other stages are left alone.
        policy: the user's policy.
        shard_config: the ShardConfig; replacements are made for its group.
    """

    def __init__(self, model: nn.Module, policy: Policy, shard_config: ShardConfig) -> None:
        self.model = model
        self.policy = policy
        self.shard_config = shard_config

    def shard(self) -> list[dict[int, Tensor]]:
        """Applies the policy in place. Returns its shared parameters; for a stage of a pipeline an empty list, since
        the stages are tied already.

        Raises UsageError, before anything is replaced, if no module matches the policy or a submodule is missing.
        """
        if self.shard_config.enable_tensor_parallelism:
            tensor_group(self.shard_config.tensor_parallel_process_group)  # lays out the ranks
        self.policy.set_model(self.model)
        self.policy.set_shard_config(self.shard_config)
        self.model = self.policy.preprocess()
        self.policy.set_model(self.model)
        shared = [] if self.shard_config.pipeline_stage_manager else self.policy.get_shared_params()
        found = self._found()
        places = [place for module, description in found for place in places_in(module, description)]
        for module, description in found:
            _change(module, description)
        made: dict[int, nn.Module] = {}
        for place in places:
            if not is_elsewhere(*place.native.modules()):
                if id(place.native) not in made:  # it may be in several places
                    made[id(place.native)] = self._made(place)
                place.parent._modules[place.key] = made[id(place.native)]
        self.model = self.policy.postprocess()
        return shared

    def _found(self) -> list[tuple[nn.Module, ModulePolicyDescription]]:
        table = self.policy.module_policy()
        modules = list(self.model.modules())
        matches = [
            (module, description)
            for wanted, description in table.items()
            for module in modules
            if wanted in (type(module), type(module).__name__)
        ]
        if table and not matches:
            names = ", ".join(wanted if isinstance(wanted, str) else wanted.__name__ for wanted in table)
            raise UsageError(
                f"{type(self.policy).__name__} is for modules of {names}, but {type(self.model).__name__} only has "
                f"modules of {', '.join(sorted({type(each).__name__ for each in modules}))}"
            )
        return matches

    def _made(self, place: Place) -> nn.Module:
        make: Any = place.description.target_module.from_native_module
        group = self.shard_config.tensor_parallel_process_group
        names = signature(make).parameters
        if "group" in names and "process_group" not in names:  # a layer of pipeflow.tensor
            given = {"group": None if group is None else tensor_group(group)}
        else:
            given = {"process_group": group}
        made: nn.Module = make(place.native, **given, **(place.description.kwargs or {}))
        return made


def _change(module: nn.Module, description: ModulePolicyDescription) -> None:
    """Replaces a module's own attributes, methods and parameters."""
    for path, value in (description.attribute_replacement or {}).items():
        owner, key = at(module, path)
        if has(owner, key):
            setattr(owner, key, value)
    for name, method in (description.method_replacement or {}).items():
        setattr(module, name, MethodType(method, module))
    if not is_elsewhere(module):
        for replace in description.param_replacement or ():
            replace(module)
