"""One step of each adapter with any form of a loss, in one process or in a pipeline: what it computes, or its error."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.losses.forms import FOUND, WHOLE, Loss
from tests.losses.words import Words, batch_of

MICROBATCHES, SAMPLES = 3, 7
_OWN = re.compile(r"(embedding|layers|head)\b.*")
FORMS: dict[str, Loss] = {each.__name__: each for each in (*FOUND, *WHOLE)}


class Case(NamedTuple):
    """A program.

    Attributes:
        form: the name of the form of its loss.
        adapter: the adapter that runs it.
        where: what computes the loss: "model", "script", "step", "function" or "trainer".
        labels: what the labels are called.
        is_pair: whether the batch is a pair, rather than a dict.
        options: further options of the pipeline.
    """

    form: str
    adapter: str
    where: str = "model"
    labels: str = "labels"
    is_pair: bool = False
    options: tuple[tuple[str, Any], ...] = ()


class Told(NamedTuple):
    """What came of it.

    Attributes:
        loss: the step's.
        weights: of this rank, after a step of SGD.
        error: its class and what it says; empty if there was none.
        warned: what pipeflow warned of.
    """

    loss: float = 0.0
    weights: dict[str, Any] | None = None
    error: str = ""
    warned: str = ""


class OfLabels(Words):
    """Its labels are called so, and its output is a dict."""

    name = "labels"

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:
        return self.told(idx, labels)

    def told(self, idx: Tensor, labels: Tensor | None) -> Any:
        found = super().forward(idx, labels)
        return {"logits": found} if labels is None else {"loss": found[1], "logits": found[0]}


class OfTarget(OfLabels):
    name = "target"

    def forward(self, idx: Tensor, target: Tensor | None = None) -> Any:
        return self.told(idx, target)


class OfY(OfLabels):
    name = "y"

    def forward(self, idx: Tensor, y: Tensor | None = None) -> Any:
        return self.told(idx, y)


MODULES = {each.name: each for each in (OfLabels, OfTarget, OfY)}


def batch(case: Case) -> Any:
    words, labels = batch_of(SAMPLES)
    return (words, labels) if case.is_pair else {"idx": words, case.labels: labels}


def parts(case: Case, given: Any) -> tuple[Tensor, Tensor]:
    return (given[0], given[1]) if case.is_pair else (given["idx"], given[case.labels])


def loss_of(case: Case, model: Any, given: Any) -> Any:
    """As a script or a step computes it with the model."""
    if case.where == "model":
        return (model(*given) if case.is_pair else model(**given))["loss"]
    words, labels = parts(case, given)
    return FORMS[case.form](model(words)["logits"], labels)


def weights_of(module: nn.Module) -> dict[str, Any]:
    """By their names in the model of words; those of other ranks are on no device."""
    named = [(name, each.detach()) for name, each in module.named_parameters() if not each.is_meta]
    return {_OWN.search(name)[0]: each.tolist() for name, each in named}  # type: ignore[index]


def with_accelerate(case: Case, ranks: int) -> Told:
    from tests.accelerate.loops import accelerator_of

    options = {} if ranks == 1 else {"microbatches": MICROBATCHES, **dict(case.options)}
    accelerator = accelerator_of("accelerate" if ranks == 1 else "pipeflow", **options)
    module = MODULES[case.labels](FORMS[case.form])
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    try:
        loss = loss_of(case, model, batch(case))
        accelerator.backward(loss)
        optimizer.step()
        return Told(float(loss), weights_of(model))
    finally:
        accelerator.free_memory()


def with_fabric(case: Case, ranks: int) -> Told:
    from lightning.fabric import Fabric

    strategy: Any = "auto"
    if ranks > 1:
        from pipeflow.adapters.lightning.fabric import PipelineStrategy

        strategy = PipelineStrategy(microbatches=MICROBATCHES, **dict(case.options))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    module: Any = stepping(case) if case.where == "step" else MODULES[case.labels](FORMS[case.form])
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    loss = model.training_step(batch(case), 0) if case.where == "step" else loss_of(case, model, batch(case))
    fabric.backward(loss)
    optimizer.step()
    return Told(float(loss), weights_of(model))


def stepping(case: Case) -> Any:
    """A LightningModule whose step computes the loss, or asks the model for it."""
    from lightning.pytorch import LightningModule

    class Stepping(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODULES[case.labels](FORMS[case.form])
            self.seen: list[float] = []

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return self.inner(*arguments, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(case, self, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(outputs["loss"]))

    return Stepping()


def with_lightning(case: Case, ranks: int) -> Told:
    from lightning.pytorch import Trainer

    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1, "devices": ranks}
    if ranks > 1:
        from pipeflow.lightning import PipelineStrategy

        options["strategy"] = PipelineStrategy(microbatches=MICROBATCHES, **dict(case.options))
    module = stepping(case)
    data: Any = [batch(case)]
    Trainer(**options).fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    [loss] = module.seen
    return Told(loss, weights_of(module))


def with_trainer(case: Case, ranks: int) -> Told:
    from pipeflow.adapters.libraries import transformers_library

    transformers = transformers_library()
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    options |= {"max_grad_norm": 0.0, "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error"}
    options |= {"per_device_train_batch_size": SAMPLES, "label_names": [case.labels], "save_strategy": "no"}
    module: Any = MODULES[case.labels](FORMS[case.form])
    base: Any = transformers.Trainer
    if ranks > 1:
        from pipeflow import Pipeline, huggingface, make_schedule

        base = huggingface.Trainer
        extra = dict(case.options)
        made = make_schedule(extra.pop("schedule", "1f1b"), ranks=ranks, microbatches=MICROBATCHES)
        example = batch(case) if case.where == "model" else {"idx": batch(case)["idx"]}
        module = Pipeline.from_module(module, made, example, **extra)

    class Kept(base):  # type: ignore[misc]  # one of two
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            self.seen = super().training_step(*arguments, **options)
            return self.seen

        if case.where == "trainer":

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                outputs = model(idx=inputs["idx"])
                loss = FORMS[case.form](outputs["logits"], inputs[case.labels])
                return (loss, outputs) if return_outputs else loss

    function = {"compute_loss_func": functional_loss(case)} if case.where == "function" else {}
    samples = [dict(zip(batch(case), each, strict=True)) for each in zip(*batch(case).values(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **options)
        trainer = Kept(module, arguments, train_dataset=InOrder(samples), **function)
        trainer.train()
    return Told(float(trainer.seen), weights_of(trainer.model))


class InOrder(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Samples that no sampler shuffles."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def functional_loss(case: Case) -> Callable[..., Any]:
    """As transformers' Trainer takes it."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return FORMS[case.form](outputs["logits"], labels)

    return loss


