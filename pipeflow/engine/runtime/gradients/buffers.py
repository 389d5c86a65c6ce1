"""Buffers that several ranks hold: checks that a step leaves those of a stage's two copies unchanged, and gives all
replicas those of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.runtime.gradients.values import share_packed


class Buffers:
    """Buffers of the stages of a bidirectional schedule. Each copy of a stage sees half of the microbatches, so buffers
    that depend on the data, such as running statistics, would differ between the copies.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._places = [(stage, *place) for stage, module in stages.items() for place in _persistent(module)]
        self._versions: list[_Version] = []

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

    def _now(self) -> list[_Version]:
        return [_version(layer._buffers[name]) for _, _, layer, name in self._places]


class ReplicatedBuffers:
    """Buffers of a module of which every replica has a copy. Each replica sees other samples, so running statistics
    would differ between them. As with DistributedDataParallel, those of the first replica are everybody's.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._group = group
        self._places = [(layer._buffers, name) for _, layer, name in _persistent(module)] if group.size > 1 else []
        self._seen = self._now()

    @property
    def are_changed(self) -> bool:
        """True if a buffer was changed or replaced on this rank since they were shared."""
        return self._now() != self._seen

    def share(self) -> None:
        """Copies the buffers of the first replica to all. Raises LinkError."""
        share_packed([buffer for buffers, name in self._places if (buffer := buffers[name]) is not None], self._group)
        self._seen = self._now()

    def _now(self) -> list[_Version]:
        return [_version(buffers[name]) for buffers, name in self._places]


_Version = tuple[int, int]
"""The identity of a buffer, and how often it was written in place."""


def _version(buffer: Tensor | None) -> _Version:
    return id(buffer), getattr(buffer, "_version", 0)


def _persistent(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, layer and name of each buffer of `module` that its state_dict has."""
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), layer, name
