"""What Lightning's own tests ask of a strategy that runs on a CPU, with its own small modules, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from pipeflow.lightning import PipelineStrategy

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


def trainer_of(**options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"devices": 1, "strategy": PipelineStrategy(microbatches=1), **quiet, **options}
    return Trainer(**options)


def test_fit_validate_test_and_predict_leave_the_weights() -> None:
    trainer, module, data = trainer_of(max_epochs=1), BoringModel(), BoringDataModule()
    before = module.layer.weight.detach().clone()
    trainer.fit(module, datamodule=data)
    assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
    trained = module.layer.weight.detach().clone()
    assert not torch.equal(trained, before)
    trainer.validate(module, datamodule=data)
    trainer.test(module, datamodule=data)
    assert all(each.shape == (1, 2) for each in trainer.predict(module, datamodule=data))
    assert torch.equal(module.layer.weight, trained)


@pytest.mark.parametrize("changes", [False, True])
def test_a_change_that_stages_do_not_see_is_told_if_it_is_the_modules(
    changes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning sets attributes of its own around each step."""

    class Changing(BoringModel):  # type: ignore[misc]  # Lightning's types are not read
        rate = 1.0

        def on_validation_start(self) -> None:
            if changes:
                self.rate = 2.0

    trainer_of(fast_dev_run=2).fit(Changing())
    assert ("rate of the module was changed" in caplog.text) is changes
    assert "_current_fx_name" not in caplog.text


def test_a_module_is_tested_alone() -> None:
    trainer_of(fast_dev_run=2).test(BoringModel())


def test_layers_are_made_in_configure_model() -> None:
    class Late(BoringModel):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.layer: Any = None

        def configure_model(self) -> None:
            if self.layer is None:
                self.layer = torch.nn.Linear(32, 2)

    trainer = trainer_of(fast_dev_run=2)
    trainer.fit(Late())
    assert trainer.state.finished


def test_the_ranks_are_connected_and_the_device_is_known_in_hooks() -> None:
    class Asking(BoringModel):  # type: ignore[misc]  # as above
        def setup(self, stage: str) -> None:
            assert torch.distributed.is_initialized()

        def on_train_start(self) -> None:
            assert self.device == torch.device("cpu")

    trainer = trainer_of(fast_dev_run=2)
    assert trainer.strategy.root_device == torch.device("cpu")
    trainer.fit(Asking())


def test_a_number_is_logged_as_it_is_and_stops_early() -> None:
    class Telling(BoringModel):  # type: ignore[misc]  # as above
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("told", 1.0)
            return super().validation_step(batch, batch_idx)

    kept = ModelCheckpoint(monitor="told", save_top_k=2, save_last=True)
    trainer = trainer_of(
        max_epochs=9, limit_train_batches=2, limit_val_batches=2, callbacks=[EarlyStopping("told", patience=2), kept]
    )
    trainer.fit(Telling(), datamodule=BoringDataModule())
    assert trainer.callback_metrics["told"] == 1.0
    assert trainer.current_epoch == 3
    assert len(list(Path("checkpoints").iterdir())) == 3


def test_frozen_parts_stay() -> None:
    class Frozen(BoringModel):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(32, 32)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                batch = self.first(batch)
            return super().training_step(batch, batch_idx)

    module = Frozen()
    before = module.first.weight.detach().clone()
    trainer_of(fast_dev_run=2).fit(module)
    assert torch.equal(module.first.weight, before)


@pytest.mark.parametrize("is_external", [True, False])
def test_lightning_starts_processes_unless_others_do(is_external: bool) -> None:
    class Cluster(LightningEnvironment):  # type: ignore[misc]  # as above
        @property
        def creates_processes_externally(self) -> bool:
            return is_external

    trainer = trainer_of(devices=2, plugins=[Cluster()])
    assert (trainer.strategy.launcher is None) is is_external


def test_a_process_that_was_started_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(LightningEnvironment):  # type: ignore[misc]  # as above
        creates_processes_externally = False

    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match="attempted to launch new distributed processes with `local_rank > 0`"):
        trainer_of(devices=2, plugins=[Wrong()]).fit(BoringModel())
