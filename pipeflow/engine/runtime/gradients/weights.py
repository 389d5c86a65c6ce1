"""The parameters of this rank, with the other ranks that hold each: replicas of a stage, ranks that hold a tied weight,
such as a word embedding that is also the output head, and with ZeRO the replica that owns it. All sums of gradients,
norms and steps follow from this. A watch notices when parameters were frozen, converted or replaced; it is asked before
every step, so it avoids Python code per parameter. Must not contain: operations on values and gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby, zip_longest
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError, numbers_of
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import expert_splits_of, partial_in, splits_of
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.runtime.gradients.fully_sharded import fully_sharded_parameters, others_in
from pipeflow.engine.stages.stage import ModuleStage

_is_trained = attrgetter("requires_grad")
_form = attrgetter("dtype", "shape", "device")


class Watch:
    """Remembers the current parameters and children of `module` and its children, and the forms of `formed`: parameters
    whose dtype, shape and device matter. Reading these takes three times as long as the rest.
    """

    def __init__(self, module: nn.Module, formed: Iterable[nn.Parameter]) -> None:
        modules = list(dict.fromkeys(others_in(module)))
        self._registries = [
            *(child._parameters for child in modules if child._parameters),
            *(child._modules for child in modules if child._modules),
        ]
        self._seen = self._now()  # kept alive, so that no new object can have the same id
        self._parameters = [each for each in self._seen if isinstance(each, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))
        self._formed = list(formed)
        self._forms = list(map(_form, self._formed))

    def notices(self) -> bool:
        """Returns True if anything has changed since the Watch was made."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        if list(map(_is_trained, self._parameters)) != self._trained:
            return True
        return list(map(_form, self._formed)) != self._forms

    def reformed(self) -> set[nn.Parameter]:
        """The parameters that have another dtype, shape or device than before."""
        return {each for each, form in zip(self._formed, self._forms, strict=True) if _form(each) != form}

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(map(methodcaller("values"), self._registries)))


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter of this rank.

    Attributes:
        name: name in the Pipeline.
        parameter: the parameter.
        stages: stages of this rank that hold it.
        ranks: pipeline ranks that hold it, including this one.
        order: sort key, the same on all of `ranks` and different for every weight that they hold.
        is_tied: True if users tied it.
        is_split: True if each tensor rank has a part of it.
        is_part: True if its gradient on a tensor rank is a part of a sum.
        is_sharded: True if fully_shard splits it and averages its gradient.
        is_expert: True if each expert rank has some of its experts.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    is_tied: bool
    is_split: bool
    is_part: bool
    is_sharded: bool
    is_expert: bool

    @property
    def after(self) -> int | None:
        """The stage after whose last backward this rank's gradient is complete; None if that is only known at the end
        of the step.
        """
        return self.stages[0] if len(self.stages) == 1 and not self.is_tied else None

    @property
    def averaged_after(self) -> int | None:
        """Like `after`, for the gradient summed over all ranks."""
        return self.after if len(self.ranks) == 1 and not self.is_part else None


def weights_of(
    model: nn.Module, stages: Mapping[int, nn.Module], ties: Sequence[Tie], placement: Placement
) -> list[Weight]:
    """Every parameter of `stages` once, in order, with its name in `model`; `ties` are those of `model`.

    Raises UsageError for a weight that is tied to one set of ranks and copied on another, unless one of the sets
    contains the other. Also raises it for a weight under fully_shard that other ranks hold, too.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    splits, parts, sharded = splits_of(model), set(partial_in(model)), fully_sharded_parameters(model)
    experts = expert_splits_of(model)
    claims: dict[nn.Parameter, list[_Claim]] = defaultdict(list)
    for number, (ranks, copies) in enumerate(ties):
        for index, parameter in enumerate(copies):
            claims[parameter].append((ranks, (0, number, index)))
    tied = set(claims)
    stages_with: dict[nn.Parameter, list[int]] = defaultdict(list)
    for stage, module in stages.items():
        for index, parameter in enumerate(module.parameters()):
            stages_with[parameter].append(stage)
            claims[parameter].append((placement.ranks_of(stage), (1, stage, index)))
    return [
        Weight(
            names[parameter],
            parameter,
            tuple(its_stages),
            *_widest(names[parameter], claims[parameter], is_sharded=parameter in sharded),
            is_tied=parameter in tied,
            is_split=id(parameter) in splits,
            is_part=parameter in parts,
            is_sharded=parameter in sharded,
            is_expert=id(parameter) in experts,
        )
        for parameter, its_stages in stages_with.items()
    ]


_Claim = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that hold a weight for one reason, and its order among those."""


