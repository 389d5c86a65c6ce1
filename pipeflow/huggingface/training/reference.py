"""Reference: the reference model of TRL's DPOTrainer, a Pipeline of its own, whose forward comes before each step. Must
not contain: the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.huggingface.training.own_loss import Trial, acting
from pipeflow.huggingface.training.places import show_attributes
from pipeflow.parallel.trees import shared_outputs
from pipeflow.runtime.computing import computing
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.microbatch import Whole
from pipeflow.runtime.pipeline import Pipeline

_NAMES = ("ref_chosen_logps", "ref_rejected_logps")


def require_reference(options: dict[str, Any]) -> None:
    """Prepares the Pipeline that a trainer with a parameter `ref_model` was given for it. Raises UsageError for
    another model, and for none.
    """
    model = options.get("ref_model")
    if not isinstance(model, Pipeline):
        raise UsageError(
            f"the reference model must be a Pipeline with the schedule of the trained one, got {type(model).__name__}: "
            "pass ref_model=pipeflow.huggingface.from_pretrained(folder, schedule)"
        )
    show_attributes(model)


class Reference:
    """Computes what the reference model gives to each sample of a batch.

    Args:
        trainer: a DPOTrainer with a `ref_model` that is a Pipeline.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._model: Pipeline = trainer.ref_model
        self._known: dict[Any, int] = {}  # as in OwnLoss
        trainer.precompute_ref_logps = True  # the loss reads them from the batch

    def added(self, inputs: Any) -> Trial:
        """The batch with the log probabilities of the reference model, on every rank."""
        model = self._model.eval()
        with computing(model, self._forward, has_loss=False):
            told = execute_pipeline(iter([inputs]), model, forward_only=True, return_outputs=True)
        with model.alarm.raised_everywhere():
            found: tuple[Tensor, ...] = shared_outputs(told.outputs, model.context)
        parts: list[Any] = inputs.microbatches
        rows = [len(each["input_ids"]) // 2 for each in parts]
        columns = [
            dict(zip(_NAMES, map(Whole, each), strict=True))
            for each in zip(*(part.split(rows) for part in found), strict=True)
        ]
        another = getattr(inputs, "another", None)
        if another is not None:  # only traced, so values do not matter
            size = len(another["input_ids"]) // 2
            another = {
                **another,
                **{name: Whole(each.new_zeros(size)) for name, each in zip(_NAMES, found, strict=True)},
            }
        made = [{**each, **column} for each, column in zip(parts, columns, strict=True)]
        return Trial(made, inputs.schedule, another)

    def _forward(self, module: nn.Module, **entries: Any) -> Any:
        with acting(self._trainer, self._model, module, self._known):
            return self._trainer.compute_ref_log_probs(module, entries)
