"""Scans: what a layer with a scan (a state space, Mamba) has in the place of attention: its sizes, parameters and
operations, and what it keeps. Must not contain: attention, MLPs and times.

A scan reads the output of a linear: `scan_width` channels, a gate for each, and per group of channels two vectors of
`scan_state` numbers. A short convolution comes before it, and an output linear after it. There are two kinds:

- With `scan_heads` (Mamba-2, arXiv 2405.21060), channels of a head share a step, and the sequence is computed in chunks
  of `scan_chunk` tokens: by products within a chunk, and with the state of each chunk.
- With `scan_rank` (Mamba, arXiv 2312.00752), each channel has a step of its own, made by two linears through so many
  numbers. The scan runs outside of the units for products, in one kernel.

Tensor ranks divide heads or channels. If there are fewer groups than ranks, each rank computes with one whole group.
Bytes are counted from the kernels of state-spaces/mamba: `mamba_split_conv1d_scan_combined` (as Megatron-LM calls it,
with the gated norm beside it) and `selective_scan_fn` (as transformers' Jamba calls it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipeflow.core.errors import UsageError

if TYPE_CHECKING:
    from pipeflow.planning.blocks import Transformer
    from pipeflow.planning.setup import Setup

RECURRENT = 9.0  # operations per channel, number of its state and token of the recurrent scan: arXiv 2312.00752, app. C
FLOAT32 = 2.0  # states of chunks and products within them are in float32: as many 16-bit numbers


class ScanSizes(NamedTuple):
    """The scan of a layer on one tensor rank.

    Attributes:
        width: channels.
        state: numbers of the state of a channel.
        vectors: numbers in the two vectors of all groups, of which there are `groups`.
        steps: heads, or numbers that make the steps of channels.
        groups: groups of channels that share the two vectors.
        by_chunks: whether it is computed in chunks.
    """

    width: int
    state: int
    vectors: int
    steps: int
    groups: int
    by_chunks: bool


def scan_sizes(model: Transformer, tensor: int = 1) -> ScanSizes:
    """The sizes of a model's scans on one of `tensor` ranks."""
    width, state = model.scan_channels, model.scan_state or 0
    groups = max(1, model.scan_groups // tensor)
    steps = model.scan_rank if model.scan_heads is None else model.scan_heads // tensor
    return ScanSizes(width // tensor, state, 2 * groups * state, steps or 0, groups, model.scan_heads is not None)


def require_scans(model: Transformer) -> None:
    """Raises UsageError for a pattern that does not fit its model, and for sizes of scans that are missing or belong to
    no scan.
    """
    pattern, given = model.pattern or "", model.scan_state is not None
    if model.pattern is not None and (len(pattern) != model.layers or {*pattern} - {*"M*-E"}):
        raise UsageError(
            f"pattern has {len(pattern)} letters for {model.layers} layers: give one for each layer, M for a scan, * "
            "for attention, - for an MLP alone or E for experts alone"
        )
    if model.parts_alone != bool({*pattern} & {*"-E"}) and (not model.parts_alone or not pattern):
        raise UsageError("the letters - and E of pattern are layers of one part: give parts_alone and the pattern")
    if "E" in pattern and (model.experts == 1 or model.expert_layers is not None or model.dense_layers):
        raise UsageError("E in pattern says which layers have experts: give experts, without expert_layers")
    if model.parts_alone and "E" not in pattern and model.experts > 1:
        raise UsageError("with parts_alone, E in pattern says which layers have experts: it has none")
    if ("M" in pattern) != given:
        raise UsageError(f"scan_state={model.scan_state} and M in pattern belong together: give both, or none")
    if given and (model.scan_heads is None) == (model.scan_rank is None):
        raise UsageError("a scan has heads (Mamba-2) or a rank of its steps (Mamba): give scan_heads or scan_rank")
    if model.scan_heads is not None and model.scan_channels % model.scan_heads:
        raise UsageError(f"scan_width {model.scan_channels} does not divide into scan_heads={model.scan_heads}")


def require_scan_ranks(model: Transformer, tensor: int, context: int = 1) -> None:
    """Raises UsageError unless heads and groups of scans divide over tensor and context ranks."""
    if model.scan_state is None:
        return
    name, parts = ("channels", model.scan_channels) if model.scan_heads is None else ("heads", model.scan_heads)
    if parts % (tensor * context):
        raise UsageError(f"tensor={tensor} x context={context} ranks do not divide the {parts} {name} of scans")
    if model.scan_groups % tensor and tensor % model.scan_groups:
        raise UsageError(f"tensor={tensor} neither divides {model.scan_groups} groups of scans nor is a multiple")


def require_scan_setup(model: Transformer, setup: Setup) -> None:
    """Raises UsageError for what no plan counts in layers with scans, and in layers of one part."""
    if model.pattern is None:
        return
    if setup.checkpoint == "op" or setup.recompute_modules:
        raise UsageError("layers of a pattern recompute all or nothing: use checkpoint full or none")
    if setup.lora_rank:
        raise UsageError("adapters (lora_rank) are planned for layers of attention with an MLP: leave out lora_rank")


def scan_parameters(model: Transformer, tensor: int) -> int:
    """Parameters of a layer's scan on one of `tensor` ranks, without its linears: the convolution with its bias, and
    per head or channel a decay, a bias of the step and a share of the input; then the norm of its output, or of the
    steps and both vectors.
    """
    width, state, vectors, steps, *_ = scan_sizes(model)
    convolved = width + (vectors if model.scan_heads is not None else 0)
    found = convolved * (model.scan_conv + 1)
    if model.scan_heads is not None:
        return (found + 3 * steps + width) // tensor
    return (found + width * (state + 2)) // tensor + steps + vectors


def scan_products(model: Transformer) -> tuple[tuple[int, int, int], ...]:
    """Per product of the scan by chunks, for each token: columns, depth, and how often, on all tensor ranks. They are
    the scores of a chunk, these with the channels, states of chunks, and what they add to the output (arXiv 2405.21060,
    section 6). None for a recurrent scan.
    """
    width, state, _, heads, groups, by_chunks = scan_sizes(model)
    if not by_chunks:
        return ()
    channels = width // heads
    chunk = model.scan_chunk
    return (chunk, state, groups), (channels, chunk, heads), (channels, state, heads), (channels, state, heads)


def scan_flops(model: Transformer) -> int:
    """Operations per token in the forward of one layer's scan, on all tensor ranks."""
    width, state, *_ = scan_sizes(model)
    if model.scan_heads is None:
        return round(RECURRENT * width * state)
    return 2 * sum(columns * depth * many for columns, depth, many in scan_products(model))


def scan_moved(model: Transformer, tensor: int) -> float:
    """Numbers per token that convolution, scan and gated norm read and write on one of `tensor` ranks."""
    width, state, vectors, steps, groups, by_chunks = scan_sizes(model, tensor)
    if not by_chunks:  # the convolution; input, step, gate and vectors are read, two outputs are written
        return 2 * width + 5 * width + 2 * (steps + vectors)
    states = FLOAT32 * 4 * width * state / model.scan_chunk  # of chunks: written, read and written in turn, read
    scores = FLOAT32 * 2 * groups * model.scan_chunk
    return 2 * (width + vectors) + 6 * width + 2 * vectors + states + scores


def scan_made(model: Transformer, tensor: int) -> int:
    """Numbers per token in the output of a scan's first linear, on one of `tensor` ranks."""
    width, _, vectors, steps, _, by_chunks = scan_sizes(model, tensor)
    return 2 * width + (vectors + steps if by_chunks else 0)


def scan_kept(model: Transformer, tensor: int) -> int:
    """Numbers per token that a scan keeps for its backward, without the input of the linear after it: what the first
    linear made, and the scan's output, which the gate and the norm need. A recurrent scan also keeps the convolution's
    output, the steps of channels, and what made them.
    """
    width, _, vectors, steps, _, by_chunks = scan_sizes(model, tensor)
    return scan_made(model, tensor) + width + (0 if by_chunks else 2 * width + steps + vectors)
