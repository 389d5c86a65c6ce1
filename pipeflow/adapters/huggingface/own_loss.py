"""What a trainer computes itself, in stages: OwnLoss is its `compute_loss` as the forward of a pipeline, which each
stage runs up to its last block, and Reference the forward of TRL's reference model, a Pipeline of its own, before each
step. Metrics that trainers collect meanwhile are shared. Must not contain: steps.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.adapters.batches import part_of
from pipeflow.adapters.huggingface.classes import show_attributes
from pipeflow.adapters.ranks import objects_of_all, shared_outputs
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.runtime.microbatch import Divided, Whole
from pipeflow.engine.runtime.other_calls import adds, computing
from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.engine.stages.absent import Absent
from pipeflow.engine.stages.values import UnprovedError
from pipeflow.engine.torch_private.trees import tree_leaves

METRICS = "_metrics"
"""The attribute of a trainer in which it collects metrics, by mode and name."""
_TOKENS, _SEEN = "num_tokens", "_total_train_tokens"
_LOG_PROBABILITIES = ("ref_chosen_logps", "ref_rejected_logps")
_OWN = _ITEMS, _OUTPUTS = "num_items_in_batch", "return_outputs"


class OwnLoss:
    """The loss of a trainer that computes it itself.

    Args:
        trainer: the trainer.
        model: its Pipeline.

    Attributes:
        divides: True if the loss is a sum divided by `num_items_in_batch`, so that microbatches and accumulated batches
            are added up. It is known once a batch with this number was traced.
        adds: True if it is a sum that is not divided.

    Raises UsageError over context ranks.
    """

    def __init__(self, trainer: Any, model: Pipeline) -> None:
        if model.context.context_size > 1:
            raise UsageError(
                f"{type(trainer).__name__} computes a loss of its own, and it is not known which label each token has "
                "in it, so context ranks cannot divide them: use the model's loss, or launch with context=1"
            )
        self.divides = self.adds = False
        self._is_traced = self._watched = False
        self._known: dict[Any, int] = {}  # tensors in the parts of the module's output
        self._trainer = trainer
        self._model = model
        takes = inspect.signature(trainer.compute_loss).parameters
        self._takes_items = _ITEMS in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values())

    @contextmanager
    def computing(self, batch: object) -> Iterator[None]:
        """Inside the `with` block, steps of the Pipeline compute this loss of a batch that `batch` made."""
        if not self._is_traced:
            with self._model.alarm.raised_everywhere(), computing(self._model, self._forward):
                self._trace(batch)
            self._is_traced = True
        with computing(self._model, self._forward):
            yield

    def _trace(self, batch: Any) -> None:
        name = type(self._trainer).__name__
        try:
            self.adds = adds(self._model, batch)
        except UnprovedError as error:
            raise UsageError(
                f"it is not known what the loss of {name}.compute_loss is divided by, so its microbatches cannot be "
                f"added up ({error}): let it end with a mean over samples, or divide a sum by num_items_in_batch"
            ) from error
        except UsageError as error:
            raise UsageError(
                f"{name}.compute_loss cannot be computed in stages: it must call its model once, and compute the loss "
                f"from what the last stage returns, such as logits ({error})"
            ) from error

    def batch(self, inputs: Any, items: float | None, *, outputs: bool) -> Any:
        """The batch with what else the loss takes.

        Args:
            inputs: the trainer's batch.
            items: the number of items in all accumulated batches of all replicas, or None.
            outputs: whether the model's outputs are returned, too.
        """
        own = {_ITEMS: None if items is None else torch.tensor(float(items)), _OUTPUTS: outputs}
        if not isinstance(inputs, Divided):
            return {**inputs, **own}
        parts: list[Any] = inputs.microbatches
        return Divided([{**each, **own} for each in parts], inputs.schedule)

    def _forward(self, module: nn.Module, **entries: Any) -> Any:
        """The trainer's loss on a stage, or on the module without memory."""
        items, outputs = entries.pop(_ITEMS), entries.pop(_OUTPUTS)
        is_traced = module is self._model.chunks[0].whole
        is_watched = not is_traced and self.divides and not self._watched and torch.is_grad_enabled()
        if (is_traced or is_watched) and items is not None:
            items = items.detach().requires_grad_()
        keywords: dict[str, Any] = {_ITEMS: items} if self._takes_items else {}
        with acting(self._trainer, self._model, module, self._known):
            found = self._trainer.compute_loss(module, entries, return_outputs=outputs, **keywords)
        if is_traced and items is not None:
            self.divides = _reaches(found[0] if outputs else found, items)
        if is_watched:
            self._watched = True
            self._require_divided(found[0] if outputs else found, items)
        return found

    def _require_divided(self, loss: Tensor, items: Tensor) -> None:
        """Raises UsageError if only a part of the loss is divided by the number of items: then the loss is not as many
        times its derivative.
        """
        [slope] = torch.autograd.grad(loss, [items], retain_graph=True)
        if not torch.isclose(-slope * items, loss.detach().to(slope), rtol=1e-2, atol=1e-5):
            raise UsageError(
                f"{type(self._trainer).__name__}.compute_loss divides only a part of its loss by num_items_in_batch, "
                "so microbatches can neither be added up nor averaged: divide all of it, or nothing"
            )


