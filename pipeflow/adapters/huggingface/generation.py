"""Text generation with a language model in stages. One rank runs transformers' own `generate`; each of its forwards
goes through the pipeline, and the other ranks run their stages when it asks. So sampling, beam search, stopping
criteria and streamers are transformers'. Must not contain: caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.adapters.huggingface.caches import (
    CacheEntry,
    Caches,
    GrowingEntry,
    Told,
    empty_cache,
    fill_up,
    ledger_of,
    require_known,
)
from pipeflow.adapters.libraries import transformers_library
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.transport.agreement import all_gather, hear, tell
from pipeflow.engine.runtime.microbatch import Whole
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.stages.entries import LABELS
from pipeflow.engine.stages.stage import ModuleStage
from pipeflow.engine.torch_private.trees import tree_map

_IDS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
_GROWING = ("decoder_attention_mask", "attention_mask")


def generate(
    model: Pipeline, input_ids: Tensor | None = None, *, schedule: Schedule | None = None, **keywords: Any
) -> Any:
    """Generates text with transformers' `generate`, and returns its result on every rank. All ranks make the same call;
    each replica has its own prompt.

    The rank with the last stage (the first of its tensor ranks) runs transformers' loop. Only this rank draws random
    numbers, from torch's default generator, and calls logits processors, stopping criteria and the `streamer`. Each
    stage keeps the keys and values of its own blocks.

    Args:
        model: Pipeline of a transformers model, made by `Pipeline.from_module` or by `pipeflow.huggingface`. It should
            be in evaluation mode.
        input_ids: the prompt [rows, positions], padded on the left, or the model's other main input, such as
            input_features.
        schedule: the schedule of each forward; by default the Pipeline's. It splits the rows into microbatches, so that
            stages work at the same time.
        **keywords: as in transformers' `generate`: attention_mask, max_new_tokens, do_sample, num_beams,
            generation_config and others.

    Raises UsageError if the model cannot generate text, if the prompt has no tokens, for another cache than
    transformers' DynamicCache, and if it is called within a step.
    """
    first = _shell_of(model)
    _require_prompt(input_ids, keywords)
    with model.alarm.raised_everywhere("generates"):
        model.runner.gradients.prepare()
    turns = _Turns(model, model.schedule if schedule is None else schedule, first.config)
    if not turns.drives:
        return turns.follow()
    return turns.drive(_Shell.of(first, turns), input_ids, keywords)


def _shell_of(model: Pipeline) -> Any:
    """The whole model in the form that a stage of this rank has. Raises UsageError if it cannot generate text."""
    if not isinstance(model, Pipeline):
        raise UsageError(f"generate takes a pipeflow.Pipeline, got {type(model).__name__}")
    stage = model.chunks[-1]
    if not isinstance(stage, ModuleStage):
        raise UsageError(
            "generate needs a Pipeline of a whole model of transformers: make it with Pipeline.from_module or "
            "pipeflow.huggingface.from_pretrained"
        )
    if model.context.experts.size > 1:
        raise UsageError(
            "generate runs another number of forwards on each replica, and expert ranks, which are replicas, compute "
            "each forward together: save the model, and generate after launch(experts=1)"
        )
    if model.runner.is_running:
        raise UsageError("generate was called within a step of the same Pipeline: call it between steps")
    found: Any = stage.root.get_base_model() if hasattr(stage.root, "get_base_model") else stage.root  # type: ignore[operator]  # of peft
    if not getattr(found, "can_generate", bool)():
        raise UsageError(
            f"a {type(found).__name__} cannot generate text: use a class with a language model's head, such as from "
            "AutoModelForCausalLM or AutoModelForSeq2SeqLM"
        )
    empty_cache(found.config)
    return found


def _require_prompt(inputs: Tensor | None, keywords: Mapping[str, Any]) -> None:
    names = ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values")
    given = [each for each in (inputs, *(keywords.get(name) for name in names)) if each is not None]
    if not given or not isinstance(given[0], Tensor) or given[0].dim() < 2 or not given[0].numel():
        found = (
            tuple(given[0].shape)
            if given and isinstance(given[0], Tensor)
            else type(given[0]).__name__
            if given
            else "none"
        )
        raise UsageError(f"generate needs a prompt of at least one token: input_ids (rows, positions), got {found}")
    if keywords.get("use_cache") is False or keywords.get("past_key_values") is not None:
        raise UsageError("a pipeline generates with its own caches: remove use_cache= and past_key_values=")


class _Turns:
    """The turns of a replica's ranks: a turn is one forward, or the end. The driving rank says which.

    Attributes:
        drives: True on the driving rank.
    """

    def __init__(self, model: Pipeline, schedule: Schedule, config: Any) -> None:
        context, placement = model.context, schedule.placement
        replica = context.layout.replica_ranks(context.rank)
        last = min(placement.ranks_of(placement.num_stages - 1))
        self._driver = replica[last * context.tensor_size]
        self.drives = context.rank == self._driver
        self._peers = [rank for rank in replica if rank != context.rank]
        self._model, self._schedule, self._config, self._context = model, schedule, config, context
        self._caches = Caches(config)
        self._ledger: Any = None
        self._entries: dict[str, Any] = {}  # of the last forward
        self._failed = False

    def drive(self, shell: Any, inputs: Tensor | None, keywords: dict[str, Any]) -> Any:
        """Runs transformers' loop, and sends its result to the other ranks."""
        try:
            output = shell.generate(*([] if inputs is None else [inputs]), **{"use_cache": True, **keywords})
        except BaseException:
            if self._failed:
                raise
            with self._model.alarm.raised_everywhere("generates"):
                raise
        if getattr(output, "past_key_values", None) is not None:
            output["past_key_values"] = None
        is_over = self._turn(("end", tree_map(_detached, output)))[1]
        while not is_over:
            is_over = self._turn(("idle",))[1]
        return output

    def follow(self) -> Any:
        """Runs this rank's stages in each turn. Returns the result that the driving rank sends."""
        output, is_over = None, False
        while not is_over:
            order, is_over, _ = self._turn(None)
            if order[0] == "end":
                output = tree_map(self._placed, order[1])
        return output

    def ledger(self, cache: Any) -> Any:
        """Starts a generation with an empty cache, and returns its ledger."""
        require_known(cache)
        self._ledger = ledger_of(cache)
        return self._ledger

    def forward(self, entries: dict[str, Any]) -> Any:
        """One forward of the whole model."""
        ledger, cache = self._ledger, entries.pop("past_key_values", None)
        if cache is not None and cache is not ledger:
            raise UsageError("a pipeline generates with its own caches: remove past_key_values=")
        past = None if cache is None else int(ledger.get_seq_length())
        told = [] if cache is None else ledger.told
        changed = {
            name: each for name, each in entries.items() if name not in self._entries or each is not self._entries[name]
        }
        gone = [name for name in self._entries if name not in entries]
        _, _, output = self._turn(("forward", past, told, changed, gone))
        self._entries = entries
        if past is not None:
            ledger.told = []
            fill_up(ledger, past + _ids(entries).shape[1], 1)
            output["past_key_values"] = ledger
        return output

    def _turn(self, order: tuple[Any, ...] | None) -> tuple[tuple[Any, ...], bool, Any]:
        """Takes one turn. Returns the driver's order, whether all replicas have ended, and the model's output."""
        world, output = self._context.world, None
        try:
            with self._model.alarm.raised_everywhere("generates"):
                if order is None:
                    order = hear(world, self._driver)
                else:
                    tell(world, self._peers, order)
                if order[0] == "forward":
                    output = self._run(*order[1:])
                is_over = order[0] != "forward"
                if self._context.data_size > 1:
                    is_over = all(done for [done] in all_gather(world, [float(is_over)]))
        except BaseException:
            self._failed = True
            raise
        return order, is_over, output

    def _run(self, past: int | None, told: list[Told], changed: dict[str, Any], gone: list[str]) -> Any:
        """Runs the forward of this rank's stages for one step of the loop."""
        kept = {name: each for name, each in self._entries.items() if name not in gone}
        self._entries = {**kept, **changed}
        ids = _ids(self._entries)
        entries = {name: _entry(name, each, len(ids)) for name, each in self._entries.items()}
        if past is not None:
            if past == 0:
                self._caches, told = Caches(self._config, told), []
            for each in told:
                self._caches.apply(each)
            self._caches.length = past
            grows = _GROWING[0 if self._config.is_encoder_decoder else 1]
            if isinstance(entries.get(grows), Tensor):
                entries[grows] = GrowingEntry(entries[grows], ids.shape[1])
            entries["past_key_values"] = CacheEntry(torch.arange(len(ids)), self._caches)
        return self._model.runner.infer(iter([entries]), self._schedule)

    def _placed(self, leaf: object) -> object:
        return leaf.to(self._context.device) if isinstance(leaf, Tensor) else leaf


