"""Jobs: a step of a job without a pipeline, and what stands out in it. Must not contain: how the time of a rank is
divided, and how it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.events import RankEvents
from pipeflow.tools.traces.rank_times import (
    COLLECTIVES,
    LOADER,
    OTHER,
    RankTimes,
    Wait,
    exchanges_of,
    steps_of_job,
    times_of,
    waits_of,
)
from pipeflow.tools.traces.trace_findings import LEAST, SMALL, Finding

OUTLIER = 1.2  # times the median step
MOST = 0.5  # share of a time that is most of it
TO_DO = {
    "all-gather": "gather earlier, while what is before computes (prefetch), or shard over fewer ranks",
    "reduce-scatter": "start it as soon as gradients are there, or accumulate gradients over more batches",
    "all-reduce": "of gradients, smaller buckets start earlier, and accumulation over more batches makes them rarer",
    "all-to-all": "compute on another part of the batch meanwhile, or exchange less",
    "broadcast": "what the others wait for the rank that sends is in it",
    OTHER: "start it earlier, while something else computes",
}


@dataclass(frozen=True)
class Job:
    """A step of a job without a pipeline.

    Attributes:
        by: what divides the recording into steps, as in `Steps`.
        step_seconds: the length of every step, on the rank that takes longest.
        step: the index of the one of median length.
        ranks: the times of each rank in this step.
        findings: what stands out, the most expensive first.
        notes: sentences on what the traces do not say.
    """

    by: str
    step_seconds: tuple[float, ...]
    step: int
    ranks: tuple[RankTimes, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The length of the median step."""
        return self.step_seconds[self.step]

    @property
    def outliers(self) -> tuple[int, ...]:
        """The indices of steps that took much longer than the median one."""
        return tuple(index for index, each in enumerate(self.step_seconds) if each > OUTLIER * self.seconds)


