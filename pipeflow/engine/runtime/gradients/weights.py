"""The parameters of this rank, with the other ranks that hold each, and a watch that notices when they were frozen,
converted or replaced. All sums of gradients follow from this. The watch is asked before every step, so it avoids Python
code per parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import NamedTuple

from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.sharding import partial_in, splits_of
from pipeflow.engine.runtime.gradients.fully_sharded import fully_sharded_parameters, others_in
from pipeflow.engine.runtime.gradients.ties import Tie

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
    """Every parameter of `stages` once, in order, with its name in `model`.

    Raises UsageError for a weight that is tied to one set of ranks and copied on another, unless one of the sets
    contains the other. Also raises it for a weight under fully_shard that other ranks hold, too.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    splits, parts, sharded = splits_of(model), set(map(id, partial_in(model))), fully_sharded_parameters(model)
    claims: dict[int, list[_Claim]] = defaultdict(list)
    for number, tie in enumerate(ties):
        for index, parameter in enumerate(tie.parameters):
            claims[id(parameter)].append(_Claim(tie.ranks, (0, number, index)))
    tied = set(claims)
    parameters: dict[int, nn.Parameter] = {}
    stages_with: dict[int, list[int]] = defaultdict(list)
    for stage, module in stages.items():
        for index, parameter in enumerate(module.parameters()):
            parameters[id(parameter)] = parameter
            stages_with[id(parameter)].append(stage)
            claims[id(parameter)].append(_Claim(placement.ranks_of(stage), (1, stage, index)))
    return [
        Weight(
            names[key],
            parameter,
            tuple(stages_with[key]),
            *_widest(names[key], claims[key], is_sharded=key in sharded),
            is_tied=key in tied,
            is_split=key in splits,
            is_part=key in parts,
            is_sharded=key in sharded,
        )
        for key, parameter in parameters.items()
    ]


class _Claim(NamedTuple):
    """The ranks that hold a weight for one reason, and its order among those."""

    ranks: tuple[int, ...]
    order: tuple[int, ...]


def _widest(name: str, claims: Sequence[_Claim], *, is_sharded: bool) -> _Claim:
    """The claim whose ranks include those of all others."""
    widest = max(claims, key=lambda claim: len(claim.ranks))
    for ranks, _ in claims:
        if not set(ranks) <= set(widest.ranks):
            raise UsageError(
                f"{name!r} is shared by ranks {list(widest.ranks)} and has copies on ranks {list(ranks)}: share it "
                "among all of them"
            )
    if is_sharded and (len(claims) > 1 or len(widest.ranks) > 1):
        raise UsageError(
            f"{name!r}, which other ranks or stages hold too (tied, or of a bidirectional schedule), cannot be under "
            "fully_shard: leave its module out, for example by fully_shard on each block and not on the stage"
        )
    return widest
