"""Recording: what a training job computes, as sketches, one file a rank. Works with any engine: hooks of modules see
the outputs, those of optimizers the gradients and the weights.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.checking.calls import Calls, named_modules
from pipeflow.checking.files import FORMAT, file_of, files_of, is_recording, line_of
from pipeflow.checking.parts import Part, Parts, find_masters, parts_of
from pipeflow.checking.sketches import PROBES, norm_squared, sketch
from pipeflow.checking.watching import (
    backwards_seen,
    clipping_seen,
    engine_losses_seen,
    labels_seen,
    scaling_seen,
    steps_seen,
    trials_seen,
)
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import own_values
from pipeflow.engine.torch_private.distributed import group_names
from pipeflow.engine.torch_private.tensors import default_states


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if (context := context_if_launched()) is not None:
        return context.rank, context.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def groups(models: Sequence[nn.Module]) -> dict[str, int]:
    """The sizes of this process's groups, by their names."""
    is_ours = any(hasattr(model, "chunks") and hasattr(model, "schedule") for model in models)
    if is_ours and (context := context_if_launched()) is not None:
        layout = context.layout
        if layout.context > 1:
            raise UsageError(
                "a recording cannot put together the tokens of context ranks: record a run with context=1, whose "
                "results are the same"
            )
        return {"data": layout.data, "pipeline": layout.pipeline, "tensor": layout.tensor}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    return {names: group.size() for group, names in group_names().items()}


def random_state() -> str:
    """A digest of the random states of this process."""
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = default_states([torch.device("cuda")] if has_gpu else [])
    return sha256(b"".join(bytes(state.numpy().data) for state in states)).hexdigest()[:16]


RULES = {  # an optimizer's numbers that its steps follow
    "lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho", "amsgrad", "maximize",
    "decoupled_weight_decay",
}  # fmt: skip


def rules_of(optimizer: Any) -> dict[int, dict[str, float]]:
    """The numbers of each parameter's steps by its id, for optimizers with the groups and states of torch's."""
    found = {}
    states = getattr(optimizer, "state", {})
    for group in getattr(optimizer, "param_groups", ()):
        rule: dict[str, float] = {}
        for name in RULES & group.keys():
            numbers = group[name] if isinstance(group[name], list | tuple) else [group[name]]
            labels = [name] if len(numbers) == 1 else [f"{name}[{index}]" for index in range(len(numbers))]
            rule |= {label: float(each) for label, each in zip(labels, numbers, strict=True) if each is not None}
        for parameter in group["params"]:
            state = states.get(parameter, {}) if isinstance(states, Mapping) else {}
            steps = {"step": float(state["step"])} if "step" in state else {}
            found[id(parameter)] = rule | steps
    return found


