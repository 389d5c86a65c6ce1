r"""Train a GPT on text through a pipeline. The command lines:

    python examples/gpt3/train.py                   4 ranks on this machine, a minute or two, no GPU needed
    python examples/gpt3/train.py --short           the same in half a minute
    python examples/gpt3/train.py --schedule interleaved-1f1b --chunks 2
    python examples/gpt3/train.py --ranks 1         one process, the same losses
    python examples/gpt3/train.py --ranks 2 --tensor 2 --replicas 2     eight processes, the same losses
    python examples/gpt3/train.py --check           compares with the whole model in one process, in float64
    DATA=my.jsonl python examples/gpt3/train.py     your own text, one {"text": ...} per line

    torchrun --nproc-per-node 4 examples/gpt3/train.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint machine-1:29500 \
        examples/gpt3/train.py --preset gpt2-xl --sequence 1024 --batch 64 --microbatches 64

Run the last one on each machine; the pipeline then spans all of them. --tensor splits every layer over several
processes; --replicas makes several copies of the pipeline, each for a part of the batch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import pipeflow

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3.build import build_gpt_pipeline, is_plain, options_of
from gpt3.check import check
from gpt3.data import Corpus, prepare, wait_for
from gpt3.model import GPTLMLoss, make_optimizer
from gpt3.plan import tell_step
from gpt3.ranks import errors_in_one_line, is_rank, start_ranks

PLAIN = [name for name, shape in pipeflow.GPT_PRESETS.items() if is_plain(shape)]
EVALUATED = 8  # batches of held-out text


def main() -> None:
    arguments = read_arguments()
    with errors_in_one_line():
        validate(arguments)
        if arguments.world == 1 or is_rank():
            run(arguments)
        else:
            prepare(arguments.data, arguments.shape.vocabulary)
            start_ranks(arguments.world)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--schedule", default="1f1b", help="a name that `pipeflow list` shows (%(default)s)")
    add("--ranks", type=int, help="pipeline ranks (4, or as many as torchrun started)")
    add("--tensor", type=int, default=1, help="processes that share every layer (%(default)s)")
    add("--replicas", type=int, default=1, help="copies of the pipeline, each for a part of the batch (%(default)s)")
    add("--microbatches", type=int, default=8, help="microbatches per batch and replica (%(default)s)")
    add("--chunks", type=int, help="stages per rank, for a schedule with chunks")
    add(
        "--steps",
        type=int,
        help="training steps (280; --short: 60, or 20 with tensor ranks or replicas; --check: 10)",
    )
    add("--batch", type=int, default=16, help="sequences per step (%(default)s)")
    add("--sequence", type=int, default=128, help="tokens per sequence (%(default)s)")
    add("--preset", default="tiny", choices=PLAIN, help="size of the model (%(default)s)")
    add("--data", type=Path, default=os.environ.get("DATA") or None, help="your text ($DATA, else Python's library)")
    add("--seed", type=int, default=0, help="seed of the weights and the batches (%(default)s)")
    add("--lr", type=float, default=4e-3, help="maximum learning rate (%(default)s)")
    add("--check", action="store_true", help="also train the whole model in one process, and compare")
    add("--short", action="store_true", help="fewer steps")
    add("--timeline", type=Path, metavar="FILE", help="write the measured timeline to this file, for `pipeflow diff`")
    arguments = parser.parse_args()
    arguments.shape = pipeflow.GPT.named(arguments.preset)
    if arguments.ranks is None:
        one = max(1, arguments.tensor * arguments.replicas)
        arguments.ranks = max(1, int(os.environ.get("WORLD_SIZE", 4 * one)) // one)
    arguments.world = arguments.ranks * arguments.tensor * arguments.replicas
    if arguments.steps is None:
        short = 20 if arguments.world > arguments.ranks else 60  # many processes have few cores each
        arguments.steps = 10 if arguments.check else short if arguments.short else 280
    return arguments


def make_schedule(arguments: argparse.Namespace) -> pipeflow.Schedule:
    options = {} if arguments.chunks is None else {"chunks": arguments.chunks}
    ranks, microbatches = arguments.ranks, arguments.microbatches
    return pipeflow.make_schedule(arguments.schedule, ranks=ranks, microbatches=microbatches, **options)


def validate(arguments: argparse.Namespace) -> None:
    """Raises UsageError for arguments that do not fit together, before anything is started."""
    world = int(os.environ.get("WORLD_SIZE", arguments.world))
    stages = make_schedule(arguments).placement.num_stages
    name, shape, replicas = arguments.preset, arguments.shape, arguments.replicas
    shape.require_tensor(arguments.tensor)
    batch, microbatches, length = arguments.batch, arguments.microbatches, arguments.sequence
    times = f" of each of {replicas} replicas" if replicas > 1 else ""
    directory = arguments.timeline.parent if arguments.timeline else Path()
    asked = f"--ranks {arguments.ranks}"
    if arguments.world > arguments.ranks:
        asked += f" --tensor {arguments.tensor} --replicas {replicas} is {arguments.world} processes"
    for broken, message in (
        (arguments.world != world, f"{asked}, but {world} processes were started"),
        (stages > shape.layers, f"{stages} stages are too many for --preset {name}, which has {shape.layers} layers"),
        (replicas < 1 or batch % replicas, f"--batch {batch} does not divide into --replicas {replicas}"),
        (batch < microbatches * replicas, f"--batch {batch} does not fill --microbatches {microbatches}{times}"),
        (not 2 <= length <= shape.positions, f"--sequence must be 2 to {shape.positions} for --preset {name}"),
        (not directory.is_dir(), f"--timeline: there is no directory {directory}"),
        (arguments.steps < 1, f"--steps must be at least 1, not {arguments.steps}"),
        (not arguments.lr > 0, f"--lr must be positive, not {arguments.lr}"),
    ):
        if broken:
            raise pipeflow.UsageError(message)


def run(arguments: argparse.Namespace) -> None:
    """The work of one rank, from reading the text to the end. Rank 0 shows progress."""
    shape, length = arguments.shape, arguments.sequence
    corpus = (wait_for if int(os.environ.get("LOCAL_RANK", 0)) else prepare)(arguments.data, shape.vocabulary)
    context = pipeflow.launch(pipeline=arguments.ranks, tensor=arguments.tensor)
    if context.rank:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    console = Console(highlight=False, quiet=context.rank > 0)

    dtype = torch.float64 if arguments.check else torch.float32
    schedule = make_schedule(arguments)
    stages = build_gpt_pipeline(
        shape.layers, placement=schedule.placement, seed=arguments.seed, dtype=dtype, **options_of(shape)
    )
    samples, uneven = divmod(arguments.batch // arguments.replicas, arguments.microbatches)
    model = pipeflow.Pipeline(
        stages,
        schedule,
        criterion=GPTLMLoss(),
        tensor_shape=None if uneven else (samples, length, shape.hidden),
        tensor_dtype=dtype,
    )
    batches = partial(batches_of, corpus, arguments, part=context.data_rank, parts=context.data_size)
    before = evaluate(model, batches(held_out=True))
    start = perf_counter()
    losses, measured = train(model, batches(), arguments, console)
    speed = arguments.steps * arguments.batch * length / (perf_counter() - start)
    after = evaluate(model, batches(held_out=True))

    learnt = f"loss on held-out text {before:.3f} -> {after:.3f}, {arguments.steps} steps, {speed:,.0f} tokens/s"
    tell_step(measured, model, learnt)
    if arguments.timeline is not None and context.rank == 0:
        arguments.timeline.write_text(measured.to_json(), encoding="utf-8")
    if arguments.check:
        check(stages, losses, batches_of(corpus, arguments), arguments, context, console)


Batches = Iterator[tuple[dict[str, Tensor], Tensor]]


def batches_of(
    corpus: Corpus, arguments: argparse.Namespace, *, part: int = 0, parts: int = 1, held_out: bool = False
) -> Batches:
    """Yields inputs and labels forever, the replica's part of each batch, the same on all of its ranks. Labels are the
    input ids; the loss shifts them.
    """
    for step in count():
        ids = corpus.batch(arguments.batch, arguments.sequence, seed=arguments.seed, step=step, held_out=held_out)
        ids = ids.tensor_split(parts)[part]
        yield {"input_ids": ids}, ids


def evaluate(model: pipeflow.Pipeline, batches: Batches) -> float:
    """The mean loss over some batches, with forwards through the same pipeline."""
    outputs = [
        pipeflow.execute_pipeline(batches, model, forward_only=True, broadcast_loss=True) for _ in range(EVALUATED)
    ]
    return sum(float(output.loss) for output in outputs if output.loss is not None) / EVALUATED


def train(
    model: pipeflow.Pipeline, batches: Batches, arguments: argparse.Namespace, console: Console
) -> tuple[list[float], pipeflow.Timeline]:
    """The loss of every step, and the measured timeline of the last one."""
    optimizer, rate = make_optimizer(model.parameters(), arguments.lr, arguments.steps)
    losses: list[float] = []
    with progress(arguments, console) as show:
        while len(losses) < arguments.steps:
            optimizer.zero_grad()
            trace = len(losses) == arguments.steps - 1
            output = pipeflow.execute_pipeline(batches, model, broadcast_loss=True, trace=trace)
            pipeflow.clip_grad_norm_(model, 1.0)
            optimizer.step()
            rate.step()
            assert output.loss is not None  # it is broadcast
            losses.append(float(output.loss))
            show(losses)
    assert output.timeline is not None  # the last step is traced
    return losses, output.timeline


@contextmanager
def progress(arguments: argparse.Namespace, console: Console) -> Iterator[Callable[[list[float]], None]]:
    """Shows the losses so far: with a bar on a terminal, else with a line after every tenth of the steps."""
    start, steps, tokens = perf_counter(), arguments.steps, arguments.batch * arguments.sequence
    live = console.is_interactive and not console.quiet
    columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not live, expand=True) as bar:
        task = bar.add_task("", total=steps)

        def show(losses: list[float]) -> None:
            step, seconds = len(losses), perf_counter() - start
            text = f"loss {losses[-1]:.3f}  {step * tokens / seconds:,.0f} tokens/s"
            bar.update(task, completed=step, description=text)
            if not live and (step % max(1, steps // 10) == 0 or step == steps):
                console.print(f"step {step}/{steps}  {text}  {seconds / step * (steps - step):.0f} s left")

        yield show


if __name__ == "__main__":
    main()
