"""Checkpoints under Megatron-LM's names: saved under one layout, loaded under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core import dist_checkpointing
from pipeflow.models import GPTLMHead
from pipeflow.tensor import current_tracker
from pipeflow.testing import run_threads
from tests.megatron.small import loader, logged_losses, models, run_step


def sharded(made: list[Any], prefix: str = "") -> Any:
    """What programs pass: a model's, or those of several by name."""
    if len(made) == 1:
        return made[0].sharded_state_dict(prefix=prefix)
    return {f"model{index}": model.sharded_state_dict(prefix=prefix) for index, model in enumerate(made)}


def save(path: Path, chunks: int, tied: bool) -> list[float]:
    """Trains a little and saves; gives the losses of what was saved."""
    made = models(chunks, tied=tied)
    optimizer = torch.optim.SGD([parameter for model in made for parameter in model.parameters()], lr=0.5)
    run_step(made, iter(loader()))
    optimizer.step()
    dist_checkpointing.save(sharded_state_dict=sharded(made, "model."), checkpoint_dir=str(path))
    return logged_losses(run_step(made, iter(loader()), forward_only=True))


def load(path: Path, chunks: int, tied: bool) -> tuple[list[float], list[float], list[float]]:
    """The losses of a new model, of the same after something was loaded, and after it took what was."""
    made = models(chunks, tied=tied)
    losses = [logged_losses(run_step(made, iter(loader()), forward_only=True))]
    state = sharded(made, "model.")
    loaded = dist_checkpointing.load(sharded_state_dict=state, checkpoint_dir=str(path))
    assert loaded.keys() == state.keys()
    losses.append(logged_losses(run_step(made, iter(loader()), forward_only=True)))
    for model, part in zip(made, [loaded] if len(made) == 1 else loaded.values(), strict=True):
        model.load_state_dict({name.removeprefix("model."): value for name, value in part.items()})
    losses.append(logged_losses(run_step(made, iter(loader()), forward_only=True)))
    return losses[0], losses[1], losses[2]


@pytest.mark.some(6)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 2, 1), (1, 1, 1)), ((4, 2, 1), (2, 2, 1)), ((2, 1, 2), (4, 2, 1)), ((1, 1, 1), (4, 2, 2))],
)
def test_any_layout_loads_what_another_saved(tmp_path: Path, saved: Any, loaded: Any, tied: bool) -> None:
    ranks, tensor, chunks = saved
    *_, expected = run_threads(save, ranks, tmp_path / "saved", chunks, tied, tensor=tensor)
    ranks, tensor, chunks = loaded
    *_, (new, untouched, found) = run_threads(load, ranks, tmp_path / "saved", chunks, tied, tensor=tensor)
    assert len(new) == 4
    assert new == untouched
    assert new != pytest.approx(expected, rel=1e-3)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_folder_that_is_there_is_written_to(tmp_path: Path) -> None:
    def again() -> None:
        made = models()
        for _ in range(2):
            dist_checkpointing.save(sharded(made), tmp_path)
            dist_checkpointing.load(sharded(made), tmp_path)

    run_threads(again, 1)


def test_a_load_leaves_random_states_alone(tmp_path: Path) -> None:
    def drawn() -> None:
        made, tracker = models(), current_tracker()
        assert tracker is not None
        dist_checkpointing.save(sharded(made), tmp_path / "saved")
        torch.rand(7, generator=tracker.shared)
        torch.rand(7)
        before = tracker.get_state(), torch.get_rng_state()
        dist_checkpointing.load(sharded(made), tmp_path / "saved")
        assert tracker.get_state()["shared"].equal(before[0]["shared"])
        assert torch.get_rng_state().equal(before[1])

    run_threads(drawn, 1)


def test_names_do_not_depend_on_the_layout() -> None:
    def names() -> set[str]:
        return set(sharded(models(), "model."))

    [whole] = run_threads(names, 1)
    assert "model.blocks.3.attention.query_key_value.weight" in whole
    assert set().union(*run_threads(names, 2)) == whole
    assert run_threads(names, 2, tensor=2) == [whole, whole]


def test_what_is_no_models_is_refused(tmp_path: Path) -> None:
    def refused() -> None:
        made = models()
        optimizer = torch.optim.SGD(made[0].parameters(), lr=1.0)
        both = {"model": sharded(made), "optimizer": optimizer.state_dict()}
        with pytest.raises(UsageError, match="entry 'optimizer' is not a model's sharded_state_dict"):
            dist_checkpointing.save(both, tmp_path / "saved")
        with pytest.raises(UsageError, match="entry 'optimizer'"):
            dist_checkpointing.load(both, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()

    run_threads(refused, 1)


def test_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    def refused() -> None:
        made = models()
        dist_checkpointing.save(sharded(made), tmp_path / "saved")
        before = {name: value.clone() for name, value in made[0].state_dict().items()}
        made[0].head = GPTLMHead(5, 16)
        del before["head.weight"]
        with pytest.raises(UsageError, match="is a checkpoint of another model"):
            dist_checkpointing.load(sharded(made), tmp_path / "saved")
        assert all(value.equal(made[0].state_dict()[name]) for name, value in before.items())

    run_threads(refused, 1)
