"""Halves: splits a compiled backward into two graphs, one for the gradients of inputs and one for those of weights.
Must not contain: how they are compiled, and when they run.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node


class Halves(NamedTuple):
    """The two graphs of a backward.

    Attributes:
        of_inputs: takes the arguments of the whole backward and returns its results, with None in the places of `late`,
            then the values that the other half needs.
        of_weights: takes the arguments `kept` of the backward, then those values; returns the results `late`.
        kept: indices of the backward's arguments that the second half needs.
        late: indices of the backward's results that the second half computes.
        examples: example arguments of the second half for its compilation.
    """

    of_inputs: GraphModule
    of_weights: GraphModule
    kept: list[int]
    late: list[int]
    examples: list[Any]


def halves_of(backward: GraphModule, wanted: Collection[int], arguments: Sequence[Any]) -> Halves | None:
    """Splits a backward so that the second half computes those results in `wanted` that no other result needs. Returns
    None if there are none.

    Args:
        backward: a graph of operators, as AOTAutograd makes it; it is not changed.
        wanted: indices of results.
        arguments: example arguments of the backward.
    """
    nodes = list(backward.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    results = results_of(backward)
    early = _ancestors(
        [each for index, each in enumerate(results) if index not in wanted and isinstance(each, Node)]
        + [node for node in nodes if node.op == "call_function" and node.is_impure()]
    )
    early |= {node for node in nodes if node.target is operator.getitem and node.args[0] in early}
    late = [
        index
        for index in sorted(wanted)
        if isinstance(results[index], Node) and results[index] not in early and results[index] not in places
    ]
    if not late:
        return None
    second = _ancestors([results[index] for index in late], until=early | set(places))
    used = {source for node in second for source in node.all_input_nodes} - second
    kept = [index for index, node in enumerate(places) if node in used or not _is_tensor(node)]
    passed = [node for node in nodes if node in used and node not in places]
    return Halves(
        _graph(backward, [None if index in late else each for index, each in enumerate(results)] + passed),
        _graph(backward, [results[index] for index in late], taken=[places[index] for index in kept] + passed),
        kept,
        late,
        [arguments[index] for index in kept] + [node.meta["val"] for node in passed],
    )


def results_of(graph: GraphModule) -> list[Any]:
    """The nodes that a graph returns."""
    output = next(reversed(graph.graph.nodes))
    return list(output.args[0])


def _ancestors(results: Iterable[Node], until: Collection[Node] = ()) -> set[Node]:
    """The nodes that `results` depend on, including themselves. The walk stops at tensors and arguments in `until`;
    numbers, such as sizes, and attributes of the graph are computed again instead.
    """
    found: set[Node] = set()
    ahead = list(results)
    while ahead:
        node = ahead.pop()
        if node in found or (node in until and (node.op == "placeholder" or _is_tensor(node))):
            continue
        found.add(node)
        ahead.extend(node.all_input_nodes)
    return found


def _is_tensor(node: Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), Tensor)


def _graph(backward: GraphModule, results: Sequence[Any], taken: Sequence[Node] | None = None) -> GraphModule:
    """The part of the backward that computes `results`, from its own arguments or from the nodes `taken`."""
    made, copies = Graph(), dict[Node, Node]()
    for node in taken or ():
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in backward.graph.nodes:
        is_mine = node.op != "output" and node not in copies and (taken is None or node.op != "placeholder")
        if is_mine and all(source in copies for source in node.all_input_nodes):
            copies[node] = made.node_copy(node, copies.__getitem__)
    output = made.output(tuple([copies[each] if isinstance(each, Node) else each for each in results]))
    output.meta["user_visible_output_idxs"] = [index for index, each in enumerate(results) if isinstance(each, Node)]
    made.eliminate_dead_code()
    return GraphModule(backward, made)
