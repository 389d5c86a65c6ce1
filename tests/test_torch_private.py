"""The private names of torch: one test for each, so that a release that lacks one fails here and says which. Other
files of the package have none.
"""

from __future__ import annotations

import ast
import inspect
import logging
import math
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from pipeflow.engine.torch_private import (
    autograd,
    distributed,
    inductor,
    modes,
    needed,
    pipelining,
    tensors,
    trees,
)
from pipeflow.engine.torch_private.attributes import ATTRIBUTES
from tests.compiling import READS_UTF8
from tests.sources import Fault, Source, require, sources

MODULES = (autograd, distributed, inductor, modes, pipelining, tensors, trees)


@cache
def compilers() -> Any:
    """The module, which takes seconds to load."""
    return import_module("pipeflow.engine.torch_private.compilers")


TREE: dict[str, Any] = {"a": [1, 2], "b": (3,)}


def _flat_and_back() -> bool:
    leaves, spec = trees.tree_flatten(TREE)
    made: object = trees.tree_unflatten([each + 1 for each in leaves], spec)
    return isinstance(spec, trees.TreeSpec) and made == {"a": [2, 3], "b": (4,)}


def _registered() -> bool:
    kind = type("Pair", (), {"of": (1, 2)})
    trees.register_pytree_node(kind, lambda pair: (list(pair.of), None), lambda parts, _: list(parts))
    return trees.tree_leaves(kind()) == [1, 2] and kind in trees.SUPPORTED_NODES


def _runs_backward() -> bool:
    """Of an edge, and calls what waits for its end, within a backward that has an id."""
    weight, seen = torch.ones(2, requires_grad=True), list[Any]()
    product = weight * 3

    def look(gradient: Tensor) -> None:
        node = get_gradient_edge(weight).node
        seen.extend([autograd.backward_id() >= 0, autograd.will_run(node)])
        autograd.at_end_of_backward(lambda: seen.append("end"))

    product.register_hook(look)
    options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
    autograd.run_backward((get_gradient_edge(product),), (torch.ones(2),), inputs=(), **options)
    assert weight.grad is not None
    return seen == [True, True, "end"] and weight.grad.tolist() == [3, 3] and autograd.backward_id() == -1


def _hides_hooks() -> bool:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pair = autograd.top_saved_hooks(True)
        autograd.pop_saved_hooks()
        hidden = autograd.top_saved_hooks(True)
        autograd.push_saved_hooks(*(pair or ()))
        return pair is not None and hidden is None and autograd.top_saved_hooks(True) == pair


def _sees_functorch() -> bool:
    seen = []

    def double(value: Tensor) -> Tensor:
        seen.append(autograd.is_under_functorch())
        return value * 2

    torch.func.grad(double)(torch.ones(()))
    return seen == [True] and not autograd.is_under_functorch()


def _sees_autocast() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        inside = autograd.is_any_autocast_enabled()
    return inside and not autograd.is_any_autocast_enabled()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, given: object) -> Tensor:
        assert given is _one  # what is no tensor passes as it is
        return tensor * 2