@contextmanager
def acting(trainer: Any, model: Pipeline, module: nn.Module, known: dict[Any, int]) -> Iterator[None]:
    """Inside the `with` block, the trainer's model is `module`, a copy of the whole module of `model`, with its own
    forward, and the trainer gathers nothing. What it counts while the forward is traced is forgotten. `known` keeps how
    many tensors the parts of the output have.
    """
    state, replaced = vars(trainer), vars(module).pop("forward")
    patch = vars(model).get("forward")
    if isinstance(patch, MethodType):  # by the trainer, for the whole model
        vars(module)["forward"] = MethodType(patch.__func__, module)
    is_traced = module is model.chunks[0].whole
    vars(module)["forward"] = partial(_whole_parts, module.forward, known, is_traced)
    before = {**state, METRICS: copy.deepcopy(state.get(METRICS))} if is_traced else {"model": state["model"]}
    state["model"] = module
    try:
        with trainer.accelerator.alone():
            yield
    finally:
        vars(module)["forward"] = replaced
        if is_traced:
            state.clear()
        state.update(before)


def _whole_parts(forward: Any, known: dict[Any, int], is_traced: bool, *arguments: Any, **options: Any) -> Any:
    """The module's forward. A part of its output, such as all hidden states, is absent if it has not as many tensors as
    in the trace: then the plan did not foresee that it is read, and blocks of other stages are missing in it.
    """
    output = forward(*arguments, **options)
    items = output.items() if isinstance(output, dict) else enumerate(output) if isinstance(output, tuple) else ()
    parts: list[tuple[Any, Any]] = list(items)
    for name, part in parts:
        count = len(tree_leaves(part)) if isinstance(part, tuple | list) else 0
        if count and is_traced:
            known[name] = max(count, known.get(name, 0))
        if count and count != known.get(name):
            absent = Absent(
                f"it reads {name!r}, of which this stage has {count} of {known.get(name, 'no')} tensors, since it did "
                "not read them in its first call: let it always read them"
            )
            output = _replaced(output, name, absent)
    return output


def _replaced(output: Any, name: Any, part: object) -> Any:
    if isinstance(output, dict):
        output[name] = part
        return output
    return tuple(part if index == name else each for index, each in enumerate(output))


class Collated(Divided):
    """A divided batch that knows of how many samples it was collated, whose rows may be others, such as pairs."""

    __slots__ = ("samples",)

    def __init__(self, microbatches: Any, schedule: Any, samples: int | None = None) -> None:
        super().__init__(microbatches, schedule)
        self.samples = samples


