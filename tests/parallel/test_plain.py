"""What ranks tell each other comes as it went; bytes of a stranger make plain values or an error, and run nothing."""

from __future__ import annotations

import enum
import json
import pickle
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from pipeflow.core.action import Action, Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.timeline import Span
from pipeflow.engine.parallel.transport.plain import pack, unpack


class Both(NamedTuple):
    first: object
    second: object


class Outer:
    class Inner(NamedTuple):
        only: object


class Registered:
    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and other.held == self.held


_pytree.register_pytree_node(Registered, lambda it: ([it.held], "context"), lambda held, _: Registered(*held))

FORWARD = Action(Kind.F, 2, 3)
VALUES: list[object] = [
    None,
    True,
    -(1 << 70),
    0.1,
    float("-inf"),
    "\x1b \ud800 \u00e9",
    [],
    (1, [2.0, ("three",)]),
    {"a": 1, 2: "b", (3, 4): {5: 6}},
    {1, 2},
    frozenset({"x"}),
    torch.Size([2, 3]),
    torch.bfloat16,
    Both(1, Both(2, [3])),
    Outer.Inner((4,)),
    OrderedDict(b=1, a=2),
    defaultdict(list, a=[1]),
    deque([1, 2], maxlen=5),
    [Registered((1, 2))],
    FORWARD,
    [Span(FORWARD, 1, 0.1, 0.2), Span(FORWARD, 1, 0.1, 0.3, Action(Kind.B, 0, 0), 0.05)],
    Placement.bidirectional(2),
]


def named(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_comes_as_it_went(value: object) -> None:
    came = unpack(pack(value))
    assert came == value
    assert type(came) is type(value)
    assert repr(came) == repr(value) or isinstance(value, list)


class Missing(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), object(), Registered, Missing.ONE, lambda: 0, {"a": [Path()]}, Kind.F.__class__],
    ids=named,
)
def test_what_is_no_plain_value_is_refused_where_it_is_sent(value: object) -> None:
    with pytest.raises(UsageError, match="not a plain value"):
        pack(value)


def test_a_value_in_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(UsageError, match="not a plain value"):
        pack(value)


RAN: list[object] = []


class Effects(NamedTuple):
    """A tuple whose making has effects; a NamedTuple's own `__new__` is made by typing, a subclass's is not."""

    only: object


class WithEffects(Effects):
    def __new__(cls, only: object) -> WithEffects:
        RAN.append(only)
        return super().__new__(cls, only)


class Runs:
    """As a pickle it calls `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def forged(tag: str, *rest: object) -> bytes:
    return json.dumps([tag, *rest]).encode()


HERE = __name__
FORGERIES = {
    "a pickle that calls": pickle.dumps(Runs(RAN.append, 1)),
    "a pickle that makes a class": pickle.dumps(Runs(enum.Enum, "Made", "A B")),
    "a pickle that changes a member": pickle.dumps(Runs(Kind, "F", state={"_value_": "B"})),
    "a pickle that changes a class": b"cpipeflow.core.placement\nPlacement\n(N(dVrank_of\nI0\nstb.",
    "a pickle of much memory": pickle.dumps(Runs(bytes, 1 << 50)),
    "nothing": b"",
    "no JSON": b"[1, 2",
    "an object": b'{"a": 1}',
    "an unknown tag": forged("os.system", "true"),
    "a tag that is none": json.dumps([["list"]]).encode(),
    "a function": forged("named", "os", "system", "true"),
    "a class": forged("named", "subprocess", "Popen", "true"),
    "one that must be imported": forged("named", "antigravity", "x"),
    "an attribute that a module makes": forged("named", "pipeflow", "Pipeline"),
    "what no dtype is": forged("dtype", "torch.load"),
    "an unregistered node": forged("node", "builtins.object", None),
    "a type that makes defaults": forged("type", "subprocess.Popen"),
    "too few fields": forged("named", HERE, "Both", 1),
    "an action that is none": forged("Action", "2Q0"),
    "a placement that is none": forged("Placement", ["tuple", ["tuple", 5]]),
    "a list as a key": forged("dict", [["list", 1], 2]),
    "depth": b"[" * 100_000,
    "depth of values": b'["list",' * 50_000 + b"1" + b"]" * 50_000,
    "a number without end": b"9" * 100_000,
}


@pytest.mark.parametrize("body", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_bytes_are_refused_and_run_nothing(body: bytes) -> None:
    before = dict(vars(Placement)), Kind.F.value, set(sys.modules)
    with pytest.raises(UsageError, match="a rank sent bytes that are not a plain value"):
        unpack(body)
    assert not RAN
    assert (dict(vars(Placement)), Kind.F.value) == before[:2]
    assert "antigravity" not in set(sys.modules) - before[2]


def test_a_named_tuple_is_made_without_its_own_code() -> None:
    assert tuple(unpack(forged("named", HERE, "WithEffects", 1))) == (1,)
    assert not RAN
