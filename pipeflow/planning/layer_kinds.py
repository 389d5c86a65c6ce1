"""Layer kinds: which layers of a mixture have experts, as models say it, as the command reads it, and as Megatron-LM
writes it. Must not contain: the sizes of layers.

A model says it by a number or by a list. The number N means the layers N, 2N, 3N and so on, counted from 1: so do Llama
4 (`interleave_moe_layer_step`) and Qwen's mixtures (`decoder_sparse_step`) in transformers. The list has 1 for each
layer with experts and 0 for each other one, as Megatron-LM's `--moe-layer-freq` has it. A number means other layers
there, 1, N + 1, 2N + 1 and so on (`get_gpt_decoder_layer_specs` in
NVIDIA/Megatron-LM/megatron/core/models/gpt/gpt_layer_specs.py), so lists alone are written for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive

LayerKind = Literal[
    "experts", "dense", "scan", "scan with experts", "scan alone", "attention alone", "MLP alone", "experts alone"
]
ROUTED = ("experts", "scan with experts", "experts alone")
"""The kinds of layers with experts."""
ALONE: dict[str, LayerKind] = {"M": "scan alone", "*": "attention alone", "-": "MLP alone", "E": "experts alone"}
"""The kinds of layers with one part, by their letters in a pattern: those of Megatron-LM's hybrid models."""
ExpertLayers = int | tuple[int, ...] | None
LARGEST = 100_000  # letters of a list whose repetitions are written out
LISTED = r"\[[01](?:,[01])*\]"


@lru_cache(maxsize=256)
def kinds_of(layers: int, expert_layers: ExpertLayers, dense_layers: int) -> tuple[LayerKind, ...]:
    """The kind of each of so many layers of a mixture. Without `expert_layers`, all but the first `dense_layers` have
    experts.

    >>> kinds_of(4, 2, 0), kinds_of(3, None, 1)
    (('dense', 'experts', 'dense', 'experts'), ('dense', 'experts', 'experts'))

    Raises UsageError for both, for a list of another length or with other numbers than 0 and 1, and if no layer has
    experts.
    """
    if expert_layers is None:
        given, kinds = f"dense_layers={dense_layers}", [layer >= dense_layers for layer in range(layers)]
    elif dense_layers:
        raise UsageError(
            f"dense_layers={dense_layers} and expert_layers both say which layers have experts: give dense_layers=0 "
            "and the whole list in expert_layers, or leave expert_layers out"
        )
    elif isinstance(expert_layers, int):
        require_positive(expert_layers=expert_layers)
        given = f"expert_layers={expert_layers}"
        kinds = [layer % expert_layers == 0 for layer in range(1, layers + 1)]
    else:
        if len(expert_layers) != layers or {*expert_layers} - {0, 1}:
            raise UsageError(
                f"expert_layers has {len(expert_layers)} numbers for {layers} layers: give one for each layer, 1 with "
                "experts or 0 without"
            )
        given, kinds = "zeros alone in expert_layers", [each == 1 for each in expert_layers]
    if not any(kinds):
        raise UsageError(f"{given} leave no layer of {layers} with experts: give at least one layer experts")
    return tuple("experts" if has_experts else "dense" for has_experts in kinds)


def of_pattern(pattern: str, behind: tuple[LayerKind, ...], parts_alone: bool) -> tuple[LayerKind, ...]:
    """The kind of each layer of a pattern. `behind` are the kinds if all layers had attention. With `parts_alone`, each
    layer has one part, otherwise M stands for a scan in the place of attention.

    >>> of_pattern("M*", ("experts", "dense"), False), of_pattern("M-", (), True)
    (('scan with experts', 'dense'), ('scan alone', 'MLP alone'))
    """
    if parts_alone:
        return tuple(ALONE[letter] for letter in pattern)
    scans: dict[LayerKind, LayerKind] = {"experts": "scan with experts", "dense": "scan"}
    return tuple(scans[kind] if letter == "M" else kind for letter, kind in zip(pattern, behind, strict=True))


def routed_layers(kinds: Sequence[LayerKind]) -> int:
    """How many of these layers have experts."""
    return sum(kinds.count(kind) for kind in ROUTED)


def expert_layers_in(text: str) -> int | tuple[int, ...]:
    """The value of `expert_layers` in a text: a number, numbers with commas, or an expression of lists as Megatron-LM
    reads it.

    >>> expert_layers_in("2"), expert_layers_in("0,1,1"), expert_layers_in("[0]*2+([1]+[0])*2")
    (2, (0, 1, 1), (0, 0, 1, 0, 1, 0))

    Raises UsageError for anything else.
    """
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    left, before = text.replace(" ", ""), ""
    left = f"[{left}]" if re.fullmatch("[01](,[01])*", left) else left
    while left != before:  # innermost first; repetitions come before sums
        before = left
        left = re.sub(rf"({LISTED})\*([0-9]+)", lambda found: _repeated(found[1], found[2]), left)
        left = re.sub(rf"\(({LISTED})\)", r"\1", left.replace("]+[", ","))
    if not re.fullmatch(LISTED, left):
        raise UsageError(
            f"it must be a number, or 0 or 1 for each layer such as 0,1,0,1 or '[0]*3+[1]*45'; got {text!r}"
        )
    return tuple(map(int, left[1:-1].split(",")))


def _repeated(numbers: str, times: str) -> str:
    if len(times) > 6 or not 0 < len(numbers) * int(times) <= LARGEST:
        raise UsageError(f"{numbers[:20]} cannot be repeated {times[:20]} times: a list has a number for each layer")
    return f"[{','.join([numbers[1:-1]] * int(times))}]"


def expert_list(kinds: tuple[LayerKind, ...]) -> str:
    """The list of these layers as an expression of Megatron-LM: a pattern that repeats, or runs of equal layers.

    >>> expert_list(("dense", "experts") * 4), expert_list(("dense", "experts", "experts"))
    ('([0,1]*4)', '([0]*1+[1]*2)')
    """
    numbers = [int(kind in ROUTED) for kind in kinds]
    runs = [[value, len(list(alike))] for value, alike in groupby(numbers)]
    written = "+".join(f"[{value}]*{count}" for value, count in runs)
    periods = (size for size in range(1, len(kinds)) if numbers[:size] * (len(kinds) // size) == numbers)
    if size := next(periods, 0):
        repeated = f"[{','.join(map(str, numbers[:size]))}]*{len(kinds) // size}"
        written = min(repeated, written, key=len)
    return f"({written})"
