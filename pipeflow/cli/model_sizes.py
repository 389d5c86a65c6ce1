"""Model sizes: the options of `pipeflow plan` for the sizes of a model. Must not contain: layouts."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from pipeflow.cli.layout_strings import layout_of
from pipeflow.cli.options import flag
from pipeflow.core.errors import UsageError
from pipeflow.planning.catalog import Model, model_named
from pipeflow.planning.transformer import GPT
from pipeflow.planning.vit import ViT

if TYPE_CHECKING:
    from pipeflow.cli.options import Parser

SIZES = {name: get_type_hints(kind)[name] for kind in (GPT, ViT) for name in (each.name for each in fields(kind))}
MEANINGS = {  # help for sizes
    "layers": "number of transformer layers",
    "hidden": "hidden size",
    "heads": "number of attention heads",
    "kv_heads": "number of key and value heads",
    "head_size": "size of an attention head",
    "ffn": "size of the MLP, or of one expert",
    "gated": "MLPs with three matrices (SwiGLU)",
    "experts": "number of experts per layer",
    "experts_per_token": "number of experts that the router selects",
    "shared_experts": "number of experts that see every token",
    "biases": "linear layers of a block that have a bias",
    "norm": "LayerNorm or RMSNorm",
    "head_norms": "norms of query and key heads",
    "dropout": "keep masks of dropouts",
    "kv_rank": "size of the latent vector of key and value (MLA)",
    "q_rank": "size of the latent vector of the query (MLA)",
    "rope_size": "part of a head that has positions (MLA)",
    "value_size": "size of a head of value",
    "window": "tokens that a query sees",
    "full_every": "each so-many-th layer sees all tokens in spite of --window",
    "parallel_block": "attention and MLP read the same norm",
    "dense_layers": "number of first layers that have one MLP instead of experts",
    "dense_ffn": "size of that MLP",
    "expert_groups": "number of equal groups of experts",
    "groups_per_token": "number of groups whose experts a token uses",
    "mtp": "number of layers that predict further tokens",
    "positions": "most tokens per sequence",
    "vocabulary": "number of tokens in the vocabulary",
    "mlp_ratio": "size of the MLP, as a multiple of the hidden size",
    "tied": "the head shares the word table",
    "position_table": "learned positions, not rotary ones",
    "image": "height and width of an image, in pixels",
    "patch": "height and width of a patch, in pixels",
    "classes": "number of classes",
}


def add_sizes(command: Parser) -> None:
    """Adds an option for each size."""
    group = command.add_argument_group("model", "override sizes of MODEL")
    for name, kind in SIZES.items():
        if kind is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=MEANINGS.get(name))
        elif get_origin(kind) is Literal:
            group.add_argument(flag(name), choices=get_args(kind), help=MEANINGS.get(name))
        else:
            group.add_argument(flag(name), type=int, metavar="N", help=MEANINGS.get(name))


def model_of(arguments: argparse.Namespace) -> Model:
    """The model with the sizes that were given. Raises UsageError for sizes that it does not have."""
    given = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    model, layout = model_named(arguments.model), layout_of(arguments)
    if layout is not None and layout.mtp and arguments.mtp is None:
        given["mtp"] = layout.mtp
    own = [each.name for each in fields(model)]
    if strange := [flag(name) for name in given if name not in own]:
        raise UsageError(f"{arguments.model} takes no {', '.join(strange)}; its sizes are {', '.join(map(flag, own))}")
    return replace(model, **given)
