"""GPT: the sizes of a decoder-only transformer, and how many parameters a part of it has. What must not live here:
bytes, times and layouts.

A block is norm, attention, norm, perceptron, each norm before what it is for (pre-LN). Attention is one linear for
query, key and value (3h x h, with bias) and an output linear (h x h, with bias); the perceptron is a wide linear
(rh x h, with bias) and an output linear (h x rh, with bias), where h is `hidden` and r is `mlp_ratio`. Before the
blocks stand a word and a position table, after them a last norm and the head, whose weight is the word table's.

A tensor split by t cuts query-key-value and wide by columns (weight and bias / t), the two outputs by rows
(weight / t, the bias on every rank), the word table and with it the head by words (each rank has as many rows as the
vocabulary has words / t, rounded up), the position table by hidden; every rank has the norms whole.
Sources: arXiv 1909.08053 (Megatron-LM), section 3; the position table by hidden is pipeflow's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_positive

Part = tuple[int, int]  # layers [start, end)


@dataclass(frozen=True, slots=True)
class GPT:
    """The sizes of a GPT.

    >>> GPT.named("gpt2-small").parameters
    124475904

    Raises UsageError for sizes below 1, and for heads that do not divide `hidden`.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden state.
        heads: number of attention heads.
        positions: the longest sequence, in tokens.
        vocabulary: number of tokens in the vocabulary.
        mlp_ratio: width of a layer's MLP, as a multiple of `hidden`.
    """

    layers: int
    hidden: int
    heads: int
    positions: int = 1024
    vocabulary: int = 50304
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        require_positive(layers=self.layers, hidden=self.hidden, heads=self.heads, positions=self.positions)
        require_positive(vocabulary=self.vocabulary, mlp_ratio=self.mlp_ratio)
        if self.hidden % self.heads:
            near = _near(self.hidden, self.heads)
            raise UsageError(f"hidden {self.hidden} does not divide into {self.heads} heads: {near}")

    @classmethod
    def named(cls, name: str) -> GPT:
        """The model `name` of GPT_PRESETS. Raises UsageError for an unknown name, with the nearest known one."""
        if name not in GPT_PRESETS:
            raise unknown("model", name, GPT_PRESETS)
        return GPT_PRESETS[name]

    @property
    def parameters(self) -> int:
        """Of the whole model, the tied word table counted once."""
        return self.parameters_of([(0, self.layers)])

    def parameters_of(self, parts: Iterable[Part], tensor: int = 1) -> int:
        """What one of `tensor` ranks holds that together hold the stages with layers [start, end) of `parts`: a word
        table that is also the head is there once.

        Raises UsageError for parts that the model does not have, and as `require_tensor`.
        """
        parts = list(parts)
        self.require_tensor(tensor)
        if wrong := [part for part in parts if not 0 <= part[0] < part[1] <= self.layers]:
            raise UsageError(f"layers {wrong[0]} are no part of {self.layers} layers: give (start, end), end excluded")
        first, last = any(start == 0 for start, _ in parts), any(end == self.layers for _, end in parts)
        count = sum(end - start for start, end in parts) * self._block(tensor)
        if first or last:
            count += self.vocabulary_rows(tensor) * self.hidden
        if first:
            count += self.positions * self.hidden // tensor
        if last:
            count += 2 * self.hidden
        return count

    def flops_per_sample(self, sequence: int | None = None) -> int:
        """Floating-point operations of the forward and the backward of one sequence, by default of `positions` tokens,
        without what is computed again: three times those of the products in the forward, which are
        (4 + 2r) 2h^2 + 4sh of a layer and 2hV of the head per token (arXiv 2104.04473, appendix), s being the sequence
        and V the vocabulary.
        """
        tokens, hidden = self.positions if sequence is None else sequence, self.hidden
        layer = 2 * (4 + 2 * self.mlp_ratio) * hidden**2 + 4 * tokens * hidden
        return 3 * tokens * (self.layers * layer + 2 * hidden * self.vocabulary)

    def vocabulary_rows(self, tensor: int = 1) -> int:
        """The rows of the word table on one of `tensor` ranks, those that pad it included."""
        return -(-self.vocabulary // tensor)

    def require_tensor(self, tensor: int) -> None:
        """Raises UsageError unless the heads, and with them `hidden`, divide into `tensor` equal parts."""
        require_positive(tensor=tensor)
        if self.heads % tensor:
            near = _near(self.heads, tensor)
            raise UsageError(f"tensor={tensor} does not divide {self.heads} heads and hidden {self.hidden}: {near}")

    def _block(self, tensor: int) -> int:
        hidden, wide = self.hidden, self.mlp_ratio * self.hidden
        matrices = (3 * hidden + hidden + 2 * wide) * hidden
        split_biases, whole_biases, norms = 3 * hidden + wide, 2 * hidden, 4 * hidden
        return (matrices + split_biases) // tensor + whole_biases + norms


def _near(whole: int, part: int) -> str:
    """Which divisors of `whole` are next to `part`, which is none."""
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    near = [number for number in divisors if number < part][-1:] + [number for number in divisors if number > part][:1]
    return f"the nearest that work{'s is' if len(near) == 1 else ' are'} {' and '.join(map(str, near))}"


_GPT3 = GPT(layers=96, hidden=12288, heads=96, positions=2048)

GPT_PRESETS: Mapping[str, GPT] = MappingProxyType(
    {
        "tiny": GPT(layers=8, hidden=128, heads=4, positions=256, vocabulary=2048),
        "gpt2-small": GPT(layers=12, hidden=768, heads=12),
        "gpt2-medium": GPT(layers=24, hidden=1024, heads=16),
        "gpt2-large": GPT(layers=36, hidden=1280, heads=20),
        "gpt2-xl": GPT(layers=48, hidden=1600, heads=32),
        "gpt2-8b": GPT(layers=72, hidden=3072, heads=24),
        "gpt2-10b": GPT(layers=50, hidden=4096, heads=16),
        "gpt3-175b": _GPT3,
        "gpt3": _GPT3,
    }
)
