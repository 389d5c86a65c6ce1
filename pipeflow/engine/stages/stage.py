"""Stage: one stage of a module as a module of its own, which runs the whole module's forward as its plan says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.absent import AbsentTensor, Reads
from pipeflow.engine.stages.copies import apply_to, stage_copy
from pipeflow.engine.stages.entries import Stateful
from pipeflow.engine.stages.plan import CutPlan
from pipeflow.engine.stages.planner import Planner
from pipeflow.engine.stages.script import Run, TensorRef
from pipeflow.engine.stages.trace import Look
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModuleStage(nn.Module):
    """Stage `index` of a module. Its parameters, buffers and children are those of the whole module that it owns, under
    the same names.

    Args:
        module: the whole module; the stage shares its buffers and the parameters that it owns.
        index: index of the stage.
        planner: planner of the module, which has planned a first batch.
        plan: plan of the first batch.
        device: device on which the stage runs.
    """

    def __init__(self, module: nn.Module, index: int, planner: Planner, plan: CutPlan, device: torch.device) -> None:
        super().__init__()
        self._reads = Reads()
        root, self._ghosts = stage_copy(module, set(plan.stages[index].owned), device, self._reads)
        _without_nested(root, plan)
        vars(self)["_root"] = root  # not a child: its children are this module's children
        vars(self).update({name: vars(root)[name] for name in _SHARED})
        self.index = index
        self.routes = plan.routes
        self.is_last = index == len(plan.stages) - 1
        self.training = root.training
        self._planner = planner
        self._places: dict[frozenset[str], list[tuple[str, dict[str, Any], str]]] = {}
        self._absent: dict[tuple[Any, ...], AbsentTensor] = {}
        self.shared_buffers = _store_used(root, index, plan)

    @property
    def root(self) -> nn.Module:
        """The copy of the whole module whose forward runs."""
        root: nn.Module = vars(self)["_root"]
        return root

    @property
    def whole(self) -> nn.Module:
        """A copy of the whole module whose parameters have shapes, but no memory."""
        return self._planner.module

    @property
    def planner(self) -> Planner:
        """The planner of the module, which all stages of a rank share."""
        return self._planner

    def blocks(self, plan: CutPlan) -> dict[str, nn.Module]:
        """The module's blocks, by name.

        Raises UsageError if the stage runs only a part of one of them.
        """
        names = self._planner.blocks()
        for watched in sorted(plan.stages[self.index].script.names):
            if within := next((name for name in names if watched.startswith(f"{name}.")), None):
                raise UsageError(
                    f"{within} cannot be compiled, since stage {self.index} replaces or sends the output of {watched} "
                    "within it: cut after whole blocks, or choose smaller blocks with blocks="
                )
        return {name: self.root.get_submodule(name) for name in names}

    def forward(self, *received: Any, **entries: Any) -> Any:
        """Takes what earlier stages sent, one argument each, and the entries of a microbatch. Returns what is sent to
        later stages: a tensor or a tuple of tensors, or a tuple of these for several stages. The last stage returns the
        module's output.
        """
        plan = self._planner.plan(entries, self.root)
        stage = plan.stages[self.index]
        ways = plan.ways[self.index]
        taken = [value for values in ways.takes.values() for value in values]
        tensors = tree_leaves(received)
        if len(tensors) != len(taken):
            raise UsageError(
                f"stage {self.index} received {len(tensors)} tensors, not {len(taken)}: it takes them from stages "
                f"{', '.join(map(str, ways.takes))}; a Pipeline of copies of its chunks needs the same placement"
            )
        if stage.is_empty:
            return _bare([() for _ in ways.gives])
        device = next(leaf.device for leaf in [*tensors, *tree_leaves(entries)] if isinstance(leaf, Tensor))
        written = stage.script.written
        values = dict(zip(taken, tensors, strict=True))
        own = {value: tensor.clone() if value in written else tensor for value, tensor in values.items()}

        def make(value: TensorRef, look: Look) -> Tensor:
            name = plan.trace.calls[value.call].name
            key = name, value.leaf < 0, look[:3], device
            found = None if value in written else self._absent.get(key)
            if found is None or type(found) is not AbsentTensor or found.shape != look.shape:
                found = self._absent_of(name, value, look, device)
                if value not in written:  # to which values may be written
                    self._absent[key] = found
            return found

        if stage.script.writes_batch:
            entries = {
                name: each if isinstance(each, Stateful) else tree_map(_cloned, each) for name, each in entries.items()
            }
        run = Run(stage.script, own, make)
        kept = {name: each.own(self.index) for name, each in entries.items() if isinstance(each, Stateful)}
        arguments = self._planner.entries.arguments({**entries, **kept})
        with self._reads.during(mixes=stage.script.mixes):
            output = run.forward(self.root, self._watched(stage.script.names), arguments)
            self._reads.require_present((output, *run.kept.values()))
        if self.is_last:
            return _without(list(kept.values()), output) if kept else output
        sent = {value: self._sent(run, values, value, plan) for value in {*chain(*ways.gives.values())}}
        parts = [_bare([sent[value] for value in given]) for given in ways.gives.values()]
        return _bare(parts)

    def _absent_of(self, name: str, value: TensorRef, look: Look, device: torch.device) -> AbsentTensor:
        what = f"the output of {name}" if value.leaf >= 0 else f"what {name} writes to its input"
        if len(look.stride) < len(look.shape):  # it is sparse
            like = torch.empty(look.shape, dtype=look.dtype, device="meta")
        else:
            like = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
        return AbsentTensor(what, self._reads, like, device)

    def _sent(self, run: Run, received: dict[TensorRef, Tensor], value: TensorRef, plan: CutPlan) -> Tensor:
        if value in received:
            return received[value]
        call = plan.trace.calls[value.call]
        if value not in run.kept:
            raise UsageError(
                f"stage {self.index} did not call {call.name}, unlike when the forward was traced: the forward "
                "branches on values, so it cannot be cut there"
            )
        tensor = run.kept[value]
        is_lost = torch.is_grad_enabled() and plan.look(value).requires_grad and not tensor.requires_grad
        if call.checkpoint == "reentrant" and is_lost and any(each.requires_grad for each in self.parameters()):
            raise UsageError(
                f"{call.name} lies within a reentrant checkpoint, and no gradient flows into one: cut "
                "elsewhere, or checkpoint with use_reentrant=False"
            )
        return tensor

    def _watched(self, names: frozenset[str]) -> dict[str, nn.Module]:
        if names not in self._places:
            self._places[names] = [(name, *_place(self.root, name)) for name in sorted(names)]
        return {name: modules[key] for name, modules, key in self._places[names]}

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the whole module, which its forward reads."""
        super().train(mode)
        self.root.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        apply_to(self._ghosts, fn)
        return self


