"""What a training job calls, watched: modules, of which sketches of the outputs and batches are noted, and, if asked,
how much each sample adds to the gradients; backwards, losses, clipping and steps of optimizers. Leaves torch as it was.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial, wraps
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeflow.checking.files import MOST_ROWS, MOST_TENSORS
from pipeflow.checking.parts import Part
from pipeflow.checking.sketches import exact, row_sketches, signs
from pipeflow.engine.parallel.sharding import own_values
from pipeflow.engine.runtime.original import unwrapped_name
from pipeflow.engine.torch_private.autograd import backward_id
from pipeflow.engine.torch_private.tensors import called_by_functional
from pipeflow.engine.torch_private.trees import tree_leaves


@contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `around(original)` in the place of a function, while the context lasts."""
    original, is_own = getattr(owner, name), name in vars(owner)
    replacement = wraps(original)(around(original))
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner).get(name) is not replacement:
            pass  # somebody else has replaced it since
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


Watch = AbstractContextManager[None]


def _watched(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Watch:
    """Calls `before(*arguments)` before a function, and `after(result, *arguments)` after it, in the context."""

    def around(original: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            result = original(*arguments, **named)
            if after is not None:
                after(result, *arguments, **named)
            return result

        return watched

    return _replaced(owner, name, around)


def backwards_seen(seen: Callable[[Tensor], None]) -> Watch:
    """Calls `seen(loss)` with each scalar at which a backward starts."""

    def before(tensors: Any, *_: Any, **__: Any) -> None:
        for each in [tensors] if isinstance(tensors, Tensor) else list(tensors):
            if isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point():
                seen(each)

    return _watched(torch.autograd, "backward", before)


@contextmanager
def engine_losses_seen(models: Sequence[Any], seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `seen(loss)` for losses at which no backward of torch starts: that of each step of these Pipelines, and
    those of torch's pipelining schedules, of which some divide the backward. The latter may come from a backward again.
    """
    steps, schedules = (
        sys.modules.get(name) for name in ("pipeflow.engine.runtime.step", "torch.distributed.pipelining.schedules")
    )
    runners = {id(model.runner) for model in models if hasattr(model, "runner")}

    def after_step(output: Any, runner: Any, _: Any, call: Any, *__: Any) -> None:
        if id(runner) in runners and call.training and output.loss is not None:
            seen(output.loss.detach())

    def after_loss(loss: Any, *_: Any, **__: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            seen(loss)

    with ExitStack() as stack:
        if runners and steps is not None:
            stack.enter_context(_watched(steps.Runner, "step", after=after_step))
        if hasattr(owner := getattr(schedules, "_PipelineSchedule", None), "_compute_loss"):
            stack.enter_context(_watched(owner, "_compute_loss", after=after_loss))
        yield


def labels_seen(seen: Callable[[Tensor, Tensor], None]) -> Watch:
    """Calls `seen(rows, valid)` for each cross entropy: sketches of the labels, and how many of them count."""

    def before(input: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, *_: Any) -> None:
        if not target.is_floating_point() and not hasattr(target, "device_mesh"):
            seen(row_sketches(target, (0,) * (target.dim() - 1)).sum(0), (target != ignored).sum())

    # not torch.nn.functional itself, which may be a key of other libraries' tables
    return _watched(called_by_functional, "cross_entropy_loss", before)


def scaling_seen(seen: Callable[[Tensor, Tensor], None]) -> Watch:
    """Calls `seen(loss, scaled loss)` when a GradScaler of torch multiplies a loss."""

    def after(scaled: Any, _: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            seen(outputs, scaled)

    return _watched(torch.amp.GradScaler, "scale", after=after)


@contextmanager
def clipping_seen(seen: Callable[[Iterable[Tensor], float, Tensor], None]) -> Iterator[None]:
    """Calls `seen(parameters, largest norm, norm)` before torch clips gradients."""
    name = "_clip_grads_with_norm_"
    if not hasattr(clip_grad, name):
        yield
        return

    def around(original: Any) -> Any:
        def clip(parameters: Any, max_norm: float, total_norm: Tensor, *arguments: Any, **named: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
            seen(listed, max_norm, norm)
            return original(listed, max_norm, total_norm, *arguments, **named)

        return clip

    with _replaced(clip_grad, name, around):
        yield


TRIALS = ("_forward_metadata_inference", "_backward_metadata_inference")  # torch's pipelining learns shapes


@contextmanager
def trials_seen(seen: Callable[[bool], None]) -> Iterator[None]:
    """Calls `seen(True)` when torch's pipelining begins to run a stage on no data, to learn the shapes that it sends,
    and `seen(False)` after it.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    owner = getattr(stages, "PipelineStage", None)

    def around(original: Any) -> Any:
        def trial(*arguments: Any, **named: Any) -> Any:
            seen(True)
            try:
                return original(*arguments, **named)
            finally:
                seen(False)

        return trial

    with ExitStack() as stack:
        for name in TRIALS:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, around))
        yield


@contextmanager
def steps_seen(optimizers: Sequence[Any], seen: Callable[[Any], None]) -> Iterator[None]:
    """Calls `seen(optimizer)` before an optimizer steps: one of these, or any of torch's if there are none."""
    with ExitStack() as stack:
        for each in optimizers:
            if isinstance(each, torch.optim.Optimizer):
                stack.callback(each.register_step_pre_hook(lambda optimizer, *_: seen(optimizer)).remove)
            else:
                stack.enter_context(_watched(each, "step", lambda *_, own=each, **__: seen(own)))
        if not optimizers:
            stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: seen(optimizer)).remove)
        yield


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


