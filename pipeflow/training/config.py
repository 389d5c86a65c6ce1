"""Config: what a job is configured with, read from a dict or a Python file and checked, as a value. What must not live
here: anything that acts on it.
"""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.optim.precision import HalfPrecision

LOG = logging.getLogger("pipeflow")


class Section(Mapping[str, Any]):
    """A dict that is read by attributes too, its dicts like itself."""

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


@dataclass(frozen=True, slots=True)
class Config:
    """What pipeflow reads of a configuration. Everything that was given, the user's own keys too, is an attribute under
    its own name: `config.BATCH_SIZE`, `config.model.num_chunks`.

    Attributes:
        pipeline, tensor: the layout, from `parallel`; the data ranks are what is left of the world.
        num_microbatches: NUM_MICRO_BATCHES, None when not given.
        num_chunks: NUM_CHUNKS or model.num_chunks, None when not given.
        tensor_shape: TENSOR_SHAPE, that of one microbatch between stages, None when not given.
        precision: from `fp16` or `bf16`, None for what the parameters are.
        clip_grad_norm: 0 when gradients are not to be clipped.
        gradient_accumulation: batches per step of the optimizer.
        seed: None when not given.
        log_path: LOG_PATH, a folder, None when not given.
        given: all of it.
    """

    pipeline: int = 1
    tensor: int = 1
    num_microbatches: int | None = None
    num_chunks: int | None = None
    tensor_shape: tuple[int, ...] | None = None
    precision: HalfPrecision | None = None
    clip_grad_norm: float = 0.0
    gradient_accumulation: int = 1
    seed: int | None = None
    log_path: str | None = None
    given: Section = field(default_factory=lambda: Section({}))

    def __getattr__(self, name: str) -> Any:
        if name == "given":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.given, name)


def read_config(source: Config | Mapping[str, Any] | str | Path) -> Config:
    """The configuration in a dict, or in a Python file's names.

    Raises UsageError for a file that is not there, values that cannot work, and keys unknown to the sections
    `parallel`, `fp16` and `bf16`. Other unknown keys are the user's; one much like a known key is logged.
    """
    if isinstance(source, Config):
        return source
    given = Section(source if isinstance(source, Mapping) else _names_in(Path(source)))
    _warn_of_slips(given)
    for key in ("BATCH_SIZE", "NUM_EPOCHS", "SEQ_LEN"):
        _number(given, key, None)
    pipeline, tensor = _layout(_section(given, "parallel", ("pipeline", "tensor")))
    return Config(
        pipeline,
        tensor,
        num_microbatches=_number(given, "NUM_MICRO_BATCHES", None),
        num_chunks=_num_chunks(given),
        tensor_shape=_tensor_shape(given),
        precision=_precision(given),
        clip_grad_norm=_clip_grad_norm(given),
        gradient_accumulation=_number(given, "gradient_accumulation", None) or 1,
        seed=_checked(given, "seed", "a whole number", lambda value: isinstance(value, int)),
        log_path=_checked(given, "LOG_PATH", "a folder", lambda value: isinstance(value, str | Path)),
        given=given,
    )


_KNOWN = (
    "parallel",
    "fp16",
    "bf16",
    "clip_grad_norm",
    "gradient_accumulation",
    "seed",
    "NUM_MICRO_BATCHES",
    "NUM_CHUNKS",
    "TENSOR_SHAPE",
    "LOG_PATH",
)
_SCALING = (
    "initial_scale",
    "growth_factor",
    "growth_interval",
    "backoff_factor",
    "hysteresis",
    "min_scale",
    "max_scale",
)


def _names_in(file: Path) -> dict[str, Any]:
    """What a configuration file defines: no private names, modules or classes."""
    if file.suffix != ".py" or not file.is_file():
        raise UsageError(f"a configuration is a dict or a Python file, and {str(file)!r} is no file that ends in .py")
    names = runpy.run_path(str(file))
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and not isinstance(value, ModuleType | type)
    }


def _warn_of_slips(given: Section) -> None:
    for key in given:
        near = get_close_matches(key.lower(), [known.lower() for known in _KNOWN], n=1, cutoff=0.85)
        if near and key not in _KNOWN:
            meant = next(known for known in _KNOWN if known.lower() == near[0])
            LOG.warning("the configuration's %r is not read: did you mean %r?", key, meant)


def _section(given: Mapping[str, Any], name: str, known: Collection[str]) -> Mapping[str, Any]:
    """That section of `given`, empty when it is not there. Raises UsageError for an unknown key."""
    section = given.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise UsageError(f"{name} must be a dict of {', '.join(known)}, got {section!r}")
    for key in section:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)
            raise UsageError(f"{name} has no key {key!r}: did you mean {near[0]!r}? It has {', '.join(known)}")
    return section


def _layout(parallel: Mapping[str, Any]) -> tuple[int, int]:
    pipeline, tensor = parallel.get("pipeline"), parallel.get("tensor")
    if isinstance(pipeline, Mapping):
        pipeline = _number(_section(parallel, "pipeline", ("size",)), "size", None)
    if isinstance(tensor, Mapping):
        section = _section(parallel, "tensor", ("mode", "size"))
        tensor, mode = _number(section, "size", None), section.get("mode")
        if mode != "1d" and (mode is not None or (tensor or 1) > 1):
            raise UsageError(f"tensor mode {mode!r} does not exist here: write tensor=dict(mode='1d', size={tensor})")
    sizes = {"parallel.pipeline": pipeline, "parallel.tensor": tensor}
    return _number(sizes, "parallel.pipeline", None) or 1, _number(sizes, "parallel.tensor", None) or 1


def _num_chunks(given: Section) -> int | None:
    model = given.get("model")
    nested = _number(model, "num_chunks", None) if isinstance(model, Mapping) else None
    number = _number(given, "NUM_CHUNKS", nested)
    if nested not in (None, number):
        raise UsageError(f"NUM_CHUNKS is {number} and model.num_chunks {nested}: give one of them")
    return number


def _tensor_shape(given: Section) -> tuple[int, ...] | None:
    shape = _checked(given, "TENSOR_SHAPE", "a tuple of positive whole numbers", _is_shape)
    return None if shape is None else tuple(shape)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple | list | torch.Size) and len(value) > 0 and all(map(_is_positive, value))


def _precision(given: Section) -> HalfPrecision | None:
    fp16, bf16 = _section(given, "fp16", ("mode", *_SCALING)), _section(given, "bf16", ("mode",))
    if fp16 and bf16:
        raise UsageError("the configuration has both fp16 and bf16: give one of them")
    if not fp16 and not bf16:
        return None
    section, dtype = (fp16, torch.float16) if fp16 else (bf16, torch.bfloat16)
    scaling = {key: section[key] for key in section if key != "mode"}
    mode: Any = section.get("mode")  # HalfPrecision refuses what is none
    return HalfPrecision(mode, dtype, scaling)


def _clip_grad_norm(given: Section) -> float:
    kind = "a number, 0 for no clipping"
    norm = _checked(given, "clip_grad_norm", kind, lambda value: isinstance(value, int | float) and value >= 0)
    return float(norm or 0.0)


def _number(given: Mapping[str, Any], key: str, default: int | None) -> int | None:
    number: int | None = _checked(given, key, "a positive whole number", _is_positive)
    return default if number is None else number


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _checked(given: Mapping[str, Any], key: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    value = given.get(key)
    if value is not None and not fits(value):
        raise UsageError(f"{key} must be {kind}, got {value!r}")
    return value
