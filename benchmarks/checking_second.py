"""`pipeflow check` on a second set of faults: other models, engines and dtypes. They were written, with what must be
said of each, before the code had seen any of them. The first figures are in the notes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.checked import chunks, contexts, experts, images, llama, loops, meshes
from benchmarks.checking import COLUMNS, Case, fill
from benchmarks.report import Report
from pipeflow.testing import run_processes

COARSE = llama.Sizes(dtype=torch.bfloat16)
CLIP = 0.05

CASES = (
    Case("S1", "a mean over each accumulation", loops, "mean of accumulations", "loss", "loss", ("masked_tokens",)),
    Case("S2", "divided by the accumulations twice", loops, "divided twice", "gradient", "head", ("scale",),
         reference="coarse", options=(COARSE,)),
    Case("S3", "gradients that are never synchronized", loops, "never synchronized", "gradient", "head",
         ("missing_reduction",)),
    Case("S4", "weight decay of norms", loops, "decayed norms", "optimizer", "layers.0.norm1", ("optimizer",)),
    Case("S5", "a rate whose schedule steps twice", loops, "stepped twice", "optimizer", "embed",
         ("scale", "optimizer"), reference="warm", options=(llama.SIZES, None, True)),
    Case("S6", "labels that are not shifted", loops, "unshifted labels", "loss", "loss", ("order",)),
    Case("S7", "a sampler that begins anew", loops, "same epoch", "batch", "", ("order",)),
    Case("S8", "another eps of norms", loops, "other eps", "output", "layers.0.norm1", ("formula",)),
    Case("S9", "a cached copy of a weight", loops, "cached weight", "output", "layers.1.feed.w1", ("stale",)),
    Case("S10", "clipping of each layer", loops, "norm of layers", "norm", "", ("norm",), reference="clipped",
         options=(llama.SIZES, CLIP)),
    Case("S11", "new values that stay in float32 copies", loops, "stale masters", "update", "layers.2.feed.w1",
         ("stale",), reference="coarse", options=(COARSE,)),
    Case("S12", "batch norms with a replica's statistics", images, "own statistics", "output", "norm2",
         ("missing_reduction",), reference="images"),
    Case("S13", "another momentum of statistics", images, "other momentum", "buffer", "norm2", ("stale",),
         reference="images"),
    Case("S14", "replicas with seeds of their own", images, "own seeds", "weight", "conv1",
         ("sharding", "missing_reduction"), reference="images"),
    Case("S15", "gradients sent in bfloat16", chunks, "coarse gradients", "gradient", "layers.0.feed.w2",
         ("precision",), 0),
    Case("S16", "the layers of another stage", chunks, "other order", "weight", "layers.2.norm1", ("sharding",), 2),
    Case("S17", "microbatches that are not averaged", chunks, "not divided", "gradient", "head", ("scale",), 3),
    Case("S18", "a stage whose gradients are not zeroed", chunks, "not zeroed", "gradient", "layers.2.feed.w2",
         ("stale",), 2),
    Case("S19", "a weight half that is not run", chunks, "lost half", "gradient", "layers.1.feed.w2",
         ("missing_microbatch",), 1, options=(llama.SIZES, "zbv")),
    Case("S20", "microbatches that are not averaged", chunks, "not divided", "gradient", "head", ("scale",), 3,
         reference="coarse", options=(COARSE, "zbv")),
    Case("S21", "a tensor rank's own initial values", meshes, "own initial values", "weight", "layers.1.attention.wq",
         ("sharding",), job="tensor"),
    Case("S22", "heads of the other tensor rank", meshes, "exchanged heads", "weight", "layers.1.attention.wv",
         ("sharding",), job="tensor"),
    Case("S23", "a sequence on the wrong ranks", meshes, "wrong ranks of the sequence", "output", "layers.1.norm2",
         ("sharding",), job="tensor"),
    Case("S24", "a norm's gradient of a part of the sequence", meshes, "norm of a part", "gradient", "layers.1.norm1",
         ("missing_reduction",), job="tensor"),
    Case("S25", "a sum of replicas for a mean", meshes, "sum for a mean", "gradient", "layers.1.feed.w2", ("scale",),
         reference="mixed", job="mixed"),
    Case("S26", "replicas that share samples", meshes, "overlapping samples", "batch", "", ("order",),
         reference="mixed", job="mixed"),
    Case("S27", "clipping by the norm of own shards", meshes, "own shards", "gradient", "head", ("norm",),
         reference="clipped", job="clipped"),
    Case("S28", "positions that begin at zero on each rank", contexts, "own positions", "input",
         "layers.0.attention: scaled_dot_product_attention #1", ("sharding", "order")),
    Case("S29", "keys of the own rank alone", contexts, "own keys", "output", "layers.1.attention.wo",
         ("sharding", "missing_reduction"), reference="coarse", options=(COARSE,)),
    Case("S30", "a mean over each rank's tokens", contexts, "own tokens", "loss", "loss", ("masked_tokens",)),
    Case("S31", "a weight without its sum", contexts, "one not summed", "gradient", "layers.1.attention.wk",
         ("missing_reduction",), reference="coarse", options=(COARSE,)),
    Case("S32", "keys without the gradients of other ranks", contexts, "keys not summed", "gradient",
         "layers.1.attention.wv", ("missing_reduction",)),
    Case("S33", "tokens that come back to the wrong rank", experts, "tokens of another rank", "output",
         "layers.1.feed", ("sharding", "order"), reference="experts"),
    Case("S34", "outputs of experts that are not added up", experts, "outputs not summed", "output", "layers.1.feed",
         ("missing_reduction",), reference="experts"),
    Case("S35", "a loss without its balance", experts, "no balance", "loss", "loss", ("unknown",),
         reference="experts"),
    Case("S36", "gradients of experts divided by replicas", experts, "experts divided", "gradient",
         "layers.1.feed.experts.3.w2", ("scale",), reference="experts"),
    Case("S37", "experts of the other rank", experts, "experts exchanged", "weight", "layers.1.feed.experts.0.w1",
         ("sharding",), reference="experts"),
)  # fmt: skip


def run(rounds: int | None = None) -> Report:
    report = Report(
        "checking_second", f"pipeflow check: {len(CASES)} more faults, in other models and engines", COLUMNS
    )
    with tempfile.TemporaryDirectory() as folder:
        fill(report, CASES, references_in(Path(folder)))
    report.notes.append("before the code had seen these faults: found 36, right place 27, right cause 21")
    return report


def references_in(folder: Path) -> dict[str, Path]:
    """The plain runs; that in mixed precision is of one rank of the same engine."""
    run_processes(meshes.mixed, 1, str(folder / "mixed"))
    return {
        "plain": llama.plain(folder / "plain"),
        "coarse": llama.plain(folder / "coarse", COARSE),
        "clipped": llama.plain(folder / "clipped", clip=CLIP),
        "warm": llama.plain(folder / "warm", warm=True),
        "images": images.plain(folder / "images"),
        "experts": llama.plain(folder / "experts", experts.SIZES),
        "mixed": folder / "mixed",
    }
