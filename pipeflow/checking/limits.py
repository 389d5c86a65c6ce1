"""Limits: when two numbers of the runs count as the same, and the reason of each limit. Must not contain: comparisons.

How far rounding takes two runs of the same computation apart is derived from its sizes and dtypes. A product of length
n whose errors are independent has a relative error near sqrt(n) u, with the unit roundoff u: Higham and Mary, "A new
approach to probabilistic rounding error analysis" (2019). Errors of the layers before add up in the same way, so that
after layers of lengths n_1 ... n_d, whose outputs are rounded to the unit u' of their dtype,

    tolerance = SAFETY (u' sqrt(d) + u sqrt(n_1 + ... + n_d)) + SKETCH.

A backward goes through the layers once more, and the gradient of a weight also sums over samples and tokens. Its error
is relative to the terms of this sum, whose root of summed squares the plain run records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

# What rounding explains. All are relative, unless their line says of what they are a share or a multiple.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FLOAT32 = UNITS["float32"]
SAFETY = 6.0  # standard deviations of an error that is a sum of many: exceeded twice in 10^9
SKETCH = 2e-6  # what float32 loses in the sums of a sketch, of the norm
SUMMED = 4.0  # times what is allowed: a sum of the outputs of several ranks, of which each rounds
LOSS = 1e-6  # a loss is often read as a float32 number, of which this is 16 units
NO_GRADIENT = 1e-5  # of the norm of all gradients: one that should be zero, as that of the bias of keys, is noise
LEAST_CHANGE = 0.05  # of a dtype's rounding: a smaller change of a weight is that of single entries
LARGEST = 0.5  # tolerance above which an update is not compared: adaptive optimizers make it of noise
OF_MOMENTS = 0.25  # tolerance of what an optimizer keeps, which is compared where noise of gradients is below it
OF_VECTORS = 1.2  # tolerance of updates of biases, of which a part, that of keys, is always such noise
FAR = 6.0  # times the root mean square of what is allowed: a wrong element, as SAFETY says

# When an explanation holds. Eight probes estimate a norm to a quarter, so what is left is far below what was wrong.
CLEAR = 0.03  # what may be left of a value that is explained
EXPLAINED = 0.25  # of what differs: what may be left of it, so that a small difference is not explained by CLEAR alone
PARTLY = 0.25  # what may be left of a gradient whose parts have different factors
NEAR = 0.02  # what a factor may be off a count: those up to 50 are told apart
NO_FACTOR = 1e-3  # a factor that is none: the values are zero
NEAR_LOGARITHM = 1e-3  # what the difference of two losses may be off the logarithm of a count
SAME_VALUES = 1e-4  # what squared norms of the same values at other places may be apart
CLIPPED = 1e-4  # what the norm of all gradients may be off a round number, and that of other steps, if it is clipped
APART = 0.1  # of how far gradients are off: a loss that is less off has not their factor
SAME_ROWS = 1e-3  # the same for rows of outputs, of which each is one sample's
SAME_START = 1e-3  # what sketches of initial values that are called the same may be apart: different draws are far off
SAME_RULE = 1e-6  # what two rates of an optimizer may be apart, which are computed in float64
DISAGREES = 1e-3  # by how much ranks differ that each have a term of a sum: rounding is below it in most dtypes
ABSENT = 0.01  # of a change that should be: no change
COUNTS = 0.1  # of a sample's weight: one that is not below it counts
WHOLE_COUNT = 0.05  # what the weight of a sample may be off 0, 1 or 2, of those of the others
UNEVEN = 0.03  # by how much the weights of samples differ that count differently

# When fewer bits may be the cause of an error.
LESS_PRECISE = 0.08  # of a gradient: errors below it may come from a dtype of 8 bits
COARSE = 0.03  # the same for an output
COARSE_UPDATE = 0.3  # the same for the change of a weight, which is small beside the weight that is rounded

TINY = 1e-300  # in place of a norm that is 0


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


def tolerance(coarsest: float, layers: float, lengths: float) -> float:
    """The formula above, with float32 sums unless the outputs are float64.

    >>> f"{tolerance(FLOAT32, 10, 10 * 1024):.1e}"
    '3.9e-05'
    """
    accumulated = min(coarsest, FLOAT32)
    return SAFETY * (coarsest * sqrt(layers) + accumulated * sqrt(lengths)) + SKETCH
