"""Ties: weights of which several ranks of the pipeline, or several modules of one rank, hold a copy, such as a word
embedding that is also the output head. Must not contain: operations on their values and gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import nn

from pipeflow.core.errors import UsageError, numbers_of
from pipeflow.engine.parallel.context import current_context

LOG = logging.getLogger("pipeflow")
_MARK = "_pipeflow_copies"  # attribute of registered modules and parameters: the ties of which they are copies
_NUMBERS = count()


class PipelineSharedModuleWrapper:
    """Ties weights across ranks of the pipeline. Make one wrapper per tied module or parameter.

    Each of `ranks` registers its copy before the `Pipeline` is made. All copies then get the values of the lowest rank,
    and after every step the gradient of each copy is the sum over all copies. If one rank registers several copies
    (with `ranks` `[0, 0]`, or in a bidirectional schedule), they become one object, the first one. Make the optimizer
    from the Pipeline's parameters.

    Args:
        ranks: the pipeline ranks that hold a copy.

    Raises UsageError for ranks that the pipeline does not have.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        context = current_context()
        ranks = numbers_of("ranks", ranks)
        if not ranks or not set(ranks) <= set(range(context.pipeline_size)):
            raise UsageError(f"ranks {list(ranks)} must be among those of the pipeline, 0..{context.pipeline_size - 1}")
        self._shared = _Shared(tuple(ranks))
        self._rank = context.pipeline_rank
        self._first: nn.Module | None = None  # the first that was registered

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a copy, ascending."""
        return self._shared.ranks

    def register_module(self, module: nn.Module) -> None:
        """Ties the parameters of `module`, including those that replace them later.

        Raises UsageError on a rank that is not in `ranks`, and for a copy whose shapes or dtypes differ from the first.
        """
        vars(module).setdefault(_MARK, []).append(self._copy(list(module.parameters())))
        self._first = self._first or module
        replace_in(module, dict(zip(map(id, module.parameters()), self._first.parameters(), strict=True)))

    def register_parameter(self, parameter: nn.Parameter) -> None:
        """Ties `parameter`, which must still be in the model when the Pipeline is made; a warning is logged if it was
        replaced before. If it may be replaced, register its module instead. Raises UsageError like `register_module`.
        """
        copy = self._copy([parameter])
        vars(parameter).setdefault(_MARK, []).append(copy)
        weakref.finalize(parameter, copy.warn_unless_adopted).atexit = False

    def _copy(self, parameters: list[nn.Parameter]) -> _Copy:
        shared = self._shared
        properties: dict[str, list[Any]] = {
            "shapes": [tuple(parameter.shape) for parameter in parameters],
            "dtypes": [parameter.dtype for parameter in parameters],
        }
        if self._rank not in self.ranks:
            raise UsageError(f"rank {self._rank} is not among the ranks {list(self.ranks)} that share this weight")
        for what, of_first in shared.properties.items():
            if properties[what] != of_first:
                raise UsageError(f"a copy of {what} {properties[what]} cannot be tied to one of {what} {of_first}")
        shared.properties = properties
        shared.copies += 1
        return _Copy(shared, shared.copies)


@dataclass(eq=False)
class _Shared:
    """The tie that one wrapper makes on this rank; all of its copies, and deep copies of these, refer to it."""

    named: tuple[int, ...]
    number: int = field(default_factory=lambda: next(_NUMBERS))
    properties: Mapping[str, list[Any]] = field(default_factory=dict)  # of the first copy
    copies: int = 0
    adopted: set[int] = field(default_factory=set)  # indices of registered parameters whose marks were moved to modules

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.named)))

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


@dataclass(frozen=True)
class _Copy:
    """The mark of a copy. `index` counts registrations on this rank. `name` is that of its parameter, or None if the
    copy is all parameters of a module.
    """

    shared: _Shared
    index: int
    name: str | None = None

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters()) if self.name is None else [module.get_parameter(self.name)]

    def warn_unless_adopted(self) -> None:
        """Called when the parameter is deleted."""
        if self.index not in self.shared.adopted:
            LOG.warning(
                "a parameter that PipelineSharedModuleWrapper(%s) registered was replaced before a Pipeline was made, "
                "so it is not tied: register its module instead",
                list(self.shared.named),
            )


@dataclass(frozen=True, slots=True)
class Tie:
    """A tied weight, or the weights of a tied module, on this rank."""

    ranks: tuple[int, ...]
    parameters: list[nn.Parameter]


def tie(model: nn.Module) -> list[Tie]:
    """The ties of `model`, in the order in which they were made. On this rank, further copies of a weight are replaced
    by the first.

    Raises UsageError for a tie on a single rank with only one copy, and for copies that no longer match.
    """
    _move_marks_to_modules(model)
    found = _copies_in(model)
    first: dict[int, nn.Parameter] = {}
    for shared, copies in found.items():
        if len(shared.ranks) == 1 and len({index for index, _ in copies}) == 1:
            raise UsageError(
                f"PipelineSharedModuleWrapper({list(shared.named)}) ties nothing, since one copy was registered: on a "
                "single rank, register all copies"
            )
        for _, copy in copies[1:]:
            _require_alike(shared, copies[0][1], copy)
            first |= {id(old): new for old, new in zip(copy, copies[0][1], strict=True)}
    replace_in(model, first)
    return [Tie(shared.ranks, copies[0][1]) for shared, copies in found.items()]


def ranks_of_tied(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Maps the id of each parameter of `model` that users tied to the pipeline ranks that hold it."""
    return {
        id(parameter): shared.ranks
        for shared, copies in _copies_in(model).items()
        for _, copy in copies
        for parameter in copy
    }


