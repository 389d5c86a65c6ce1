"""LightningModules in a pipeline, against the same in one process: the same numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from pipeflow.testing import run_processes

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning.modules import BATCH, Continued, fit, make_images

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


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (4, {"tensor": 2}),
    "chunks": (2, {"schedule": "interleaved-1f1b", "schedule_options": {"chunks": 2}}),
    "one": (1, {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_train_as_one_process(tmp_path: Path, layout: str) -> None:
    """Gradients are accumulated and clipped."""
    ranks, sizes = LAYOUTS[layout]
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected = fit("alone", tmp_path, **options)
    run = partial(fit, **options)
    tensor = sizes.get("tensor", 1)
    require_same(run_processes(run, ranks, "pipeline", tmp_path, ranks, sizes, deadline=200.0, tensor=tensor), expected)


@pytest.mark.exhaustive
def test_replicas_train_as_one_process_with_all_their_batches(tmp_path: Path) -> None:
    """Lightning gives each replica every second sample of its own order. A checkpoint has the name that rank 0 gives
    it, although replicas have other losses in validation.
    """
    order: Any = DistributedSampler(make_images(), 1, 0, seed=3)
    expected = fit("alone", tmp_path / "alone", batch=2 * BATCH, sampler=order)
    kept = ModelCheckpoint(tmp_path, "{val_loss:.6f}", save_top_k=-1)
    run = partial(fit, enable_checkpointing=True, callbacks=[kept])
    found = run_processes(run, 4, "pipeline", tmp_path, 4, {"pipeline": 2}, deadline=200.0, data=2)
    for losses, _, _ in found:
        assert losses == pytest.approx(expected[0], abs=1e-5)
    told = [f"val_loss={metrics['val_loss']:.6f}.ckpt" for _, _, metrics in found]
    assert told[0] != told[2]
    assert [(tmp_path / name).is_dir() for name in told] == [True, True, False, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 3e-2), ("64-true", 1e-5), ("bf16-true", 0.2)])
def test_a_precision_is_that_of_one_process(tmp_path: Path, precision: str, tolerance: float) -> None:
    expected = fit("alone", tmp_path, precision=precision)
    for losses, _, _ in run_processes(partial(fit, precision=precision), 2, "pipeline", tmp_path, 2, deadline=200.0):
        assert losses == pytest.approx(expected[0], abs=tolerance)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_another_layout(tmp_path: Path) -> None:
    """From two pipeline ranks to one process of two tensor ranks, and from a file without a pipeline to two ranks."""
    expected = fit("alone", tmp_path / "alone", max_epochs=2, shuffle=False)
    first: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": True, "shuffle": False}
    run_processes(partial(fit, **first), 2, "pipeline", tmp_path, 2, deadline=200.0)
    [saved] = tmp_path.glob("checkpoints/*.ckpt")
    assert saved.is_dir()
    resumed = partial(fit, max_epochs=2, resume=str(saved), shuffle=False)
    found = run_processes(resumed, 2, "pipeline", tmp_path, 2, {"tensor": 2}, deadline=200.0, tensor=2)
    require_rest(found, expected)
    fit("alone", tmp_path / "file", **first)
    [saved] = tmp_path.glob("file/checkpoints/*.ckpt")
    found = run_processes(
        partial(fit, max_epochs=2, resume=str(saved), shuffle=False), 2, "pipeline", tmp_path, 2, deadline=200.0
    )
    require_rest(found, expected)


@pytest.mark.exhaustive
def test_a_run_that_was_cut_short_goes_on_within_its_epoch(tmp_path: Path) -> None:
    """A loader that knows its place gives each batch once."""
    expected = fit("alone", tmp_path / "alone", max_epochs=2, loader=Continued())
    kept = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    short = partial(fit, max_steps=10, enable_checkpointing=True, callbacks=[kept], loader=Continued())
    run_processes(short, 2, "pipeline", tmp_path, 2, deadline=200.0)
    resumed = partial(fit, max_epochs=2, resume=str(tmp_path / "step=9.ckpt"), loader=Continued())
    for losses, _, _ in run_processes(resumed, 2, "pipeline", tmp_path, 2, deadline=200.0):
        assert losses == pytest.approx(expected[0][2 * 9 :], abs=1e-5)


def require_rest(results: list[Any], expected: Any) -> None:
    """The losses of the second half are those of a run that was not interrupted."""
    for losses, _, metrics in results:
        assert losses == pytest.approx(expected[0][len(expected[0]) // 2 :], abs=1e-5)
        assert metrics == pytest.approx(expected[2], abs=1e-5)
