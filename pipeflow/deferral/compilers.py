"""Compilers: torch's own backends, with backwards that are compiled in halves. Must not contain: how a backward is
split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.fx import GraphModule

Code = Callable[..., Any]
Compiler = Callable[[GraphModule, Sequence[Any], "Collection[int] | None"], Code]
"""Compiles a graph, given example arguments and the indices of those that are needed afterwards, or None for all. The
code takes its arguments in a list, which it empties.
"""
Split = Callable[[GraphModule, Sequence[Any], Compiler], Code]
"""Makes the code of a backward with a compiler, given example arguments."""


def by_inductor(graph: GraphModule, examples: Sequence[Any], split: Split, options: dict[str, Any]) -> Code:
    """Compiles with inductor and its options."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compiled(graph: GraphModule, examples: Sequence[Any], **keywords: Any) -> Any:
        def half(graph: GraphModule, examples: Sequence[Any], held: Collection[int] | None) -> Code:
            # Part of inductor's cache key: code that does not hold an argument may overwrite it.
            static = [index for index in keywords["static_input_idxs"] if held is not None and index not in held]
            with _not_overwritten(held):
                return cast(Code, compile_fx_inner(graph, examples, **{**keywords, "static_input_idxs": static}))

        if keywords.get("is_backward"):
            return split(graph, examples, half)
        return compile_fx_inner(graph, examples, **keywords)

    with config.patch(enable_autograd_cache=False):  # that cache stores whole backwards
        return cast(Code, compile_fx(graph, examples, inner_compile=compiled, config_patches=options))


@contextmanager
def _not_overwritten(held: Collection[int] | None) -> Iterator[None]:
    """Inside, a backward is compiled that does not overwrite its arguments `held`; None stands for all arguments."""
    metadata: Any = torch._guards.TracingContext.get().fw_metadata
    donated = metadata.bw_donated_idxs
    metadata.bw_donated_idxs = [index for index in donated or () if held is not None and index not in held]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = donated


def by_aot_eager(graph: GraphModule, examples: Sequence[Any], split: Split, options: dict[str, Any]) -> Code:
    """Runs torch's operators one after the other; this shows the graphs that AOTAutograd makes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def half(graph: GraphModule, examples: Sequence[Any], held: Collection[int] | None) -> Code:
        return boxed_nop(graph, list(examples))

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=lambda graph, examples: split(graph, examples, half),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, examples)


COMPILERS: Mapping[str, Callable[[GraphModule, Sequence[Any], Split, dict[str, Any]], Code]] = {
    "inductor": by_inductor,
    "aot_eager": by_aot_eager,
}
"""By name of the backend: the function that compiles a graph, given example arguments, a Split and options."""
