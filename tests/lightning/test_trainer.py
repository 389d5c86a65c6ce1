"""LightningModules in a pipeline, against the same in one process: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeflow.testing import run_processes

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from tests.lightning.modules import fit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def require_same(results: list[Any], expected: Any) -> None:
    for losses, others, metrics in results:
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert others == pytest.approx(expected[1], abs=1e-5)
        assert metrics == pytest.approx(expected[2], abs=1e-5)


def test_a_module_trains_as_in_one_process(tmp_path: Path) -> None:
    expected = fit("alone", tmp_path)
    assert len(expected[0]) > 20
    require_same(run_processes(fit, 2, "pipeline", tmp_path, 2, deadline=200.0), expected)
