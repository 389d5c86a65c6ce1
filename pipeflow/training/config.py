"""Config: a job's configuration as a value, read from a dict or a Python file and checked. Must not contain: anything
that acts on it.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeflow.core.errors import UsageError, closest
from pipeflow.engine.parallel.grid import MODES
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.training.optim.precision import HalfPrecision, LossScaler


class Section(Mapping[str, Any]):
    """A mapping whose entries are also attributes; nested dicts become Sections too."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = {key: Section(entry) if isinstance(entry, dict) else entry for key, entry in entries.items()}

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._entries:
            raise AttributeError(f"the configuration has no {name!r}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)


def _require_section(key: str, section: Any, known: Collection[str]) -> None:
    """Raises UsageError unless `section` is a dict of known keys."""
    if not isinstance(section, Mapping):
        raise UsageError(f"{key} must be a dict with the keys {', '.join(known)}, got {section!r}")
    for name in section:
        if name not in known:
            near = closest(name, known, cutoff=0.0)
            raise UsageError(f"{key} has no key {name!r}: did you mean {near!r}? Its keys are {', '.join(known)}")


def _checked(kind: str, fits: Callable[[Any], bool], convert: Callable[[Any], Any], key: str, value: Any) -> Any:
    if not fits(value):
        raise UsageError(f"{key} must be {kind}, got {value!r}")
    return convert(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple | list | torch.Size) or not value:
        return False
    return (value[0] is None or _is_positive(value[0])) and all(map(_is_positive, value[1:]))


def _is_norm(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


_number = partial(_checked, "a positive whole number", _is_positive, int)
_seed = partial(_checked, "a whole number", _is_whole, int)
_shape = partial(_checked, "a tuple of positive whole numbers, whose first may be None", _is_shape, tuple)
_norm = partial(_checked, "a number of at least 0 (0 disables clipping)", _is_norm, float)
_alpha = partial(_checked, "a number of at least 0 (0 disables Mixup)", _is_norm, float)
_flag = partial(_checked, "True or False", lambda value: isinstance(value, bool), bool)
_folder = partial(_checked, "a folder", lambda value: isinstance(value, str | Path), lambda value: value)


def _pipeline(key: str, value: Any) -> int | None:
    if isinstance(value, Mapping):
        _require_section(key, value, ("size",))
        key, value = f"{key}.size", value.get("size")
    return None if value is None else _number(key, value)


def _tensor(key: str, value: Any) -> int | None:
    if isinstance(value, Mapping):
        _require_section(key, value, ("mode", "size", "depth"))
        mode, size = value.get("mode"), value.get("size")
        if mode is None and (size or 1) > 1:
            raise UsageError(f"{key} has a size and no mode: write tensor=dict(mode='1d', size={size})")
        key, value = f"{key}.size", size
    return None if value is None else _number(key, value)


_mode = partial(_checked, f"one of {', '.join(map(repr, MODES))}", lambda value: value in MODES, str)


def _precision(dtype: torch.dtype, scaling: Collection[str], key: str, section: Any) -> HalfPrecision | None:
    _require_section(key, section, ("mode", *scaling))
    if not section:
        return None
    options = {name: section[name] for name in section if name != "mode"}
    return HalfPrecision(section.get("mode"), dtype, options)  # it checks the mode


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration that was read by `read_config`. Every key that was given, including the user's own, is also an
    attribute: `config.BATCH_SIZE`, `config.model.num_chunks`. Attributes without a default are None if not given.

    Attributes:
        pipeline, tensor, context: numbers of pipeline, tensor and context ranks, from `parallel`, 1 by default; further
            ranks are data ranks.
        experts: number of expert ranks, which are among the data ranks, from `parallel`, 1 by default.
        tensor_mode, tensor_depth: as in `launch`, from `parallel.tensor`.
        num_microbatches: number of microbatches per batch, from NUM_MICRO_BATCHES.
        num_chunks: number of stages per rank, from NUM_CHUNKS or model.num_chunks.
        tensor_shape: shape of one microbatch between stages, from TENSOR_SHAPE; as in Pipeline, its first entry may be
            None.
        precision: precision and loss scaling, from `fp16` or `bf16`; None leaves the parameters as they are.
        clip_grad_norm: maximum norm of the gradient; 0, the default, disables clipping.
        gradient_accumulation: number of batches per optimizer step, 1 by default.
        batch_size: number of samples per batch and data rank, from BATCH_SIZE.
        num_epochs: number of epochs, from NUM_EPOCHS.
        seed: seed of random numbers.
        log_path: folder for log files, from LOG_PATH.
        mixup_alpha: Mixup's alpha, from `dali`; 0, the default, disables Mixup.
        gpu_augmentation: whether `dali` asks for augmentation on the GPU; pipeflow only stores it.
        given: the whole configuration as given.
    """

    # the metadata of an attribute has the keys that it is read from; a dot in a key stands for a nested dict

    pipeline: int = field(default=1, metadata={"parallel.pipeline": _pipeline})
    tensor: int = field(default=1, metadata={"parallel.tensor": _tensor})
    context: int = field(default=1, metadata={"parallel.context": _number})
    experts: int = field(default=1, metadata={"parallel.experts": _number})
    tensor_mode: str = field(default="1d", metadata={"parallel.tensor.mode": _mode})
    tensor_depth: int = field(default=1, metadata={"parallel.tensor.depth": _number})
    num_microbatches: int | None = field(default=None, metadata={"NUM_MICRO_BATCHES": _number})
    num_chunks: int | None = field(default=None, metadata={"NUM_CHUNKS": _number, "model.num_chunks": _number})
    tensor_shape: tuple[int | None, ...] | None = field(default=None, metadata={"TENSOR_SHAPE": _shape})
    precision: HalfPrecision | None = field(
        default=None,
        metadata={
            "fp16": partial(_precision, torch.float16, signature(LossScaler).parameters),
            "bf16": partial(_precision, torch.bfloat16, ()),
        },
    )
    clip_grad_norm: float = field(default=0.0, metadata={"clip_grad_norm": _norm})
    gradient_accumulation: int = field(default=1, metadata={"gradient_accumulation": _number})
    batch_size: int | None = field(default=None, metadata={"BATCH_SIZE": _number})
    num_epochs: int | None = field(default=None, metadata={"NUM_EPOCHS": _number})
    seed: int | None = field(default=None, metadata={"seed": _seed})
    log_path: str | None = field(default=None, metadata={"LOG_PATH": _folder})
    mixup_alpha: float = field(default=0.0, metadata={"dali.mixup_alpha": _alpha})
    gpu_augmentation: bool = field(default=False, metadata={"dali.gpu_aug": _flag})
    given: Section = field(default_factory=lambda: Section({}))

    def __getattr__(self, name: str) -> Any:
        if name == "given":  # copy and pickle ask before it is set
            raise AttributeError(name)
        return getattr(self.given, name)

    def layout(self, world_size: int | None = None) -> WorldLayout:
        """The layout of so many processes, by default of as few as it needs. Raises UsageError as `WorldLayout.of`."""
        one = self.pipeline * self.tensor * self.context * self.experts
        grid: dict[str, Any] = {"tensor_mode": self.tensor_mode, "tensor_depth": self.tensor_depth}
        return WorldLayout.of(world_size or one, self.pipeline, self.tensor, self.context, self.experts, **grid)

    def require_keys(self, needed: Collection[str], others: Collection[str]) -> None:
        """Raises UsageError if a key of `needed` was not given, or if a key was given that neither set has."""
        for message, keys in (
            ("lacks", set(needed) - set(self.given)),
            ("has unknown keys:", set(self.given) - {*needed, *others}),
        ):
            if keys:
                raise UsageError(f"the configuration {message} {', '.join(sorted(keys))}")


KEYS = {key: (attribute.name, read) for attribute in fields(Config) for key, read in attribute.metadata.items()}
"""The known keys, each with the attribute of Config that it sets, and the function that reads it: `read(key, value)`
returns the attribute's value, or None for no value, and raises UsageError for an invalid one.
"""

USERS = frozenset({"PATCH_SIZE"})
"""The user's own keys that are allowed although they are spelled much like a known one (here BATCH_SIZE)."""

UNREAD: Mapping[str, str] = {
    "zero": "wrap the optimizer, as in pipeflow.optim.Zero(model, optimizer)",
    "gradient_handler": "remove it; every step reduces its gradients",
    "cudnn_benchmark": "set torch.backends.cudnn.benchmark",
    "cudnn_deterministic": "set torch.backends.cudnn.deterministic",
}
"""ColossalAI's keys that change what a program does and are not supported, each with what to do instead."""


def read_config(source: Config | Mapping[str, Any] | str | Path) -> Config:
    """Reads and checks a configuration.

    Args:
        source: a dict, the path of a Python file whose variables are the keys, or a Config, which is returned as it is.

    Raises UsageError for a missing file, for invalid values, and for unknown keys in the sections `parallel`, `fp16`,
    `bf16` and `dali`. Also raises it for an unknown key whose spelling is similar to a known one. Other unknown keys
    are kept for the user.
    """
    if isinstance(source, Config):
        return source
    given = Section(source if isinstance(source, Mapping) else _names_in(Path(source)))
    _refuse_unread(given)
    return Config(**_read(given), given=given)


def _names_in(file: Path) -> dict[str, Any]:
    """The public variables of a configuration file, without modules and classes."""
    if file.suffix != ".py" or not file.is_file():
        raise UsageError(f"a configuration is a dict or a Python file; {str(file)!r} is not an existing .py file")
    names = runpy.run_path(str(file))
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and not isinstance(value, ModuleType | type)
    }


def _read(given: Section) -> dict[str, Any]:
    """The attributes of Config that are read from `given`."""
    found: dict[str, tuple[str, Any]] = {}
    for key, (attribute, read) in KEYS.items():
        value = _value_of(given, key)
        became = None if value is None else read(key, value)
        if became is None:
            continue
        other, its = found.setdefault(attribute, (key, became))
        if its != became:
            raise UsageError(f"the configuration has both {other} and {key}, with different values: give one of them")
    return {attribute: became for attribute, (_, became) in found.items()}


def _value_of(given: Mapping[str, Any], key: str) -> Any:
    """The value under a key, None if it is not given; a dot in the key leads into a section."""
    name, _, inside = key.partition(".")
    value = given.get(name)
    if not inside:
        return value
    return _value_of(value, inside) if isinstance(value, Mapping) else None


def _refuse_unread(given: Section) -> None:
    """Raises UsageError for keys that the user expects to have an effect, but that would have none."""
    for key in given:
        if key in UNREAD:
            raise UsageError(f"the configuration's {key!r} has no effect: {UNREAD[key]}")
        _refuse_slip(key, [known.partition(".")[0] for known in KEYS])
    for section in ("parallel", "dali"):
        if given.get(section) is not None:
            _require_section(section, given[section], _inside(section))
    if isinstance(model := given.get("model"), Mapping):
        for key in model:
            _refuse_slip(f"model.{key}", [f"model.{known}" for known in _inside("model")])


def _inside(section: str) -> list[str]:
    """The known keys of a section."""
    inside = (key.partition(".")[2] for key in KEYS if key.startswith(f"{section}."))
    return [key for key in inside if "." not in key]


def _refuse_slip(key: str, known: Collection[str]) -> None:
    names = {name.lower(): name for name in known}
    near = closest(key.lower(), names, cutoff=0.85)
    if near and key not in known and key not in USERS:
        raise UsageError(
            f"the configuration's {key!r} is not a known key: did you mean {names[near]!r}? "
            "If it is a key of your own, give it a less similar name"
        )
