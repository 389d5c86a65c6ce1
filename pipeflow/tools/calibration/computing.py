"""Computing: the times of products, of attention, of elementwise operations, of whole layers, of the optimizer, and of
whole steps of a pipeline of all ranks. Must not contain: communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.engine.runtime.pipeline import Pipeline, execute_pipeline
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.transformer import GPT
from pipeflow.planning.work import ATTENTION_AGAIN, MatrixProduct, layer_work
from pipeflow.schedules import make_schedule
from pipeflow.tools.calibration.machine import DTYPES, Stopwatch, Work, products_in
from pipeflow.tools.calibration.machine_times import LayerTime, ProductTime, SizeTime, StepTime
from pipeflow.training.models import GPTBlock, GPTLMLoss, build_gpt_pipeline

ROWS = (32, 128, 512, 2048, 8192)
DIMENSIONS = (128, 512, 2048, 8192)
NARROW = 4  # the dimensions of a weight differ by at most this factor, as in a transformer
PRODUCTS = tuple(
    sorted(
        (
            MatrixProduct(rows, columns, depth)
            for rows, columns, depth in product(ROWS, DIMENSIONS, DIMENSIONS)
            if max(columns, depth) <= NARROW * min(columns, depth)
        ),
        key=lambda each: each.flops,
    )
)
OTHERS = 3  # in other precisions than the first, one of so many sizes is measured
MOVED = (2**24, 2**26, 2**27)  # bytes of a tensor: more than the caches of a device hold
MOVED_ON_CPU = (2**20, 2**22, 2**24)  # and no more than the allocator keeps, since pages are slow to get
ATTENTIONS = ((128, 256), (256, 512), (512, 512), (512, 1024), (1024, 2048), (2048, 4096))  # hidden size, tokens
HEAD = 64  # width of a head
ATTENTION_PASSES = 3 + ATTENTION_AGAIN  # the backward takes two forwards, and computes products again
LAYERS = (  # hidden size, tokens
    (128, 128),
    (128, 512),
    (256, 256),
    (256, 512),
    (512, 256),
    (512, 512),
    (1024, 2048),
    (4096, 2048),
)
STACKED, MICROBATCHES = 2, 2  # layers, and microbatches that pass through them forward before they go back
FEWEST_PASSES = 4  # of them, in the time for one size
OPTIMIZED = (512, 1024)  # hidden sizes of layers
FEWEST = 2  # sizes of attention and of layers are measured in any case
TINY = (HEAD, 8)  # of a layer in which computing takes no time beside launching
COLD = 2**26  # bytes of operands that take turns, so that caches do not hold them, as they do not in training
WIDE = 4  # times the hidden size
HIDDEN = 1024  # size of the layer whose elementwise operations are measured
ELEMENTWISE_PASSES = 2 * (2 + 3) + 2 * WIDE  # two norms and sums with a residual, and a GELU
STEPS = ((192, 96), (320, 192))  # hidden size, tokens of a microbatch
STEP_LAYERS, STEP_MICROBATCHES = 3, 2  # per rank
VOCABULARY = 1024


def sized(hidden: int, tokens: int, precision: str) -> tuple[GPT, Setup]:
    """A layer of a GPT with heads of width HEAD, which computes one sequence in a precision of products."""
    model = GPT(1, hidden, hidden // HEAD, positions=tokens, dropout=False)
    return model, Setup(precision=PRECISIONS["float32" if precision == "tf32" else precision])


def products(
    watch: Stopwatch, precisions: Sequence[str], budget: float, sizes: Sequence[MatrixProduct] = PRODUCTS
) -> Iterator[ProductTime]:
    """Yields times of products of growing `sizes`, until they are too long to be measured in `budget` seconds. The
    first precision is measured with all sizes, the others with some of them. Each time is the mean of a product in a
    forward and of the two in its backward.
    """
    chosen = {name: sizes[:: 1 if index == 0 else OTHERS] for index, name in enumerate(precisions)}
    each = budget / sum(map(len, chosen.values()))
    for precision in precisions:
        with products_in(precision) as dtype:
            rate = 0.0  # FLOP/s, of the last size
            for size in chosen[precision]:
                if rate and 3 * size.flops / rate > each:
                    continue
                seconds = watch.seconds(_products(size, dtype, watch.context.device), each) / 3
                rate = size.flops / seconds
                yield ProductTime(precision, size, seconds)


def _products(size: MatrixProduct, dtype: torch.dtype, device: torch.device) -> Work:
    """The product of a forward with weights, and those of its backward."""
    rows, columns, depth = int(size.rows), int(size.columns), int(size.depth)
    bytes_taken = (rows * depth + columns * depth + rows * columns) * dtype.itemsize
    operands = cycle(
        [
            tuple(torch.rand(shape, dtype=dtype, device=device) for shape in shapes)
            for shapes in [((rows, depth), (columns, depth), (rows, columns))] * max(1, min(64, COLD // bytes_taken))
        ]
    )

    def work() -> None:
        taken, weight, gradient = next(operands)
        taken @ weight.t()
        gradient @ weight
        gradient.t() @ taken

    return work


def moved(
    watch: Stopwatch, precision: str, budget: float, sizes: Sequence[int] | None = None
) -> tuple[list[SizeTime], list[SizeTime]]:
    """Times of copies of memory, and of a layer's elementwise operations, forward and backward. The tensors have
    growing `sizes` in bytes, until they are too large to be measured in `budget` seconds.
    """
    device, dtype = watch.context.device, DTYPES[precision]
    sizes = sizes or (MOVED_ON_CPU if device.type == "cpu" else MOVED)
    each, rate = budget / (2 * len(sizes)), 0.0
    copies, elementwise = [], []
    for size in sizes:
        taken = size // WIDE // dtype.itemsize
        passes = ELEMENTWISE_PASSES * taken * dtype.itemsize
        if rate and 3 * passes / rate > each:
            continue
        source = torch.rand(size // dtype.itemsize, dtype=dtype, device=device)
        copies.append(SizeTime(2 * size, watch.seconds(partial(torch.empty_like(source).copy_, source), each)))
        seconds = watch.seconds(_elementwise(taken, dtype, device), each) / 3
        rate = passes / seconds
        elementwise.append(SizeTime(passes, seconds))
    return copies, elementwise


def _elementwise(numbers: int, dtype: torch.dtype, device: torch.device) -> Work:
    """The forward and the backward of a layer's elementwise operations."""
    rows = numbers // HIDDEN
    taken, wide = (
        torch.rand((rows, width), dtype=dtype, device=device, requires_grad=True) for width in (HIDDEN, WIDE * HIDDEN)
    )
    norms = [nn.LayerNorm(HIDDEN, dtype=dtype, device=device) for _ in range(2)]
    gradients = (torch.rand_like(taken), torch.rand_like(wide))

    def work() -> None:
        whole: Tensor = taken
        for norm in norms:
            whole = whole + norm(whole)
        torch.autograd.grad((whole, functional.gelu(wide)), (taken, wide), gradients)

    return work


