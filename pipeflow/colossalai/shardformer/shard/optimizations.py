"""The optimizations of a ShardConfig: functions for a model's attention and normalizations."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.core.errors import UsageError


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