class Chunks:
    """A collate function whose batches can be divided into microbatches. If rows of a batch are not its samples, as in
    batches of pairs, it collates each microbatch by itself.

    Args:
        collate: the trainer's collate function.
        model: the Pipeline, whose schedule says how many microbatches there are.
    """

    def __init__(self, collate: Any, model: Pipeline) -> None:
        self.collate = collate
        self._schedule = model.schedule

    def __call__(self, samples: list[Any]) -> Any:
        whole = self.collate(samples)
        if all(len(each) == len(samples) for each in whole.values() if isinstance(each, Tensor) and each.dim()):
            return whole
        many = min(self._schedule.num_microbatches, len(samples))
        parts = [self._part(samples[part_of(len(samples), many, index)]) for index in range(many)]
        return Collated(parts, self._schedule.first(many), len(samples))

    def _part(self, samples: list[Any]) -> Any:
        """A microbatch. Tensors of another length than its rows, such as where packed sequences begin, are whole."""
        part = self.collate(samples)
        lengths = {name: len(each) for name, each in part.items() if isinstance(each, Tensor) and each.dim()}
        rows = next(iter(lengths.values()), 0)
        return {name: Whole(each) if lengths.get(name, rows) != rows else each for name, each in part.items()}


def computes_own(trainer: Any, plain: Any) -> bool:
    """True if a trainer computes another loss than its model does; `plain` is transformers' own Trainer."""
    return bool(
        type(trainer).compute_loss is not plain.compute_loss or trainer.compute_loss_func or trainer.label_smoother
    )


def _reaches(loss: Tensor, items: Tensor) -> bool:
    """True if the loss was computed with the number of items."""
    left, seen = [loss.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is items:
            return True
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return False


def require_reference(options: dict[str, Any], trained: Pipeline) -> None:
    """Prepares the Pipeline that a trainer with a parameter `ref_model` was given for it; without one, that is a copy
    of the trained model as it is now. Raises UsageError for another model.
    """
    model = options.get("ref_model")
    if model is None:
        model = Pipeline(copy.deepcopy(trained.chunks), trained.schedule, autocast=trained.autocast)
        options["ref_model"] = model.requires_grad_(False)
    if not isinstance(model, Pipeline):
        raise UsageError(
            f"the reference model must be a Pipeline with the schedule of the trained one, got {type(model).__name__}: "
            "leave ref_model out for a copy of the trained one, or pass "
            "ref_model=pipeflow.huggingface.from_pretrained(folder, schedule)"
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

    def added(self, inputs: Any) -> Divided:
        """The batch with the log probabilities of the reference model, on every rank."""
        model = self._model.eval()
        with computing(model, self._forward, has_loss=False):
            told = execute_pipeline(iter([inputs]), model, forward_only=True, return_outputs=True)
        with model.alarm.raised_everywhere():
            found: tuple[Tensor, ...] = shared_outputs(told.outputs, model.context)
        parts: list[Any] = inputs.microbatches
        rows = [len(each["input_ids"]) // 2 for each in parts]
        columns = [
            dict(zip(_LOG_PROBABILITIES, map(Whole, each), strict=True))
            for each in zip(*(part.split(rows) for part in found), strict=True)
        ]
        made = [{**each, **column} for each, column in zip(parts, columns, strict=True)]
        return Divided(made, inputs.schedule)

    def _forward(self, module: nn.Module, **entries: Any) -> Any:
        with acting(self._trainer, self._model, module, self._known):
            return self._trainer.compute_ref_log_probs(module, entries)


def share_metrics(trainer: Any, context: Context) -> None:
    """Gives every rank the means of what the microbatches of all replicas collected since the last log. Numbers of
    tokens are added up over the replicas. All ranks call it together.
    """
    collected = getattr(trainer, METRICS, None)
    if collected is None:
        return
    mode = "train" if trainer.model.training else "eval"
    everyone = objects_of_all(context, (dict(collected[mode]), getattr(trainer, _SEEN, 0)))
    size = len(everyone) // context.data_size
    tellers = [
        next((told for told in everyone[first : first + size] if told[0]), None)
        for first in range(0, len(everyone), size)
    ]
    told = [each for each in tellers if each is not None]
    values = {
        name: [value for metrics, _ in told for value in metrics.get(name, [])]
        for metrics, _ in told
        for name in metrics
    }
    if _TOKENS in values:
        values[_TOKENS] = [float(sum(seen for _, seen in told))]
    collected[mode] = defaultdict(list, {name: [sum(each) / len(each)] for name, each in values.items() if each})
