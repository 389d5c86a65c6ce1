"""Stage: one piece of the model, the entries of a batch that it takes, and its deferred weight gradients. Must not
contain: when a stage runs, and where its input comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from pipeflow.core.route import Routes, sources_of
from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.deferral.past import Slices
from pipeflow.engine.runtime.head import SlicedHead
from pipeflow.engine.runtime.microbatch import Batch
from pipeflow.engine.runtime.original import uncompiled
from pipeflow.engine.stages.module_state import ModuleState
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.tensors import state_of


class Stage:
    """A module that is prepared for split backwards, with its keywords for each microbatch of the current step; if
    microbatches are cut into slices, also with what the slices of each leave for later ones.

    Args:
        index: index of the stage.
        module: the stage's module.
        watched: a device whose random generator is watched during calls; None to watch none.
        routes: routes of the pipeline, which determine the number of positional arguments.
        fuses: whether linear layers add the products of their weights to the gradients while these are computed.
        head: the head of the module, if it is computed by slices.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        watched: torch.device | None = None,
        routes: Routes = (),
        fuses: bool = False,
        head: SlicedHead | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self._watched: WatchedCall | None = None
        self._call: Callable[..., Any] = module if head is None else head.watched(module)
        if watched is not None:
            self._call = self._watched = WatchedCall(self._call, watched)
        self.call: Callable[..., Any] = self._call
        self.deferral = defer_weight_gradients(module)
        self.deferral.fuses = fuses
        if head is not None:
            head.deferral = self.deferral
        self.state = ModuleState(f"stage {index}", module.root if isinstance(module, ModuleStage) else module)
        self.keywords: list[dict[str, object]] = []
        self.slices = Slices()
        self.takes = Keywords.of(module, inputs=len(sources_of(index, routes)))

    @property
    def draws(self) -> bool:
        """True if a watched forward has ever drawn from torch's own generator."""
        return self._watched is not None and self._watched.draws

    def defer(self) -> None:
        """Makes layers that were added to the module later defer their weight gradients, too."""
        defer_weight_gradients(self.module, self.deferral)

    def load(self, batch: Batch, region: torch.autocast | None) -> None:
        """Stores, per microbatch, the entries that the module takes, and in which region of autocast it runs."""
        self.call = self._call if region is None else region(self._call)
        self.state.renew()
        self.slices.load(self.module, batch.cuts)
        self.deferral.copies = None if region is None else {}
        parts = {name: batch.split(entry) for name, entry in batch.named.items() if name in self.takes}
        self.keywords = [{name: part[index] for name, part in parts.items()} for index in range(len(batch.sizes))]

    def unload(self) -> None:
        """Releases the references that only a running step needs."""
        self.deferral.copies = None
        self.keywords = []
        self.slices.pasts = []


class WatchedCall:
    """A function that records whether it ever draws from the generator of `device`. Draws of other threads in the
    meantime count, too.
    """

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self.draws = False
        self._call = call
        self._generator = generator_of(device)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.draws:
            return self._call(*arguments, **keywords)
        before = state_of(self._generator)
        output = self._call(*arguments, **keywords)
        self.draws = not torch.equal(before, state_of(self._generator))
        return output


def generator_of(device: torch.device) -> torch.Generator:
    """The generator from which computations on a device draw by default."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


Names = frozenset[str] | None
"""Names of entries; None stands for all names."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The entries of a batch that a module takes by name.

    Attributes:
        names: names of the entries; None if it takes any except `positional`.
        positional: names of parameters that are filled by position.
    """

    names: Names
    positional: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, *, inputs: int) -> Keywords:
        """The keywords of `module.forward` (of the original module if it is compiled), without the first `inputs`
        parameters, which receive outputs of earlier stages.
        """
        parameters = list(signature(uncompiled(module).forward).parameters.values())
        first = [parameter for parameter in parameters[:inputs] if parameter.kind in _BY_POSITION]
        positional, rest = frozenset(parameter.name for parameter in first), parameters[len(first) :]
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in rest):
            return cls(None, positional)
        return cls(frozenset(parameter.name for parameter in rest if parameter.kind in _BY_NAME), positional)

    def __contains__(self, name: object) -> bool:
        return name not in self.positional if self.names is None else name in self.names


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def names_taken(stages: Mapping[int, nn.Module], routes: Routes) -> Names:
    """The names of the entries that any of `stages` takes; `stages` are modules by stage index."""
    return union(Keywords.of(module, inputs=len(sources_of(stage, routes))).names for stage, module in stages.items())


def union(names: Iterable[Names]) -> Names:
    """The union of several sets of names; None if one of them is None."""
    known = list(names)
    return None if None in known else frozenset().union(*(each for each in known if each is not None))