def moments_of(optimizer: Any, part: Part) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps of a parameter, in its shape and placement, by name."""
    states, own = getattr(optimizer, "state", None), part.stepped
    state = states.get(own, {}) if isinstance(states, Mapping) else {}
    for key, value in state.items():
        is_like = isinstance(value, Tensor) and value.is_floating_point() and value.shape == own.shape
        if is_like and own.dim() and getattr(value, "placements", None) == getattr(own, "placements", None):
            yield str(key), value


Models = nn.Module | Sequence[nn.Module]


def record(
    folder: str | os.PathLike[str] | None,
    model: Models,
    optimizer: object = None,
    *,
    parts: Parts | None = None,
    names: Callable[[str], str] | None = None,
    samples: bool | None = None,
    whole: str = "",
) -> Recording:
    """Records the steps of a training job that run in its `with` block, for `pipeflow check`. Every rank calls it.

        with pipeflow.checking.record("plain", model, optimizer=optimizer):
            train(steps=1)

    Each rank writes one file in `folder`. It has digests, not values: linear sketches of the outputs of all modules, of
    the batches, of the gradients when an optimizer steps, and of weights and buffers before and after. Files of an
    earlier recording in the folder are replaced.

    Args:
        folder: where the files go; None records nothing, at no cost.
        model: this rank's module, or its modules: a Pipeline, the stage of any pipeline, a model under fully_shard.
        optimizer: the optimizer or optimizers, torch's or any object with a method `step`. By default all of torch's
            are watched that step weights of the model.
        parts: `parts(name, tensor)` says which part of the whole model's tensor a rank holds: (dim, index, count) for
            an even part along a dimension, (shape, [(slices, offset), ...]) for others, None if pipeflow knows it.
            It knows DTensors, FullyShardedDataParallel, DeepSpeed, Megatron-LM and itself.
        names: `names(name)` returns the name in the whole model of the parameter or buffer that this rank calls `name`.
            Names of modules follow from it.
        samples: also record how much each sample adds to the weight gradients of linear layers and embeddings, which
            tells missing samples from wrong weights. By default in runs of one process.
        whole: a pattern such as "blocks.1.*.weight" of the parameters whose initial values and gradients are recorded
            whole, to be told which of their rows and columns are wrong, and of the modules whose outputs are. Pass the
            same in both runs.

    Raises UsageError if the folder cannot be written, or if `whole` is no pattern.
    """
    return Recording(folder, model, optimizer, parts=parts, names=names, samples=samples, whole=whole)


class Recording:
    """A recording under way: the context manager that `record` returns, with its arguments."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        model: Models,
        optimizer: object = None,
        *,
        parts: Parts | None = None,
        names: Callable[[str], str] | None = None,
        samples: bool | None = None,
        whole: str = "",
    ) -> None:
        if not isinstance(whole, str):
            raise UsageError(f"whole must be a pattern of the names of parameters, such as '*' for all, got {whole!r}")
        self.folder = None if folder is None else Path(folder)
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers: Any = () if optimizer is None else optimizer
        self._optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        self._given, self._names, self._samples, self._whole = parts, names, samples, whole
        self._events: list[tuple[dict[str, object], dict[str, Tensor]]] = []
        self._stack = ExitStack()
        self._seen: set[str] = set()  # whose gradients of this step are recorded
        self._clipped: set[str] = set()
        self._others: dict[str, tuple[dict[str, object], Tensor]] = {}
        self._losses: dict[int, weakref.ref[Tensor]] = {}  # noted in this step
        self._has_stepped = False
        self._thread = threading.get_ident()
        self._is_paused = self._has_ended = False
        self.step = 0

    def __enter__(self) -> Self:
        if self.folder is None:
            return self
        rank, world = place()
        self._parts = parts_of(self._models, self._given, self._names)
        self._begin(self.folder, rank, world)
        self._write_start(rank, world)
        self._weights("before")
        samples = world == 1 if self._samples is None else self._samples
        calls = Calls(self._models, self._parts, self._names, self.event, self._called, samples, self._whole)
        self._stack.enter_context(calls)
        self._stack.enter_context(trials_seen(self._pause))
        self._stack.enter_context(engine_losses_seen(self._models, self._loss))
        self._stack.enter_context(backwards_seen(self._loss))
        self._stack.enter_context(scaling_seen(self._scaled))
        self._stack.enter_context(labels_seen(self._labels))
        self._stack.enter_context(clipping_seen(self._on_clip))
        self._stack.enter_context(steps_seen(self._optimizers, self._on_step))
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.folder is None:
            return
        self._stack.close()
        if kind is None:
            self.end()
        self._file.close()

    def end(self) -> None:
        """Writes what was seen of this step, and the end of the file. What comes later is not recorded. Hooks and modes
        stay, since they can only be taken away where the `with` block ends.
        """
        if self._has_ended:
            return
        if not self._has_stepped:
            self._gradients("gradient", self._parts, self._seen)
        self._finish()
        self.event("end")
        self._flush()
        self._has_ended = True

    @property
    def done(self) -> int:
        """How many steps optimizers have taken."""
        return self.step + self._has_stepped

    def loss(self, value: Tensor | float) -> None:
        """Records a loss, for engines whose backward does not start at one on this rank."""
        if self.folder is not None:
            self.event("loss", value=torch.as_tensor(value).detach())

    def event(self, kind: str, told: dict[str, object] | None = None, **arrays: Tensor) -> None:
        """Notes an event of this step, with arrays that are still on their device."""
        if self._is_paused or self._has_ended:
            return
        self._events.append(({"kind": kind, "step": self.step, **(told or {})}, arrays))

    def _begin(self, folder: Path, rank: int, world: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = file_of(folder, rank)
            if os.path.lexists(file) and not is_recording(file):
                raise UsageError(f"{file} is no recording, and only a recording is replaced: choose another folder")
            if rank == 0:
                for number, old in files_of(folder):
                    if number >= world and is_recording(old):
                        old.unlink()
            self._file = file.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from error

    def _write_start(self, rank: int, world: int) -> None:
        tensors = [
            {
                "name": part.name,
                "parameter": isinstance(part.tensor, nn.Parameter) or part.tensor.requires_grad,
                "shape": part.shape,
                "offsets": part.offsets,
                "dtype": str(part.tensor.dtype),
                "stage": part.stage,
                "chunk": part.chunk,
                "same": id(part.tensor),
            }
            for part in self._parts
        ]
        modules = [
            {
                "name": name,
                "type": type(module).__name__,
                "leaf": not any(module.children()),
                "drops": module.training and any(shares_dropped(module)),
                "settings": {
                    key: value
                    for key, value in vars(module).items()
                    if isinstance(value, float | bool | str) and key != "training" and key[:1] != "_"
                },
            }
            for name, module in named_modules(self._models, self._names)
        ]
        told = {"format": FORMAT, "rank": rank, "world": world, "tensors": tensors, "modules": modules}
        self.event(
            "start", {**told, "groups": groups(self._models), "torch": torch.__version__, "random": random_state()}
        )

    def _weights(self, when: str) -> None:
        for part in self._parts:
            self._tensor(when, part, part.tensor)

    def _tensor(self, kind: str, part: Part, values: Tensor, **more: object) -> None:
        found = _sketched(part, values, only_norm=kind == "moment" and self.step > 0)
        if found is not None:
            told: dict[str, object] = {"name": part.name, "dtype": str(values.dtype), **more}
            if kind not in ("after", "moment") and fnmatchcase(part.name, self._whole) and not values.is_complex():
                flat = [block.values.detach().flatten().to(torch.float64) for block in part.cut(values)]
                self.event(kind, told, sketch=found, values=torch.cat(flat))
            else:
                self.event(kind, told, sketch=found)

    def _gradients(self, kind: str, parts: Iterable[Part], seen: set[str]) -> None:
        for part in parts:
            if part.name not in seen and (gradient := part.gradient()) is not None:
                seen.add(part.name)
                self._tensor(kind, part, gradient)

    def _other_gradients(self, mine: Sequence[Part]) -> None:
        """Keeps the gradients of what this optimizer does not step, for the case that none does."""
        names = {part.name for part in mine} | self._seen
        for part in self._parts:
            gradient = None if part.name in names else part.gradient()
            if gradient is not None and (found := _sketched(part, gradient)) is not None:
                self._others[part.name] = {"name": part.name, "dtype": str(gradient.dtype)}, found

    def _mine(self, tensors: Iterable[Tensor]) -> list[Part]:
        """The parts of these parameters, or of which these are copies in another precision; all if none is known."""
        by_id = {id(each): each for each in tensors}
        known = {id(part.stepped) for part in self._parts}
        if copies := [each for own, each in by_id.items() if own not in known]:
            find_masters([part for part in self._parts if part.tensor.requires_grad and part.master is None], copies)
        return [part for part in self._parts if id(part.stepped) in by_id] or self._parts

    def _on_step(self, optimizer: Any) -> None:
        rules = rules_of(optimizer)
        stepped = [each for group in getattr(optimizer, "param_groups", []) for each in group["params"]]
        mine = self._mine(stepped)
        known = {part.name: rules[id(part.stepped)] for part in mine if id(part.stepped) in rules}
        own = {id(part.stepped): part.tensor.dtype for part in self._parts}
        others = [each for each in stepped if id(each) not in own]
        if known and sum(each.grad is not None and each.dtype in own.values() for each in others) > len(known):
            raise UsageError(
                f"the optimizer steps {len(known)} parameters of the recorded modules and {len(others)} others: record "
                "all modules of this rank"
            )
        copies = {each.dtype for each in others}  # of what they are copies is not known
        for part in self._parts:
            if part.tensor.requires_grad and part.gradient() is None and copies - {part.tensor.dtype}:
                known.setdefault(part.name, {})
        self.event("rules", {"rules": known, "optimizer": type(optimizer).__name__})
        for part in mine:
            for key, value in moments_of(optimizer, part) if part.name in known else ():
                self._tensor("moment", part, value, key=key)
        self._gradients("gradient", mine, self._seen)
        self._other_gradients(mine)
        self._has_stepped = True

    def _on_clip(self, parameters: Iterable[Tensor], most: float, norm: Tensor) -> None:
        self._gradients("unclipped", self._mine(parameters), self._clipped)
        self.event("norm", {"most": float(most)}, value=own_values(norm).detach())

    def _loss(self, loss: Tensor) -> None:
        """Notes a loss once, even if it comes from its computation and from its backward."""
        known = self._losses.get(id(loss))
        if threading.get_ident() != self._thread or (known is not None and known() is loss):
            return
        self._losses[id(loss)] = weakref.ref(loss)
        value = loss.detach()
        self.event("loss", value=value.full_tensor() if hasattr(value, "full_tensor") else value)

    def _scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """Notes a loss, and not the one that it is multiplied to."""
        self._loss(loss)
        self._losses[id(scaled)] = weakref.ref(scaled)

    def _labels(self, rows: Tensor, valid: Tensor, numbers: dict[str, float]) -> None:
        if threading.get_ident() == self._thread:
            self.event("labels", {"numbers": numbers}, rows=rows, valid=valid)

    def _pause(self, begins: bool) -> None:
        if threading.get_ident() == self._thread:
            self._is_paused = begins

    def _called(self) -> None:
        """A forward begins: the step before it, if an optimizer stepped, is over."""
        if self._has_stepped:
            self._finish()

    def _finish(self) -> None:
        for name, (told, found) in self._others.items():
            if name not in self._seen:
                self.event("gradient", told, sketch=found)
        self._weights("after")
        self.event("stepped", {"random": random_state()})
        self._flush()
        self._has_stepped = False
        self._seen.clear()
        self._others.clear()
        self._clipped.clear()
        self._losses.clear()
        self.step += 1

    def _flush(self) -> None:
        """Writes the events; their arrays come from the device together."""
        arrays = [array.to(torch.float64) for _, each in self._events for array in each.values()]
        joined = torch.cat([array.flatten() for array in arrays]).cpu().numpy() if arrays else None
        start, lines, shapes = 0, [], iter(arrays)
        for event, named in self._events:
            found = {}
            for name in named:
                shape = next(shapes).shape
                assert joined is not None
                found[name] = joined[start : start + shape.numel()].reshape(shape)
                start += shape.numel()
            lines.append(line_of(event, found))
        self._file.writelines(lines)
        self._file.flush()
        self._events.clear()


def _sketched(part: Part, values: Tensor, only_norm: bool = False) -> Tensor | None:
    """The sketch of a part's values, or zeros, with its squared norm; None if the rank has nothing of it."""
    blocks = part.cut(values)
    if not blocks:
        return None
    zeros = torch.zeros(PROBES, dtype=torch.float64, device=blocks[0].values.device)
    found = zeros if only_norm else torch.stack([sketch(block) for block in blocks]).sum(0)
    norm = torch.stack([norm_squared(block.values) for block in blocks]).sum()
    return torch.cat([found, norm[None]])


def shares_dropped(module: nn.Module) -> Iterator[str]:
    """The attributes that say which share of its values a module drops at random, where it is not 0."""
    for name in ("p", "dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout"):
        if isinstance(share := getattr(module, name, 0.0), float) and share > 0:
            yield name
