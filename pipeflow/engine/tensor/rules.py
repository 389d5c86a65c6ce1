"""Rules: say by name which modules and parameters of a model are split over the tensor ranks, and how. The default
rules are for the layer names in transformers and many other libraries. Must not contain: the splitting itself.

Different models pack query, key and value under one name in different orders. Rules for such names therefore name the
class, and an unknown class is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from torch import nn

from pipeflow.core.errors import UsageError

Kind = Literal[
    "column",
    "attention",
    "row",
    "vocabulary",
    "head",
    "parameter",
    "partial",
    "sum",
    "argument",
    "attribute",
    "groups",
    "whole",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Rule:
    """One line of the table of rules. The first rule that matches a name is used.

    Attributes:
        kind: how a module, parameter or attribute with a matching name is treated:
            "column": each rank has some of the outputs of a linear layer.
            "attention": like "column". The outputs are attention heads, of query, key and value or of all three in one.
            "row": each rank has some of the inputs of a linear layer. Outputs are summed before the bias is added.
            "vocabulary": each rank has some of the rows of an embedding.
            "head": each rank has some of the outputs of a linear layer. All outputs are gathered.
            "parameter": each rank has a part of a parameter along `dim`, such as a parameter with an entry per head.
            "partial": a whole parameter that is used with split tensors only, so its gradient is summed over the ranks.
            "sum": a module that computes with split parameters. Its output is summed over the ranks.
            "argument": each rank gets its part, along `dim`, of an argument of a module's forward.
            "attribute": an integer, such as a number of heads, that is divided by the number of ranks.
            "groups": an integer: how many heads of the query share one head of key and value.
            "whole": unchanged, even if a later rule matches.
        pattern: regular expression for the end of the name, starting at a dot or at the beginning. "parameter" matches
            names of parameters; "partial" those of parameters or modules; "attribute", "groups" and "argument" those of
            attributes and arguments, such as `attn.num_heads`; all others match names of modules. An "attribute" whose
            pattern begins with `config` is an attribute of the module's `config`; the module then gets its own copy of
            the config.
        parts: parts of a packed tensor, such as query, key and value, each of which is split: their number if they are
            equal, or their relative sizes. Names stand for integer attributes of the surrounding module: a single name
            for the size of each part, several for relative sizes.
        dim: dimension that is split, for "parameter" and "argument".
        together: for "attention", how many parts lie together. It is 3 if query, key and value of one head come one
            after the other, and then those of the next head. Or the name of an attribute that counts such groups.
        shared: for "attention", the indices of parts whose heads several ranks share if there are fewer heads than
            ranks: those of key and value. (0,) for a layer that has only such heads, and for an "attribute" that counts
            them.
        of: regular expression for the name of the class that surrounds the layer, or has the parameter, attribute or
            argument; the rule applies to such modules only.
        where: attributes of that module with their required values; the rule applies only if all of them match.

    Raises UsageError for an unknown kind, and for a pattern that is not a regular expression.
    """

    kind: Kind
    pattern: str
    parts: int | str | tuple[int | str, ...] = 1
    dim: int = 0
    together: int | str = 1
    shared: tuple[int, ...] = ()
    of: str = ""
    where: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no kind of rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        try:
            self._expression, self._classes  # noqa: B018  # compiles both
        except re.error as error:
            raise UsageError(f"the pattern of {self} is not a regular expression: {error}") from error

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(rf"(?:^|\.)(?:{self.pattern})$")

    @cached_property
    def _classes(self) -> re.Pattern[str]:
        return re.compile(self.of)

    def matches(self, name: str, around: nn.Module | None) -> bool:
        """Returns True if the full `name` matches the pattern and the rule applies to the module `around`; None stands
        for any module.
        """
        return self._expression.search(name) is not None and (around is None or self.suits(around))

    def suits(self, module: nn.Module) -> bool:
        """Returns True if the rule applies to the module."""
        if self.of and self._classes.fullmatch(type(module).__name__) is None:
            return False
        if isinstance(self.parts, str) and not isinstance(vars(module).get(self.parts), int):
            return False
        return all(attribute_of(module, name) == value for name, value in self.where)

    def sizes(self, name: str, size: int, around: nn.Module) -> tuple[int, ...]:
        """The sizes of the parts of a tensor of `size` entries. Raises UsageError if they are not integers."""
        shares = self._shares(size, around)
        each = vars(around)[self.parts] if isinstance(self.parts, str) else 1
        if not shares or min(shares) < 1 or size % sum(shares) or size % each:
            raise UsageError(f"{name} has {size} outputs, which cannot be divided into the parts of {self}")
        return tuple(size // sum(shares) * share for share in shares)

    def _shares(self, size: int, around: nn.Module) -> tuple[int, ...]:
        if isinstance(self.parts, int):
            return (1,) * self.parts
        if isinstance(self.parts, str):
            return (1,) * (size // int(vars(around)[self.parts]))
        return tuple(share if isinstance(share, int) else _count(around, share, self) for share in self.parts)


def _count(around: nn.Module, name: str, rule: Rule) -> int:
    """An integer attribute of a module or of its config. Raises UsageError if neither has it."""
    for holder in (around, attribute_of(around, "config")):
        if isinstance(found := attribute_of(holder, name), int):
            return found
    raise UsageError(f"{type(around).__name__} has no integer attribute {name!r}, which {rule} names")


def config_rule(rules: Sequence[Rule], name: str, around: nn.Module) -> Rule | None:
    """The rule for an attribute of a module's config; `name` is the full name of the module, `config.` and the
    attribute.
    """
    of_configs = [rule for rule in rules if rule.pattern.startswith("config")]
    return first_match(of_configs, name, ("attribute",), around)


def first_match(
    rules: Sequence[Rule], name: str, kinds: Sequence[Kind], around: nn.Module | None = None
) -> Rule | None:
    """The first rule of the given kinds that matches `name` in the module `around`, or None."""
    return next((rule for rule in rules if rule.kind in kinds and rule.matches(name, around)), None)


_PACKED_VISION = r"(Sam|SamHQ)Vision(Sdpa)?Attention|(GotOcr2Vision|Blip|Blip2|InstructBlip|InstructBlipVideo)Attention"
_WIDE = r"(Blip|Blip2|InstructBlip|InstructBlipVideo)Attention"  # they compute with the width of their input
_HALVES = r"(Phi3|Phi4Multimodal|Glm|Glm4|Glm4v\w*|GlmOcr\w*|Dia)MLP"
_IN_ROWS = (("is_transposed", False),)  # expert weights of (expert, out, in)
_IN_COLUMNS = (("is_transposed", True),)
_HALVED = ("is_concatenated", True)


class _Defaults(tuple[Rule, ...]):
    """Rules that are written as their name, so that signatures with them as a default are short."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DEFAULT_RULES"


