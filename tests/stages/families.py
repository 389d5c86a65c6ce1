"""Models of transformers, tiny and of random weights, with a batch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.stages.families_known import HEADS, KNOWN
from tests.stages.families_seen import SEEN
from tests.stages.families_written import WRITTEN
from tests.stages.family import WORDS, Family, Made, Sizes

__all__ = ["EVERY", "FAMILIES", "HEADS", "KNOWN", "SEEN", "WORDS", "WRITTEN", "make"]

EVERY: dict[str, Family] = {**KNOWN, **HEADS, **WRITTEN, **SEEN}
_SOME = [name for name in KNOWN if name not in ("mixtral", "qwen3-moe", "blip-2")]
FAMILIES: dict[str, tuple[str, str, Sizes, Callable[[], dict[str, Any]]]] = {
    name: EVERY[name][:4] for name in [*_SOME, "gemma2", "bart", "t5-classifier"]
}
"""Those without experts and without a model within a model: the class, that of its configuration, sizes, a batch."""


def make(transformers: Any, name: str) -> Made:
    """A model in float64 all of whose weights are random, and a batch for it."""
    return Family(*(FAMILIES.get(name) or EVERY[name])).make(transformers)
