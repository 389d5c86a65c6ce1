"""Block sizes: which sizes of a transformer's layers cannot be, and the errors. Must not contain: what follows from
sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least, require_positive

if TYPE_CHECKING:
    from pipeflow.planning.blocks import Transformer

NORMS = ("layer", "rms")
OPTIONAL = ("kv_heads", "head_size", "ffn", "kv_rank", "q_rank", "value_size", "window", "dense_ffn")


def require_block(model: Transformer) -> None:
    """Raises UsageError for sizes of a transformer's layers that cannot be: see `Transformer`."""
    given = {name: size for name in OPTIONAL if (size := getattr(model, name)) is not None}
    require_positive(layers=model.layers, hidden=model.hidden, heads=model.heads, **given)
    require_positive(experts=model.experts, experts_per_token=model.experts_per_token)
    require_positive(expert_groups=model.expert_groups, groups_per_token=model.groups_per_token)
    require_at_least(
        0,
        shared_experts=model.shared_experts,
        rope_size=model.rope_size,
        full_every=model.full_every,
        dense_layers=model.dense_layers,
    )
    if model.head_size is None and model.hidden % model.heads:
        near = near_divisors(model.hidden, model.heads)
        raise UsageError(f"hidden {model.hidden} does not divide into {model.heads} heads: {near}")
    if model.kv_heads is not None and model.heads % model.kv_heads:
        near = near_divisors(model.heads, model.kv_heads)
        raise UsageError(f"{model.heads} heads do not divide into kv_heads={model.kv_heads} groups: {near}")
    if model.experts_per_token > model.experts:
        raise UsageError(f"experts_per_token={model.experts_per_token} is more than experts={model.experts}")
    if model.groups_per_token > model.expert_groups or model.experts % model.expert_groups:
        raise UsageError(
            f"{model.experts} experts in {model.expert_groups} equal groups, of which a token uses "
            f"{model.groups_per_token}: these sizes are impossible"
        )
    if model.shared_experts and model.experts == 1:
        raise UsageError(f"shared_experts={model.shared_experts} need other experts, too: set experts to at least 2")
    _require_owners(model)
    for name, value, known in (("biases", model.biases, ("all", "qkv", "none")), ("norm", model.norm, NORMS)):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _require_owners(model: Transformer) -> None:
    """Raises UsageError for sizes that say nothing without another one."""
    owned = {
        "q_rank": (model.q_rank is not None, model.kv_rank is not None, "kv_rank"),
        "rope_size": (model.rope_size > 0, model.kv_rank is not None, "kv_rank"),
        "full_every": (model.full_every > 0, model.window is not None, "window"),
        "dense_layers": (model.dense_layers > 0, model.experts > 1, "experts of at least 2"),
        "dense_ffn": (model.dense_ffn is not None, model.dense_layers > 0, "dense_layers"),
    }
    for name, (is_given, has_owner, owner) in owned.items():
        if is_given and not has_owner:
            raise UsageError(f"{name}={getattr(model, name)} needs {owner}: give it too, or leave out {name}")
    if model.dense_layers >= model.layers > 1 and model.experts > 1:
        raise UsageError(f"dense_layers={model.dense_layers} leave no layer of {model.layers} with experts")
    if model.kv_rank is not None and model.head_width <= model.rope_size:
        raise UsageError(f"rope_size={model.rope_size} must be less than head_size={model.head_width}")


def near_divisors(whole: int, part: int) -> str:
    """Which divisors of `whole` are next to `part`, which is none."""
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    near = [number for number in divisors if number < part][-1:] + [number for number in divisors if number > part][:1]
    return f"the nearest that work{'s is' if len(near) == 1 else ' are'} {' and '.join(map(str, near))}"
