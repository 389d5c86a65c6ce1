"""The contents of a checkpoint: the names under which weights, optimizer states, random states and values of the run
are stored, and how they are restored. Must not contain: files, or which rank writes what.

A weight `name` is stored as `model.name`, its optimizer state `key` as `optimizer.key.name`, and the options of its
group and states that are not tensors as `options.name`. `random.rank` belongs to one rank of the world, `run` to the
whole run.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.original import plain_name
from pipeflow.engine.tensor.random import current_tracker
from pipeflow.engine.torch_private.tensors import default_states, set_default_states
from pipeflow.training.checkpoint.pieces import LocalTensor, Piece, Pieces, state_pieces
from pipeflow.training.checkpoint.storage import CheckpointStorage, dtype_named, to_bytes
from pipeflow.training.optim.optimizer import Wrapper, names_by_group, options_of, states_alike

_MERSENNE = "MT19937"  # the only bit generator of numpy's that np.random.seed makes


def generator_states(*, load_numpy: bool = False) -> dict[str, Tensor]:
    """The states by name: "python", and "numpy" if its generators are loaded, and the global one is the usual one.

    Args:
        load_numpy: loads numpy's generators first.
    """
    if load_numpy:
        import numpy.random  # noqa: F401  # only then, because it loads slowly
    version, numbers, spare = random.getstate()
    states = {"python": _packed([version, *numbers], spare)}
    if (of_numpy := sys.modules.get("numpy.random")) is not None:
        told = of_numpy.get_state(legacy=False)
        if told["bit_generator"] == _MERSENNE:
            numbers = [*told["state"]["key"].tolist(), told["state"]["pos"]]
            states["numpy"] = _packed(numbers, told["gauss"] if told["has_gauss"] else None)
    return states


def set_generator(name: str, state: Tensor, *, only_try: bool = False) -> None:
    """Sets the generator `name` to a state of `generator_states`, or only tries it on another generator. Raises
    ValueError for a state that it does not accept.
    """
    numbers, spare = _unpacked(state)
    if name == "python":
        target = random.Random() if only_try else random
        target.setstate((numbers[0], tuple(numbers[1:]), spare))
    else:
        of_numpy: Any = sys.modules["numpy.random"]
        generator = of_numpy.RandomState() if only_try else of_numpy
        key = {"key": numbers[:-1], "pos": numbers[-1]}
        gauss = {"has_gauss": spare is not None, "gauss": spare or 0.0}
        generator.set_state({"bit_generator": _MERSENNE, "state": key, **gauss})


def _packed(numbers: Sequence[int], spare: float | None) -> Tensor:
    """The numbers of a Mersenne Twister, and the second of two normal numbers if it has drawn only the first."""
    bits = struct.unpack("<q", struct.pack("<d", spare or 0.0))[0]
    return torch.tensor([*numbers, int(spare is not None), bits], dtype=torch.int64, device="cpu")


def _unpacked(state: Tensor) -> tuple[list[int], float | None]:
    *numbers, has_spare, bits = state.tolist()
    return numbers, struct.unpack("<d", struct.pack("<q", bits))[0] if has_spare else None


T = TypeVar("T")
MODEL, OPTIMIZER, OPTIONS, RUN = "model.", "optimizer.", "options.", "run"
_OUTSIDE = {"python", "numpy"}  # the generators that are not torch's


def weight_pieces(tensors: Sequence[LocalTensor]) -> dict[str, Sequence[Piece]]:
    """The pieces of all weights and buffers."""
    return {MODEL + each.name: each.pieces for each in tensors}


def weight_shapes(storage: CheckpointStorage) -> dict[str, tuple[int, ...]]:
    """The shapes of the saved weights, by name in the whole model."""
    return {name.removeprefix(MODEL): each[0].shape for name, each in storage.tensors.items() if name.startswith(MODEL)}


def optimizer_content(
    optimizer: Wrapper, tensors: Sequence[LocalTensor]
) -> tuple[Pieces, dict[str, bytes], dict[str, Any]]:
    """An optimizer's state on this rank: tensors, plain values (options of groups and states that are not tensors), and
    further entries of its `state_dict`.
    """
    told = optimizer.state_dict()
    pieces: dict[str, Sequence[Piece]] = {}
    values: dict[str, bytes] = {}
    all_names, alike = _all_names(optimizer.model, tensors), states_alike(optimizer)
    for group, names in zip(optimizer.param_groups, names_by_group(optimizer), strict=True):
        what, options = "the optimizer's options or states", options_of(group)
        usual: dict[tuple[str, ...], bytes] = {}
        for own in names:
            state = told["state"].get(own, {})
            keys = tuple(key for key, value in state.items() if isinstance(value, Tensor))
            plain = {key: value for key, value in state.items() if key not in keys}
            said = {"options": options, "values": plain, "tensors": list(keys)}
            stored = to_bytes(what, said) if plain or keys not in usual else usual[keys]
            usual |= {} if plain else {keys: stored}
            for each in all_names[own]:
                values[OPTIONS + each.name] = stored
                for key in keys:
                    pieces[f"{OPTIMIZER}{key}.{each.name}"] = state_pieces(each, key, state[key], alike.get(own))
    return pieces, values, {key: value for key, value in told.items() if key not in ("state", "param_groups")}


def _all_names(model: nn.Module, tensors: Sequence[LocalTensor]) -> dict[str, list[LocalTensor]]:
    """All names in the whole model of each parameter of `model`, by its name in `model`."""
    groups: dict[int, list[LocalTensor]] = defaultdict(list)
    for each in tensors:
        groups[id(each.tensor)].append(each)
    return {plain_name(name): groups[id(parameter)] for name, parameter in model.named_parameters()}


def optimizer_room(
    optimizer: Wrapper, tensors: Sequence[LocalTensor], storage: CheckpointStorage
) -> tuple[Pieces, dict[str, Any]]:
    """The pieces of an optimizer's saved states on this rank, and the `state_dict` that has them once they are filled.

    Raises UsageError if the checkpoint lacks some of them, or if the optimizer's groups differ from the saved ones.
    """
    groups, all_names = names_by_group(optimizer), _all_names(optimizer.model, tensors)
    owned = {own: all_names[own][0] for names in groups for own in names}
    plain = _plain_states([each.name for each in owned.values()], storage)
    pieces: dict[str, Sequence[Piece]] = {}
    states: dict[str, dict[str, Any]] = {}
    alike = states_alike(optimizer)
    for own, each in owned.items():
        states[own] = {**plain[each.name]["values"]}
        for key in plain[each.name]["tensors"]:
            states[own][key] = room = _room(each, key, storage, alike.get(own))
            pieces[f"{OPTIMIZER}{key}.{each.name}"] = state_pieces(each, key, room, alike.get(own))
    options = [_common_options([owned[own].name for own in names], plain) for names in groups]
    return pieces, {"state": states, "param_groups": options}


def options_of_groups(groups: Sequence[Sequence[str]], storage: CheckpointStorage) -> list[dict[str, Any]]:
    """The saved options of groups, given the names of their parameters in the whole model. Raises UsageError as
    `optimizer_room` does.
    """
    plain = _plain_states([name for names in groups for name in names], storage)
    return [_common_options(names, plain) for names in groups]


def _plain_states(names: Collection[str], storage: CheckpointStorage) -> dict[str, dict[str, Any]]:
    """Plain values of each parameter: its group's "options", "values" of plain states, and names of its "tensors"."""
    if names and not any(name.startswith(OPTIONS) for name in storage.values):
        raise UsageError("the checkpoint was saved without an optimizer: call load_checkpoint without one")
    if missing := [name for name in names if OPTIONS + name not in storage.values]:
        raise UsageError(
            f"the checkpoint's optimizer did not have {missing[0]!r}: make the optimizer from the same parameters"
        )

    def plain(name: str) -> dict[str, Any]:
        read: dict[str, Any] = storage.value(OPTIONS + name)
        return _checked(
            OPTIONS + name,
            read,
            lambda: (
                all(isinstance(each, dict) for each in (read, read["options"], read["values"]))
                and all(f"{OPTIMIZER}{key}.{name}" in storage.tensors for key in read["tensors"])
            ),
        )

    return {name: plain(name) for name in names}


