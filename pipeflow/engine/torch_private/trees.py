"""Nested containers of values. torch's own pipelining and export use this module, and nothing public handles the
classes that users register.
"""

from __future__ import annotations

from pipeflow.engine.torch_private import needed

with needed():
    from torch.utils._pytree import (
        SUPPORTED_NODES,
        TreeSpec,
        keystr,
        register_pytree_node,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )

__all__ = [
    "SUPPORTED_NODES",
    "TreeSpec",
    "keystr",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
