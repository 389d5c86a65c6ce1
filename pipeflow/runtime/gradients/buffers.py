"""Buffers of stages that two ranks hold: checks that a step leaves them unchanged, so that both copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pipeflow.core.errors import UsageError


class Buffers:
    """Buffers of the stages of a bidirectional schedule. Each copy of a stage sees half of the microbatches, so buffers
    that depend on the data, such as running statistics, would differ between the copies.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._places = [
            (stage, f"{path}.{name}".lstrip("."), layer, name)
            for stage, module in stages.items()
            for path, layer in module.named_modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None and name not in layer._non_persistent_buffers_set
        ]
        self._versions: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Call before the first forward of a step."""
        self._versions = self._now()

    def end(self) -> None:
        """Call after the last one. Raises UsageError if a buffer was changed in between."""
        for (stage, path, layer, _), before, now in zip(self._places, self._versions, self._now(), strict=True):
            if before != now:
                raise UsageError(
                    f"stage {stage} changed its buffer {path!r}, of a {type(layer).__name__}: under a bidirectional "
                    "schedule the two copies of a stage see different microbatches, so buffers would drift apart: use "
                    "a layer without running statistics (LayerNorm, GroupNorm, track_running_stats=False), its eval(), "
                    "or a schedule that has each stage once"
                )

    def _now(self) -> list[tuple[int, int]]:
        return [
            (id(layer._buffers[name]), getattr(layer._buffers[name], "_version", 0))
            for _, _, layer, name in self._places
        ]
