"""Through each adapter a model trains as in one process: with several losses, plain numbers beside them, an error and
the next step, evaluation, accumulation, clipping, resuming under another layout, and data without a length.
"""

from __future__ import annotations

import logging
import re
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pipeflow.testing import run_processes, run_threads
from tests.adapters.entries import ENTRIES, Entry
from tests.adapters.programs import CONCERNS, LOSSES, TOGETHER, Program, Told, run_loop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-9


def ran(adapter: str, programs: Mapping[str, Program], folder: Path) -> list[Told]:
    """What comes of each program on this rank, one after the other."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = []
    for name, program in programs.items():
        own = folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        try:
            found.append(ENTRIES[adapter].run(program, own))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.append(Told(error=f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"))
    return found


def off(one: object, other: object) -> float:
    """The largest difference, relative to the largest entry."""
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    return float((first - second).abs().max() / max(1.0, float(second.abs().max())))


def wrong(entry: Entry, name: str, expected: Told, found: Sequence[Told]) -> str:
    """What is wrong with what the ranks say; empty if nothing is."""
    refusal = next((said for start, said in entry.refuses.items() if name.startswith(start)), None)
    errors = [each.error for each in found]
    if refusal is not None:
        return "" if all(re.search(refusal, error) for error in errors) else f"not refused: {errors}"
    if any(errors):
        return f"{errors}"
    weights = {its: value for each in found for its, value in each.weights.items()}
    if weights.keys() != expected.weights.keys():
        return f"other weights: {sorted(weights)}"
    away = {"weights": max(off(weights[its], value) for its, value in expected.weights.items())}
    for rank, each in enumerate(found):
        if each.losses[0] is not None:
            away[f"losses of rank {rank}"] = off(each.losses, expected.losses)
        if each.evaluated is not None and expected.evaluated is not None:
            away[f"evaluation of rank {rank}"] = max(map(off, each.evaluated, expected.evaluated))
    told = [each for each in found if each.evaluated is not None]
    if (expected.evaluated is not None) is not bool(told) or all(each.losses[0] is None for each in found):
        return "no rank knows the result"
    if entry.passes_numbers and any(each.numbers != expected.numbers for each in told):
        return f"numbers {[each.numbers for each in told]}, not {expected.numbers}"
    return ", ".join(f"{what} {by:.1e} off" for what, by in away.items() if not by < TOLERANCE)


def require(adapter: str, programs: Mapping[str, Program]) -> None:
    entry = ENTRIES[adapter]
    if find_spec(entry.needs) is None:
        pytest.skip(f"{entry.needs} is not installed")
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        expected = [run_loop(entry.plain, program, folder) for program in programs.values()]
        run = run_threads if entry.by_threads else run_processes
        ranks = run(ran, 2, adapter, programs, folder, deadline=900.0)
    found = {name: wrong(entry, name, one, its) for name, one, *its in zip(programs, expected, *ranks, strict=True)}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.some(len(ENTRIES))
@pytest.mark.parametrize("adapter", ENTRIES)
def test_all_concerns_together(adapter: str) -> None:
    require(adapter, TOGETHER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", ENTRIES)
@pytest.mark.parametrize("concern", CONCERNS)
def test_each_concern_with_each_loss(concern: str, adapter: str) -> None:
    require(adapter, {f"{concern}, {loss}": Program(loss=loss, **CONCERNS[concern]) for loss in LOSSES})
