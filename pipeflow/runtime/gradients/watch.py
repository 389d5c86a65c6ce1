"""Watch: notices that parameters of a module were frozen, unfrozen, converted, as by `module.to`, or replaced alone or
with their layer. It is asked before every step, so it avoids Python code per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller

from torch import nn

from pipeflow.runtime.gradients.fully_sharded import others_in

_is_trained = attrgetter("requires_grad")
_form = attrgetter("dtype", "shape", "device")


class Watch:
    """Remembers the current parameters and children of `module` and its children, and the forms of `formed`: parameters
    whose dtype, shape and device matter. Reading these takes three times as long as the rest.
    """

    def __init__(self, module: nn.Module, formed: Iterable[nn.Parameter]) -> None:
        modules = list(dict.fromkeys(others_in(module)))
        self._registries = [
            *(child._parameters for child in modules if child._parameters),
            *(child._modules for child in modules if child._modules),
        ]
        self._seen = self._now()  # kept alive, so that no new object can have the same id
        self._parameters = [each for each in self._seen if isinstance(each, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))
        self._formed = list(formed)
        self._forms = list(map(_form, self._formed))

    def notices(self) -> bool:
        """Returns True if anything has changed since the Watch was made."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        if list(map(_is_trained, self._parameters)) != self._trained:
            return True
        return list(map(_form, self._formed)) != self._forms

    def reformed(self) -> set[nn.Parameter]:
        """The parameters that have another dtype, shape or device than before."""
        return {each for each, form in zip(self._formed, self._forms, strict=True) if _form(each) != form}

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(map(methodcaller("values"), self._registries)))