class Calls:
    """Hooks on all modules while the context lasts.

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
        self._models, self._names, self._whole = models, names, whole
        self._note, self._began, self._samples = note, began, samples
        self._by_tensor = {id(part.tensor): part for part in reversed(parts)}
        self._handles: list[Any] = []
        self._depth = 0
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
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            runs = [_places(own.get("weight"), dim) for dim in (0, 1)]
            after = partial(self._after, name, runs, own)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth = 1 if id(module) in self._outer else self._depth + 1  # an engine may have left the last call early
        is_wrapped = self._depth == 2 and id(module) in self._wrapped and not self._has_batch
        if (self._depth > 1 and not is_wrapped) or _is_left_out():
            return
        if backward_id() >= 0:  # a backward computes activations again
            return
        self._began()
        given = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        fresh = [each for each in given if not each.requires_grad and each.dim() and each.dtype != torch.bool]
        self._has_batch = bool(fresh)
        self._outermost += self._has_batch
        with torch.no_grad():
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
        self._depth = max(0, self._depth - 1)
        if output is None or _is_left_out():
            return
        call = self._counts[name]
        self._counts[name] += 1
        given = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        found = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
        places = runs[bool(given) and not given[0].is_floating_point()]  # words choose rows of an embedding
        with torch.no_grad():
            for place, each in enumerate(found[:MOST_TENSORS]):
                self._output(name, call, place, each, places)
        if own and given and found and found[0].requires_grad and self._samples:
            watch_gradient(self._note, own, given[0], found[0], self._outermost)

    def _output(self, name: str, call: int, place: int, output: Tensor, places: list[LocalRange] | None) -> None:
        told: dict[str, object] = {"module": name, "call": call, "place": place, "dtype": str(output.dtype)}
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
        sketch = values @ signs(1, 0, shape[1], values.dtype, values.device)
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
            theirs = rows @ signs(factor.dim, 0, rows.shape[-1], rows.dtype, rows.device)
            note("samples", told, rows=(theirs * factor.sketch).sum(1), mass=(sizes * factor.sizes).sum())
        elif key == "bias" and part.shape == (rows.shape[-1],):
            theirs = rows.sum(1) @ signs(0, 0, rows.shape[-1], rows.dtype, rows.device)
            note("samples", told, rows=theirs, mass=sizes.sum())
        else:
            note("mass", told, mass=sizes.sum())
