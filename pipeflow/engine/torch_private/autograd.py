"""The engine of autograd, and what surrounds a call of a function that it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pipeflow.engine.torch_private import needed

with needed():
    from torch.autograd.graph import _engine_run_backward as run_backward

    backward_id: Callable[[], int] = torch._C._current_graph_task_id
    will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
    is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
    is_under_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
    tracing_state: Callable[[], object] = torch._C._get_tracing_state
    without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
    at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    _autograd: Any = torch._C._autograd
    top_saved_hooks: Callable[[bool], tuple[Any, Any] | None] = _autograd._top_saved_tensors_default_hooks
    pop_saved_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
    push_saved_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks

__all__ = [
    "applied",
    "at_end_of_backward",  # calls a function when the backward that runs ends; public hooks belong to one tensor
    "backward_id",  # of the backward that runs in this thread, -1 outside; nothing public tells two apart
    "is_any_autocast_enabled",  # of any device; the public names ask for one, and take longer
    "is_under_functorch",  # in torch.func.grad, vmap and the like; nothing public says so
    "pop_saved_hooks",  # of saved_tensors_hooks: public names add hooks, and none hides them for a while
    "push_saved_hooks",
    "run_backward",  # torch.autograd.backward for many edges: the public one takes edges only since torch 2.9, slowly
    "top_saved_hooks",
    "tracing_state",  # of torch.jit.trace; torch.jit.is_tracing, which is deprecated
    "will_run",  # whether the backward that runs comes to a node; nothing public says so
    "without_torch_function",  # as the default __torch_function__ of a subclass; nothing public
]


def applied(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """The `apply` of `function` without what it does for torch.func's transforms alone, which takes as long as a small
    layer. Not to be called under them.
    """
    return cast(Callable[..., Tensor], super(torch.autograd.Function, function).apply)  # type: ignore[misc]  # of torch