def _without_nested(root: nn.Module, plan: CutPlan) -> None:
    """Makes each nn.TransformerEncoder that is cut pass padded tensors between its layers. In evaluation with a padding
    mask, it would pass nested ones, which cannot be sent.
    """
    watched = [name for stage in plan.stages for name in stage.script.names]
    for name, module in root.named_modules():
        if isinstance(module, nn.TransformerEncoder) and any(each.startswith(f"{name}.") for each in watched):
            module.use_nested_tensor = False


def _without(kept: list[object], output: object) -> object:
    """An output without the objects that the stage keeps."""
    return tree_map(lambda leaf: None if any(leaf is each for each in kept) else leaf, output)


def _bare(entries: list[Any]) -> Any:
    return entries[0] if len(entries) == 1 else tuple(entries)


def _cloned(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _place(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    parent, _, key = name.rpartition(".")
    return root.get_submodule(parent)._modules, key


def _store_used(root: nn.Module, index: int, plan: CutPlan) -> dict[str, tuple[int, ...]]:
    """Removes buffers that the stage does not use from the state_dict. Returns the buffers that other stages use, too,
    with the stages.
    """
    shared = {}
    for name, _ in root.named_buffers():
        stages = tuple(stage for stage, each in enumerate(plan.stages) if name in each.buffers)
        if index not in stages:
            owner, _, key = name.rpartition(".")
            root.get_submodule(owner)._non_persistent_buffers_set.add(key)
        elif len(stages) > 1:
            shared[name] = stages
    return shared