DEFAULT_RULES: tuple[Rule, ...] = _Defaults(
    (
        Rule("whole", r"(classifier|score|pooler|qa_outputs|mask_decoder|router|talking_head)(\..*)?"),
        Rule("whole", r"LayerNorm", of=r"Albert(Sdpa)?Attention"),  # it normalizes the attention's output
        # Attention: query, key and value apart, or in one
        Rule("attention", r"q_proj|query|q_lin|query_proj|(Self|EncDec)Attention\.q|pos(_q|_key|_query)?_proj"),
        Rule("attention", r"[kv]_proj|key|value|[kv]_lin|(key|value)_proj|(Self|EncDec)Attention\.[kv]", shared=(0,)),
        Rule("attention", r"query_key_value", together=3, of=r"(Bloom|GPTNeoX|GPTNeoXJapanese|Persimmon)Attention"),
        Rule(
            "attention",
            r"query_key_value",
            together="num_kv_heads",
            of="FalconAttention",
            where=(("multi_query", False),),
        ),
        Rule(
            "attention",
            r"query_key_value",
            together="num_kv_heads",
            of="FalconAttention",
            where=(("new_decoder_architecture", True),),
        ),
        Rule("attention", r"query_key_value", ("num_heads", 1, 1), shared=(1, 2), of="FalconAttention"),
        Rule(
            "attention",
            r"query_key_value",
            (
                "num_attention_heads_per_partition",
                "num_multi_query_groups_per_partition",
                "num_multi_query_groups_per_partition",
            ),
            shared=(1, 2),
            of="SelfAttention",
            where=(("multi_query_attention", True),),
        ),
        Rule(
            "attention",
            r"qkv_proj",
            ("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
            shared=(1, 2),
            of=r"(Phi3|Phi4Multimodal)Attention",
        ),
        Rule("attention", r"c_attn", ("num_heads", 1, 1), shared=(1, 2), where=(("multi_query", True),)),
        Rule("attention", r"c_attn", together=3, where=(("multi_query", False),), of="GPTBigCodeAttention"),
        Rule("attention", r"c_attn", "split_size"),
        Rule("attention", r"q_attn", where=(("is_cross_attention", True),)),
        Rule("attention", r"Wqkv", 3, of=r"(Mpt|ModernBert)Attention"),
        Rule("attention", r"qkv", 3, of=_PACKED_VISION),
        Rule("attention", r"in_proj", together=3, of="DisentangledSelfAttention"),
        Rule("row", r"o_proj|out_proj|out_lin|(self_)?attention\.dense|output\.dense|(Self|EncDec)Attention\.o"),
        Rule("row", r"dense", of=r"(Bloom|GPTNeoXJapanese|Persimmon|Falcon|Self|Phi)Attention"),
        Rule("row", r"proj|projection", of=_PACKED_VISION),
        Rule("row", r"Wo", of=r"ModernBert(Attention|MLP)"),
        # Layers between the attentions
        Rule("column", r"dense_h_to_4h", 2, of="MLP"),
        Rule("column", r"gate_up_proj", 2, of=_HALVES),
        Rule("column", r"Wi", 2, of="ModernBertMLP"),
        Rule("column", r"gate_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h|intermediate\.dense|ffn|wi|wi_\d|lin1"),
        Rule("column", r"intermediate_query\.dense|experts\.\d+\.w[13]|ffn\.up_proj"),
        Rule(
            "row", r"down_proj|fc2|fc_out|c_proj|dense_4h_to_h|ffn_output|wo|lin2|output_query\.dense|experts\.\d+\.w2"
        ),
        # Experts in one parameter: (expert, out, in), or transposed; gate and up are halves, or alternate
        Rule("sum", r"experts", where=(("has_bias", False),)),
        Rule("parameter", r"gate_up_proj", 2, dim=1, where=(*_IN_ROWS, _HALVED)),
        Rule("parameter", r"gate_up_proj", 2, dim=2, where=(*_IN_COLUMNS, _HALVED)),
        Rule("parameter", r"gate_up_proj|up_proj", dim=1, where=_IN_ROWS),
        Rule("parameter", r"gate_up_proj|up_proj", dim=2, where=_IN_COLUMNS),
        Rule("parameter", r"down_proj", dim=2, where=_IN_ROWS),
        Rule("parameter", r"down_proj", dim=1, where=_IN_COLUMNS),
        # Vocabulary
        Rule("vocabulary", r"embed_tokens|wte|word_embeddings|shared|tok_embeddings"),
        Rule("head", r"lm_head|predictions\.decoder|lm_head\.decoder|proj_out|embed_out"),
        # Other tensors of an attention: with entries per head, used with heads, or passed as arguments
        Rule("parameter", r"relative_position_bias_table", dim=1, of=r"(Beit|Data2VecVision)RelativePositionBias"),
        Rule("parameter", r"relative_attention_bias\.weight|relative_position_bias_table", dim=1),
        Rule("parameter", r"self\.logit_scale|[qv]_bias|sinks"),
        Rule("parameter", r"[qk]_norm\.weight", of="CohereLayerNorm"),
        Rule("whole", r"continuous_position_bias_mlp\.0"),
        Rule("column", r"continuous_position_bias_mlp\.2"),
        Rule("partial", r"[qkv]_norm|[qk]_layernorm|rel_pos_[hw]|act|act_fn|activation(_fn)?"),
        Rule("argument", r"alibi", "num_heads", of="BloomAttention"),
        Rule("argument", r"alibi|attention_mask", "num_heads", dim=1, of="FalconAttention"),
        Rule("argument", r"attention_mask", "num_attn_heads", dim=1, of="ProphetNetAttention"),
        Rule("argument", r"position_bias", of="MptAttention"),
        Rule("argument", r"hidden_states", dim=-1, of=rf"{_WIDE}|(LEDDecoder|GroupViT|TrOCR)Attention"),
        # Integers that count a rank's part
        Rule("attribute", r"num_heads|num_attention_heads|n_heads?|num_attn_heads|num_attention_heads_per_partition"),
        Rule("attribute", r"num_key_value_heads|num_kv_heads|n_kv_heads|kv_heads", shared=(0,)),
        Rule("attribute", r"num_multi_query_groups_per_partition", shared=(0,)),
        Rule("attribute", r"split_size|all_head_size|inner_dim|hidden_size_per_partition"),
        Rule("attribute", r"embed_dim", of=rf"GPTBigCodeAttention|{_WIDE}"),
        Rule("attribute", r"kv_dim", shared=(0,), of="GPTBigCodeAttention"),
        Rule("attribute", r"config\.num_attention_heads", of=r"(Phi3|Phi4Multimodal)Attention"),
        Rule("groups", r"num_key_value_groups|num_queries_per_kv"),
    )
)
"""Rules for the layer names in transformers and many other libraries. Classifiers stay whole, so they can have any
number of labels.
"""


def attribute_of(holder: object, name: str) -> Any:
    """An attribute of a model's own class, or None without it. Such a class may define a `__getattr__` that raises any
    error for a name that it does not have.
    """
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def has_attribute(module: nn.Module, name: str) -> bool:
    """Returns True if a module or its class has an attribute. Unlike `hasattr`, runs no property or `__getattr__`."""
    own = (vars(module), module._parameters, module._buffers, module._modules)
    return any(name in each for each in (*own, *map(vars, type(module).__mro__)))
