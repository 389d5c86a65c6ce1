"""ModuleState: what forwards of a module change beside its gradients, remembered and restored, for forwards that run
twice and count once. Must not contain: when they do, and the generators that all modules share.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.absent import AbsentTensor
from pipeflow.engine.torch_private.modes import FakeTensor
from pipeflow.engine.torch_private.tensors import keep_version
from pipeflow.engine.torch_private.trees import tree_leaves

Counts = dict[tuple[str, str], int | float]


def counts_of(module: nn.Module) -> Counts:
    """The numbers that are attributes of a module and of its children, such as counters of calls: by the child's name
    and the attribute's.
    """
    return {
        (child, name): each
        for child, its in module.named_modules()
        for name, each in vars(its).items()
        if type(each) in (int, float)
    }


def set_counts(module: nn.Module, counts: Counts) -> None:
    """Gives a module, or a copy of it, the numbers of `counts_of`."""
    children = dict(module.named_modules())
    for (child, name), each in counts.items():
        if child in children:
            children[child].__dict__[name] = each


def held_by(module: nn.Module) -> dict[tuple[str, int], Tensor]:
    """The tensors in attributes of a module and of its children but its parameters, by the attribute's name and a
    place.
    """
    found = {}
    for prefix, child in module.named_modules():
        for name, each in vars(child).items():
            if name != "_parameters" and isinstance(each, Tensor | list | tuple | dict):
                for place, leaf in enumerate(tree_leaves(each)):
                    if isinstance(leaf, Tensor):
                        found[f"{prefix}.{name}".lstrip("."), place] = leaf
    return found


# Theory of operation
#
# A forward may write buffers and other tensors in place, replace attributes, and change lists, dictionaries, sets,
# generators and objects that attributes hold. `now` remembers all of these. Attributes and containers are copied
# without their content, which is compared by identity. The values of a tensor are copied once; torch's version counter
# shows whether a forward has written it since. So modules that write nothing are only looked at.
#
# Layers of torch and pipeflow keep nothing but buffers, so their attributes are only remembered if they have hooks,
# which may set some. Objects are remembered without those that they hold, because a module may hold its trainer.
#
# Some writes do not change the version: batch_norm's on a CPU, those of fused observers, and all through `.data`. So
# what one layer holds counts as written if any of it is, tiny tensors are compared, and others are compared once,
# after their first forward. A copy of each large tensor, such as a table or quantized weights in a buffer, would take
# memory for nothing: the copy is freed then, unless it was written.

_TINY = 2**16  # bytes of a tensor on a CPU that is compared each time
_SMALL = 2**20  # bytes of a tensor of which a copy is kept in any case
_WIDE = 256  # entries of a container whose content is looked into
_OWN = frozenset(vars(nn.Module()))
_HOOKS = [name for name in _OWN if "_hooks" in name and "forward" in name]  # some are added in the first forward
_PLAIN: tuple[type, ...] = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_SKIPPED = frozenset((*_PLAIN, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial))
_QUIET = frozenset({"torch", "pipeflow", "builtins", "_thread", "weakref", "logging"})  # packages of skipped classes


class TensorVersion:
    """A tensor, and the values and the version that it had. Values that are None were not copied.

    Attributes:
        hides: whether forwards write it without changing its version.
        mates: those of the same layer, also itself, if they are small.
    """

    __slots__ = ("_is_tiny", "hides", "mates", "name", "tensor", "values", "version")

    def __init__(self, name: str, tensor: Tensor, last: TensorVersion | None, mates: list[TensorVersion]) -> None:
        small = tensor.nbytes <= _SMALL
        self.name, self.tensor, self.version = name, tensor, tensor._version
        self.hides: bool = last is not None and last.hides
        self.mates = mates if small else []
        self.values = tensor.detach().clone() if small or tensor.is_floating_point() else None
        self._is_tiny = tensor.device.type == "cpu" and tensor.nbytes <= _TINY
        self.mates.append(self)

    @property
    def is_written(self) -> bool:
        """Whether the tensor was written since, or may have been."""
        if self.hides or any(mate.tensor._version != mate.version for mate in self.mates):
            return True
        return self._is_tiny and not self._is_equal()

    def look(self) -> None:
        """Call after the first forward: notes whether it wrote the tensor, and frees a large copy if not."""
        if self.values is not None and not self._is_tiny and not self.is_written:
            self.hides = not self._is_equal()
            if not self.hides and self.tensor.nbytes > _SMALL:
                self.values = None

    def _is_equal(self) -> bool:
        assert self.values is not None  # of a tensor that is not large
        return torch.equal(self.tensor, self.values)

    def restore(self) -> None:
        """Writes the values back. Raises UsageError if they are not here."""
        if not self.is_written:
            return
        if self.values is None:
            raise UsageError(
                f"a forward wrote {self.name}, a tensor of {self.tensor.nbytes >> 20} MB that the forwards before did "
                "not write, and must run again, but such a tensor is not copied before each forward: write it outside "
                "of the forward, or use a schedule without recomputation and without the optimizer's step"
            )
        self.tensor.copy_(self.values)


class Snapshot:
    """What forwards of a module may change, as it was at one moment.

    Attributes:
        tensors: tensors that may be written in place, by their ids.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, TensorVersion] = {}
        self.dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.others: list[tuple[Any, Any]] = []  # lists, sets and deques
        self.generators: list[tuple[Any, Any]] = []
        self.seen: set[int] = set()  # ids of what `others`, `dicts` and `generators` have

    def written(self) -> list[Tensor]:
        """The tensors that were written in place since."""
        return [kept.tensor for kept in self.tensors.values() if kept.is_written]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives everything what it had then. Raises UsageError for a tensor of which no copy was kept."""
        for found, before in self.dicts:
            if not _same(found, before):
                for key in [key for key in found if key not in before]:
                    del found[key]
                found.update({key: value for key, value in before.items() if found.get(key, _same) is not value})
        for container, content in self.others:
            if len(container) != len(content) or not all(map(is_, container, content)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(content)
        for generator, state in self.generators:
            _set_state(generator, state)
        for kept in self.tensors.values():
            kept.restore()


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))


class ModuleState:
    """The state of a module.

    Args:
        name: what it is called in errors, such as "stage 1".
        module: the module.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._layers: list[tuple[str, nn.Module, bool]] | None = None  # with names, and whether they have attributes
        self._last: dict[int, TensorVersion] = {}
        self._new: list[TensorVersion] = []  # those that no forward has had a chance to write

    def renew(self) -> None:
        """Call before a step: the module may have got other layers."""
        self._layers = None

    @property
    def layers(self) -> list[tuple[str, nn.Module, bool]]:
        """The layers with their names, and whether their attributes are remembered."""
        if self._layers is None:
            self._layers = list(_layers_of(self._module))
        return self._layers

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all layers."""
        return [each for _, layer, _ in self.layers for each in layer._parameters.values() if each is not None]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of all layers."""
        return [each for _, layer, _ in self.layers for each in layer._buffers.values() if each is not None]

    def now(self) -> Snapshot:
        """What forwards may change, as it is now."""
        found = Snapshot()
        for name, layer, keeps in self.layers:
            if layer._buffers:
                self._dict(found, f"{name}.", layer._buffers)
            if keeps:
                self._dict(found, f"{name}.", vars(layer), objects=True)
                found.dicts += [(hooks, hooks.copy()) for hooks in map(vars(layer).get, _HOOKS) if hooks is not None]
        self._last = found.tensors
        return found

    @contextmanager
    def as_it_is(self, before: Snapshot) -> Iterator[Snapshot]:
        """A region that begins with the state `before`, and after which the state is as it is now, which it passes on.
        Versions of tensors do not change, since their values do not.
        """
        now = self.now()
        with keep_version(tuple(each.tensor for each in now.tensors.values())):
            try:
                before.restore()
                yield now
            finally:
                now.restore()

    def ran(self) -> None:
        """Call after a forward."""
        for kept in self._new:
            kept.look()
        self._new = []

    def _dict(self, found: Snapshot, path: str, own: dict[Any, Any], *, objects: bool = False) -> None:
        found.dicts.append((own, own.copy()))
        skipped = _OWN if objects else ()
        items = [
            (f"{path}{key}", value) for key, value in own.items() if type(value) not in _SKIPPED and key not in skipped
        ]
        if items:
            self._values(found, items, objects=objects)

    def _values(self, found: Snapshot, items: Iterable[tuple[str, Any]], *, objects: bool = False) -> None:
        """Remembers the values that a layer or a container holds; if `objects`, also the attributes of objects."""
        tensors: list[tuple[str, Tensor]] = []
        for path, value in items:
            if id(value) in found.seen:
                continue
            found.seen.add(id(value))
            if isinstance(value, Tensor):
                tensors.append((path, value))
            elif isinstance(value, list | set | deque | tuple | dict):
                self._container(found, path, value)
            elif (state := _state_of(value)) is not None:
                found.generators.append((value, state))
            elif objects and not _is_quiet(value) and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
                self._dict(found, f"{path}.", vars(value))
        if tensors:
            self._tensors(found, tensors)

    def _container(self, found: Snapshot, path: str, value: Any) -> None:
        wide = len(value) > _WIDE
        if isinstance(value, dict):
            if wide:
                found.dicts.append((value, value.copy()))
            else:
                self._dict(found, f"{path}.", value)
            return
        if not isinstance(value, tuple):
            found.others.append((value, list(value)))
        inside = [] if wide else [(path, each) for each in value if type(each) not in _SKIPPED]
        self._values(found, inside)

    def _tensors(self, found: Snapshot, tensors: list[tuple[str, Tensor]]) -> None:
        mates: list[TensorVersion] = []
        for path, tensor in tensors:
            last = self._last.get(id(tensor))
            if last is not None and last.tensor is not tensor:
                last = None
            if last is None and (tensor.requires_grad or not _is_writable(tensor)):
                continue
            kept = last
            if kept is None or kept.is_written:
                kept = TensorVersion(f"{path} of {self._name}", tensor, last, mates)
                if last is None:
                    self._new.append(kept)
            found.tensors[id(tensor)] = kept


def _layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    for name, layer in module.named_modules():
        hooked = layer._forward_hooks or layer._forward_pre_hooks
        yield name or type(layer).__name__, layer, bool(hooked) or not _is_quiet(layer)


def _is_quiet(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in _QUIET


def _is_writable(tensor: Tensor) -> bool:
    """Whether a tensor may be written in place: it has memory of its own for each entry."""
    if tensor.is_meta or isinstance(tensor, FakeTensor | AbsentTensor) or tensor.is_inference():
        return False
    return tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() >= tensor.nbytes


def _state_of(value: Any) -> Any:
    """The state of a generator of random numbers, or None for another object."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if type(value).__module__.startswith("numpy.random") else None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
