"""Options of ColossalAI that have no effect here: their defaults are accepted, any other value is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipeflow.colossalai import plugins, policies
from pipeflow.colossalai.booster.plugin import HybridParallelPlugin
from pipeflow.colossalai.policies import Elsewhere
from pipeflow.colossalai.shardformer import ShardConfig
from pipeflow.core.errors import UsageError
from pipeflow.testing import run_threads


def plugin(**options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(1, 1, precision="fp32", **options)


def test_the_size_of_sequences_may_be_left_open() -> None:
    run_threads(lambda: plugin(sp_size=None).tp_size, 1)


EACH: list[tuple[Callable[..., Any], str, Elsewhere]] = [
    (make, name, option)
    for make, options in ((plugin, plugins.ELSEWHERE), (ShardConfig, policies.ELSEWHERE))
    for name, option in options.items()
]


def another(default: Any) -> Any:
    return not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else "another"


@pytest.mark.parametrize(("make", "name", "option"), EACH, ids=lambda value: value if isinstance(value, str) else "")
def test_an_option_without_effect(make: Callable[..., Any], name: str, option: Elsewhere) -> None:
    def rank() -> None:
        make(**{name: option.default})
        value = another(option.default)
        with pytest.raises(UsageError, match=re.escape(f"does not support {name}={value!r}: {option.instead}")):
            make(**{name: value})

    run_threads(rank, 1)