def _ids(entries: Mapping[str, Any]) -> Tensor:
    """The new tokens of a forward."""
    found: Tensor = next(entries[name] for name in _IDS if entries.get(name) is not None)
    return found


def _entry(name: str, tree: object, rows: int) -> Any:
    """An entry of a batch with `rows` rows; tensors without rows go whole to each microbatch."""

    def marked(leaf: object) -> object:
        is_split = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows and name != "cache_position"
        return leaf if is_split or not isinstance(leaf, Tensor) else Whole(leaf)

    return tree_map(marked, tree)


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class _Shell:
    """A mixin for a class of transformers: an object like a stage's model, whose calls go through the pipeline."""

    _turns: _Turns

    def __init_subclass__(cls) -> None:
        """Prevents the class's own `__init_subclass__` from running."""

    @classmethod
    def of(cls, model: nn.Module, turns: _Turns) -> Any:
        """Makes such an object; it shares the attributes of `model`, which is not changed."""
        kind = type(model)
        made: Any = object.__new__(type(kind.__name__, (cls, kind), {"__module__": kind.__module__}))
        vars(made).update(vars(model), _turns=turns)
        return made

    def __call__(self, **entries: Any) -> Any:
        """One forward of the whole model."""
        return self._turns.forward(entries)

    def get_encoder(self, *_: object, **__: object) -> Any:
        """The encoder of an encoder-decoder, over the pipeline."""
        return _Encoder(self, super().get_encoder())  # type: ignore[misc]  # of the class beside

    def _prepare_cache_for_generation(self, config: Any, keywords: dict[str, Any], *rest: Any) -> Any:
        """Like transformers', but makes the cache a ledger."""
        made = super()._prepare_cache_for_generation(config, keywords, *rest)  # type: ignore[misc]  # of the class beside
        keywords["past_key_values"] = self._turns.ledger(keywords.get("past_key_values"))
        return made


class _Encoder:
    """The encoder of a model in stages. Its output comes from a forward with a single token for the decoder."""

    def __init__(self, shell: Any, encoder: nn.Module) -> None:
        self._shell, self.forward = shell, encoder.forward  # whose parameters transformers looks at

    def __call__(self, **entries: Any) -> Any:
        """Returns the encoder's output for its inputs."""
        taken = signature(self._shell.forward).parameters.keys() - {LABELS}
        given = {name: each for name, each in entries.items() if name in taken and each is not None}
        inputs = given[self._shell.main_input_name]
        token = torch.zeros(len(inputs), 1, dtype=torch.long, device=inputs.device)
        output = self._shell(**given, decoder_input_ids=token, use_cache=False)
        return transformers_library().modeling_outputs.BaseModelOutput(
            last_hidden_state=output.encoder_last_hidden_state
        )
