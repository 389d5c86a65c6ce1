"""Texts of different lengths: does the step become as much shorter as `order_for` plans? 4 ranks whose stages sleep for
each token of a microbatch; per batch the same samples in microbatches of equal counts, and in planned ones.

The lengths have a long tail, as those of FLANv2 in DynaPipe (arXiv 2311.10418). They are drawn from a log-normal
distribution with a median of 200 tokens and a sigma of 1.1, cut at 4096; these numbers are chosen, not measured.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from random import Random
from typing import Any

from benchmarks.measure import Times, paired, step_times
from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS, MICROBATCHES, SAMPLES, BATCHES = 4, 16, 128, 5
FORWARD, BACKWARD = 0.010, 0.020  # seconds of a mean microbatch, on one stage
LARGE = {"ranks": 8, "microbatches": 32, "samples": 256}  # for the time of planning
LONGEST = 4096  # tokens of a sample
VERY_LONG = 32_768  # tokens of a sample in batches with very long ones
SLICES = 1, 2, 4, 8
SLOWER = 10  # times as long a mean microbatch takes in batches that may be sliced, whose actions are many and short
QUADRATIC = 1 / 4096  # a sequence of 4096 tokens is half attention
TIMES_AS_LONG = 8, 12, 16  # how many times as long as the others one microbatch is
ROOM = 1.5  # times what zb-h1 keeps


def lengths_of(seed: int, samples: int = SAMPLES, longest: int = LONGEST) -> list[int]:
    """The lengths of a batch."""
    draw = Random(seed)
    return [min(longest, max(8, int(draw.lognormvariate(5.3, 1.1)))) for _ in range(samples)]


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 5
    results = run_ranks("lengths:measure", RANKS, {"rounds": rounds}, deadline=120 + 30 * rounds)
    times, planned = step_times([each["times"] for each in results]), results[0]["planned"]
    title = f"lengths: {RANKS} ranks, {MICROBATCHES} microbatches of {SAMPLES} samples, {rounds} rounds"
    columns = ["batch", "equal counts (or whole) ms", "planned (or in slices) ms", "planned gain", "measured gain"]
    report = Report("lengths", title, [*columns, "measured / planned", "bound / makespan"])
    ratios = []
    for seed in range(BATCHES):
        each = planned[seed]
        gain, measured = each["equal"] / each["order"], paired(times, f"{seed} equal", f"{seed} order")
        ratios.append(measured / gain)
        steps = [f"{1e3 * statistics.median(times[f'{seed} {name}']):.0f}" for name in ("equal", "order")]
        figures = [f"{number:.3f}" for number in (gain, measured, ratios[-1], each["bound"] / each["order"])]
        report.rows.append([str(seed), *steps, *figures])
    first, later, near = planning_seconds()
    very_long, its_seconds = very_long_batches()
    _, sliced_seconds = very_long_batches(slices=SLICES)
    one = one_long_text()
    sliced = run_ranks("lengths:measure_slices", RANKS, {"rounds": rounds}, deadline=240 + 60 * rounds)
    with_slices, its_times = sliced[0]["planned"], step_times([each["times"] for each in sliced])
    for seed, each in with_slices.items():
        gain, measured = each["whole"] / each["sliced"], paired(its_times, f"{seed} whole", f"{seed} sliced")
        ratios.append(measured / gain)
        steps = [f"{1e3 * statistics.median(its_times[f'{seed} {name}']):.0f}" for name in ("whole", "sliced")]
        figures = [f"{number:.3f}" for number in (gain, measured, ratios[-1], each["bound"] / each["sliced"])]
        report.rows.append([f"{seed}, one of {VERY_LONG} tokens, in {each['slices']} slices", *steps, *figures])
    report.data = {"seconds": times, "planned": planned, "planning seconds": later, "first planning seconds": first}
    report.data |= {"slices": with_slices, "slices seconds": its_times}
    report.data |= {"one long text": one, "very long": very_long, "very long planning seconds": its_seconds}
    report.notes += [
        "targets: measured gain within 5 % of the planned one; bound / makespan at least 0.9; planning in 50 ms",
        f"planning for {LARGE['ranks']} ranks and {LARGE['microbatches']} microbatches, in processor time: "
        f"{1e3 * first:.0f} ms for the first batch of a placement, then {1e3 * statistics.median(later):.0f} ms, at "
        f"most {1e3 * max(later):.0f} ms; bound / makespan there at least {near:.3f}",
        f"the same with a sample of {VERY_LONG} tokens: {1e3 * statistics.median(its_seconds):.0f} ms, at most "
        f"{1e3 * max(its_seconds):.0f} ms; bound / makespan at least {min(very_long):.3f}; with the choice of "
        f"{SLICES} slices {1e3 * statistics.median(sliced_seconds):.0f} ms",
        f"one of {MICROBATCHES} microbatches {' / '.join(map(str, TIMES_AS_LONG))} times as long, {ROOM} times the "
        f"memory of zb-h1, bound / makespan: search {_near(one['search'])}, order_for {_near(one['order_for'])}",
    ]
    return report


def planning_seconds() -> tuple[float, list[float], float]:
    """The processor time of `order_for` for the first batch of a placement, one with a single path or one with two, and
    for each of 20 more batches, half of them with a sample that is longer than a mean microbatch; and the least of
    their bounds over their makespans.
    """
    import pipeflow

    placements = pipeflow.Placement.linear(LARGE["ranks"]), pipeflow.Placement.bidirectional(LARGE["ranks"])
    seconds, near = [], []
    for seed in range(22):
        placement = placements[seed // 2 % 2]
        cost = pipeflow.CostModel.even(placement)
        lengths = lengths_of(seed, LARGE["samples"])
        lengths[0] = 12_000 if seed % 2 else lengths[0]
        begun = time.process_time()
        order = pipeflow.order_for(lengths, placement, cost, LARGE["microbatches"])
        seconds.append(time.process_time() - begun)
        near.append(order.lower_bound / order.timeline.makespan)
    later = [each for seed, each in enumerate(seconds) if seed not in (0, 2)]  # the first of a placement
    return max(seconds[0], seconds[2]), later, min(near)


def _near(ratios: list[float]) -> str:
    return " / ".join(f"{ratio:.3f}" for ratio in ratios)


def very_long_batches(**options: Any) -> tuple[list[float], list[float]]:
    """Of batches with long tails and one sample of VERY_LONG tokens, after the first: bounds over makespans, and the
    processor time of `order_for` with these `options`.
    """
    import pipeflow

    placement = pipeflow.Placement.linear(LARGE["ranks"])
    near, seconds = [], []
    for seed in range(11):
        lengths = [VERY_LONG, *lengths_of(seed, LARGE["samples"] - 1, VERY_LONG)]
        begun = time.process_time()
        cost = pipeflow.CostModel.even(placement)
        order = pipeflow.order_for(lengths, placement, cost, LARGE["microbatches"], **options)
        seconds.append(time.process_time() - begun)
        near.append(order.lower_bound / order.timeline.makespan)
    return near[1:], seconds[1:]


def one_long_text() -> dict[str, list[float]]:
    """Bounds over makespans of `search` and `order_for`, for each of TIMES_AS_LONG, within ROOM."""
    from dataclasses import replace

    import pipeflow

    placement = pipeflow.Placement.linear(RANKS)
    alike = pipeflow.CostModel.even(placement, saved_bytes=4, deferred_bytes=1)
    usual = pipeflow.make_schedule("zb-h1", ranks=RANKS, microbatches=MICROBATCHES)
    near: dict[str, list[float]] = {"search": [], "order_for": []}
    for times in TIMES_AS_LONG:
        lengths = [times, *(1.0,) * (MICROBATCHES - 1)]
        factors = tuple(MICROBATCHES * length / sum(lengths) for length in lengths)
        cost = replace(alike, microbatch_factors=factors)
        cap = ROOM * max(pipeflow.simulate(usual, cost).peak_bytes)
        found = pipeflow.search(placement, MICROBATCHES, cost, bytes_cap=cap, candidates=1000)
        order = pipeflow.order_for(lengths, placement, alike, MICROBATCHES, bytes_cap=cap)
        near["search"].append(found.lower_bound / found.timeline.makespan)
        near["order_for"].append(order.lower_bound / order.timeline.makespan)
    return near


def measure(rounds: int) -> dict[str, Any]:
    """On every rank: per batch the times of both ways, and what their plans say."""
    import torch
    from torch.nn import functional

    import pipeflow
    from benchmarks.links import go_first
    from benchmarks.measure import alternate
    from benchmarks.models import TokenStage
    from benchmarks.task import Contender

    go_first()
    rank = int(os.environ["RANK"])
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    model = pipeflow.Pipeline(TokenStage(), schedule, criterion=functional.mse_loss)
    cost = pipeflow.CostModel((FORWARD,) * RANKS, (BACKWARD,) * RANKS, (0.0,) * RANKS)
    times: Times = {}
    planned = []
    for seed in range(BATCHES):
        lengths = lengths_of(seed)
        order = pipeflow.order_for(lengths, schedule.placement, cost, MICROBATCHES, among=[schedule])
        samples = torch.tensor([[float(length), 1.0] for length in lengths])
        divided = pipeflow.Divided([(samples[[*group]], samples[[*group]]) for group in order.groups], order.schedule)
        TokenStage.forward_seconds = FORWARD * MICROBATCHES / sum(lengths)
        TokenStage.backward_seconds = BACKWARD * MICROBATCHES / sum(lengths)
        contenders = {
            f"{seed} {name}": Contender(name, partial(_step, given, model), [model])
            for name, given in (("equal", (samples, samples)), ("order", divided))
        }
        times |= alternate(contenders, rounds)
        counts = [float(part.sum()) for part in samples[:, 0].tensor_split(MICROBATCHES)]
        factors = tuple(MICROBATCHES * count / sum(counts) for count in counts)
        equal = pipeflow.CostModel(cost.forward, cost.backward_input, cost.backward_weight, microbatch_factors=factors)
        planned.append(
            {
                "equal": pipeflow.simulate(schedule, equal).makespan,
                "order": order.timeline.makespan,
                "bound": order.lower_bound,
            }
        )
    return {"times": times, "planned": planned if rank == 0 else []}


def measure_slices(rounds: int) -> dict[str, Any]:
    """On every rank: per batch with one very long text, the times of the best order of whole microbatches and of the
    best one that may cut them, both padded; and what their plans say.
    """
    import torch

    import pipeflow
    from benchmarks.links import go_first
    from benchmarks.measure import alternate
    from benchmarks.models import SlicedTokens, TokenMean
    from benchmarks.task import Contender

    go_first()
    schedule = pipeflow.make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    model = pipeflow.Pipeline(SlicedTokens(QUADRATIC), schedule, criterion=TokenMean())
    forward, backward = SLOWER * FORWARD, SLOWER * BACKWARD
    cost = pipeflow.CostModel((forward,) * RANKS, (backward,) * RANKS, (0.0,) * RANKS)
    times: Times = {}
    planned: dict[str, dict[str, float]] = {}
    for seed in range(2):
        lengths = [VERY_LONG, *lengths_of(seed, SAMPLES - 1)]
        contenders = {}
        for name, slices in (("whole", (1,)), ("sliced", SLICES)):
            order = pipeflow.order_for(
                lengths, schedule.placement, cost, MICROBATCHES, QUADRATIC, padded=True, slices=slices
            )
            shapes = [(len(group), max(lengths[index] for index in group), 1) for group in order.groups]
            parts = [(torch.zeros(shape), torch.zeros(shape[:2])) for shape in shapes]
            padded = sum(samples * (length + QUADRATIC * length**2) for samples, length, _ in shapes)
            batch = pipeflow.Divided(parts, order.schedule, order.cost)
            contenders[f"{seed} {name}"] = Contender(name, partial(_step, batch, model), [model])
            figures = {name: order.timeline.makespan, "bound": order.lower_bound, "slices": order.schedule.slices}
            planned.setdefault(str(seed), {}).update(figures)
        SlicedTokens.forward_seconds = forward * MICROBATCHES / padded
        SlicedTokens.backward_seconds = backward * MICROBATCHES / padded
        times |= alternate(contenders, rounds)
    return {"times": times, "planned": planned}


def _step(batch: object, model: Any) -> None:
    import pipeflow

    pipeflow.execute_pipeline(iter([batch]), model)
