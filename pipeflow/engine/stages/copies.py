"""Copies of a module: its structure with other tensors. A fake copy has shapes but no memory; the copy of a stage has
the parameters that the stage owns, and ghosts in place of the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.absent import AbsentTensor, Reads
from pipeflow.engine.stages.flow import LEAST, Flow
from pipeflow.engine.stages.module_state import ModuleState
from pipeflow.engine.torch_private.modes import FakeTensorMode

Ghosts = list[tuple[nn.Module, str]]
"""The places of parameters that a stage does not own: modules, and the names of attributes that are AbsentTensors."""


class Fakes:
    """A copy of a module on `device` whose parameters are fake. Buffers are real, unless they are on the meta device.
    Each parameter and buffer is a source with a bit of its own, from the second bit on.

    Attributes:
        mode: mode of the fake tensors.
        module: the copy.
        parameters, buffers: their names.
        bits: the bit of each of them, by name.
        of_parameters: the bits of all parameters.
        draws: whether the forward draws numbers from Python or NumPy, so that each run has other constants.

    Raises UsageError for a module that cannot be copied, or that has parameters without a shape.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.draws = False
        named = dict(module.named_parameters())
        if lazy := [name for name, parameter in named.items() if is_lazy(parameter)]:
            raise UsageError(f"{lazy[0]} has no shape yet: run the lazy layers of the module once before it is cut")
        buffers = dict(module.named_buffers())
        instead: dict[int, Tensor] = {
            id(parameter): nn.Parameter(self.fake(parameter), requires_grad=parameter.requires_grad)
            for parameter in named.values()
        }
        for buffer in buffers.values():
            instead[id(buffer)] = self.fake(buffer) if buffer.is_meta else buffer.detach().to(device, copy=True)
        for tensor in _loose(module):
            instead.setdefault(id(tensor), tensor.detach().clone())
        self.module = copied(module, instead)
        for name, each in self.module.named_modules():
            vars(each)["_apply"] = partial(_unchanged, each, name)
        self.parameters, self.buffers = list(named), list(buffers)
        self.bits = {name: 2 << index for index, name in enumerate([*named, *buffers])}
        self.of_parameters = sum(self.bits[name] for name in named)
        self._state = ModuleState("the module", self.module)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A region for a forward of the copy, which then is as before."""
        before = self._state.now()
        try:
            yield
        finally:
            before.restore()

    def fake(self, like: Tensor) -> Tensor:
        """A fake tensor on the device with the shape, strides and dtype of `like`."""
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def flow(self, *, draw: float = LEAST, guess: bool = True) -> Flow:
        """A Flow in which the parameters and buffers of the copy are sources, with arguments as in Flow."""
        flow = Flow(self.mode, self._of_buffers, draw=draw, guess=guess, draws=self.draws)
        for name, tensor in self.tensors().items():
            flow.give(tensor, self.bits[name])
        return flow

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of the copy, by name."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @property
    def _of_buffers(self) -> int:
        """The bits of buffers that have values."""
        return sum(self.bits[name] for name, buffer in self.module.named_buffers() if type(buffer) is Tensor)

    def owners(self, sources: int) -> list[str]:
        """The names of the parameters and buffers in `sources`."""
        return [name for name, bit in self.bits.items() if bit & sources]


def _unchanged(module: nn.Module, name: str, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces a module's own `_apply`: a forward may call a conversion that changes nothing."""
    for tensor in module.parameters(recurse):
        if function(tensor).dtype is not tensor.dtype:
            raise UsageError(
                f"{name or 'the module'} converts its parameters from {tensor.dtype} when it is called, which stages "
                "cannot take into account: convert them before"
            )
    return module


def _haunted(module: nn.Module, device: torch.device) -> Ghosts:
    """Moves tensors that are no nn.Parameter from the parameters of `module` and its children to attributes."""
    found: Ghosts = []
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                del owner._parameters[name]
                vars(owner)[name] = parameter.to(device)
                found.append((owner, name))
    for owner in module.modules():
        inside = set() if next(owner.parameters(), None) is not None else set(map(id, owner.modules()))
        if mine := [vars(each)[name] for each, name in found if id(each) in inside]:
            vars(owner)["parameters"] = partial(_iterate, mine)
    return found


def _iterate(tensors: list[Tensor], recurse: bool = True) -> Any:
    return iter(tensors)


def apply_to(ghosts: Ghosts, function: Callable[[Tensor], Tensor]) -> None:
    """Moves or converts ghosts, as nn.Module._apply does with parameters."""
    for owner, name in ghosts:
        ghost: AbsentTensor = vars(owner)[name]
        entry = function(torch.zeros((), dtype=ghost.dtype, device=ghost.device))
        vars(owner)[name] = AbsentTensor(ghost.what, ghost.reads, entry.detach().expand(ghost.shape))


def stage_copy(module: nn.Module, owned: set[str], device: torch.device, reads: Reads) -> tuple[nn.Module, Ghosts]:
    """A copy that shares the parameters named in `owned` and the buffers of the module, with ghosts in place of other
    parameters.
    """
    instead: dict[int, Tensor] = {id(tensor): tensor for tensor in [*module.buffers(), *_loose(module)]}
    for name, parameter in module.named_parameters():
        instead[id(parameter)] = (
            parameter if name in owned else AbsentTensor(f"the parameter {name}", reads, parameter, device)
        )
    made = copied(module, instead)
    return made, _haunted(made, device)


def copied(module: nn.Module, instead: Mapping[int, Tensor]) -> nn.Module:
    """A deep copy with replacements of the tensors with the given ids. Hooks that hold parts of the module hold those
    of the copy. Raises UsageError if it cannot be copied.
    """
    memo: dict[int, Any] = dict(instead)
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            f"the module, a {type(module).__name__}, cannot be copied by copy.deepcopy: {error}"
        ) from error
    for each in made.modules():
        for hooks in (each._forward_hooks, each._forward_pre_hooks):
            for key, hook in hooks.items():
                hooks[key] = _rebound(hook, memo)
    return made


def _rebound(hook: Any, memo: Mapping[int, Any]) -> Any:
    """The function with copies in place of the objects that its closure holds."""
    held = cells_of(hook) if isinstance(hook, FunctionType) else []
    instead = {id(cell): CellType(memo[id(each)]) for cell, each in held if id(each) in memo}
    if not instead:
        return hook
    cells = tuple(instead.get(id(cell), cell) for cell in hook.__closure__)
    made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    made.__kwdefaults__ = hook.__kwdefaults__
    return made


def cells_of(function: FunctionType) -> list[tuple[CellType, Any]]:
    """The variables of a closure, with their values."""
    found: list[tuple[CellType, Any]] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has none yet
            found.append((cell, cell.cell_contents))
    return found


def _loose(module: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes of modules."""
    return [value for each in module.modules() for value in vars(each).values() if isinstance(value, Tensor)]