def _common_options(names: Sequence[str], plain: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options that all parameters of a group were saved with. Raises UsageError if they differ."""
    first = plain[names[0]]["options"] if names else {}
    for name in names:
        if plain[name]["options"] != first:
            raise UsageError(
                f"one group of the optimizer has {names[0]!r} and {name!r}, which were saved with different options, "
                f"{first} and {plain[name]['options']}: make the groups as they were at the save"
            )
    return dict(first)


def _checked(name: str, read: T, fits: Callable[[], bool]) -> T:
    """The plain value `read`, if it fits. Raises UsageError if it cannot be the value saved under `name`."""
    with suppress(LookupError, TypeError, AttributeError):
        if fits():
            return read
    raise _damaged(name)


def _damaged(name: str) -> UsageError:
    return UsageError(f"{name!r} is not the value that was saved: the checkpoint is damaged; load an earlier one")


def _room(local: LocalTensor, key: str, storage: CheckpointStorage, alike: Collection[str] | None) -> Tensor:
    """An empty tensor for this rank's part of a state."""
    stored = storage.tensors[f"{OPTIMIZER}{key}.{local.name}"][0]
    dtype = dtype_named(stored.dtype)
    if stored.shape == local.shape and (alike is None or key in alike):
        return torch.zeros_like(local.tensor, dtype=dtype, requires_grad=False)
    return torch.zeros(stored.shape, dtype=dtype)


def read_run(storage: CheckpointStorage) -> dict[str, Any]:
    """Values of the run: "step", "data", "extra" and "scheduler", and "optimizer" if one was saved."""
    run: dict[str, Any] = storage.value(RUN)
    return _checked(
        RUN,
        run,
        lambda: (
            {"step", "data", "extra", "scheduler"} <= run.keys()
            and isinstance(run["step"], int | None)
            and isinstance(run["scheduler"], dict | None)
            and isinstance(run.get("optimizer", {}), dict)
        ),
    )


def random_states(context: Context, saved: Collection[str] = ()) -> dict[str, Tensor]:
    """The states of this rank's generators: torch's default ones, those of tensor-parallel layers, Python's, and
    numpy's if numpy is loaded or its state is among the names in `saved`.
    """
    gpus = [context.device] if context.device.type == "cuda" else []
    states = dict(zip(("cpu", "cuda"), default_states(gpus), strict=False))
    states |= generator_states(load_numpy=f"random.{context.rank}.numpy" in saved)
    if tracker := current_tracker():
        states |= {f"tracker.{name}": state for name, state in tracker.get_state().items()}
    return {f"random.{context.rank}.{name}": state for name, state in states.items()}


def saved_random(states: Mapping[str, Tensor], storage: CheckpointStorage) -> dict[str, Tensor]:
    """The `states` that were saved: always the CPU's generator, others if the rank had them then. Raises UsageError if
    one is missing or has another size.
    """
    found = {name: state for name, state in states.items() if name in storage.tensors or name.endswith(".cpu")}
    for name, state in found.items():
        if name not in storage.tensors or storage.tensors[name][0].shape != state.shape:
            raise _damaged(name)
    return found


def require_random(states: Mapping[str, Tensor]) -> None:
    """Raises UsageError for a state that generators do not accept."""
    for name, state in states.items():
        generator = _generator(name)
        try:
            if generator in _OUTSIDE:
                set_generator(generator, state, only_try=True)
            else:
                torch.Generator("cuda" if generator == "cuda" else "cpu").set_state(state)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{name!r} is not the state of a random generator: the checkpoint is damaged; load another"
            ) from error


def _generator(name: str) -> str:
    """The name of a generator, without the rank."""
    return name.split(".", 2)[2]


def restore_random(context: Context, saved: Mapping[str, Tensor]) -> None:
    """Sets the generators to the states of `saved_random`, once they were read, if there are any."""
    states = {_generator(name): state for name, state in saved.items()}
    if "cpu" in states:
        defaults = [states[name] for name in ("cpu", "cuda") if name in states]
        set_default_states(defaults, [context.device] * (len(defaults) - 1))
    for name in states.keys() & _OUTSIDE:
        set_generator(name, states[name])
    tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    if tracked and (tracker := current_tracker()):
        tracker.set_state(tracked)
