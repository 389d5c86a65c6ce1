"""Rounding: how far two runs of the same computation may be apart, derived from its sizes and dtypes.

A product of length n whose errors are independent has a relative error near sqrt(n) u, with the unit roundoff u: Higham
and Mary, "A new approach to probabilistic rounding error analysis" (2019). Errors of the layers before add up in the
same way, so that after layers of lengths n_1 ... n_d, whose outputs are rounded to the unit u' of their dtype,

    tolerance = SAFETY (u' sqrt(d) + u sqrt(n_1 + ... + n_d)) + SKETCH.

A backward goes through the layers once more, and the gradient of a weight also sums over samples and tokens. Its error
is relative to the terms of this sum, whose root of summed squares the plain run records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt

from pipeflow.checking.files import Event
from pipeflow.checking.runs import Run

SAFETY = 6.0
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FLOAT32 = UNITS["float32"]
SKETCH = 2e-6  # what float32 loses in the sums of a sketch, relative to the norm


def unit(dtype: str) -> float:
    """The unit roundoff of a dtype, as torch writes it; float8 counts as its significand of 3 bits."""
    name = dtype.removeprefix("torch.")
    return 2.0**-4 if name.startswith("float8") else UNITS.get(name, FLOAT32)


@dataclass
class Rounding:
    """The tolerances of a run.

    Attributes:
        given: a tolerance that the user gave for all; None: derive them.
        order: the place of each module in the forward.
        outputs: the tolerance of each module's output.
        whole: that of the whole forward.
        coarsest: the largest unit roundoff of an output.
        drift: what earlier steps may have added.
        gradients: by name, the norm of an error that was measured; {}: derive it.
    """

    given: float | None
    order: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    coarsest: float = FLOAT32
    drift: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)

    def output(self, module: str) -> float:
        """The tolerance of a module's output, relative to the size of a row."""
        return self.given or self.outputs.get(module, self.whole) + self.drift

    def gradient(self) -> float:
        """The tolerance of gradients, relative to the terms that they sum up."""
        return self.given or 2.0 * self.whole + 2.0 * self.drift


def rounding_of(run: Run, given: float | None = None) -> Rounding:
    """The tolerances of a run, from the first step that it recorded, or the one that is given."""
    found = Rounding(given)
    lengths = _lengths(run)
    total, layers = 0.0, 0
    for _, event in run.events(0, "output"):
        name = event["module"]
        if name in found.order:
            continue
        found.order[name] = len(found.order)
        found.coarsest = max(found.coarsest, unit(event["dtype"]))
        layers += 1
        total += lengths.get(name, event["shape"][-1] if event["shape"] else 1)
        found.outputs[name] = tolerance(found.coarsest, layers, total)
    found.whole = max(found.outputs.values(), default=tolerance(found.coarsest, 16, 4096))
    return found


def tolerance(coarsest: float, layers: float, lengths: float) -> float:
    """The formula above, with float32 sums unless the outputs are float64.

    >>> f"{tolerance(FLOAT32, 10, 10 * 1024):.1e}"
    '3.9e-05'
    """
    accumulated = min(coarsest, FLOAT32)
    return SAFETY * (coarsest * sqrt(layers) + accumulated * sqrt(lengths)) + SKETCH


def _lengths(run: Run) -> dict[str, int]:
    """The length of the products of each module with weights."""
    lengths: defaultdict[str, int] = defaultdict(int)
    for rank in run.ranks:
        for info in rank.tensors.values():
            lengths[info.name.rpartition(".")[0]] += prod(info.shape[1:])
    return lengths


def masses(run: Run, step: int, first: Mapping[str, str]) -> dict[str, float]:
    """For each weight, the root of the summed squares of the terms that its gradient adds up."""
    squares: defaultdict[str, float] = defaultdict(float)
    for _, event in run.events(step, "samples", "mass"):
        squares[first.get(event["name"], event["name"])] += float(_mass(event))
    return {name: sqrt(value) for name, value in squares.items()}


def _mass(event: Event) -> float:
    return float(event["mass"].reshape(-1)[0]) if event["mass"].size else 0.0