def _widest(name: str, claims: Sequence[_Claim], *, is_sharded: bool) -> _Claim:
    """The claim whose ranks include those of all others."""
    widest = max(claims, key=lambda claim: len(claim[0]))
    most, _ = widest
    for ranks, _ in claims:
        if not set(ranks) <= set(most):
            raise UsageError(
                f"{name!r} is shared by ranks {list(most)} and has copies on ranks {list(ranks)}: share it "
                "among all of them"
            )
    if is_sharded and (len(claims) > 1 or len(most) > 1):
        raise UsageError(
            f"{name!r}, which other ranks or stages hold too (tied, or of a bidirectional schedule), cannot be under "
            "fully_shard: leave its module out, for example by fully_shard on each block and not on the stage"
        )
    return widest


Bucket = list[nn.Parameter]
BUCKET = 25 * 2**20  # bytes that are exchanged at once: enough for the bandwidth of any link


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def in_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[Bucket]:
    """Groups neighbouring parameters, of one dtype and device, as their gradients, up to BUCKET bytes per group."""
    for _, alike in groupby(parameters, key=lambda parameter: (gradient_dtype(parameter), *_form(parameter)[::2])):
        bucket, filled = Bucket(), 0
        for parameter in alike:
            if bucket and filled + parameter.nbytes > BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += parameter.nbytes
        yield bucket


@dataclass(slots=True, eq=False)
class Owners:
    """The weights of a rank that single replicas own.

    Attributes:
        group: the replicas.
        expert_group: those that hold the same experts.
        of: the place in its group of the replica that owns each of these weights.
        experts: those of the weights that are experts'.
        are_averaged: whether the last step averaged gradients, which only owners have then.
    """

    group: Group
    expert_group: Group
    of: dict[nn.Parameter, int] = field(default_factory=dict)
    experts: set[nn.Parameter] = field(default_factory=set)
    are_averaged: bool = False

    def group_of(self, parameter: nn.Parameter) -> Group:
        """The replicas that hold the parameter."""
        return self.expert_group if parameter in self.experts else self.group

    def divide(self, parameters: Sequence[nn.Parameter], experts: set[nn.Parameter]) -> dict[nn.Parameter, int]:
        """The place of the replica that owns each of these weights from now on: from the largest on, each goes to the
        one that owns least of its kind so far, which is `experts` or not.
        """
        self.experts |= experts
        loads = {kind: [0] * group.size for kind, group in ((False, self.group), (True, self.expert_group))}
        owners = dict[nn.Parameter, int]()
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            load = loads[parameter in experts]
            owners[parameter] = owner = load.index(min(load))
            load[owner] += parameter.numel()
        if self.group.size > 1:
            self.of |= owners
        return owners

    def buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[Bucket]:
        """Parameters in buckets of one owner, or of none. Owners take turns, so that they send at the same time."""
        each: dict[tuple[int, bool], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            each[self.of.get(parameter, -1), parameter in self.experts].append(parameter)
        common = each.pop((-1, False), [])
        turns = [in_buckets(sorted(own, key=lambda each: str(each.dtype))) for _, own in sorted(each.items())]
        yield from in_buckets(common)
        yield from filter(None, chain.from_iterable(zip_longest(*turns)))

    def averages(self, parameters: Container[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The averages of an earlier step that these parameters still have. Raises UsageError for other gradients."""
        left = {p: p.grad for p in self.of if self.are_averaged and p.grad is not None and p in parameters}
        if any(self.of[parameter] != self.group_of(parameter).rank for parameter in left):
            raise UsageError(
                "a parameter of which another data rank has the averaged gradient, as with Zero, was given one here: "
                "clear gradients before the next batch (zero_grad)"
            )
        return left


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


Tie = tuple[tuple[int, ...], list[nn.Parameter]]
"""The ranks that hold a tied weight, or the weights of a tied module, and its parameters on this rank."""


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
    return [(shared.ranks, copies[0][1]) for shared, copies in found.items()]


def ranks_of_buffers(chunks: Iterable[nn.Module], placement: Placement) -> dict[int, tuple[int, ...]]:
    """Maps the id of each buffer in `chunks` that several stages of a cut module use to the pipeline ranks that have
    it.
    """
    return {
        id(chunk.get_buffer(name)): tuple(sorted({rank for stage in stages for rank in placement.ranks_of(stage)}))
        for chunk in chunks
        if isinstance(chunk, ModuleStage)
        for name, stages in chunk.shared_buffers.items()
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
