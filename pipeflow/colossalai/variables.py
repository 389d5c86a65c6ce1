"""Settings that a script keeps in variables beside its configuration, as the tutorials do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeflow.training.config import Config

Source = Config | Mapping[str, Any] | str | Path
_KINDS = {"TENSOR_SHAPE": (tuple, list), "NUM_CHUNKS": (int,)}


def with_variables(config: Source) -> Source:
    """Returns the configuration; if it is a dict, with TENSOR_SHAPE and NUM_CHUNKS from the script that Python runs,
    unless the dict has them.
    """
    if not isinstance(config, Mapping):
        return config
    script, model = vars(sys.modules["__main__"]), config.get("model")
    known = {*config, *(["NUM_CHUNKS"] if isinstance(model, Mapping) and "num_chunks" in model else [])}
    found = {
        name: script[name]
        for name, kinds in _KINDS.items()
        if name not in known and isinstance(script.get(name), kinds)
    }
    return {**found, **config}
