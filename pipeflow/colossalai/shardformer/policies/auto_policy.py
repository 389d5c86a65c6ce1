"""ColossalAI's `colossalai.shardformer.policies.auto_policy`: policies for models by the names of their classes. The
list is empty, because rules split models of any class; add your own policies to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from torch import nn

from pipeflow.colossalai.shardformer.policies.base_policy import Policy
from pipeflow.colossalai.shardformer.shard.shard_config import ShardConfig
from pipeflow.core.errors import UsageError

__all__ = ["PolicyLocation", "get_autopolicy", "import_policy"]


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
    """Imports a policy's class. Raises UsageError if it is not there."""
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
