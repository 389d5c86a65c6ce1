"""Trees: flattens what modules return, in which plain dataclasses are nodes like tuples and dicts."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from pipeflow.engine.torch_private.trees import TreeSpec, register_pytree_node, tree_flatten, tree_leaves


def flattened(tree: object) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a tree. If torch's pytrees do not know a dataclass with tensors, it is
    registered there, with its attributes as children. All of torch's functions for trees then treat it as a node.
    """
    leaves, spec = tree_flatten(tree)
    while kinds := {type(leaf) for leaf in leaves if is_dataclass(leaf) and _holds_tensors(leaf)}:
        for kind in kinds:
            _register(kind)
        leaves, spec = tree_flatten(tree)
    return leaves, spec


def _holds_tensors(leaf: object) -> bool:
    inner = tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return any(isinstance(each, Tensor) or (is_dataclass(each) and _holds_tensors(each)) for each in inner)


def _register(kind: type) -> None:
    def flatten(node: Any) -> tuple[list[Any], Any]:
        return list(vars(node).values()), tuple(vars(node))

    def unflatten(values: Any, names: Any) -> Any:
        node: Any = object.__new__(kind)
        vars(node).update(zip(names, values, strict=True))
        return node

    register_pytree_node(kind, flatten, unflatten)
