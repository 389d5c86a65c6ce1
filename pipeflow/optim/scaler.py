"""LossScaler: the factor of the loss that keeps small gradients above zero in float16 (Micikevicius et al., 2018,
arXiv:1710.03740, section 3.2). Must not contain: the multiplication, or the search for overflows.
"""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError


class LossScaler:
    """A loss scale that grows after steps without overflow and shrinks after overflows.

    Args:
        initial_scale: the scale at the start.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks, less than 1.
        growth_interval: number of consecutive steps without overflow after which the scale grows.
        hysteresis: after so many overflows since the scale last grew, each overflow shrinks it; 1 shrinks it at every
            overflow.
        min_scale, max_scale: bounds of the scale.

    Attributes:
        scale: the current factor of the loss.

    Raises UsageError for numbers out of range.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale:
            bounds = f"min_scale {min_scale} <= initial_scale {initial_scale} <= max_scale {max_scale}"
            raise UsageError(f"a LossScaler needs 0 < {bounds}")
        if not 0 < backoff_factor < 1 < growth_factor:
            raise UsageError(
                f"a LossScaler needs 0 < backoff_factor {backoff_factor} < 1 < growth_factor {growth_factor}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise UsageError(
                f"growth_interval and hysteresis must be at least 1, got {growth_interval} and {hysteresis}"
            )
        self.scale = initial_scale
        self._growth = (growth_factor, growth_interval, max_scale)
        self._backoff = (backoff_factor, hysteresis, min_scale)
        self._clean = 0  # consecutive steps without overflow
        self._patience = hysteresis

    def update(self, *, overflow: bool) -> None:
        """Updates the scale after a step. All ranks call it with the same argument."""
        if overflow:
            factor, _, smallest = self._backoff
            self._clean, self._patience = 0, max(0, self._patience - 1)
            if self._patience == 0:
                self.scale = max(smallest, self.scale * factor)
            return
        factor, interval, largest = self._growth
        self._clean += 1
        if self._clean == interval:
            self._clean, self._patience = 0, self._backoff[1]
            self.scale = min(largest, self.scale * factor)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters."""
        return {"scale": self.scale, "clean": self._clean, "patience": self._patience}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        self.scale, self._clean, self._patience = (state_dict[key] for key in ("scale", "clean", "patience"))
