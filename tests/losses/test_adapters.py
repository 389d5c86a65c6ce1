"""However a loss is written, each adapter trains as one process does, or its first step says what to write. Nothing is
only warned of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from pipeflow.testing import run_processes
from tests.losses.adapters import FORMS, Case, Told, tried
from tests.losses.forms import FOUND, WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NEEDS = {"accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning", "Trainer": "transformers"}
WAYS = {
    "from_module": ["model", "script"],
    "accelerate": ["model", "script"],
    "Fabric": ["model", "script", "step"],
    "Lightning": ["model", "script"],
    "Trainer": ["model", "function", "trainer"],
}
EVERY = [(adapter, where) for adapter, ways in WAYS.items() for where in ways]
SUMS, OTHERS = ([each.__name__ for each in forms] for forms in (FOUND, WHOLE))
FEW = ["mean_ce", "sum_over_read", "three_terms", "perplexity"]
SAYS = ("weigh=", "divide a sum by num_items_in_batch", "pass labels to", "pass labels of", "compute one loss of it")
BY_NAME = re.compile(rf".*UsageError: .*({'|'.join(SAYS)})", re.DOTALL)


def programs(adapter: str, where: str, forms: Sequence[str]) -> list[Case]:
    """With labels of each name, in a dict; and in a pair, where the adapter takes one."""
    names = ["labels"] if where == "function" else ["labels", "target", "y"]
    pairs = [] if adapter == "Trainer" else ["labels"]
    cases = [Case(form, adapter, where, name) for form in forms for name in names]
    return cases + [Case(form, adapter, where, name, is_pair=True) for form in forms for name in pairs]


def outcome(expected: Told, found: Sequence[Told]) -> str:
    """ "right", "refused", or what is wrong."""
    if all(each.error for each in found):
        return "refused" if all(map(BY_NAME.match, (each.error for each in found))) else found[-1].error
    if any(each.error for each in found):
        return f"not all ranks have an error: {[each.error for each in found]}"
    weights = {name: value for each in found for name, value in (each.weights or {}).items()}
    if expected.error or expected.weights is None or weights.keys() != expected.weights.keys():
        return f"{expected.error}: {sorted(weights)}"
    if any(each.warned for each in found):
        return f"warned: {found[-1].warned}"
    off = max(_distance(weights[name], value) for name, value in expected.weights.items())
    away = max(abs(each.loss - expected.loss) / abs(expected.loss) for each in found)
    return "right" if off < 1e-9 and away < 1e-9 else f"weights {off:.1e} and loss {away:.1e} off"


def _distance(one: Any, other: Any) -> float:
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    return float((first - second).abs().max() / max(1.0, float(second.abs().max())))


def outcomes(cases: list[Case]) -> dict[Case, str]:
    [alone] = run_processes(tried, 1, cases, 1, deadline=1500.0)
    ranks = run_processes(tried, 2, cases, 2, deadline=1500.0)
    return {case: outcome(one, found) for case, one, *found in zip(cases, alone, *ranks, strict=True)}


def require(adapter: str, ways: Sequence[str], forms: Sequence[str]) -> None:
    """All sums over samples are right, unless a script computes them from a model's output that is on another rank;
    what is no sum is refused, unless a script computes it from a loss that is one.
    """
    if adapter in NEEDS and find_spec(NEEDS[adapter]) is None:
        pytest.skip(f"{NEEDS[adapter]} is not installed")
    found = outcomes([case for where in ways for case in programs(adapter, where, forms)])
    wrong = {}
    for case, told in found.items():
        of_output = case.where == "script" and adapter in ("accelerate", "Fabric")
        expected = {"right", "refused"} if of_output else {"right" if case.form in SUMS else "refused"}
        if told not in expected:
            wrong[case] = told
    assert not wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize(("adapter", "where"), EVERY)
def test_every_form_is_right_or_refused(adapter: str, where: str) -> None:
    require(adapter, [where], [*FORMS])


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", [*NEEDS])
def test_a_few_forms_are_right_or_refused(adapter: str) -> None:
    require(adapter, WAYS[adapter], FEW)
