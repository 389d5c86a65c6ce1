"""Watch: notices when the parameters of a module are others than they were: unfrozen, replaced alone or with their
layer. Asked before every step, so no line of Python runs once per parameter.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller

from torch import nn

from pipeflow.runtime.gradients.fully_sharded import others_in

_is_trained = attrgetter("requires_grad")


class Watch:
    """Of the parameters of `module` and its children, and of these, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(dict.fromkeys(others_in(module)))
        self._registries = [
            *(child._parameters for child in modules if child._parameters),
            *(child._modules for child in modules if child._modules),
        ]
        self._seen = self._now()  # kept alive, so that none is taken for another one in its place
        self._parameters = [each for each in self._seen if isinstance(each, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))

    def notices(self) -> bool:
        """Whether anything has changed since."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        return list(map(_is_trained, self._parameters)) != self._trained

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(map(methodcaller("values"), self._registries)))
