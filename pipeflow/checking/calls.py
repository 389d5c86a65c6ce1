"""Calls of modules, and of functions between them: sketches of the outputs, of inputs that no watched module gave out,
and of batches are noted, and, if asked, how much each sample adds to the gradients. Leaves torch as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from math import nan
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from pipeflow.checking.files import INPUT, MOST_ROWS, MOST_TENSORS
from pipeflow.checking.parts import Part
from pipeflow.checking.sketches import exact, product, row_sketches, signs
from pipeflow.engine.parallel.sharding import own_values
from pipeflow.engine.runtime.original import unwrapped_name
from pipeflow.engine.torch_private.autograd import backward_id
from pipeflow.engine.torch_private.modes import FakeTensor
from pipeflow.engine.torch_private.trees import tree_leaves

PRODUCTS = {"scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum"}  # their inputs are noted, too
ACTIVATIONS = {"elu", "gelu", "glu", "leaky_relu", "mish", "relu", "sigmoid", "silu", "softplus", "tanh"}
MASKS = {"masked_fill", "where"}  # their infinite values are left out
OTHERS = {"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "linear", "embedding", "normalize"}
FUNCTIONS = PRODUCTS | ACTIVATIONS | MASKS | OTHERS
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen runpy>")


Note = Callable[..., None]


class LocalRange(NamedTuple):
    """Entries of an output's last dimension that lie together in the whole: where they start here and there."""

    start: int
    length: int
    there: int