class _Watched(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with autograd.without_torch_function():
            return type(func(*args, **(kwargs or {})))


def _fakes() -> bool:
    with modes.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, device="cpu"))
        with pytest.raises(modes.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(modes.DynamicOutputShapeException):
            fake.nonzero()
        return isinstance(fake, modes.FakeTensor) and isinstance(mode, modes.TorchDispatchMode)


def _disables_modes() -> bool:
    with modes.FakeTensorMode(), modes.disable_current_modes():
        return torch.ones(2).sum().item() == 2


def _sees_operators() -> bool:
    """A tensor of a subclass without memory sees operators, and computes below itself."""
    seen = []

    class Seeing(Tensor):
        __torch_function__ = tensors.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            seen.append((func, isinstance(func, tensors.OpOverload)))
            with modes.no_dispatch():
                return torch.ones(2)

    made = tensors.make_wrapper(Seeing, (2,), dtype=torch.float32)
    return type(made) is Seeing and (made + 1).tolist() == [1, 1] and seen == [(torch.ops.aten.add.Tensor, True)]


def _keeps_version() -> bool:
    written = torch.zeros(2)
    with tensors.keep_version((written,)):
        written.add_(1)
    return written._version == 0 and written.tolist() == [1, 1]


def _foreach(name: str, *rest: Any) -> list[list[float]]:
    """The tensors of 4 and 9 after the function, or what it returns."""
    given = [torch.tensor([4.0]), torch.tensor([9.0])]
    made = getattr(tensors, name)(given, *rest)
    return [each.tolist() for each in (given if name.endswith("_") else made)]


def _under_one_group(look: Callable[[], bool]) -> bool:
    """In a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return look()
    finally:
        dist.destroy_process_group()


def _knows_groups() -> bool:
    group = distributed.default_group()
    distributed.set_timeout(torch.distributed.constants.default_pg_timeout, group)
    return group in distributed.group_names() and distributed.has_cpu(group)


def _compiles() -> bool:
    seen = []

    def inner(graph: Any, examples: Any, **keywords: Any) -> Any:
        seen.append(compilers().graph_metadata())
        return compilers().boxed_nop(graph, list(examples))

    with compilers().functorch_config.patch(enable_autograd_cache=False):
        backend = compilers().aot_autograd(
            fw_compiler=inner, bw_compiler=inner, partition_fn=compilers().min_cut_rematerialization_partition
        )
        weight = torch.ones(2, requires_grad=True)
        torch.compile(lambda value: (value * 2).sum(), backend=backend)(weight).backward()
    return len(seen) == 2 and hasattr(seen[0], "bw_donated_idxs") and weight.grad is not None


def _one() -> int:
    return 1


def _takes(function: Any, *names: str) -> bool:
    found = inspect.signature(function).parameters
    return set(names) <= set(found) or any(each.kind is each.VAR_KEYWORD for each in found.values())


def _one_block() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (1,))
    return distributed.compute_local_shape_and_global_offset(torch.Size([4]), mesh, [Shard(0)]) == ((4,), (0,))


def _drops_gradients() -> bool:
    module: Any = fully_shard(nn.Linear(2, 2))
    module.set_requires_gradient_sync(False)
    seen = []
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
        [group] = module._get_fsdp_state()._fsdp_param_groups
        seen.append(any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params))
        for each in group.fsdp_params:
            distributed.drop_gradients(each)
        seen.append(any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params))
    module.set_requires_gradient_sync(True)
    module(torch.ones(1, 2)).sum().backward()
    return seen[1::2] == [False, False] and module.bias.grad.full_tensor().tolist() == [1, 1]


def _viewed() -> bool:
    whole = torch.zeros(4)
    return tensors.unviewed(whole) is whole and not tensors.unviewed(whole[:2])._is_view()


def _held() -> bool:
    whole = torch.zeros(4)
    part = whole[:2]
    return tensors.holders(part) == 2 and tensors.storage_key(whole) == tensors.storage_key(part)


def _subclassed() -> bool:
    made = tensors.make_subclass(_Watched, torch.zeros(2), True)
    kind: object = torch.sum(made)
    return type(made) is _Watched and kind is Tensor


def _attends() -> bool:
    """Without these operators, slices are slower."""
    if tensors.CPU_FLASH is None or tensors.CPU_FLASH_BACKWARD is None:
        return tensors.CPU_FLASH is tensors.CPU_FLASH_BACKWARD
    one = torch.ones(1, 1, 2, 4)
    output, logsumexp = tensors.CPU_FLASH(one, one, one, 0.0, True, scale=1.0)
    found = tensors.CPU_FLASH_BACKWARD(one, one, one, one, output, logsumexp, 0.0, True, scale=1.0)
    sums: list[float] = logsumexp.flatten().tolist()
    return output.equal(one) and sums == pytest.approx([4, 4 + math.log(2)]) and found[2].sum().item() == 8


CHECKS: dict[str, Callable[[], bool]] = {
    "trees.SUPPORTED_NODES": lambda: {list, tuple, dict} <= set(trees.SUPPORTED_NODES),
    "trees.TreeSpec": lambda: trees.tree_flatten(TREE)[1].num_leaves == 3,
    "trees.keystr": lambda: trees.keystr(trees.tree_flatten_with_path(TREE)[0][1][0]) == "['a'][1]",
    "trees.register_pytree_node": _registered,
    "trees.tree_flatten": _flat_and_back,
    "trees.tree_flatten_with_path": lambda: trees.tree_flatten_with_path(TREE)[0][2][1] == 3,
    "trees.tree_leaves": lambda: trees.tree_leaves(TREE) == [1, 2, 3],
    "trees.tree_map": lambda: trees.tree_map(str, TREE) == {"a": ["1", "2"], "b": ("3",)},
    "trees.tree_map_only": lambda: trees.tree_map_only(str, len, ["ab", 1]) == [2, 1],
    "trees.tree_unflatten": _flat_and_back,
    "autograd.applied": lambda: autograd.applied(_Twice)(torch.ones(2), _one).tolist() == [2, 2],
    "autograd.at_end_of_backward": _runs_backward,
    "autograd.backward_id": _runs_backward,
    "autograd.is_any_autocast_enabled": _sees_autocast,
    "autograd.is_under_functorch": _sees_functorch,
    "autograd.pop_saved_hooks": _hides_hooks,
    "autograd.push_saved_hooks": _hides_hooks,
    "autograd.run_backward": _runs_backward,
    "autograd.top_saved_hooks": _hides_hooks,
    "autograd.tracing_state": lambda: autograd.tracing_state() is None,
    "autograd.will_run": _runs_backward,
    "autograd.without_torch_function": _subclassed,
    "modes.FAKE_LOGGER": lambda: modes.FAKE_LOGGER in logging.Logger.manager.loggerDict,
    "modes.DataDependentOutputException": _fakes,
    "modes.DynamicOutputShapeException": _fakes,
    "modes.FakeTensor": _fakes,
    "modes.FakeTensorMode": _fakes,
    "modes.TorchDispatchMode": _fakes,
    "modes.disable_current_modes": _disables_modes,
    "modes.no_dispatch": _sees_operators,
    "tensors.CPU_FLASH": _attends,
    "tensors.CPU_FLASH_BACKWARD": _attends,
    "tensors.GROUPED_MM": lambda: str(tensors.GROUPED_MM) == "aten._grouped_mm.default",
    "tensors.LOCAL_SCALAR": lambda: tensors.LOCAL_SCALAR(torch.tensor(3)) == 3,
    "tensors.PACK_PADDED": lambda: tensors.PACK_PADDED(torch.ones(2, 1), torch.tensor([1]), False)[1].tolist() == [1],
    "tensors.UNSAFE_INDEX": lambda: tensors.UNSAFE_INDEX(torch.arange(3), [torch.tensor([2])]).tolist() == [2],
    "tensors.Convolution": lambda: issubclass(nn.Conv1d, tensors.Convolution),
    "tensors.OpOverload": _sees_operators,
    "tensors.assert_async": lambda: tensors.assert_async(torch.tensor(True)) is None,  # type: ignore[func-returns-value]
    "tensors.called_by_functional": lambda: callable(tensors.called_by_functional.cross_entropy_loss),
    "tensors.disable_dynamo": lambda: tensors.disable_dynamo(_one)() == 1,
    "tensors.foreach_add_": lambda: _foreach("foreach_add_", 1) == [[5], [10]],
    "tensors.foreach_addcmul_": lambda: (
        _foreach("foreach_addcmul_", [torch.ones(1)] * 2, [torch.ones(1)] * 2, 2) == [[6], [11]]
    ),
    "tensors.foreach_copy_": lambda: _foreach("foreach_copy_", [torch.ones(1)] * 2) == [[1], [1]],
    "tensors.foreach_div_": lambda: _foreach("foreach_div_", [2, 3]) == [[2], [3]],
    "tensors.foreach_lerp_": lambda: _foreach("foreach_lerp_", [torch.zeros(1)] * 2, 0.5) == [[2], [4.5]],
    "tensors.foreach_mul": lambda: _foreach("foreach_mul", [2, 3]) == [[8], [27]],
    "tensors.foreach_mul_": lambda: _foreach("foreach_mul_", [2, 3]) == [[8], [27]],
    "tensors.foreach_norm": lambda: (
        [each.item() for each in tensors.foreach_norm([torch.ones(4)], 2, torch.float64)] == [2]
    ),
    "tensors.foreach_reciprocal_": lambda: _foreach("foreach_reciprocal_")[0] == [0.25],
    "tensors.foreach_sqrt": lambda: _foreach("foreach_sqrt") == [[2], [3]],
    "tensors.foreach_sub_": lambda: _foreach("foreach_sub_", [torch.ones(1)] * 2) == [[3], [8]],
    "tensors.foreach_zero_": lambda: _foreach("foreach_zero_") == [[0], [0]],
    "tensors.has_bf16_units": lambda: isinstance(tensors.has_bf16_units(), bool),
    "tensors.holders": _held,
    "tensors.keep_version": _keeps_version,
    "tensors.make_wrapper": _sees_operators,
    "tensors.no_torch_function": _sees_operators,
    "tensors.storage_types": lambda: tensors.storage_types()[torch.float32] == "FloatStorage",
    "tensors.make_subclass": _subclassed,
    "tensors.storage_key": _held,
    "tensors.unviewed": _viewed,
    "compilers.aot_autograd": _compiles,
    "compilers.boxed_nop": _compiles,
    "compilers.compile_fx": lambda: _takes(compilers().compile_fx, "inner_compile", "config_patches"),
    "compilers.compile_fx_inner": lambda: _takes(compilers().compile_fx_inner, "static_input_idxs", "is_backward"),
    "compilers.functorch_config": lambda: isinstance(compilers().functorch_config.enable_autograd_cache, bool),
    "compilers.graph_metadata": _compiles,
    "compilers.min_cut_rematerialization_partition": _compiles,
    "inductor.modes": lambda: {"default", "reduce-overhead", "max-autotune"} <= set(inductor.modes()),
    "inductor.options": lambda: "triton.cudagraphs" in inductor.options(),
    "distributed.default_group": lambda: _under_one_group(_knows_groups),
    "distributed.group_names": lambda: _under_one_group(_knows_groups),
    "distributed.has_cpu": lambda: _under_one_group(_knows_groups),
    "distributed.set_timeout": lambda: _under_one_group(_knows_groups),
    "distributed.StorageInfo": lambda: distributed.StorageInfo("a.distcp", 1, 2).length == 2,
    "distributed.compute_local_shape_and_global_offset": lambda: _under_one_group(_one_block),
    "distributed.drop_gradients": lambda: _under_one_group(_drops_gradients),
    "pipelining.ComputationType": lambda: (
        {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B", "UNSHARD", "RESHARD"}
        <= set(pipelining.ComputationType.__members__)
    ),
    "pipelining.PipeInfo": lambda: _takes(pipelining.PipeInfo, "graph", "num_stages", "has_loss_and_backward"),
    "pipelining.PipelineSchedule": lambda: _takes(
        pipelining.PipelineSchedule, "n_microbatches", "loss_fn", "scale_grads"
    ),
    "pipelining.PipelineScheduleRuntime": lambda: callable(pipelining.PipelineScheduleRuntime.step),
    "pipelining.ScheduleForwardOnly": lambda: callable(pipelining.ScheduleForwardOnly.step),
    "pipelining.StageInfo": lambda: (
        pipelining.StageInfo is None or _takes(pipelining.StageInfo, "stage_index", "microbatch_index")
    ),
    "pipelining.TorchAction": lambda: str(pipelining.TorchAction(2, pipelining.ComputationType.FORWARD, 3)) == "2F3",
    "pipelining.backward": lambda: callable(pipelining.backward.stage_backward),
    "pipelining.debug": lambda: callable(pipelining.debug.map_debug_info),
    "pipelining.forward_contexts": lambda: (
        not hasattr(PipelineStage, "register_forward_context") or has(PipelineStage, "_forward_contexts")
    ),
    "pipelining.ir": lambda: callable(pipelining.ir.pipeline) and callable(pipelining.ir.Pipe.info),
    "pipelining.schedule_visualizer": lambda: callable(pipelining.schedule_visualizer.get_schedule_ops),
    "pipelining.unflatten": lambda: pipelining.unflatten.__name__.endswith("._unflatten"),
    "pipelining.utils": lambda: pipelining.utils.PipeInfo is pipelining.PipeInfo,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=READS_UTF8 if name.startswith("compilers") else ()) for name in CHECKS]
)
def test_a_private_name_of_torch_does_what_it_stands_for(name: str) -> None:
    assert CHECKS[name](), f"torch {torch.__version__} changed {name}: see pipeflow/engine/torch_private"


def test_files_of_torch_that_the_locale_cannot_read_are_told() -> None:
    with pytest.raises(ImportError, match="set PYTHONUTF8=1"), needed():
        "é".encode().decode("ascii")


@pytest.mark.lint
def test_each_private_name_has_a_check() -> None:
    names = {
        f"{module.__name__.rpartition('.')[2]}.{name}" for module in (*MODULES, compilers()) for name in module.__all__
    }
    assert names == set(CHECKS)


def _owner(path: str) -> Any:
    """A class or a module by its full name."""
    found: Any = torch
    for end in range(len(path.split(".")), 0, -1):
        head, rest = path.split(".")[:end], path.split(".")[end:]
        try:
            found = import_module(".".join(head))
        except ModuleNotFoundError:
            continue
        for step in rest:
            found = getattr(found, step)
        return found
    return found


def has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, or its code or that of a module sets it on objects."""
    if hasattr(owner, name):
        return True
    kinds = inspect.getmro(owner) if inspect.isclass(owner) else (owner,)
    for each in kinds:
        try:
            text = inspect.getsource(each)
        except (OSError, TypeError):  # it is built in
            continue
        if re.search(rf"(?:\.{name}\b|^\s+{name}: |[\"']{name}[\"'])", text, re.MULTILINE):
            return True
    return False


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names])
def test_an_object_of_torch_has_its_private_attribute(owner: str, name: str) -> None:
    says = f"torch {torch.__version__} has no {owner}.{name}: pipeflow reads it as {ATTRIBUTES[owner][name]}"
    try:
        found = has(_owner(owner), name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{says} ({error})", pytrace=False)
    if not found:
        pytest.fail(says, pytrace=False)


def test_an_attribute_that_no_class_sets_is_missed() -> None:
    assert has(nn.Module, "_parameters")
    assert not has(nn.Module, "_never")


def test_a_torch_without_a_name_is_told() -> None:
    with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)} lacks .*_never.* 2\.10 to"), needed():
        from torch.autograd.graph import _never  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match=r"lacks .*'_never'"), needed():
        _ = torch._C._never  # type: ignore[attr-defined]


