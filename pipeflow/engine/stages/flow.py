"""Flow: finds from which parameters, buffers and received values each tensor of a forward is computed, and how, without
memory or arithmetic for tensors that depend on any of them. Must not contain: module calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.stages.isolation import host_random_state
from pipeflow.engine.stages.tape import (
    INDEXING,
    PACKING,
    Tape,
    draws_in,
    is_like,
    is_mask,
    packed,
    read_by,
    written_by,
    written_to,
)
from pipeflow.engine.torch_private.modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
)
from pipeflow.engine.torch_private.tensors import GROUPED_MM, LOCAL_SCALAR, storage_key
from pipeflow.engine.torch_private.trees import tree_leaves, tree_map

# Theory of operation
#
# A stage runs the module's own forward, in which calls of other stages are replaced. So it must be known beforehand
# on which parameters, buffers and received tensors each tensor of the forward depends. Each of these is a source and
# has a bit, and a forward on fake tensors tells: an operator's output depends on the sources of its arguments. It is
# more than a union of bits, for three reasons:
#
# - Views share memory, so sources belong to storages. An operator that writes in place adds its sources to a storage.
# - A forward may branch on values of the batch, such as a mask. So tensors that depend on the batch alone have
#   values. All others are fake; where a value of one is needed it is guessed, and the guess is noted. The planner
#   runs the forward again with the opposite guess: if other modules are called, the forward cannot be cut there.
# - Random numbers are a source, too: two stages that both compute a tensor with dropout would drop other entries.
#
# Identities say how each tensor was computed. Two runs of a forward computed the same if their results have the same.

RANDOM = 1
"""The source of random numbers."""

LEAST = 2**-24
"""The smallest random number but 0: what happens if a number is at most 0 is taken to have a probability of 0."""

_MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default
_MOST = 1024  # entries of a constant whose values are read


class Identity(NamedTuple):
    """How a tensor was computed.

    Attributes:
        made: number of what its memory has: of the operator that made or last wrote it, and of all before.
        offset: place of the tensor in that memory.
        look: its shape, strides and dtype.
    """

    made: int
    offset: int
    look: tuple[Any, ...]

    @classmethod
    def of_source(cls, source: int) -> Identity:
        """That of all of a parameter or buffer with this bit."""
        return cls(hash((cls, source)), 0, ())


class Identities:
    """The identities of the tensors of one run.

    Args:
        key: function that gives a number for the memory of a tensor.
        draws: whether tensors that no operator made may have been drawn, and are other ones in each run.

    Attributes:
        writes: for each memory that was written to in place, the times and the numbers that it had then.
    """

    def __init__(self, key: Callable[[Tensor], int], *, draws: bool = False) -> None:
        self._key = key
        self._draws = draws
        self.writes: dict[int, list[tuple[int, int]]] = {}
        self._made: dict[int, tuple[int, int]] = {}  # by memory: the number, and the offset where the memory begins

    def of(self, tensor: Tensor) -> Identity:
        """The identity of a tensor. One that no operator made is known by its values, if these are few integers on the
        CPU: to read others, the host would wait for a device.
        """
        key = self._key(tensor)
        if key not in self._made:
            self._made[key] = 0 if self._draws else _constant(tensor), 0
        made, offset = self._made[key]
        return Identity(made, offset + _offset(tensor), _look(tensor))

    def give(self, tensor: Tensor, identity: Identity) -> None:
        """Gives a tensor with memory of its own an identity of another run."""
        self._made[self._key(tensor)] = identity.made, identity.offset - _offset(tensor)

    def note(
        self, func: object, given: Iterable[object], output: object, written: Iterable[Tensor], clock: int
    ) -> None:
        """Records one operator: its arguments as `identified` before it ran, its output, what it wrote to, and when."""
        number = hash((func, *given))
        for tensor in written:
            key = self._key(tensor)
            self._made[key] = hash((self._made[key][0], number)), self._made[key][1]
            self.writes.setdefault(key, []).append((clock, self._made[key][0]))
        for index, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor) and self._key(tensor) not in self._made:
                self._made[self._key(tensor)] = hash((number, index)), 0

    def identified(self, leaves: Iterable[object]) -> list[object]:
        """The arguments of an operator with tensors replaced by their identities."""
        return [self.of(leaf) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]


class Flow(TorchDispatchMode):
    """Runs the operators of a forward on fake tensors, and records for each storage the set of sources that flowed into
    it, as an integer with a bit per source.

    Tensors that depend on the batch alone are really computed, so a forward may branch on them. Tensors that share
    memory share their sources.

    Args:
        fakes: mode of the fake parameters.
        real: bits of the sources that have values, which are buffers.
        draw: value to use for a single random number, to find out whether a forward branches on it.
        guess: how to treat values that are not known. If True, values that determine a shape count as nonzero, so that
            the result has its largest size. Values that are read count as zero. If False, it is the opposite. So a
            forward that loops over entries until a value ends the loop visits all of them.
        draws: as of Identities.

    Attributes:
        where: index of the call in which operators run, set by the watcher of calls.
        clock: number of entries into and exits from calls, set likewise.
        born: the call in which each storage was made.
        uses: for each storage and call other than the one that made it, when it was last read there.
        written: for each storage that was written to in place, how often.
        mixed: for each such write, the sources of the storage before and those of what was written.
        decided: calls that read a random number.
        guesses: calls in which values were guessed, with the first time.
        tape: records the operators; None to record nothing.
        identities: how each tensor was computed.
        read: sources of values on which the forward may branch, because Python read them or their number.
        is_live: True while random numbers belong to this stage; before, they count as a source.
    """

    def __init__(
        self, fakes: FakeTensorMode, real: int = 0, *, draw: float = LEAST, guess: bool = True, draws: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._fakes = fakes
        self._real = real | RANDOM
        self._draw = draw
        self._guess = guess
        self._host = host_random_state()
        self._guessed: set[int] = set()  # storages of tensors with guessed values
        self._sources: dict[int, int] = {}
        self._alive: dict[int, Any] = {}  # storages, kept so that no new one can have the same key
        self.where = 0
        self.clock = 0
        self.born: dict[int, int] = {}
        self.uses: dict[tuple[int, int], int] = {}
        self.written: Counter[int] = Counter()
        self.mixed: set[tuple[int, int]] = set()
        self.decided: list[int] = []
        self.guesses: dict[int, int] = {}
        self.tape: Tape | None = None
        self.identities = Identities(self.key, draws=draws)
        self.read = 0
        self.is_live = False

    def mark(self, tensor: Tensor, sources: int) -> int:
        """Adds sources to the tensor's storage and returns its key."""
        key = self.key(tensor)
        self._sources[key] = self._sources.get(key, 0) | sources
        return key

    def give(self, tensor: Tensor, source: int, identity: Identity | None = None) -> int:
        """Makes the tensor a source with this bit, and by default with an identity of its own. Returns its key."""
        self.identities.give(tensor, Identity.of_source(source) if identity is None else identity)
        return self.mark(tensor, source)

    def recorded(self, buffers: Iterable[tuple[str, Tensor]]) -> Tape:
        """Records the operators from now on. Returns the tape, which knows these buffers by their names."""

        def is_known(tensor: Tensor) -> bool:
            return self.is_known(tensor) and not self.sources(tensor) & RANDOM

        self.tape = Tape(self.key, is_known, lambda tensor: bool(self.sources(tensor)))
        for name, buffer in buffers:
            self.tape.give_buffer(name, buffer)
        return self.tape

    def has_branches(self, tensor: Tensor) -> bool:
        """Returns True if a forward may branch on a tensor that has values: known whole numbers, or a guessed mask or
        number.
        """
        if tensor.is_floating_point() or tensor.is_complex():
            return False
        is_plain = tensor.dtype is torch.bool or tensor.numel() == 1
        return self.is_known(tensor) or (is_plain and self.key(tensor) in self._guessed)

    def keep_values(self, tensor: Tensor) -> None:
        """Lets operators compute with the values of a source."""
        self._guessed.add(self.key(tensor))

    def overwrite(self, tensor: Tensor, sources: int) -> int:
        """Adds sources to the tensor's storage, in place of all others if the tensor is all of it. Returns its key."""
        key = self.key(tensor)
        if tensor.layout is torch.strided and tensor.nbytes == tensor.untyped_storage().nbytes():
            self._sources[key] = 0
        return self.mark(tensor, sources)

    def key(self, tensor: Tensor) -> int:
        """A number that stands for the memory of a tensor."""
        try:
            storage: Any = tensor.untyped_storage()
            key = storage_key(tensor)
        except (NotImplementedError, RuntimeError):  # a layout without a storage
            storage, key = tensor, -id(tensor)
        self._alive.setdefault(key, storage)
        return key

    def sources_of(self, key: int) -> int:
        """The sources of the storage with this key."""
        return self._sources.get(key, 0)

    def sources_written(self, keys: Iterable[int]) -> int:
        """The sources of those of the storages with these keys that were written to in place."""
        found = 0
        for key in keys:
            found |= self.sources_of(key) if key in self.written else 0
        return found

    def sources(self, tree: object) -> int:
        """The sources of all tensors in a tree."""
        found = 0
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                found |= self._sources.get(self.key(leaf), 0)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources, is_fake, is_guessed, read = 0, False, False, set[int]()
        leaves = tree_leaves((args, kwargs))
        is_drawn = func is _MADE_OF_NUMBERS and host_random_state() != self._host
        given = self.identities.identified(leaves)
        for tensor in leaves:
            if not isinstance(tensor, Tensor):
                continue
            key = self.key(tensor)
            read.add(key)
            own = self._sources.get(key, 0)
            sources |= own
            is_guessed = is_guessed or key in self._guessed
            is_fake = is_fake or isinstance(tensor, FakeTensor) or bool(own & ~self._real and key not in self._guessed)
            if self.born.get(key, self.where) != self.where:
                self.uses[key, self.where] = self.clock
        if func is LOCAL_SCALAR and sources & RANDOM and not is_fake:
            self.decided.append(self.where)
        if func is PACKING and is_fake and not self.sources(args[1]) & ~self._real:
            return self._packed(args, read)
        draws, written = draws_in(func, args, kwargs), written_to(func, args, kwargs)
        self.mixed.update((self.sources(tensor), sources) for tensor in written)
        moved = None if self.tape is None else self.tape.before(func, args)
        output = self._run(func, args, kwargs, is_fake=is_fake, draws=draws)
        if is_like(func):
            sources = 0
        if (draws or is_drawn) and not self.is_live:
            sources |= RANDOM
        self._note(output, sources, read)
        if self.tape is not None:
            self.tape.note(func, args, kwargs, output, moved)
        if is_guessed and not is_fake:
            self._guess_at(output)
        self.read |= self.sources(read_by(func, args)) & ~RANDOM
        for tensor in written:
            self.written[self.mark(tensor, sources)] += 1
            if is_fake:
                self._guessed.discard(self.key(tensor))
        self.identities.note(func, given, output, written, self.clock)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any, *, is_fake: bool, draws: bool) -> Any:
        if (not is_fake or self._is_view_of_memory(func, args)) and not draws:
            return func(*args, **kwargs)
        if func in INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        try:
            with self._fakes:
                output = (_grouped_products if func is GROUPED_MM else func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            output = self._guessing(func, args, kwargs, error)
        if not is_fake and isinstance(output, Tensor) and output.numel() == 1 and not written_by(func):
            drawn = round(self._draw) if func.overloadpacket is torch.ops.aten.bernoulli else self._draw
            return torch.full(output.shape, drawn, dtype=output.dtype, device=output.device)
        return output

    def _is_view_of_memory(self, func: Any, args: Any) -> bool:
        """Returns True for a view of memory that has values, even if unknown ones were written to it: a later write to
        the view must be seen in that memory.
        """
        return func.is_view and not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args))

    def _packed(self, args: Any, read: set[int]) -> tuple[Any, Tensor]:
        """A batch of padded sequences as a packed one. Its batch sizes depend on the lengths alone: they are real."""
        padded, lengths, batch_first = args
        plain, sizes = packed(padded, lengths, batch_first)
        data = self._faked(plain)
        self._note(data, self.sources((padded, lengths)), read)
        self._note(sizes, self.sources(lengths), read)
        return data, sizes

    def _guessing(self, func: Any, args: Any, kwargs: Any, unknown: Exception) -> Any:
        """The result of an operator that needs values of fake tensors, computed on ones or zeros instead. Raises
        `unknown` if it fails on these, too.
        """
        guess = not self._guess if func is LOCAL_SCALAR else self._guess
        try:
            output, other = (self._of_stand_ins(func, args, kwargs, each) for each in (guess, not guess))
        except Exception:
            raise unknown from None
        if not isinstance(output, Tensor | tuple | list) or _shapes(output) != _shapes(other):
            self.guesses.setdefault(self.where, self.clock)
            self._guess_at(output)
        return tree_map(self._faked, output)

    def _of_stand_ins(self, func: Any, args: Any, kwargs: Any, guess: bool) -> Any:
        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, FakeTensor):
                return leaf
            return torch.full((), int(guess), dtype=leaf.dtype).expand(leaf.shape)

        return func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))

    def _guess_at(self, output: object) -> None:
        """Keeps the guessed values of whole numbers, because a forward branches on them."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                self._guessed.add(self.key(leaf))

    def _faked(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or (self.key(leaf) in self._guessed and not leaf.is_floating_point()):
            return leaf
        with self._fakes:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    def _without_masks(self, indices: list[Any]) -> list[Any]:
        """The indices with known masks replaced by positions, so that the length of the result is known."""
        found: list[Any] = []
        for index in indices:
            if (
                isinstance(index, Tensor)
                and is_mask(index)
                and not isinstance(index, FakeTensor)
                and not self.sources(index) & ~self._real
            ):
                found += index.nonzero().unbind(1)
            else:
                found.append(index)
        return found

    def _note(self, output: object, sources: int, read: set[int]) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                key = self.key(leaf)
                if key not in read:
                    self.born[key] = self.where
                if sources:
                    self._sources[key] = self._sources.get(key, 0) | sources

    def is_known(self, tensor: Tensor) -> bool:
        """Returns True if the values of a tensor depend on the batch and on buffers alone, so they are computed."""
        return not isinstance(tensor, FakeTensor) and not self.sources(tensor) & ~self._real


def _shapes(output: object) -> list[Any]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


def _grouped_products(left: Tensor, right: Tensor, *others: Any, **options: Any) -> Tensor:
    """Products of a mixture of experts on fake tensors, for which torch's operator takes bfloat16 alone."""
    product: Tensor = GROUPED_MM(left.bfloat16(), right.bfloat16(), *others, **options)
    return product.to(left.dtype)


def _constant(tensor: Tensor) -> int:
    is_read = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.is_floating_point()
    return hash(str(tensor.tolist())) if is_read and tensor.numel() <= _MOST else 0


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) if tensor.layout is torch.strided else 0


def _look(tensor: Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return tuple(tensor.shape), tuple(stride), tensor.dtype


def _plain(leaf: object) -> object:
    """The argument itself, but of a float its type: Python may have drawn it, and then each run has another."""
    return leaf if isinstance(leaf, int | str | torch.dtype | None) else float if isinstance(leaf, float) else str(leaf)
