"""LossScaler: which number a loss is multiplied by, so that small gradients survive float16 (Micikevicius et al., 2018,
arXiv:1710.03740, section 3.2). What must not live here: who multiplies, and who finds an overflow.
"""

from __future__ import annotations

from typing import Any

from pipeflow.core.errors import UsageError


class LossScaler:
    """Grows after a run of steps without overflow, and shrinks when overflows come often.

    Args:
        initial_scale: at the start.
        growth_factor, growth_interval: the scale grows by this after so many steps without overflow in a row.
        backoff_factor, hysteresis: it shrinks by this at an overflow, from the `hysteresis`-th since it grew last.
        min_scale, max_scale: it stays between them.

    Attributes:
        scale: what to multiply the loss by now.

    Raises UsageError for numbers that make no sense.
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
            raise UsageError(f"it must be 0 < {bounds}")
        if not 0 < backoff_factor < 1 < growth_factor:
            raise UsageError(f"it must be 0 < backoff_factor {backoff_factor} < 1 < growth_factor {growth_factor}")
        if growth_interval < 1 or hysteresis < 1:
            raise UsageError(f"growth_interval {growth_interval} and hysteresis {hysteresis} must be 1 or more")
        self.scale = initial_scale
        self._growth = (growth_factor, growth_interval, max_scale)
        self._backoff = (backoff_factor, hysteresis, min_scale)
        self._clean = 0  # steps in a row
        self._patience = hysteresis

    def update(self, *, overflow: bool) -> None:
        """Takes note of a step. All ranks call it alike."""
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
        """The scale, and what it will do next."""
        return {"scale": self.scale, "clean": self._clean, "patience": self._patience}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.scale, self._clean, self._patience = (state_dict[key] for key in ("scale", "clean", "patience"))