def with_module(case: Case, ranks: int) -> Told:
    """Of `Pipeline.from_module`; one process needs none."""
    from pipeflow import Pipeline, execute_pipeline, make_schedule

    module: Any = MODULES[case.labels](FORMS[case.form])
    given = batch(case)
    if ranks == 1:
        loss = loss_of(case, module, given)
        loss.backward()
    else:
        extra: dict[str, Any] = dict(case.options)
        made = make_schedule(extra.pop("schedule", "1f1b"), ranks=ranks, microbatches=MICROBATCHES)
        if case.where == "script":
            extra["criterion"] = logits_loss(FORMS[case.form])
            given = given if case.is_pair else ({"idx": given["idx"]}, given[case.labels])
        elif case.is_pair:
            given = given, given[1]
        module = Pipeline.from_module(module, made, given, **extra)
        loss = execute_pipeline(iter([given]), module, broadcast_loss=True).loss
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    return Told(float(loss), weights_of(module))


def logits_loss(form: Loss) -> Callable[..., Tensor]:
    def loss(output: Any, labels: Tensor) -> Tensor:
        return form(output["logits"], labels)

    return loss


ADAPTERS: dict[str, Callable[[Case, int], Told]] = {
    "from_module": with_module,
    "accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
    "Trainer": with_trainer,
}


def tried(cases: list[Case], ranks: int) -> list[Told]:
    """What came of each program on this rank, one after the other."""
    torch.set_num_threads(1)
    found = []
    for case in cases:
        with heard() as said:
            try:
                one = ADAPTERS[case.adapter](case, ranks)
            except Exception as error:
                one = Told(error=f"{type(error).__name__}: {error}")
        found.append(one._replace(warned="; ".join(said)))
    return found


class _Hearing(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """What pipeflow warns of inside the `with` block."""
    said: list[str] = []
    hearing, logger = _Hearing(said), logging.getLogger("pipeflow")
    logger.addHandler(hearing)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught if "/pipeflow/" in each.filename]
    finally:
        logger.removeHandler(hearing)
