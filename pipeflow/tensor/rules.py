"""Rules: which modules and parameters of any model are split over the tensor ranks, and how, by their names. A table,
and how it is read; nothing is split here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pipeflow.core.errors import UsageError

Kind = Literal["column", "row", "vocabulary", "head", "heads", "partial", "attribute", "whole"]
KINDS: tuple[Kind, ...] = ("column", "row", "vocabulary", "head", "heads", "partial", "attribute", "whole")


@dataclass(frozen=True)
class Rule:
    """One line of the table. Of the rules that match a name the first one counts.

    Attributes:
        kind: what is done with what has such a name:
            "column": each rank has some of the outputs of a linear layer;
            "row": each rank has some of its inputs, and the outputs are summed before the whole bias is added;
            "vocabulary": each rank has some of the rows of an embedding;
            "head": each rank has some of the outputs of a linear layer, and all are gathered;
            "heads": each rank has a part of a parameter along `dim`, one that has an entry per head;
            "partial": the parameter is whole, and used with split tensors alone, so its gradient is summed;
            "attribute": an integer, such as a number of heads, is divided by the number of ranks;
            "whole": nothing, also where a later rule would match.
        pattern: a regular expression for the end of the name, from a dot or the beginning on. "heads" takes the names
            of parameters, "partial" those of parameters or modules, "attribute" those of attributes, as in
            `attn.num_heads`, all others names of modules.
        parts: of a "column": the layer computes several things in one, such as query, key and value, of each of which
            every rank has its part. Their number where they are equal, or their sizes relative to each other.
        dim: of "heads".

    Raises UsageError for a kind that there is not, and a pattern that is no regular expression.
    """

    kind: Kind
    pattern: str
    parts: int | tuple[int, ...] = 1
    dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no kind of rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        try:
            self._expression  # noqa: B018  # compiles it
        except re.error as error:
            raise UsageError(f"the pattern of {self} is no regular expression: {error}") from error

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(rf"(?:^|\.)(?:{self.pattern})$")

    def matches(self, name: str) -> bool:
        """Whether a full name ends as the pattern says."""
        return self._expression.search(name) is not None

    def sizes(self, name: str, outputs: int) -> tuple[int, ...]:
        """Those of the parts of a layer with so many outputs. Raises UsageError where they do not come out even."""
        shares = (1,) * self.parts if isinstance(self.parts, int) else self.parts
        if not shares or min(shares) < 1 or outputs % sum(shares):
            raise UsageError(f"{name} has {outputs} outputs, which are not made of the parts of {self}")
        return tuple(outputs // sum(shares) * share for share in shares)


def first_match(rules: Sequence[Rule], name: str, kinds: Sequence[Kind]) -> Rule | None:
    """The rule that counts for a name, of those of certain kinds."""
    return next((rule for rule in rules if rule.kind in kinds and rule.matches(name)), None)


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule("whole", r"(classifier|score|pooler|qa_outputs|mask_decoder|router)(\..*)?"),
    Rule("column", r"[qkv]_proj|query|key|value|[qkv]_lin|(Self|EncDec)Attention\.[qkv]"),
    Rule("column", r"gate_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h|intermediate\.dense|ffn|wi|wi_\d|lin1"),
    Rule("column", r"c_attn", parts=3),
    Rule("column", r"gate_up_proj", parts=2),
    Rule("row", r"o_proj|out_proj|out_lin|(self_)?attention\.dense|output\.dense|(Self|EncDec)Attention\.o"),
    Rule("row", r"down_proj|fc2|fc_out|c_proj|dense_4h_to_h|ffn_output|wo|lin2"),
    Rule("vocabulary", r"embed_tokens|wte|word_embeddings|shared"),
    Rule("head", r"lm_head|predictions\.decoder|lm_head\.decoder|proj_out|embed_out"),
    Rule("heads", r"relative_attention_bias\.weight|relative_position_bias_table", dim=1),
    Rule("heads", r"self\.logit_scale"),
    Rule("column", r"continuous_position_bias_mlp\.2"),
    Rule("partial", r"[qk]_norm"),
    Rule("attribute", r"num_heads|num_attention_heads|n_heads?|num_key_value_heads|num_kv_heads|n_kv_heads"),
    Rule("attribute", r"split_size|all_head_size|inner_dim"),
)
"""Names that models of transformers and many others use. Those of classifiers stay whole, so any number of labels will
do. Names that mean different orders in different models, such as `qkv`, are left to a rule of your own.
"""
