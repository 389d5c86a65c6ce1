"""The head and the loss by slices of tokens: the most memory that logits take, and the time of a step.

A GPT of a large vocabulary trains on one rank. Logits are what has the vocabulary as its last dimension: they
themselves, their logarithms and their gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import paired
from benchmarks.report import Report

VOCABULARY, LENGTH, WIDTH, LAYERS = 32_000, 1024, 256, 2
SLICES = (1, 2, 4, 8)
MICROBATCHES = 2


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 11
    times, peaks, losses = _measure(rounds)
    title = f"head: {VOCABULARY} words, {LENGTH} tokens, width {WIDTH}, {LAYERS} layers, one core, {rounds} rounds"
    columns = ["", "most logits MB", "x 1/n of whole", "median CPU ms", "x whole", "loss"]
    report = Report("head", title, columns, data={"seconds": times, "bytes": peaks, "losses": losses})
    for name, count in zip(times, SLICES, strict=True):
        share = peaks[name] * count / peaks["whole"]
        milliseconds = 1e3 * statistics.median(times[name])
        cells = [f"{peaks[name] / 1e6:.0f}", f"{share:.3f}", f"{milliseconds:.0f}"]
        report.rows.append([name, *cells, f"{paired(times, name, 'whole'):.3f}", f"{losses[name]:.6f}"])
    report.notes.append("targets: 1/n of the whole logits within 5 %, at most 1.05 x the time")
    return report


def _measure(rounds: int) -> tuple[dict[str, list[float]], dict[str, int], dict[str, float]]:
    """Per contender the seconds of the processor for a step, in rounds that alternate them, the most bytes of logits,
    and the loss.
    """
    import torch

    import pipeflow
    from pipeflow.models import GPTLMLoss, build_gpt_pipeline

    torch.set_num_threads(1)
    pipeflow.launch(pipeline=1)
    schedule = pipeflow.make_schedule("1f1b", ranks=1, microbatches=MICROBATCHES)
    ids = torch.randint(0, VOCABULARY, (MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(0))
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    steps: dict[str, Callable[..., Any]] = {}
    for count in SLICES:
        stage = build_gpt_pipeline(LAYERS, placement=schedule.placement, max_position_embeddings=LENGTH, **sizes)
        sliced: dict[str, Any] = {} if count == 1 else {"head_slices": count, "head": "head"}
        model = pipeflow.Pipeline(stage, schedule, criterion=GPTLMLoss(), **sliced)

        def step(model: Any = model) -> Any:
            model.zero_grad()
            start = time.process_time()
            loss: Any = pipeflow.execute_pipeline(iter([({"input_ids": ids}, ids)]), model).loss
            return time.process_time() - start, float(loss)

        steps["whole" if count == 1 else f"{count} slices"] = step
    for step in steps.values():
        step()  # in the first two batches the engine also tries how the loss is divided
    losses = {name: step()[1] for name, step in steps.items()}
    peaks = {name: _most_logits(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = steps[name]()[0]
            if number >= 0:
                times[name].append(seconds)
    return times, peaks, losses


def _most_logits(step: Callable[..., Any]) -> int:
    """The most bytes that tensors with the vocabulary as their last dimension took at once."""
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watching(TorchDispatchMode):
        most = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch's
            self.known: dict[int, tuple[StorageWeakRef, int]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[-1] == VOCABULARY and not leaf.is_meta:
                    storage = leaf.untyped_storage()
                    if storage.nbytes() != 4 * VOCABULARY * WIDTH:  # not the transposed weight
                        self.known = {key: each for key, each in self.known.items() if not each[0].expired()}
                        self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                        self.most = max(self.most, sum(size for _, size in self.known.values()))
            return output

    watching = Watching()
    with watching:
        step()
    return watching.most