ELSEWHERE = {
    *("_asdict", "_fields", "_replace"),  # of named tuples, which Python documents
    *(
        "_ArgumentGroup",
        "_SubParsersAction",
        "_actions",
        "_current_frames",
        "_exit",
        "_getframe",
        "_run_exitfuncs",
    ),  # Python
    *("_convert_stateful_objects_in_state", "_n_gpu", "_prepare_input", "_shared_state", "_weight_conversions"),
    *("_hp_mapping", "_index_in_param_group"),  # DeepSpeed
}
"""Private names of others than torch."""


def is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None


def private_names(source: Source, defined: set[str]) -> Iterator[Fault]:
    """Private names that a file imports from torch or reads from its modules, and private attributes that neither
    pipeflow defines nor the table lists.
    """
    roots = {"torch"}
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names):
                for each in names:
                    if each.name.partition(".")[0] == "torch":
                        roots.add(each.asname or "torch")
                        if any(map(is_private, each.name.split("."))):
                            yield node.lineno, f"imports {each.name}: add it to torch_private"
            case ast.ImportFrom(module, names) if (module or "").partition(".")[0] == "torch":
                roots |= {each.asname or each.name for each in names}
                for each in names:
                    if any(map(is_private, f"{module}.{each.name}".split("."))):
                        yield node.lineno, f"imports {module}.{each.name}: add it to torch_private"
    listed = {name for names in ATTRIBUTES.values() for name in names}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in roots and node.attr not in ELSEWHERE:
                yield node.lineno, f"reads {ast.unparse(node)}: add it to torch_private"
            elif node.attr not in defined | listed | ELSEWHERE:
                yield (
                    node.lineno,
                    f"reads {ast.unparse(node)}: say in engine/torch_private/attributes.py what it stands for",
                )


