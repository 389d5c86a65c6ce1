"""Key-value caches for generation. Each stage has one of transformers' caches per microbatch. The rank that runs
transformers' loop has a ledger: a cache without keys that records what the loop does to it. Must not contain: messages
between ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.engine.stages.entries import Stateful
from pipeflow.engine.torch_private.trees import register_pytree_node

Told = tuple[str, list[Any], int]
"""A recorded call: a method of a cache, its arguments, and the length of the cache before the call."""

_KNOWN = {"DynamicLayer", "DynamicSlidingWindowLayer"}


def empty_cache(config: Any) -> Any:
    """The cache that transformers' `generate` makes for a model of this configuration. Raises UsageError if layers keep
    anything besides keys and values.
    """
    transformers = transformers_library()
    text = config.get_text_config(decoder=True)
    cache = transformers.DynamicCache(config=text)
    require_known(cache)
    if not config.is_encoder_decoder:
        return cache
    return transformers.EncoderDecoderCache(cache, transformers.DynamicCache(config=text))


def require_known(cache: Any) -> None:
    """Raises UsageError for a cache that cannot be divided among stages."""
    kinds = {type(layer).__name__ for part in _parts(cache) for layer in part.layers}
    if type(cache).__name__ not in ("DynamicCache", "EncoderDecoderCache") or kinds - _KNOWN:
        raise UsageError(
            f"a pipeline generates with a DynamicCache of keys and values, got a {type(cache).__name__} of "
            f"{', '.join(sorted(kinds)) or 'no layers'}: remove cache_implementation= and past_key_values="
        )


class Caches:
    """The caches of this rank's stages in one generation, by stage and first row of the microbatch.

    Args:
        config: the model's configuration.
        begun: calls that were made on the empty ledger.

    Attributes:
        length: number of positions in each cache.
    """

    def __init__(self, config: Any, begun: Sequence[Told] = ()) -> None:
        self.config = config
        self.length = 0
        self._begun = begun
        self._caches: dict[tuple[int, int], tuple[Any, int]] = {}  # with the number of rows

    def of(self, stage: int, rows: Tensor) -> Any:
        """The cache of a stage for the microbatch with these rows of the batch."""
        key = stage, int(rows[0])
        if key not in self._caches:
            made = empty_cache(self.config)
            for name, arguments, _ in self._begun:
                call(made, name, *arguments)
            self._caches[key] = made, len(rows)
        cache, _ = self._caches[key]
        fill_up(cache, self.length, len(rows))
        return cache

    def apply(self, told: Told) -> None:
        """Repeats a call on the ledger on all caches. Raises UsageError if rows would have to move between ranks."""
        name, arguments, self.length = told
        for cache, rows in self._caches.values():
            fill_up(cache, self.length, rows)
        if name == "reorder_cache":
            self._reorder(*arguments)
            return
        for cache, _ in self._caches.values():
            call(cache, name, *arguments)

    def _reorder(self, chosen: Tensor) -> None:
        for stage in {stage for stage, _ in self._caches}:
            mine = [self._caches[key] for key in sorted(self._caches) if key[0] == stage]
            sizes = [rows for _, rows in mine]
            if sum(sizes) < len(chosen):
                raise UsageError(
                    "beam search moves rows between microbatches, but their caches are on two ranks under this "
                    "schedule: pass generate(schedule=) a schedule with one microbatch"
                )
            for parts in zip(*(_parts(cache) for cache, _ in mine), strict=True):
                for layers in _distinct(zip(*(part.layers for part in parts), strict=True)):
                    _reorder(layers, chosen, sizes)


def _reorder(layers: tuple[Any, ...], chosen: Tensor, sizes: list[int]) -> None:
    """Selects rows of a cache layer that is split into microbatches."""
    if layers[0].get_seq_length() == 0:
        return
    for name in ("keys", "values"):
        whole = torch.cat([getattr(layer, name) for layer in layers])
        for layer, part in zip(layers, whole.index_select(0, chosen.to(whole.device)).split(sizes), strict=True):
            setattr(layer, name, part)


def _distinct(columns: Any) -> Iterator[tuple[Any, ...]]:
    seen = set[int]()
    for layers in columns:
        if id(layers[0]) not in seen:
            seen.add(id(layers[0]))
            yield layers


def _parts(cache: Any) -> list[Any]:
    """The caches inside a cache, the one of the decoder's own positions first."""
    if hasattr(cache, "self_attention_cache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def call(cache: Any, name: str, *arguments: Any) -> None:
    """Calls a method of every cache layer of the decoder's own positions."""
    for (layer,) in _distinct(zip(_parts(cache)[0].layers, strict=True)):
        if hasattr(layer, name):
            getattr(layer, name)(*arguments)


def fill_up(cache: Any, length: int, rows: int) -> None:
    """Extends cache layers without a block in this stage to `length` positions, since models ask any layer for its
    length. Layers of a kind share one layer with empty heads.
    """
    layers = _parts(cache)[0].layers
    behind: dict[Hashable, Any] = {}
    for index, layer in enumerate(layers):
        if layer.get_seq_length() < length:
            layers[index] = behind.setdefault((type(layer), getattr(layer, "sliding_window", 0)), layer)
    for layer in behind.values():
        blank = torch.zeros(()).expand(rows, 1, length - layer.get_seq_length(), 1)
        layer.update(blank, blank)


class _Ledger:
    """A mixin for a class of caches that records the calls made on it.

    Attributes:
        told: calls recorded since they were last read.
    """

    told: list[Told]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows of the caches on all ranks by `beam_idx`, as in transformers."""
        self._tell("reorder_cache", beam_idx)

    def crop(self, length: int) -> None:
        """Shortens the caches on all ranks to `length` tokens, as in transformers."""
        self._tell("crop", length)
        call(self, "crop", length)

    def activate_past_recording(self) -> None:
        """Calls the method of the same name of the caches on all ranks."""
        self._tell("activate_past_recording")
        call(self, "activate_past_recording")

    def _tell(self, name: str, *arguments: Any) -> None:
        length: int = self.get_seq_length()  # type: ignore[attr-defined]  # of the class of caches
        self.told.append((name, list(arguments), length))

    def _refuse(self, *_: object, **__: object) -> None:
        raise UsageError(
            "this way of generating changes the number of rows in the cache, which a pipeline does not support: "
            "use greedy search, sampling or beam search"
        )

    batch_repeat_interleave = batch_select_indices = reset = update = _refuse


def ledger_of(cache: Any) -> Any:
    """Turns an empty cache into a ledger."""
    kind = type(cache)
    cache.told = []
    cache.__class__ = type(kind.__name__, (_Ledger, kind), {"__module__": kind.__module__})
    return cache


class CacheEntry(Stateful):
    """The cache as an entry of a batch, for `rows` of it."""

    def __init__(self, rows: Tensor, caches: Caches) -> None:
        self.rows, self.caches = rows, caches

    @property
    def key(self) -> Hashable:
        """The same for every cache, since a plan is made with an empty one."""
        return type(self).__name__

    def planned(self) -> object:
        """The empty cache with which the stages are planned."""
        return empty_cache(self.caches.config)

    def own(self, stage: int) -> object:
        """The cache of stage `stage` for these rows."""
        return self.caches.of(stage, self.rows)


class GrowingEntry(Stateful):
    """A tensor [rows, positions] such as an attention mask; the last `new` positions are not in the cache yet."""

    def __init__(self, value: Tensor, new: int) -> None:
        self.value, self.new = value, new

    @property
    def key(self) -> Hashable:
        """The properties that a plan depends on: rows, number of new positions, dtype."""
        return type(self).__name__, len(self.value), self.new, self.value.dtype

    def planned(self) -> object:
        """The part for the new positions."""
        return self.value[:, -self.new :].clone()

    def own(self, stage: int) -> object:
        """The whole tensor, which is the same for every stage."""
        return self.value


def _register(kind: Any, tensor: str, other: str) -> None:
    register_pytree_node(
        kind,
        lambda entry: ([getattr(entry, tensor)], getattr(entry, other)),
        lambda tensors, context: kind(next(iter(tensors)), context),
    )


_register(CacheEntry, "rows", "caches")
_register(GrowingEntry, "value", "new")
