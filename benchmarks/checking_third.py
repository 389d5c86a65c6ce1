"""`pipeflow check` on a third set of faults: of training loops, optimizers and resuming too. They were written, with
what must be said of each, before the code had seen any of them. The first figures are in the notes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.checked import chunks, contexts, experts, llama, meshes, training
from benchmarks.checking import COLUMNS, Case, fill
from benchmarks.report import Report
from pipeflow.testing import run_processes

CASES = (
    Case("U1", "clipping before the loss scale is undone", training, "clipped before unscaling", "gradient", "head",
         ("scale", "norm"), reference="clipped", options=("clipped",)),
    Case("U2", "a loss scale that is not undone", training, "not unscaled", "gradient", "head", ("scale",)),
    Case("U3", "averaged weights that stay after an evaluation", training, "averaged weights stay", "update", "embed",
         ("optimizer", "stale")),
    Case("U4", "label smoothing on one rank alone", training, "smoothed on one rank", "loss", "loss",
         ("unknown", "order", "formula"), reference="smoothed", options=("smoothed",)),
    Case("U5", "rotary positions from zero on one context rank", contexts, "positions of one rank", "input",
         "layers.2.attention: scaled_dot_product_attention #1", ("sharding", "order")),
    Case("U6", "tokens above an expert's capacity", experts, "capacity", "output", "layers.1.feed",
         ("sharding", "missing_microbatch"), reference="experts"),
    Case("U7", "a last microbatch that is dropped", training, "last microbatch dropped", "batch", "",
         ("missing_microbatch",)),
    Case("U8", "padding of the vocabulary that counts in the loss", training, "padded vocabulary", "loss", "loss",
         ("unknown", "sharding")),
    Case("U9", "a rate that one rank does not raise", training, "rate on one rank", "optimizer", "embed",
         ("optimizer", "stale"), reference="warm", options=("warm",)),
    Case("U10", "weight decay of norms on one rank", training, "decay on one rank", "optimizer", "layers.0.norm1",
         ("optimizer", "stale")),
    Case("U11", "a frozen weight that one rank trains", training, "trained on one rank", "update", "layers.1.feed.w1",
         ("optimizer", "stale"), reference="frozen", options=("frozen",)),
    Case("U12", "a wrong backward of an activation", training, "wrong backward", "gradient", "layers.1.feed.w1",
         ("unknown",)),
    Case("U13", "heads that are cut in turns", meshes, "interleaved heads", "weight", "layers.1.attention.wq",
         ("sharding",), job="tensor"),
    Case("U14", "an optimizer without its state after resuming", training, "state not restored", "optimizer", "embed",
         ("optimizer", "stale")),
    Case("U15", "a tied embedding whose copies are not added up", chunks, "no tie", "gradient", "embed",
         ("missing_tie",), None, reference="tied", options=(llama.SIZES, "zbv")),
)  # fmt: skip


def run(rounds: int | None = None) -> Report:
    report = Report("checking_third", f"pipeflow check: {len(CASES)} faults of losses, loops and optimizers", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        fill(report, CASES, references_in(Path(folder)))
    report.notes.append("before the code had seen these faults: found 15, right place 12, right cause 10")
    return report


def references_in(folder: Path) -> dict[str, Path]:
    """The plain runs, of one rank of the same job."""
    for kind in ("clipped", "warm", "frozen", "smoothed"):
        run_processes(training.run, 1, str(folder / kind), "", kind)
    run_processes(chunks.tied, 1, str(folder / "tied"))
    return {
        "plain": llama.plain(folder / "plain"),
        "experts": llama.plain(folder / "experts", experts.SIZES),
        **{kind: folder / kind for kind in ("clipped", "warm", "frozen", "smoothed", "tied")},
    }
