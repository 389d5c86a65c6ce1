"""ColossalAI's ShardFormer and ModelSharder: split a model over tensor ranks by rules, or as a policy says. Everything
in a policy is found and checked first, so a mistake in it changes nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, reduce
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.colossalai.policies import (
    ModulePolicyDescription,
    Policy,
    ShardConfig,
    SubModuleReplacementDescription,
    require_whole,
)
from pipeflow.colossalai.processes import tensor_group
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import partial_in
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.stages.blocks import listed
from pipeflow.engine.tensor.module_sharding import shard


class Replacement(NamedTuple):
    """The place of a submodule, and its replacement."""

    parent: nn.Module
    key: str
    native: nn.Module
    description: SubModuleReplacementDescription


def places_in(module: nn.Module, description: ModulePolicyDescription) -> Iterator[Replacement]:
    """The places of the submodules to replace, without those that already have their new class.

    Raises UsageError for a suffix that matches no submodule, unless `ignore_if_not_exist`.
    """
    for each in description.sub_module_replacement or ():
        parent, key = at(module, each.suffix)
        native = _step(parent, key)
        if isinstance(parent, nn.Module) and isinstance(native, nn.Module):
            if not isinstance(each.target_module, type) or not isinstance(native, each.target_module):
                yield Replacement(parent, key, native, each)
        elif not each.ignore_if_not_exist:
            raise UsageError(
                f"suffix {each.suffix!r} of the policy is not a submodule of {type(module).__name__}, which has "
                f"{', '.join(name for name, _ in module.named_modules() if name)}; set ignore_if_not_exist=True if "
                "only some modules have it"
            )


def at(module: nn.Module, path: str) -> tuple[Any, str]:
    """The owner of the last step of a path such as `layers[0].attention` (None if it does not exist), and that step."""
    *before, last = [step for step in re.split(r"[.\[\]]+", path) if step]
    return reduce(_step, before, module), last


def has(owner: Any, key: str) -> bool:
    """True if the owner has this step."""
    return _step(owner, key) is not None


def _step(owner: Any, step: str) -> Any:
    """The object at this step; None if there is none."""
    if owner is None or not step.isdecimal():
        return getattr(owner, step, None)
    if isinstance(owner, nn.Module):
        return owner._modules.get(step)
    return owner[int(step)] if int(step) < len(owner) else None


def is_elsewhere(*modules: nn.Module) -> bool:
    """True if another stage has some of their parameters; plain tensors replace them here."""
    return any(isinstance(value, Tensor) for each in modules for value in vars(each).values())


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

    def _made(self, place: Replacement) -> nn.Module:
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


def optimize(model: nn.Module, config: ShardConfig) -> None:
    """Applies the optimizations of `config` to the model. Raises UsageError if its attention cannot be changed."""
    if config.enable_flash_attention:
        choose_attention(model)
    elif config.enable_all_optimization:
        with suppress(UsageError):
            choose_attention(model)
    if config.enable_fused_normalization:
        fuse_norms(model)


def choose_attention(model: nn.Module) -> None:
    """Makes a transformers model compute attention with torch's scaled_dot_product_attention.

    Raises UsageError if the model does not support that.
    """
    choose: Any = getattr(model, "set_attn_implementation", None)
    why = "it is not a transformers model"
    if choose is not None:
        try:
            choose("sdpa")
            if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":
                return
            why = "it has only one implementation"
        except (ValueError, ImportError) as error:
            why = str(error)
    raise UsageError(
        f"enable_flash_attention: the attention of {type(model).__name__} cannot be changed ({why}): remove the "
        "option, or write the attention with torch.nn.functional.scaled_dot_product_attention"
    )


class _Fused(nn.Module):
    """A root mean square norm that uses torch's own function."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = functional.rms_norm(hidden_states, self.weight.shape, None, self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


@lru_cache(maxsize=1024)
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Fused, kind), {"__module__": kind.__module__})


def fuse_norms(model: nn.Module) -> None:
    """Replaces the class of RMS norms by one that uses torch's function, after a test on copies that results agree."""
    for module in model.modules():
        kind = type(module)
        is_one = "RMSNorm" in kind.__name__ and isinstance(vars(module).get("variance_epsilon"), float)
        if is_one and not isinstance(module, _Fused) and _is_plain(module):
            module.__class__ = _fused(kind)  # type: ignore[arg-type]  # types are hashable


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(list(module.parameters())) > 1:
        return False
    probe: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        probe.weight.copy_(torch.rand(weight.shape, generator=generator))
        sample = torch.randn(3, len(weight), generator=generator)
        return torch.allclose(probe(sample), _Fused.forward(probe, sample), rtol=1e-5, atol=1e-6)


class ShardFormer:
    """Shards models over tensor ranks. All ranks make one together, because it arranges the processes.

    Args:
        shard_config: the settings.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config
        self._group: Group = Alone()
        if shard_config.enable_tensor_parallelism:
            self._group = tensor_group(shard_config.tensor_parallel_process_group)

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Splits the model's layers in place with `pipeflow.tensor.shard`, or replaces them as `policy` says. Returns
        the model and the policy's shared parameters. Call the model and differentiate its loss as usual, with the same
        batch on all ranks.

        Raises UsageError as `pipeflow.tensor.shard` and ModelSharder do.
        """
        optimize(model, self.shard_config)
        shared: list[dict[int, Tensor]] = []
        if policy is None:
            require_whole(self.shard_config.sequence_parallelism_mode)
            shard(model, group=self._group)
        else:
            sharder = ModelSharder(model, policy, self.shard_config)
            shared, model = sharder.shard(), sharder.model
        if self._group.size > 1:
            for parameter in partial_in(model):
                _sum_gradient(parameter, self._group)
        if self.shard_config.enable_jit_fused:
            for name in listed(model) or [""]:
                model.get_submodule(name).compile()
        return model, shared


def _sum_gradient(parameter: nn.Parameter, group: Group) -> None:
    """Sums the parameter's gradient over the tensor ranks, since each computes a part of it."""

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.detach().clone().contiguous()
        group.all_reduce(whole).wait()
        return whole

    if parameter.requires_grad:
        parameter.register_hook(summed)