def names_defined_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name


def others() -> list[Source]:
    return [source for source in sources() if not source.name.startswith("engine/torch_private/")]


@pytest.mark.lint
def test_private_names_of_torch_are_in_one_place() -> None:
    defined = {name for source in others() for name in names_defined_in(source.tree)}
    require(lambda source: private_names(source, defined), others())


@pytest.mark.lint
def test_each_listed_attribute_is_used() -> None:
    text = "\n".join(source.text for source in sources() if source.name != "engine/torch_private/attributes.py")
    listed = {name for names in ATTRIBUTES.values() for name in names}
    assert {name for name in listed if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.lint
def test_the_guard_sees_private_names() -> None:
    text = """
    import torch
    import torch._inductor
    import torch.distributed as dist
    from torch.utils import _pytree
    from torch._ops import OpOverload
    torch._C
    dist.distributed_c10d._world
    module._never
    module._parameters
    self._mine
    point._replace()
    """
    source = Source("core/one.py", textwrap.dedent(text))
    assert [line for line, _ in private_names(source, {"_mine"})] == [3, 5, 6, 7, 8, 9]


THREADS = """
import gc, time, threading, weakref
from pipeflow.engine.torch_private.tensors import default_states, set_default_states

class Cycle:
    def __init__(self):
        self.own = self

def work():
    references = []
    for _ in range(500):
        references = [*references[-20:], weakref.ref(Cycle(), lambda _: time.sleep(0.001))]
        set_default_states(default_states())

gc.set_threshold(10)
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


@pytest.mark.slow
def test_threads_may_ask_for_random_states_while_garbage_is_collected() -> None:
    """Garbage whose weak references give up the interpreter's lock. Plain calls of torch stop the process here."""
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=240)