def named_modules(
    models: Sequence[nn.Module], names: Callable[[str], str] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a rank with their names in the whole model, without those of wrappers."""
    seen: set[int] = set()
    known: dict[str, str] = {}
    for model in models:
        for root in _roots(model):
            for own, module in root.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield _name_of(unwrapped_name(own), module, names, known), module


def _name_of(own: str, module: nn.Module, names: Callable[[str], str] | None, known: dict[str, str]) -> str:
    """The name of a module in the whole model: what `names` puts before the first tensor in it; for a module without
    tensors, that of the one around it and its own. `known` has those of the modules before.
    """
    if names is None or not own:
        return own
    inside = next((unwrapped_name(name) for name, _ in (*module.named_parameters(), *module.named_buffers())), None)
    around, _, last = own.rpartition(".")
    name = f"{known[around]}.{last}" if around in known else own
    if inside is not None and names(f"{own}.{inside}").endswith(f".{inside}"):
        name = names(f"{own}.{inside}").removesuffix(f".{inside}")
    known[own] = name
    return name


def _roots(model: nn.Module) -> Sequence[nn.Module]:
    """The modules from which names count: the stages of a Pipeline."""
    chunks = getattr(model, "chunks", None)
    return list(chunks) if isinstance(chunks, nn.ModuleList) and hasattr(model, "schedule") else [model]


class Origin(NamedTuple):
    """A tensor whose values are noted: it, or what it is a view of; how it lies in memory; and as what it is noted."""

    tensor: weakref.ref[Tensor]
    layout: tuple[object, ...]
    name: str


@dataclass
class Call:
    """A call of a module that goes on: its name, whether its functions are noted, how often each was called, and what
    the module was given: as what its tensors are noted, and these with their versions.
    """

    name: str
    is_own: bool
    counts: Counter[str] = field(default_factory=Counter)
    inputs: list[str] = field(default_factory=list)
    given: set[tuple[int, int]] = field(default_factory=set)


class Calls(TorchFunctionMode):
    """Hooks on all modules while the context lasts, and on torch's functions within them.

    Args:
        models: the modules of this rank.
        parts: this rank's parts, which say where the outputs of divided layers lie.
        names: as in `record`.
        note: is called with each event.
        began: is called when an outermost module is called.
        samples: whether to record what each sample adds.
        whole: a pattern of the names of modules whose outputs are recorded whole.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        parts: Sequence[Part],
        names: Callable[[str], str] | None,
        note: Note,
        began: Callable[[], None],
        samples: bool,
        whole: str,
    ) -> None:
        super().__init__()
        self._models, self._names, self._whole = models, names, whole
        self._note, self._began, self._samples = note, began, samples
        self._by_tensor = {id(part.tensor): part for part in reversed(parts)}
        self._handles: list[Any] = []
        self._stack: list[Call] = []
        self._origins: dict[int, Origin] = {}
        self._is_busy = False  # noting, whose own functions are none of the job's
        self._outer = {id(root) for model in models for root in _roots(model)}
        self._wrapped: set[int] = set()  # modules in wrappers that hand them the batch in ways of their own
        self._has_batch = False
        self._outermost = 0
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        for name, module in named_modules(self._models, self._names):
            if not name:
                self._wrapped.add(id(module))
            own = {
                key: self._by_tensor[id(each)]
                for key, each in module._parameters.items()
                if id(each) in self._by_tensor
            }
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            runs = [_places(own.get("weight"), dim) for dim in (0, 1)]
            after = partial(self._after, name, runs, own)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *told: type[BaseException] | BaseException | TracebackType | None) -> None:
        super().__exit__(*told)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if id(module) in self._outer:
            self._stack.clear()  # an engine may have left the last call early
        self._stack.append(Call(name, not type(module).__module__.startswith("torch.")))
        depth = len(self._stack)
        given = tree_leaves((arguments, named))
        if _is_left_out():
            return
        is_batch = depth == 1 or (depth == 2 and id(module) in self._wrapped and not self._has_batch)
        if is_batch and backward_id() < 0:  # a backward computes activations again
            self._began()
        self._stack[-1].given = {(id(each), each._version) for each in given if isinstance(each, Tensor)}
        with self._noting():
            if is_batch and backward_id() < 0:
                self._batch([each for each in given if isinstance(each, Tensor)])
            elif depth > 1:
                self._stack[-1].inputs = self._inputs(name, INPUT, given)
            self._scalars(name, "given", given)

    def _batch(self, given: Sequence[Tensor]) -> None:
        fresh = [each for each in given if not each.requires_grad and each.dim() and each.dtype != torch.bool]
        self._has_batch = bool(fresh)
        self._outermost += self._has_batch
        self._origins.clear()
        for place, each in enumerate(fresh[:MOST_TENSORS]):
            values = own_values(each)
            told = {"place": place, "shape": list(values.shape), "call": self._outermost}
            self._note("batch", told, rows=_rows(values, (0,) * (values.dim() - 1)))

    def _after(
        self,
        name: str,
        runs: Sequence[list[LocalRange] | None],
        own: dict[str, Part],
        module: nn.Module,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        mine = self._stack.pop() if self._stack else Call(name, is_own=False)
        if output is None or _is_left_out():
            return
        call = self._counts[name]
        self._counts[name] += 1
        given = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        found = [each for each in tree_leaves(output) if _is_floating(each)]
        places = runs[bool(given) and not given[0].is_floating_point()]  # words choose rows of an embedding
        told = {"module": name, "call": call, "inputs": mine.inputs, "again": backward_id() >= 0}
        with self._noting():
            for place, each in enumerate(found[:MOST_TENSORS]):
                if (id(each), each._version) not in mine.given:  # a placeholder computes nothing
                    self._output(told | {"place": place}, each, places)
            self._scalars(name, "returned", tree_leaves(output))
        if own and given and found and found[0].requires_grad and self._samples:
            watch_gradient(self._note, own, given[0], found[0], self._outermost)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        self._is_busy = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_busy = False

    def _output(self, told: dict[str, Any], output: Tensor, places: list[LocalRange] | None) -> None:
        name = told["module"]
        self._origin(output, name)
        told["dtype"] = str(output.dtype)
        values, offset, whole = own_values(output), [0] * max(0, output.dim() - 1), list(output.shape)
        if isinstance(output, DTensor):
            from pipeflow.engine.torch_private.distributed import compute_local_shape_and_global_offset

            told["partial"] = any(each.is_partial() for each in output.placements)
            _, start = compute_local_shape_and_global_offset(output.shape, output.device_mesh, output.placements)
            offset, places = list(start[1:]), None
        elif places is not None and values.dim() > 1 and sum(run.length for run in places) == values.shape[-1]:
            pieces = [values[..., run.start : run.start + run.length] for run in places]
            rows = [_rows(piece, (*offset[:-1], run.there)) for piece, run in zip(pieces, places, strict=True)]
            told |= {"shape": list(values.shape), "begin": [*offset[:-1], places[0].there], "known": True}
            self._note("output", told, rows=torch.stack(rows).sum(0))
            return
        told |= {"shape": list(values.shape), "begin": offset, "known": isinstance(output, DTensor), "whole": whole}
        found = _rows(values, offset)
        is_asked = bool(self._whole) and fnmatchcase(name, self._whole)  # "" is the name of the outermost module
        is_seen = is_asked and told["shape"] == whole and len(found) == (whole or [0])[0]
        self._note("output", told, rows=found, **({"values": values.detach().clone()} if is_seen else {}))

    def _scalars(self, name: str, way: str, given: Sequence[object]) -> None:
        """Notes the numbers that a module is given or returns."""
        for place, each in enumerate(given):
            told = {"module": name, "way": way, "place": place}
            if isinstance(each, int | float) and not isinstance(each, bool):
                self._note("scalar", told | {"value": each})
            elif isinstance(each, Tensor) and not each.dim() and not isinstance(each, FakeTensor):
                self._note("scalar", told, value=own_values(each).detach())

    def _origin(self, tensor: Tensor, name: str) -> str:
        """As what the values of a tensor are noted already; from now on, they are as `name`, if it is not empty."""
        base = tensor if tensor._base is None else tensor._base
        layout = (base._version, tensor.storage_offset(), tensor.shape, tensor.stride())
        known = self._origins.get(id(base))
        if known is not None and known.tensor() is base and known.layout == layout:
            return known.name
        if name:
            self._origins[id(base)] = Origin(weakref.ref(base), layout, name)
        return ""

    def _inputs(self, name: str, function: str, given: Sequence[object]) -> list[str]:
        """As what inputs are noted: those that are results of the job's own code, and of nothing watched, are now."""
        told, found = {"module": name, "function": function, "where": where()}, []
        for place, each in enumerate(given):
            if not _is_floating(each) or isinstance(each, nn.Parameter):
                continue
            is_noted = place < MOST_TENSORS and each.grad_fn is not None
            known = self._origin(each, f"{name}: {function}" if is_noted else "")
            if is_noted and not known:
                self._values(told | {"call": self._counts[name], "place": place}, each)
            found.append(known or f"{name}: {function}" * is_noted)
        return found

    def _values(self, told: dict[str, object], values: Tensor, **arrays: Tensor) -> None:
        own = own_values(values)
        told |= {"dtype": str(values.dtype), "shape": list(own.shape), "begin": [0] * (own.dim() - 1), "known": False}
        self._note("output", told, rows=_rows(own, (0,) * (own.dim() - 1)), **arrays)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch, whose result is noted if it is within a module that is no layer of torch's."""
        given, named = args, kwargs or {}
        if torch.compiler.is_compiling() or self._is_busy or not self._stack:
            return func(*given, **named)
        call, name = self._stack[-1], getattr(func, "__name__", "").strip("_")
        if name == "detach" and given and given[0].requires_grad and not _is_left_out():
            self._note("detached", {"module": call.name, "where": where()})
        if name not in FUNCTIONS or not call.is_own or _is_left_out():
            return func(*given, **named)
        call.counts[name] += 1
        label, leaves = f"{name} #{call.counts[name]}", tree_leaves((given, named))
        told: dict[str, object] = {"module": call.name, "function": label, "where": where(), "place": 0}
        told |= {"call": self._counts[call.name], "arguments": _arguments(given, named)}
        with self._noting():
            if name in PRODUCTS:
                told["inputs"] = self._inputs(call.name, f"{label}: {INPUT}", leaves)
            else:
                told["inputs"] = [self._origin(each, "") for each in leaves if _is_floating(each)]
        result = func(*given, **named)
        if _is_floating(result):
            with self._noting():
                self._origin(result, f"{call.name}: {label}")
                masks = [own_values(each) for each in leaves if isinstance(each, Tensor) and each.dtype == torch.bool]
                marks = {"marks": masks[0].float().mean()} if masks and masks[0].numel() else {}
                self._values(told, result.nan_to_num(nan, 0.0, 0.0) if name in MASKS else result, **marks)
        return result


def _arguments(given: Sequence[object], named: dict[str, object]) -> dict[str, object]:
    """The arguments that are no tensors, and whether there is a tensor, by place or name."""
    by_name = {**{str(place): each for place, each in enumerate(given)}, **named}
    return {
        name: "a tensor" if isinstance(each, Tensor) else each
        for name, each in by_name.items()
        if each is None or isinstance(each, Tensor | bool | int | float | str)
    }


def _is_floating(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of floating numbers with a dimension; not one that only has a shape."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
        and value.is_floating_point()
        and value.dim() > 0
    )


def where() -> str:
    """The file and the line of the job's code that calls a function or a module of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@lru_cache(maxsize=1024)
def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES)


def _is_left_out() -> bool:
    """Whether a call is no part of training: an evaluation, an engine that looks for shapes, or a compiler."""
    return not torch.is_grad_enabled() or torch.compiler.is_compiling()


def _rows(values: Tensor, offset: Sequence[int]) -> Tensor:
    found = row_sketches(values, tuple(offset))
    return found if len(found) <= MOST_ROWS else found.sum(0, keepdim=True)


def _places(part: Part | None, dim: int) -> list[LocalRange] | None:
    """Where the outputs of a layer lie in the whole, whose weight is divided along `dim`. None if it is not."""
    if part is None or len(part.shape) != 2 or part.tensor.shape == part.shape:
        return None
    found, start = [], 0
    for offset, shape in part.offsets:
        if len(shape) != 2 or shape[1 - dim] != part.shape[1 - dim]:
            return None
        found.append(LocalRange(start, shape[dim], offset[dim]))
        start += shape[dim]
    return found


def watch_gradient(note: Note, own: dict[str, Part], inputs: Tensor, output: Tensor, microbatch: int) -> None:
    """Notes, when the gradient of a layer's output comes, how much each sample adds to the gradients of its weight and
    bias, and how large the terms are that these gradients sum up, which bounds their rounding.
    """
    weight = own.get("weight")
    factor = None
    with torch.no_grad():
        if weight is not None and len(weight.shape) == 2:
            factor = _factor(own_values(inputs), weight.shape, output)

    def arrived(gradient: Tensor) -> None:
        with torch.no_grad():
            _note_samples(note, own, factor, exact(own_values(gradient)), microbatch)

    output.register_hook(arrived)


class _Factor(NamedTuple):
    """What multiplies the gradient of an output in that of the weight, for each sample and token.

    Attributes:
        sketch: [rows, tokens, PROBES], over one dimension of the weight.
        sizes: its squared norm, [rows, tokens].
        dim: the weight's other dimension, that of the output.
    """

    sketch: Tensor
    sizes: Tensor
    dim: int


def _factor(inputs: Tensor, shape: Sequence[int], output: Tensor) -> _Factor | None:
    """The factor of an embedding or a linear layer whose weight has this shape; None for other layers."""
    if not inputs.is_floating_point() and output.shape[:-1] == inputs.shape and output.shape[-1] == shape[1]:
        rows = inputs.reshape(len(inputs), -1)
        table = signs(0, 0, shape[0], torch.float32, inputs.device)
        return _Factor(table[rows], torch.ones_like(rows, dtype=torch.float32), 1)
    if inputs.is_floating_point() and inputs.dim() > 1 and (inputs.shape[-1], output.shape[-1]) == (shape[1], shape[0]):
        values = exact(inputs).reshape(len(inputs), -1, shape[1])
        sketch = product(values, signs(1, 0, shape[1], values.dtype, values.device))
        return _Factor(sketch, _squares(values), 0)
    return None


def _squares(rows: Tensor) -> Tensor:
    """The squared norms along the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.square()


def _note_samples(note: Note, own: dict[str, Part], factor: _Factor | None, gradient: Tensor, microbatch: int) -> None:
    rows = gradient.reshape(len(gradient), -1, gradient.shape[-1]) if gradient.dim() > 1 else gradient.reshape(1, 1, -1)
    sizes = _squares(rows)
    for key, part in own.items():
        told = {"name": part.name, "microbatch": microbatch}
        if key == "weight" and factor is not None and factor.sizes.shape == sizes.shape:
            theirs = product(rows, signs(factor.dim, 0, rows.shape[-1], rows.dtype, rows.device))
            note("samples", told, rows=(theirs * factor.sketch).sum(1), mass=(sizes * factor.sizes).sum())
        elif key == "bias" and part.shape == (rows.shape[-1],):
            theirs = product(rows.sum(1), signs(0, 0, rows.shape[-1], rows.dtype, rows.device))
            note("samples", told, rows=theirs, mass=sizes.sum())
        else:
            note("mass", told, mass=sizes.sum())
