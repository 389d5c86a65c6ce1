"""Listed: the layers of a model in the order in which they are called, with functions between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipeflow.colossalai.pipeline.model import Function, Functions
from pipeflow.core.errors import UsageError

SPLIT = "SPLIT_NODE"


@dataclass
class Listed:
    """A list of layers.

    Attributes:
        layers: the layers.
        splits: indices of the layers before which the list is split.
        fronts, behinds: functions before and behind layers, by the layer's index as a text.
    """

    layers: list[nn.Module]
    splits: list[int] = field(default_factory=list)
    fronts: Functions = field(default_factory=lambda: defaultdict(list))
    behinds: Functions = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, exec_seq: Sequence[Any], model: nn.Module) -> Listed:
        """Reads a list of names of the model's modules; of functions, which are called behind the layer before them,
        or, as `(function, "front")`, before the next layer; and of "SPLIT_NODE" between stages.

        Raises UsageError for a name that is no module, for a function without its layer, and for another element.
        """
        made, modules, waiting = cls([]), dict(model.named_modules()), list[Function]()
        for element in exec_seq:
            function, where = element if isinstance(element, tuple) else (element, "behind")
            here = len(made.layers)
            if element == SPLIT:
                made.splits.append(here)
            elif isinstance(element, str) and element in modules:
                made.fronts[str(here)], waiting = waiting, []
                made.layers.append(modules[element])
            elif where == "front" and callable(function):
                waiting.append(function)
            elif where == "behind" and callable(function) and here:
                made.behinds[str(here - 1)].append(function)
            else:
                raise UsageError(
                    f"exec_seq has {element!r}, which is neither a module of {type(model).__name__} nor {SPLIT}, a "
                    "function behind a layer, or (function, 'front')"
                )
        if waiting:
            raise UsageError("exec_seq ends with a function for the front of a layer: put it before the layer")
        return made
