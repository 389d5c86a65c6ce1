"""Kept: the numbers per token that a layer keeps for its backward where tensor ranks split it. Must not contain: what a
checkpoint drops, and stages.

In 8 or 4 bits, a linear keeps its input in the type of its products, since its weight gradient is a product of it
(Transformer Engine). Everything else stays as wide as weights are: what goes into norms, query, key and value, the
output of attention, which the linear after it keeps once more in its own type, and the outputs of wide linears, from
which the activation function's gradient follows.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.linears import latent_values
from pipeflow.planning.setup import Precision, Setup


class KeptPerToken(NamedTuple):
    """Numbers per token: those as wide as weights, and inputs of linears. `again` are those of the former that a linear
    keeps once more if its inputs are narrower.
    """

    plain: int
    inputs: int
    again: int = 0

    @property
    def numbers(self) -> int:
        """How many there are, whatever their widths."""
        return self.plain + self.inputs

    def bytes(self, precision: Precision) -> int:
        """Their bytes in a precision, inputs of linears in its own type."""
        narrow = precision.kept_input
        again = 0 if narrow == precision.weight else self.again
        return precision.weight * self.plain + round(narrow * (self.inputs + again))


def layer_values(model: Transformer, setup: Setup) -> KeptPerToken:
    """A layer keeps (4 + 2r) h/t numbers. A backward needs query, key and value, the input of attention's output
    linear, the output of the wide linears, and the input of the output linear after them. Every rank has at least one
    head of key and value. A gated MLP counts as fused: its activation is recomputed. Latent attention makes a key and a
    value for every head, from latent vectors that are whole on every tensor rank.
    """
    heads, tensor = model.heads // setup.tensor, setup.tensor
    query = heads * (model.head_width + model.value_width)
    key = query if model.kv_rank is not None else 2 * max(model.key_width // tensor, model.head_width)
    latent, parted = latent_values(model), tensor if setup.sequence_parallel else 1
    normed = ((model.kv_rank or 0) + (model.q_rank or 0)) // parted
    always = model.shared_experts if model.experts > 1 else 1
    rest = mlp_values(model, always, setup), routed_kept(model, setup)
    plain = query + key + latent // parted - normed + sum(each.plain for each in rest)
    inputs = normed * keeps_input(setup, "linear_qkv") + sum(each.inputs for each in rest)
    again = heads * model.value_width * keeps_input(setup, "linear_proj")
    return KeptPerToken(plain + adapter_values(model, setup), inputs, again=again)


def keeps_input(setup: Setup, target: str) -> bool:
    """Whether the linears of this name of LORA_TARGETS keep their inputs: if their weights or adapters learn."""
    return not setup.frozen or (setup.lora_rank > 0 and target in setup.lora_targets)


def normed_inputs(setup: Setup) -> int:
    """How many of the two linears behind the norms of a layer keep their inputs."""
    return keeps_input(setup, "linear_qkv") + keeps_input(setup, "linear_fc1")


def adapter_values(model: Transformer, setup: Setup) -> int:
    """Numbers that the adapters of a layer keep between their two linears."""
    if not setup.lora_rank:
        return 0
    uses = model.active_experts if model.experts > 1 else 1
    wide = {"linear_fc1", "linear_fc2"}
    return setup.lora_rank * sum(uses if target in wide else 1 for target in setup.lora_targets)


def op_values(model: Transformer, setup: Setup) -> KeptPerToken:
    """What a layer with checkpoint "op" keeps: its input, attention's output, and every other product in the order of
    torchtitan's linears, which are query, key, value, output, gate, up and down. Kept are query, value and the gate, or
    the first wide linear of an MLP without one. With sequence parallelism the sum of attention's parts is kept, too,
    since a reduce-scatter is not repeated. The last product is not needed, so compiled programs do not keep it.

    Source: `_save_list` of pytorch/torchtitan/torchtitan/parallelisms/parallelize_llama.py at 9dec370ad26b. Raises
    UsageError for layers with other linears.
    """
    if model.experts > 1 or model.kv_rank is not None:
        raise UsageError(
            "checkpoint 'op' is for layers with one MLP and without latent attention: use 'full', or recompute_modules"
        )
    tensor, is_parted = setup.tensor, setup.sequence_parallel
    whole = model.hidden // tensor if is_parted else model.hidden
    heads = model.heads // tensor * (model.head_width + model.value_width)
    value = max(model.key_width // tensor, model.head_width)
    return KeptPerToken(whole * (2 if is_parted and tensor > 1 else 1) + heads + value + model.wide // tensor, 0)


def mlp_values(model: Transformer, count: int, setup: Setup) -> KeptPerToken:
    """The numbers that `count` MLPs keep if each gets all tokens."""
    wide, tensor = count * model.wide, setup.tensor
    return KeptPerToken(wide * (2 if model.gated else 1) // tensor, wide // tensor * keeps_input(setup, "linear_fc2"))


def wide_values(model: Transformer, setup: Setup) -> int:
    """Numbers per token in the outputs of wide linears, of all MLPs that a token uses."""
    always = model.shared_experts if model.experts > 1 else 1
    each = (2 if model.gated else 1) * model.wide
    routed = model.experts_per_token if model.experts > 1 else 0
    return (always + routed) * each // setup.tensor


def routed_kept(model: Transformer, setup: Setup) -> KeptPerToken:
    """What experts keep: the inputs that the router sends to each, and one number per expert. Their outputs are kept
    where the router's weights multiply them. On expert ranks, these multiply the activations, as in Megatron-LM, so
    outputs are not needed. The ranks of an expert have all tokens that are sent to it, and divide its width; ranks that
    have whole experts get as many tokens as they send, which with sequence parallelism are a part.
    """
    if model.experts == 1:
        return KeptPerToken(0, 0)
    split, uses = setup.expert_split, model.experts_per_token * setup.expert_split
    output = model.hidden if setup.expert == 1 else 0
    plain = uses * (output + (2 if model.gated else 1) * model.wide // split) // setup.tensor + model.experts
    first, second = keeps_input(setup, "linear_fc1"), keeps_input(setup, "linear_fc2")
    return KeptPerToken(plain, uses * (first * model.hidden + second * model.wide // split) // setup.tensor)