def attention(
    watch: Stopwatch, precision: str, budget: float, sizes: Sequence[tuple[int, int]] = ATTENTIONS
) -> Iterator[SizeTime]:
    """Yields times of causal attention without its linears, forward and backward, for layers of `sizes` (hidden size,
    tokens) that are short enough to be measured in `budget` seconds.
    """
    each, rate = budget / len(sizes), 0.0
    for index, (hidden, tokens) in enumerate(sizes):
        flops = layer_work(*sized(hidden, tokens, precision)).attention_flops
        if index >= FEWEST and ATTENTION_PASSES * flops / rate > each:
            continue
        shape = (1, hidden // HEAD, tokens, HEAD)
        operands = [
            torch.rand(shape, dtype=DTYPES[precision], device=watch.context.device, requires_grad=True)
            for _ in range(3)
        ]
        seconds = watch.seconds(partial(_attend, operands), each) / ATTENTION_PASSES
        rate = flops / seconds
        yield SizeTime(flops, seconds)


def _attend(operands: Sequence[Tensor]) -> None:
    query, key, value = operands
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.autograd.grad(seen, (query, key, value), seen.detach())


def layers(
    watch: Stopwatch, precision: str, budget: float, sizes: Sequence[tuple[int, int]] = LAYERS
) -> Iterator[LayerTime]:
    """Yields times of the forward and of the backward of layers of `sizes` (hidden size, tokens), FEWEST of them and
    more while a pass is short beside `budget` seconds.
    """
    each, rate = budget / len(sizes), 0.0
    for index, (hidden, tokens) in enumerate(sizes):
        layer = sized(hidden, tokens, precision)
        flops = 3 * sum(product.flops for product in layer_work(*layer).products)
        work = _Layers(hidden, tokens, precision, watch.context.device)
        if index >= FEWEST and flops * work.passed / rate > each / FEWEST_PASSES:
            continue
        forward, backward = (seconds / work.passed for seconds in watch.phases([work.forward, work.backward], each))
        rate = flops / (forward + backward)
        yield LayerTime(*layer, forward, backward)


def launches(watch: Stopwatch, precision: str, budget: float) -> tuple[float, float]:
    """The seconds in which the host launches the forward and the backward of one layer, measured on a tiny one."""
    work = _Layers(*TINY, precision, watch.context.device)
    forward, backward = watch.phases([work.forward, work.backward], budget, launch=True)
    return forward / work.passed, backward / work.passed


class _Layers:
    """Layers of a GPT through which microbatches pass as in training: first forward, then backward. A backward frees
    what its forward kept, and adds up the gradients of the weights.

    Attributes:
        passed: layers that all microbatches together pass through.
    """

    def __init__(self, hidden: int, tokens: int, precision: str, device: torch.device) -> None:
        dtype = DTYPES[precision]
        self._layers = [GPTBlock(hidden, max(1, hidden // HEAD), dtype=dtype).to(device) for _ in range(STACKED)]
        self._taken = torch.rand(1, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        self._gradient = torch.rand_like(self._taken)
        self._outputs: list[Tensor] = []
        self.passed = STACKED * MICROBATCHES

    def forward(self) -> None:
        """Computes the outputs of all microbatches, and keeps what their backwards need."""
        for layer in self._layers:
            layer.zero_grad()
        for _ in range(MICROBATCHES):
            output = self._taken
            for layer in self._layers:
                output, _ = layer(output, None)
            self._outputs.append(output)

    def backward(self) -> None:
        """Runs the backwards of all microbatches whose forwards have run."""
        for output in self._outputs:
            output.backward(self._gradient)
        self._outputs.clear()


def optimizer(watch: Stopwatch, budget: float, sizes: Sequence[int] = OPTIMIZED) -> Iterator[SizeTime]:
    """Yields times of steps of AdamW on the parameters of layers of `sizes` (hidden size), in float32."""
    for hidden in sizes:
        layer = GPTBlock(hidden, max(1, hidden // HEAD)).to(watch.context.device)
        for parameter in layer.parameters():
            parameter.grad = torch.rand_like(parameter)
        stepping = torch.optim.AdamW(layer.parameters(), lr=0.0)
        count = sum(parameter.numel() for parameter in layer.parameters())
        yield SizeTime(count, watch.seconds(stepping.step, budget / len(sizes)))


def steps(watch: Stopwatch, budget: float, sizes: Sequence[tuple[int, int]] = STEPS) -> Iterator[StepTime]:
    """Yields times of steps of GPTs of `sizes` (hidden size, tokens of a microbatch) in float32 under 1F1B, without the
    optimizer.
    """
    ranks = watch.context.pipeline_size
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=STEP_MICROBATCHES * ranks)
    for hidden, tokens in sizes:
        gpt = GPT(STEP_LAYERS * ranks, hidden, hidden // HEAD, tokens, VOCABULARY, dropout=False)
        stages = build_gpt_pipeline(
            gpt.layers,
            placement=schedule.placement,
            hidden_size=hidden,
            num_attention_heads=gpt.heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=tokens,
        )
        model = Pipeline(stages, schedule, criterion=GPTLMLoss())
        ids = torch.zeros(schedule.num_microbatches, tokens, dtype=torch.long, device=watch.context.device)
        seconds = watch.seconds(partial(_step, model, ids), budget / len(sizes))
        yield StepTime(gpt, Setup(precision=PRECISIONS["float32"]), schedule, seconds)


def _step(model: Pipeline, ids: Tensor) -> None:
    model.zero_grad()
    execute_pipeline(iter([({"input_ids": ids}, ids)]), model)
