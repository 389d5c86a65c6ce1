"""explained: a criterion whose errors about what it was given say what that was, and what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.copies import Fakes, cells_of
from pipeflow.engine.stages.isolation import isolated
from pipeflow.engine.stages.scaling import Scalars
from pipeflow.engine.stages.tape import BATCH_NORMS, Recorded, upstream
from pipeflow.engine.stages.values import UnprovedError
from pipeflow.engine.torch_private.modes import TorchDispatchMode
from pipeflow.engine.torch_private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten


def explained(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The criterion. Raises UsageError if it returns no scalar tensor, and in place of its error if its labels are
    None, or if that is about an output that is no tensor.
    """

    def called(output: Any, labels: Any) -> Tensor:
        try:
            loss = criterion(output, labels)
        except (AttributeError, TypeError) as error:
            if labels is None:
                raise UsageError(
                    f"the criterion got None as labels, since the batch has none ({error}): pass (inputs, labels), "
                    "call their entry of a dict 'labels', or evaluate without a loss by forward_only=True"
                ) from error
            kind = type(output).__name__
            if isinstance(output, Tensor) or kind not in str(error):
                raise
            part = _part(output)
            raise UsageError(
                f"the last stage returned a {kind}, which the criterion does not take ({error}): choose a part, as "
                f"in criterion=lambda output, labels: loss(output{part}, labels)"
            ) from error
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"criterion must return a scalar tensor, got {what}: take the mean over its samples")
        return loss

    return called


def _part(output: Any) -> str:
    """How to write a tensor of an output."""
    items = output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, tuple) else ()
    names = [name for name, each in items if isinstance(each, Tensor)]
    name = "logits" if "logits" in names else next(iter(names), None)
    return ".logits" if name is None else f"[{name!r}]"


def loss_in(output: object) -> Tensor | None:
    """The loss in a module's output: a scalar, `output.loss`, `output["loss"]`, or in a tuple the first entry if it is
    a scalar, else the only scalar, as in `(logits, loss)`.
    """
    found: object = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        scalars = [each for each in output if isinstance(each, Tensor) and not each.dim()]
        first = scalars[0] if scalars and (len(scalars) == 1 or scalars[0] is output[0]) else None
        found = getattr(output, "loss", first)
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and not found.dim() else None


def own_loss(output: object, labels: object) -> Tensor:
    """The module's own loss as a criterion. Raises UsageError if there is none."""
    loss = loss_in(output)
    if loss is None:
        raise UsageError(
            f"the module returned a {type(output).__name__} without a loss: pass from_module(criterion=...), or "
            "include the labels in batches from which it computes one"
        )
    return loss


CRITERION = "pipeflow_criterion."
"""What the names of a criterion's buffers begin with."""


class _Criterion(nn.Module):
    """A criterion as a module, so that it can be copied without memory."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.pipeflow_criterion = criterion


class _Alone(TorchDispatchMode):
    """Refuses collectives of torch: tensors without memory must not reach a backend, and no other rank would answer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UnprovedError("it calls a collective of torch")
        return func(*args, **(kwargs or {}))


