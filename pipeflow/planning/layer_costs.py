"""The costs of a model's layers one by one, and what follows from them: where to cut it, and the costs of its stages.
Must not contain: how they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Part, stage_parts


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Times of each layer, and the sizes of what it makes and saves, for one microbatch.

    >>> costs = LayerCosts((3, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), (8, 8, 8, 4))
    >>> costs.parts(2)
    [(0, 1), (1, 4)]
    >>> costs.cost_model(costs.parts(2)).forward
    (3, 3)

    Raises UsageError for tuples of different lengths.

    Attributes:
        forward: per layer, the time of its forward, in any unit.
        backward_input: per layer, the time of the first half of its backward, in the same unit.
        backward_weight: per layer, the time of the second half.
        output_bytes: per layer, the size of its output.
        unit: "s" if times are in seconds; "" if the unit is not known.
        saved_bytes: per layer, the bytes that its forward saves for its backward, its input included. Empty: not known.
        input_bytes: per layer, the size of its input; 0 if that is a part of the batch. Empty: not known.
        offload: per layer, the time to copy to the host what it saves. Empty: not known.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    output_bytes: tuple[float, ...]
    unit: str = ""
    saved_bytes: tuple[float, ...] = ()
    input_bytes: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        further = (each for each in (self.saved_bytes, self.input_bytes, self.offload) if each)
        columns = (self.forward, self.backward_input, self.backward_weight, self.output_bytes, *further)
        if len(set(map(len, columns))) > 1:
            raise UsageError(f"costs are per layer: got {', '.join(map(str, map(len, columns)))} of them")

    @property
    def weights(self) -> tuple[float, ...]:
        """Per layer, the time of its forward and its backward."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def parts(self, num_stages: int) -> list[Part]:
        """The parts `(start, end)` of the layers, one per stage, with which the slowest stage is as fast as possible.
        Raises UsageError if there are fewer layers than stages.
        """
        return stage_parts(len(self.forward), num_stages, self.weights)

    def cost_model(self, parts: Sequence[Part]) -> CostModel:
        """The costs of stages with these `parts`, for `simulate` and `search`. Links take no time;
        `dataclasses.replace(..., latency=, bandwidth=)` sets their times. Raises UsageError for parts that do not cover
        the layers.
        """
        parts = stage_parts(len(self.forward), len(parts), parts)

        def per_stage(layers: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(layers[start:end]) for start, end in parts)

        return CostModel(
            forward=per_stage(self.forward),
            backward_input=per_stage(self.backward_input),
            backward_weight=per_stage(self.backward_weight),
            activation_bytes=tuple(self.output_bytes[end - 1] for _, end in parts),
            saved_bytes=per_stage(self.saved_bytes) if self.saved_bytes else (),
            input_bytes=tuple(self.input_bytes[start] for start, _ in parts) if self.input_bytes else (),
            offload=per_stage(self.offload) if self.offload else (),
            unit=self.unit,
        )
