"""Compiling: chooses the modules of a rank's stages that torch.compile compiles, and the options. Must not contain: how
weight gradients of compiled code are deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.compile_backend import COMPILERS, CompiledCall, Opaque, deferring_backend, is_compiled
from pipeflow.engine.runtime.stage import Stage
from pipeflow.engine.stages.blocks import listed
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private import inductor

_CUDA_GRAPHS = "triton.cudagraphs"  # inductor's option
_VARIANTS = 64  # of code: for different modules, modes (training or not) and sizes; torch's limit is 8


@dataclass(frozen=True, slots=True)
class Compiling:
    """Arguments of torch.compile, which have the same meaning here.

    Raises UsageError for values that torch.compile does not know, and for options that use CUDA graphs.
    """

    backend: str | Callable[..., Any]
    mode: str | None
    options: dict[str, Any] | None
    fullgraph: bool
    dynamic: bool | None

    def __post_init__(self) -> None:
        if isinstance(self.backend, str) and self.backend not in (known := torch.compiler.list_backends(())):
            raise UsageError(f"torch.compile has no backend {self.backend!r}; it has {', '.join(map(repr, known))}")
        if self.mode is not None and self.options is not None:
            raise UsageError("torch.compile takes a mode or options, not both")
        options, name = self.inductor_options(), f"mode={self.mode!r}" if self.mode else f"options={self.options}"
        if self.backend == "cudagraphs" or options.get(_CUDA_GRAPHS):
            raise UsageError(
                f"{'the backend cudagraphs' if self.backend == 'cudagraphs' else name} uses CUDA graphs, which return "
                "their outputs in the same memory each time, but a stage keeps outputs of several microbatches: "
                'use mode="max-autotune-no-cudagraphs" or "default"'
            )
        if self.backend == "aot_eager" and options:
            raise UsageError(f"{name} works with the backend inductor only, not with aot_eager")

    def inductor_options(self) -> dict[str, Any]:
        """Options of inductor, including those that the mode stands for. Raises UsageError for an unknown mode or
        option.
        """
        modes = inductor.modes()
        if self.mode is not None and self.mode not in modes:
            raise UsageError(f"torch.compile has no mode {self.mode!r}; it has {', '.join(map(repr, modes))}")
        if self.backend == "inductor" and (unknown := set(self.options or ()) - set(inductor.options())):
            raise UsageError(f"inductor has no option {min(unknown)!r}: torch._inductor.list_options() lists them")
        return {**modes.get(self.mode or "default", {}), **(self.options or {})}

    def compile(self, stages: Iterable[Stage], plan: CutPlan | None, *, blocks: bool) -> None:
        """Compiles the blocks of stages, or whole stages if `blocks` is False, when they are next called.

        Modules that were compiled before are compiled again. Equal modules share their code. `plan` is the plan of a
        Pipeline made by `from_module`, else None.

        Raises UsageError for a module that cannot be compiled.
        """
        name = self.backend if isinstance(self.backend, str) and self.backend in COMPILERS else None
        backend = None if name is None else deferring_backend(name, tuple(sorted(self.inductor_options().items())))
        chosen = [(stage, chosen_of(stage, plan, blocks=blocks)) for stage in stages]
        count = sum(len(modules) for _, modules in chosen)
        code = self._code(self.backend if backend is None else backend, count)
        for stage, modules in chosen:
            for module in stage.module.modules():
                if isinstance(module._compiled_call_impl, CompiledCall):
                    module._compiled_call_impl = None
            for module in modules.values():
                self._leave_eager(module)
                module._compiled_call_impl = CompiledCall(module, code, backend, stage.deferral)
            stage.defer()

    def _leave_eager(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            if isinstance(layer, Opaque) and not layer.compiles:
                if self.fullgraph:
                    raise UsageError(
                        f"{name} waits for other ranks, so it cannot be part of a full graph: use fullgraph=False"
                    )
                layer.leave_eager()

    def _code(self, backend: str | Callable[..., Any], modules: int) -> Callable[..., Any]:
        """The code of all modules; torch.compile finds out which of them differ."""
        own = backend is not self.backend
        limit: Any = {"recompile_limit": max(_VARIANTS, 8 * modules)}
        code: Callable[..., Any] = torch.compile(
            _call,
            backend=backend,
            mode=None if own else self.mode,
            options=None if own else self.options,
            fullgraph=self.fullgraph,
            dynamic=self.dynamic,
            **(limit if "recompile_limit" in signature(torch.compile).parameters else {}),
        )
        return code


def _call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return module._call_impl(*arguments, **keywords)


def chosen_of(stage: Stage, plan: CutPlan | None, *, blocks: bool) -> dict[str, nn.Module]:
    """The modules of a stage to compile, by name. These are its blocks: the children of outermost lists that have
    children of their own. Without such blocks, it is the whole stage, under the name "".

    Raises UsageError for a stage of `from_module` that is to be compiled whole, and for modules that are already
    compiled.
    """
    module = stage.module
    if isinstance(module, ModuleStage):
        assert plan is not None
        if not blocks:
            raise UsageError(
                f"stage {stage.index} cannot be compiled whole, because it runs only a part of the module's "
                "forward: compile its blocks, with blocks=True"
            )
        found = module.blocks(plan)
        found = _of_several_layers(found) or found
    else:
        names = sorted(listed(module)) if blocks else []
        found = _of_several_layers({name: module.get_submodule(name) for name in names}) or {"": module}
    for name, each in found.items():
        for inner, child in each.named_modules(prefix=name):
            if is_compiled(child) and not isinstance(child._compiled_call_impl, CompiledCall):
                raise UsageError(f"{inner or 'the stage'} is compiled already: leave compilation to Pipeline.compile")
    return found


def _of_several_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if next(module.children(), None) is not None}
