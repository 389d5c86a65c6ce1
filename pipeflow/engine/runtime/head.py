"""Head: the module of the last stage that computes logits, whose calls are computed by slices of tokens. Must not
contain: what may follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import Deferral
from pipeflow.engine.runtime.head_logits import Sliced, Slicing, applied, in_memory
from pipeflow.engine.stages.stage import ModuleStage

_TRIED = 8  # tokens with which a head is tried


class SlicedHead:
    """The head of a stage's module.

    Args:
        name: name of the head in the module.
        module: the module of the stage.
        slices: the number of slices.
        deferral: that of the stage, once there is one.
    """

    def __init__(self, name: str, module: nn.Module, slices: int) -> None:
        self._name, self._module, self._slices = name, module, slices
        self.deferral: Deferral | None = None
        self._tried: set[tuple[bool, torch.dtype]] = set()
        self._is_called = False

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a stage, in which the head is computed by slices. It raises UsageError if the head is not called
        in it, since nothing would be sliced then.
        """

        @wraps(call)
        def sliced(*arguments: Any, **keywords: Any) -> Any:
            self._is_called = False
            head = self._module.get_submodule(self._name)
            with ExitStack() as stack:
                for each in head.modules():
                    if getattr(each, "acts_on_tokens", False):
                        stack.enter_context(_replaced(each, _of_rows(each)))
                stack.enter_context(_replaced(head, self._begun(head.forward)))
                output = call(*arguments, **keywords)
            if not self._is_called:
                raise UsageError(
                    f"head_slices: the last stage did not call its head {self._name!r}: name the module that computes "
                    'the logits, as in head="lm_head", or leave head_slices out'
                )
            return output

        return sliced

    def _begun(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The head's forward, which makes a Sliced of its input."""

        def begun(*arguments: Any, **keywords: Any) -> Any:
            hidden, *others = *arguments, *keywords.values()
            if others or not isinstance(hidden, Tensor) or isinstance(hidden, Sliced) or hidden.dim() < 2:
                raise UsageError(
                    f"head_slices: the head {self._name!r} must be called with one tensor (..., width), the hidden "
                    "states of the tokens"
                )
            self._is_called = True
            self._try(forward, hidden)
            slicing = Slicing(self._slices, self.deferral)
            with slicing.plain():
                return forward(Sliced.of(slicing, hidden, hidden.dim() - 1))

        return begun

    def _try(self, forward: Callable[..., Any], hidden: Tensor) -> None:
        """Computes a few tokens together and by slices. Raises UsageError if the results differ."""
        key = self._module.training, hidden.dtype
        if key in self._tried:
            return
        some = hidden.detach().flatten(0, -2)[:_TRIED]
        with torch.no_grad():
            expected = forward(some)
            found: Any = in_memory(forward(Sliced.of(Slicing(min(2, self._slices)), some, 1)))
        close = {"rtol": torch.finfo(expected.dtype).eps ** 0.5, "atol": 1e-3, "equal_nan": True}
        if expected.shape[:-1] != some.shape[:-1] or not torch.allclose(found, expected, **close):
            raise UsageError(
                f"head_slices: the head {self._name!r} computes something else for a few tokens than for all of them: "
                "leave head_slices out"
            )
        self._tried.add(key)


def require_sliceable(slices: int | None, name: str | None, *, over_batch: bool, graph: bool) -> None:
    """Raises UsageError for arguments with which logits cannot be computed by slices."""
    if slices is None:
        if name is not None:
            raise UsageError("head= names the head that head_slices divides: pass head_slices=, too")
        return
    if type(slices) is not int or slices < 1:
        raise UsageError(f"head_slices must be a whole number of 1 or more, got {slices!r}")
    if over_batch:
        raise UsageError(
            'head_slices computes the loss of each microbatch alone, and loss_over="batch" needs the logits of all of '
            "them: leave one of the two out"
        )
    if graph:
        raise UsageError("head_slices computes gradients in a forward, which graph=True does not record: leave one out")


def head_of(module: nn.Module, name: str | None, slices: int) -> SlicedHead:
    """The head of the module of the last stage.

    Args:
        module: the module.
        name: the head's name; by default it is what `get_output_embeddings` returns.
        slices: the number of slices.

    Raises UsageError if there is none, and for one with hooks, which would see what is not computed yet.
    """
    root = module.root if isinstance(module, ModuleStage) else module
    if name is None:
        find = getattr(root, "get_output_embeddings", None)
        found = find() if callable(find) else None
        name = next((each for each, its in root.named_modules() if its is found and each), None)
    try:
        head = root.get_submodule(name or "")
    except AttributeError:
        head = root
    if head is root or name is None:
        has = f"has no module {name!r}" if name else "has no get_output_embeddings() that returns its head"
        raise UsageError(
            f"head_slices needs the module that computes the logits, and {type(root).__name__} {has}: name it, as in "
            'head="lm_head"'
        )
    if any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in head.modules()):
        raise UsageError(
            f"head_slices: the head {name!r} has hooks, as those of fully_shard, which would see logits that are not "
            "computed yet: remove them, or leave head_slices out"
        )
    if any(getattr(each, "acts_on_tokens", True) is False for each in head.modules()):
        raise UsageError(
            f"head_slices: the head {name!r} has sequence_parallel=True, so it takes a piece of the sequence and "
            "returns all of it: leave head_slices out"
        )
    return SlicedHead(name, root, slices)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the `with` block, a module has another forward."""
    own, attributes = vars(module).get("forward"), vars(module)
    attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward")
        if own is not None:
            attributes["forward"] = own


def _of_rows(module: nn.Module) -> Callable[..., Any]:
    """The forward of a layer that acts on each token alone, whatever it calls. It also takes a Sliced."""
    forward = module.forward

    def called(input: Tensor) -> Any:
        return (
            applied(forward, (input,), {}, input, module.parameters()) if isinstance(input, Sliced) else forward(input)
        )

    return called