def replace_in(module: nn.Module, by: Mapping[int, nn.Parameter]) -> None:
    """Replaces the parameters with these ids in `module`."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if id(parameter) in by:
                owner._parameters[name] = by[id(parameter)]


def _require_alike(shared: _Shared, first: Sequence[nn.Parameter], other: Sequence[nn.Parameter]) -> None:
    mine, its = (
        [(tuple(parameter.shape), parameter.dtype, parameter.requires_grad) for parameter in copy]
        for copy in (first, other)
    )
    if mine != its:
        raise UsageError(
            f"PipelineSharedModuleWrapper({list(shared.named)}): copies on one rank become one, but the first has "
            f"(shape, dtype, requires_grad) {mine}, and another {its}: make them the same"
        )


def _copies_in(model: nn.Module) -> dict[_Shared, list[tuple[int, list[nn.Parameter]]]]:
    """Every copy with its index, by tie, in the order in which the ties were made and the copies registered."""
    found: dict[_Shared, list[tuple[int, list[nn.Parameter]]]] = defaultdict(list)
    for owner in model.modules():
        for mark in _marks_of(owner):
            found[mark.shared].append((mark.index, mark.parameters(owner)))
    return {
        shared: sorted(found[shared], key=lambda copy: copy[0])
        for shared in sorted(found, key=lambda shared: shared.number)
    }


def _marks_of(owner: nn.Module) -> list[_Copy]:
    """The marks of a module and of its own parameters, each once."""
    of_parameters = [
        _Copy(mark.shared, mark.index, name)
        for name, parameter in owner._parameters.items()
        if parameter is not None
        for mark in vars(parameter).get(_MARK, ())
    ]
    return list(dict.fromkeys([*vars(owner).get(_MARK, ()), *of_parameters]))


def _move_marks_to_modules(model: nn.Module) -> None:
    """Moves marks from parameters to the modules that hold them, because parameters may be replaced."""
    for owner in model.modules():
        if marks := _marks_of(owner):
            vars(owner)[_MARK] = marks
    for parameter in model.parameters():
        for mark in vars(parameter).pop(_MARK, ()):
            mark.shared.adopted.add(mark.index)
