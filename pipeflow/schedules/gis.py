"""GIS: interleaved 1F1B with early gradients, so that it has the warm-up and the activations of 1F1B."""

from __future__ import annotations

from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.interleaved_zb import grouped_row
from pipeflow.schedules.row_parts import group_size


def gis(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B in the memory of 1F1B: split backwards, a shorter warm-up.

    Groups of g microbatches (`group`, at least R/2; default: R) go through a rank's chunks, as in interleaved 1F1B.
    Warm-up: one forward for each rank after this one, and the first group through every chunk but the last. Then the
    rank alternates between a forward and both halves of a backward. The rank before it waits only for the first half.

    Source: arXiv 2503.01328. With R ranks, v chunks and M a multiple of g, the bubble is (R-1)(F+I)/v. If g < R and F =
    I = W, it is longer by (R-g)(v-1)F/v. The peak is min(g(v-1) + R-r, Mv) chunk activations on rank r, which is Rv on
    rank 0 if g = R. In the picture, lower case is chunk 1.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(gis(4, 4, chunks=2))))
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  i0 w0 .  i1 w1 .  i2 w2 .  i3 w3 I0 W0 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 .  .  i0 w0 f3 i1 w1 .  i2 w2 .  i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 .
    rank 2  .  .  F0 F1 F2 F3 f0 f1 .  i0 w0 f2 i1 w1 f3 i2 w2 .  i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 .  .
    rank 3  .  .  .  F0 F1 F2 F3 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 .  .  .
    """
    return _grouped("gis", ranks, microbatches, chunks, group=group)


def gis_h(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """GIS in groups of half as many microbatches: fewer activations, more bubble.

    It is `gis` with the smallest possible groups, of g = ceil(R/2) microbatches.

    Source: arXiv 2503.01328. With R ranks, v chunks, M a multiple of g and F = I = W, the bubble is (R-1)(F+I)/v +
    (R-g)(v-1)F/v. The peak is min(g(v-1) + R-r, Mv) chunk activations on rank r.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(gis_h(4, 4, chunks=2))))
    rank 0  F0 F1 .  .  f0 f1 F2 F3 .  .  .  i0 w0 .  f2 i1 w1 f3 I0 W0 I1 W1 .  i2 w2 .  i3 w3 I2 W2 I3 W3
    rank 1  .  F0 F1 .  .  f0 f1 F2 .  .  i0 w0 F3 i1 w1 f2 I0 W0 f3 I1 W1 .  i2 w2 .  i3 w3 I2 W2 I3 W3 .
    rank 2  .  .  F0 F1 .  .  f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 .  i3 w3 I2 W2 I3 W3 .  .
    rank 3  .  .  .  F0 F1 .  .  f0 i0 w0 f1 i1 w1 F2 I0 W0 F3 I1 W1 f2 i2 w2 f3 i3 w3 I2 W2 I3 W3 .  .  .
    """
    return _grouped("gis-h", ranks, microbatches, chunks, group=-(-ranks // 2))


def _grouped(name: str, ranks: int, microbatches: int, chunks: int, *, group: int | None) -> Schedule:
    require_positive(chunks=chunks)
    size = group_size(group, ranks=ranks, microbatches=microbatches, least=-(-ranks // 2))
    rows = [grouped_row(ranks, microbatches, chunks, rank, group=size, lag=0) for rank in range(ranks)]
    return Schedule(name, Placement.looped(ranks, chunks), microbatches, tuple(rows))