def job_of(ranks: Sequence[RankEvents], notes: Sequence[str]) -> Job:
    """The median step of a job, on the ranks that were recorded. Raises UsageError if it has no length."""
    steps = steps_of_job(ranks)
    lengths = [max(end - start for start, end in each) for each in steps.windows]
    step = sorted(range(len(lengths)), key=lambda index: lengths[index])[(len(lengths) - 1) // 2]
    windows = steps.windows[step]
    if min(end - start for start, end in windows) <= 0:
        raise UsageError(f"{ranks[0].source}: its step takes no time: record at least one whole step")
    sent = [exchanges_of(each) for each in ranks]
    waits = waits_of(ranks, sent, windows)
    numbers = [each.rank or 0 for each in ranks]
    if len(ranks) == 1 and not ranks[0].ranks:  # a number in the name of its only file is none of a rank
        ranks, numbers = [replace(ranks[0], rank=0)], [0]
    times = [times_of(*own, numbers) for own in zip(ranks, sent, waits, windows, strict=True)]
    found = [*_own(times, ranks), *_last_ranks(times, waits)]
    least = max(LEAST * lengths[step], SMALL * max((each.seconds for each in found), default=0.0))
    findings = sorted((each for each in found if each.seconds > least), key=lambda each: -each.seconds)
    said = [*notes, *_unknown(ranks, times, steps.by, is_waiting_known=any(waits))]
    return Job(steps.by, tuple(lengths), step, tuple(times), tuple(findings), tuple(said))


def _unknown(
    ranks: Sequence[RankEvents], times: Sequence[RankTimes], by: str, *, is_waiting_known: bool
) -> Iterator[str]:
    """What the traces do not say."""
    whole = max(each.ranks or 0 for each in ranks)
    if by == "recording":
        yield "nothing divides the recording into steps: call step() of torch.profiler after each one"
    if by == "update":
        yield "the profiler marks no steps, so a step is from the end of one optimizer step to the end of the next one"
    if len(ranks) < whole:
        yield f"{len(ranks)} of {whole} ranks were recorded: what others wait for is not known"
    if any(each.communications for each in times) and not is_waiting_known:
        what = "of one rank alone" if len(ranks) == 1 else "since the collectives of the ranks cannot be matched"
        yield f"waiting for other ranks and transfer cannot be told apart {what}: both count as communication"
    if any(len(each.devices) > 1 for each in ranks):
        yield "a rank has several devices: it computes where at least one of them does"
    if any(each.launches and not own.on_device for each, own in zip(ranks, times, strict=True)):
        yield "work was launched on a device, but what ran there was not recorded: times are those of the host"
    if any(own.part("idle") for own in times):
        yield "nothing says when kernels were launched: record the CPU, too, to see why a device is idle"


def _own(times: Sequence[RankTimes], ranks: Sequence[RankEvents]) -> Iterator[Finding]:
    """What each kind of lost time costs on the rank on which it costs most."""
    kinds = dict.fromkeys(kind for each in times for kind, _ in each.parts)
    for kind in (each for each in kinds if each not in ("computes", "waiting")):
        worst = max(range(len(times)), key=lambda place: times[place].part(kind))
        own = times[worst]
        where = f" on rank {own.rank}" if len(times) > 1 else ""
        yield Finding(kind, own.rank, own.part(kind), _text(kind, own, ranks[worst]).format(where=where))


def _text(kind: str, own: RankTimes, events: RankEvents) -> str:
    """What costs time{where}, and what can be done."""
    what = "the device" if own.on_device else "the host"
    if kind in (*COLLECTIVES, OTHER):
        [each] = [each for each in own.communications if each.kind == kind]
        hidden = f"{each.hidden / each.seconds:.0%} of its time is hidden"
        name = "communication of an unknown kind" if kind == OTHER else kind
        return f"{name} that no computation hides{{where}}; {hidden}; {TO_DO.get(kind, TO_DO[OTHER])}"
    if kind == "data loading":
        is_alone = any(each.name.startswith(LOADER) and "_SingleProcess" in each.name for each in events.ranges)
        to_do = (
            "it runs in the process itself: set num_workers" if is_alone else "try more workers or a longer prefetch"
        )
        return f"{what} waits for the data loader{{where}}; {to_do}"
    if kind == "optimizer":
        return "the optimizer runs{where}" + "; fused=True launches fewer kernels" * own.on_device
    if kind == "copies":
        return (
            "memory is copied while nothing computes{where}; pinned memory and non_blocking=True let both run at once"
        )
    if kind == "launch":
        return f"{own.pieces[kind]} times, the device has not yet begun what was launched{{where}}"
    if kind == "host" and own.on_device:
        return (
            f"{own.pieces[kind]} short pauses until the host launches more{{where}}; larger batches, torch.compile or "
            "CUDA graphs need fewer launches"
        )
    if kind == "host":
        return f"{own.pieces[kind]} short pauses between operators{{where}}; larger batches or torch.compile need fewer"
    if kind == "idle":
        return "nothing runs on the device{where}"
    return f"{'the device is idle' if own.on_device else 'no operator runs'} in long pauses{{where}}{_named(own)}"


def _named(own: RankTimes) -> str:
    """What the host does in the long pauses of a rank, the longest first."""
    whole = own.part("pauses")
    causes = sorted(((time, cause) for (kind, cause), time in own.parts.items() if kind == "pauses"), reverse=True)
    told = [f"{cause!r} {time / whole:.0%}" for time, cause in causes if cause and time > SMALL * whole]
    names = f"; of them, the host is in {', '.join(told)}" if told else ""
    unnamed = own.parts.get(("pauses", ""), 0.0)
    if unnamed > MOST * whole:
        names += "; nothing names what the host does then: use torch.profiler.record_function"
    return names.replace("{", "{{").replace("}", "}}")


def _last_ranks(times: Sequence[RankTimes], waits: Sequence[Mapping[int, Wait]]) -> Iterator[Finding]:
    """The ranks for which others wait in collectives, and what they do meanwhile."""
    for place, last in enumerate(times):
        others = [each for each in times if each is not last]
        waited = [each.parts.get(("waiting", f"rank {last.rank}"), 0.0) for each in others]
        if any(waited):
            seconds, often = fmean(waited), sum(each.last == place for each in waits[place].values())
            count = f"comes last to {often} of its {len(waits[place])} collectives"
            text = f"the other ranks wait for rank {last.rank}, which {count}{_reason(last, others, seconds)}"
            yield Finding("last rank", last.rank, seconds, text)


def _reason(last: RankTimes, others: Sequence[RankTimes], waited: float) -> str:
    """What a rank does longer than the others do on average, if that is most of what they wait."""
    more = {
        key: seconds - fmean(each.parts.get(key, 0.0) for each in others)
        for key, seconds in last.parts.items()
        if key[0] not in (*COLLECTIVES, OTHER, "waiting")
    }
    kind, cause = max(more, key=lambda key: more[key])
    if more[kind, cause] < MOST * waited:
        return ""
    usual = fmean(each.parts.get((kind, cause), 0.0) for each in others)
    words = {
        "computes": "computes",
        "optimizer": "is in the optimizer",
        "data loading": "waits for its data loader",
        "copies": "copies memory",
    }.get(kind, f"stands still{f' in {cause!r}' if cause else ''}")
    factor = f" {last.parts[kind, cause] / usual:.3g} times as long as they do" if usual else ", and they do not"
    return f": it {words}{factor}"
