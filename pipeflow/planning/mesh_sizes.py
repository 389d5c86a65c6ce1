"""Meshes: the sizes that a number of devices and a batch allow, and the errors if there are none. Must not contain: the
costs of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.layout import Wanted
from pipeflow.planning.shares import sequence_of

CONTEXT = 4096  # tokens of a sequence that a context rank has at least, unless their number is given
FAR = 4096  # how far from what is asked for a number of devices is looked for that works


NAMES = ("tensor", "pipeline", "context")  # of sizes that may be given


class Sizes(NamedTuple):
    """Numbers of tensor ranks, pipeline ranks, replicas, and context ranks of each replica."""

    tensor: int
    pipeline: int
    data: int
    context: int


def meshes(wanted: Wanted) -> list[Sizes]:
    """All sizes that fit the devices, the model and the batch. Raises UsageError if there are none; the error names the
    nearest number of devices, or the nearest batch, that has some.
    """
    split = list(_split(wanted, wanted.devices))
    if not split:
        raise UsageError(_no_devices(wanted))
    found = [sizes for sizes in split if not wanted.batch % _sequences(wanted, sizes)]
    if not found:
        raise UsageError(_no_batch(wanted, split))
    return found


def microbatch_sizes(wanted: Wanted, sizes: Sizes) -> list[int]:
    """The sizes of a microbatch that divide a replica's part of the batch."""
    if wanted.microbatch_size is not None:
        return [wanted.microbatch_size]
    return divisors(wanted.batch // sizes.data)


@cache
def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _split(wanted: Wanted, devices: int) -> Iterator[Sizes]:
    """The sizes whose product is `devices`."""
    for tensor in [wanted.tensor] if wanted.tensor else divisors(wanted.model.heads):
        if devices % tensor or not takes(wanted, tensor):
            continue
        ranks = devices // tensor
        contexts = [context for context in _contexts(wanted) if takes(wanted, tensor, context)]
        for pipeline in [wanted.pipeline] if wanted.pipeline else range(1, min(ranks, wanted.model.layers) + 1):
            if ranks % pipeline == 0:
                replicas = ranks // pipeline
                found = (Sizes(tensor, pipeline, replicas // each, each) for each in contexts if not replicas % each)
                yield from found


def _contexts(wanted: Wanted) -> list[int]:
    """Powers of 2 that leave each context rank CONTEXT tokens."""
    if wanted.context is not None:
        return [wanted.context]
    tokens = wanted.model.tokens if wanted.setup.sequence is None else wanted.setup.sequence
    return [1, *(2**power for power in range(1, 11) if tokens >= CONTEXT * 2**power)]


def takes(wanted: Wanted, tensor: int, context: int = 1, *, sequence_parallel: bool | None = None) -> bool:
    """Whether the model can be split over `tensor` ranks, and a sequence over `context` ranks, and over all of them if
    it is `sequence_parallel`, by default as wanted. If the user asked for these sizes, the error that says why not is
    raised.
    """
    asked = bool(wanted.sequence_parallel)
    parallel = asked if sequence_parallel is None else sequence_parallel
    try:
        split = replace(wanted.setup, tensor=tensor, context=context, sequence_parallel=parallel)
        sequence_of(wanted.model, split)
    except UsageError:
        if parallel == asked and tensor in (1, wanted.tensor) and context in (1, wanted.context):
            raise
        return False
    return True


def _sequences(wanted: Wanted, sizes: Sizes) -> int:
    """The sequences that the batch must be a multiple of."""
    return sizes.data * (wanted.microbatch_size or 1)


def _no_devices(wanted: Wanted) -> str:
    fixed = [f"{name} {size}" for name in NAMES if (size := getattr(wanted, name))]
    works = _near(wanted, lambda devices: any(_split(wanted, devices)))
    advice = [] if works is None else [f"the nearest number that works is {works}"]
    advice += [
        f"with {wanted.devices} devices, {name} {' or '.join(map(str, sizes))} works"
        for name in NAMES
        if (sizes := _other_sizes(wanted, name))
    ]
    return f"{wanted.devices} devices do not divide into layouts with {'; '.join([' and '.join(fixed), *advice])}"


def _other_sizes(wanted: Wanted, name: str) -> list[int]:
    """The next smaller and the next larger value of the size `name` with which the devices divide."""
    asked = getattr(wanted, name)
    if asked is None:
        return []
    change: dict[str, Any] = {name: None}
    free = replace(wanted, **change)
    found = sorted({getattr(sizes, name) for sizes in _split(free, wanted.devices)})
    return [size for size in found if size < asked][-1:] + [size for size in found if size > asked][:1]


def _no_batch(wanted: Wanted, split: list[Sizes]) -> str:
    needed = {_sequences(wanted, sizes) for sizes in split}
    below = max(wanted.batch // each * each for each in needed)
    above = min(-(-wanted.batch // each) * each for each in needed)
    near = [str(batch) for batch in (below, above) if batch]
    replicas = " or ".join(str(data) for data in sorted({sizes.data for sizes in split})[:3])
    size = f" in microbatches of {wanted.microbatch_size}" if wanted.microbatch_size else ""
    works = _near(
        wanted,
        lambda devices: any(wanted.batch % _sequences(wanted, sizes) == 0 for sizes in _split(wanted, devices)),
    )
    advice = "" if works is None else f"; with this batch, the nearest number of devices that works is {works}"
    return (
        f"a batch of {wanted.batch} sequences does not divide over {replicas} replicas{size}: "
        f"the nearest that work{' are' if len(near) > 1 else 's is'} {' and '.join(near)}{advice}"
    )


def _near(wanted: Wanted, works: Callable[[int], bool]) -> int | None:
    """The nearest number of devices that works. If two are equally near, the smaller one."""
    around = chain.from_iterable((wanted.devices - away, wanted.devices + away) for away in range(1, FAR))
    return next((devices for devices in around if devices > 0 and works(devices)), None)