def recorded(
    criterion: Callable[..., Tensor],
    output: Any,
    labels: Any,
    leaves: int,
    scalars: Mapping[int, Recorded],
    device: torch.device,
    functions: Scalars | None = None,
) -> Recorded:
    """How a criterion computes the loss of a microbatch. A copy of the criterion runs, on tensors without memory.

    Args:
        criterion: the criterion.
        output: what the last stage returns, of which only shapes and dtypes count.
        labels: the labels of the microbatch.
        leaves: number of leaves that the inputs have; those of the labels follow them.
        scalars: how the module computes scalars in its output, by the indices of their leaves.
        device: the device of the stages.
        functions: records the scalars that functions of torch return; None to record none.

    Raises UnprovedError if it does not run on such tensors.
    """
    with _tracing(criterion):
        fakes = Fakes(_Criterion(criterion), device)
        flow = fakes.flow()
        tape = flow.recorded(fakes.module.named_buffers())
        copied: Any = fakes.module.pipeflow_criterion
        before = [(owner, name, each, tape.of(each)) for owner, name, each in _held(copied)]
        of_output = 2 << len(fakes.bits)
        given, spec = tree_flatten(output)
        numbers = set[object]()
        for index, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                given[index] = fake = fakes.fake(leaf).requires_grad_(leaf.requires_grad or leaf.is_floating_point())
                flow.give(fake, of_output)
                tape.put(fake, scalars[index].node if index in scalars else None)
                if not leaf.dim() and index not in scalars:
                    numbers.add(tape.of(fake))
        copies = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, labels)
        tape.give([None] * leaves + tree_leaves(copies))
        alone: Any = _Alone()  # type: ignore[no-untyped-call]  # torch's
        with torch.enable_grad(), flow, alone, nullcontext() if functions is None else functions.on(tape):
            loss = explained(copied)(tree_unflatten(given, spec), copies)
        nodes = set(upstream(tape.of(loss)))
        if numbers & nodes:
            raise UnprovedError("the last stage returns a number for each microbatch")
        if nodes.intersection(
            node
            for owner, name, each, node in before
            if getattr(owner, name, None) is not each or flow.written[flow.key(each)]
        ):
            raise UnprovedError("it depends on what the criterion keeps of earlier microbatches")
        nodes.difference_update(*(upstream(known.node) for known in scalars.values()))
        if any(node.name in BATCH_NORMS and node.argument("training") for node in nodes):
            raise UnprovedError("the criterion normalizes over the batch")
        read = [each for known in scalars.values() for each in known.read]
        return Recorded(tape.of(loss), [*tape.read, *read], tape.seen)


def _held(criterion: object) -> list[tuple[object, str, Tensor]]:
    """The buffers and other tensors, but for parameters, that a criterion has as attributes, with their owners."""
    parts = criterion.modules() if isinstance(criterion, nn.Module) else [criterion]
    return [
        (part, name, each)
        for part in parts
        for name, each in {**getattr(part, "__dict__", {}), **getattr(part, "_buffers", {})}.items()
        if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)
    ]


@contextmanager
def _tracing(criterion: object) -> Iterator[None]:
    """Raises UnprovedError for any error of a criterion that is traced, and leaves no trace of its calls."""
    try:
        with isolated(), _functions_unchanged(criterion):
            yield
    except UnprovedError:
        raise
    except Exception as error:  # whatever the criterion raises
        raise UnprovedError(
            f"it cannot be traced ({str(error).partition(chr(10))[0] or type(error).__name__})"
        ) from error


@contextmanager
def _functions_unchanged(criterion: object) -> Iterator[None]:
    """Gives plain functions of a criterion, which are not copied, what their variables and the lists, dicts and sets in
    them had before.
    """
    cells, names, held = [], [], []
    for function in functions_of(criterion):
        found = {name: each for name, each in function.__globals__.items() if name in function.__code__.co_names}
        names.append((function.__globals__, found))
        own = cells_of(function)
        cells += own
        held += [each for each in (*found.values(), *(each for _, each in own)) if type(each) in (list, dict, set)]
    before = [each.copy() for each in held]
    try:
        yield
    finally:
        for variables, found in names:
            variables.update({name: each for name, each in found.items() if variables.get(name) is not each})
        for cell, content in cells:
            cell.cell_contents = content
        for each, content in zip(held, before, strict=True):
            if len(each) != len(content) or not all(map(is_, each, content)):
                each.clear()
                (each.extend if isinstance(each, list) else each.update)(content)


def functions_of(criterion: object) -> list[FunctionType]:
    """The plain functions that a criterion is, wraps, or has as attributes."""
    found, pending, seen = [], [criterion], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            found.append(each)
            pending += [content for _, content in cells_of(each) if callable(content)]
        elif isinstance(each, partial):
            pending.append(each.func)
        elif callable(each) and not isinstance(each, type) and hasattr(each, "__dict__"):
            parts = each.modules() if isinstance(each, nn.Module) else [each]
            pending += [value for part in parts for value in vars(part).values() if callable(value)]
    return found
