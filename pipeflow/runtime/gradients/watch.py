"""Watch: notices that parameters of a module were frozen, unfrozen, or replaced alone or with their layer. It is asked
before every step, so it avoids Python code per parameter.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller

from torch import nn

from pipeflow.runtime.gradients.fully_sharded import others_in

_is_trained = attrgetter("requires_grad")


class Watch:
    """Remembers the current parameters and children of `module` and its children."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(dict.fromkeys(others_in(module)))
        self._registries = [
            *(child._parameters for child in modules if child._parameters),
            *(child._modules for child in modules if child._modules),
        ]
        self._seen = self._now()  # kept alive, so that no new object can have the same id
        self._parameters = [each for each in self._seen if isinstance(each, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))

    def notices(self) -> bool:
        """Returns True if anything has changed since the Watch was made."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        return list(map(_is_trained, self._parameters)) != self._trained

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(map(methodcaller("values"), self._registries)))
