"""Calls: each call of a watched module goes to a function instead, which decides what to do. The
stack of the code shows the activation checkpoint or the autograd.Function around it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial, wraps
from inspect import unwrap
from threading import get_ident
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from pipeflow.core.errors import UsageError

_FILE = torch.utils.checkpoint.__file__


def surroundings(until: CodeType) -> tuple[str | None, str | None]:
    """What is around the caller, up to the frame that runs `until`: the kind of the activation checkpoint, "reentrant"
    or "plain", and the name of the custom autograd.Function in whose forward it is; None without one. Reentrant
    checkpoints are no such Function.
    """
    checkpoint = function = None
    frame: Any = sys._getframe(1)
    forwards = _forwards()
    while frame is not None and frame.f_code is not until:
        if checkpoint is None and frame.f_code.co_filename == _FILE:
            checkpoint = _kind(frame)
        function = forwards.get(frame.f_code, function)
        frame = frame.f_back
    return checkpoint, function


def _forwards() -> dict[CodeType, str]:
    """The forwards of custom autograd.Functions, with their names: since torch 2.14, `apply` has no frame."""
    found: dict[CodeType, str] = {}
    classes = deque(torch.autograd.Function.__subclasses__())
    while classes:
        each = classes.popleft()
        classes.extend(each.__subclasses__())
        code = _code_of(each.forward)
        if code is not None and each is not torch.utils.checkpoint.CheckpointFunction:
            found[code] = each.__name__
    return found


@lru_cache(maxsize=1024)
def _code_of(forward: Callable[..., Any]) -> CodeType | None:
    """The code of a function within its decorators, which may share theirs with others."""
    return getattr(unwrap(forward), "__code__", None)


def _kind(frame: Any) -> str:
    while frame is not None and frame.f_code.co_filename == _FILE:
        if frame.f_code.co_name == "forward":
            return "reentrant"
        frame = frame.f_back
    return "plain"


_KEY = "_pipeflow_watched"


def _set_class(module: nn.Module, to: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", to)  # nn.Module's own looks for parameters first


Called = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is called instead of a watched module: with its name, its own `__call__`, and the arguments."""


class _Swallow(nn.Module):
    """Keeps `__init_subclass__` of a module's class from running for the class that watches it."""

    def __init_subclass__(cls) -> None:
        pass


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], called: Called, replayed: Collection[str] = (), outputs: list[Any] | None = None
) -> Iterator[None]:
    """Sends this thread's calls of `modules` to `called`.

    Meanwhile each module has another class, so that wrappers around the `__call__` of its own class, such as activation
    checkpointing, run within the watched call. Other threads call the modules as usual, for example in a backward that
    recomputes a forward. The forward of a module named in `replayed` returns what is in `outputs`, if anything is.

    Raises UsageError for a module whose class cannot be replaced.
    """
    thread = get_ident()
    replaced: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for name, module in modules.items():
            plain: Any = type(module)
            vars(module)[_KEY] = (thread, called, name, outputs)
            _forget_own_forward(module, plain)
            try:
                _set_class(module, _watched_class(plain, is_replayed=name in replayed))
            except TypeError as error:
                raise UsageError(f"the calls of {name!r}, a {plain.__name__}, cannot be watched: {error}") from error
            replaced.append((module, plain))
        yield
    finally:
        for module, plain in replaced:
            _set_class(module, plain)
            vars(module).pop(_KEY, None)


def _forget_own_forward(module: nn.Module, plain: Any) -> None:
    """Removes the attribute `forward` of a module if it is the forward of its class; code that wraps and restores a
    forward leaves such an attribute.
    """
    own = getattr(vars(module).get("forward"), "__func__", None)
    if own is not None and getattr(own, "__wrapped__", own) in (plain.forward, vars(plain).get("forward")):
        del vars(module)["forward"]


@cache
def _watched_class(plain: Any, *, is_replayed: bool) -> type[nn.Module]:
    """A subclass of `plain`, a class of modules, whose calls go to the watcher."""
    own_call: Any = plain.__call__

    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        own = partial(own_call, self) if self._compiled_call_impl is None else partial(_call_plainly, self, plain)
        thread, called, name, _ = vars(self).get(_KEY, (None, None, "", None))
        if thread != get_ident():
            return own(*arguments, **keywords)
        return called(name, own, arguments, keywords)

    @wraps(plain.forward)
    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        thread, _, _, outputs = vars(self).get(_KEY, (None, None, "", None))
        if thread == get_ident() and outputs:
            return outputs.pop()
        return plain.forward(self, *arguments, **keywords)

    members = {"__call__": call, "__module__": plain.__module__}
    if is_replayed:
        members["forward"] = forward
    watched_class: type[nn.Module] = type(plain)(plain.__name__, (_Swallow, plain), members)
    return watched_class


def _call_plainly(module: nn.Module, plain: type[nn.Module], *arguments: Any, **keywords: Any) -> Any:
    """Calls a compiled module with its own class: torch.compile would compile it again for the other class."""
    watched_class = type(module)
    _set_class(module, plain)
    try:
        return module(*arguments, **keywords)
    finally:
        _set_class(module, watched_class)
