"""timm's keywords of a vision transformer, converted to arguments here; unsupported ones raise an error."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional

import pipeflow
from vit.model import PipelineVisionTransformer

ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu, "swish": functional.silu}

NAMES = {
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "drop_path",
    "embed_dim": "dim",
}
"""Keywords that have another name here."""

WEIGHTS = {"": "torch", "skip": "torch", "jax": "jax"}
"""Initial weights by timm's `weight_init`; "" means torch's own, as without the keyword."""

ALWAYS: Mapping[str, Any] = {
    "global_pool": "token",
    "class_token": True,
    "no_embed_class": False,
    "reg_tokens": 0,
    "pos_embed": "learn",
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "qk_norm": False,
    "init_values": None,
    "patch_drop_rate": 0.0,
    "dynamic_img_size": False,
    "dynamic_img_pad": False,
}
"""Keywords with only one supported value."""


def from_timm(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts keywords, timm's or its own, to arguments of PipelineVisionTransformer and `seed`.

    `drop_rate` is dropout everywhere, as before timm 0.9; `pos_drop_rate` (after the positions) and `proj_drop_rate`
    (in the blocks) override it. `norm_layer` may be torch's LayerNorm with an eps.

    Raises UsageError for an unknown or unsupported keyword.
    """
    options = {NAMES.get(name, name): value for name, value in given.items()}
    rate = options.pop("drop_rate", options.get("dropout", 0.0))
    options["dropout"] = options.pop("proj_drop_rate", rate)
    options["embedding_dropout"] = options.pop("pos_drop_rate", rate)
    for name, value in ALWAYS.items():
        if name in options and options.pop(name) != value:
            raise pipeflow.UsageError(f"{name}={given[name]!r} is not supported: this model has {value!r}; remove it")
    if "weight_init" in options:
        options["init_method"] = _of(WEIGHTS, "weight_init", options.pop("weight_init"))
    if (activation := options.pop("act_layer", None)) is not None:
        is_name = isinstance(activation, str)
        options["activation"] = _of(ACTIVATIONS, "act_layer", activation) if is_name else activation()
    if (norm := options.pop("norm_layer", None)) is not None:
        options["layernorm_epsilon"] = _epsilon(norm)
    if unknown := sorted(set(options) - {*inspect.signature(PipelineVisionTransformer).parameters, "seed"}):
        raise pipeflow.UsageError(f"this vision transformer does not support {', '.join(unknown)}: remove it")
    return options


def _of(table: Mapping[str, Any], name: str, value: Any) -> Any:
    if value not in table:
        raise pipeflow.UsageError(f"{name} must be one of {', '.join(map(repr, table))}, got {value!r}")
    return table[value]


def _epsilon(norm: Any) -> float:
    """The eps of torch's LayerNorm, or of a partial of it."""
    options = dict(norm.keywords) if isinstance(norm, partial) and not norm.args else {}
    kind = norm.func if isinstance(norm, partial) else norm
    epsilon: float = options.pop("eps", 1e-5)
    if kind is not nn.LayerNorm or options:
        raise pipeflow.UsageError(f"norm_layer must be nn.LayerNorm, or a partial of it with its eps, got {norm!r}")
    return epsilon
