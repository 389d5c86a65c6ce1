"""The default rules, for the layer names in transformers and many other libraries. Must not contain: anything else.

Different models pack query, key and value under one name in different orders. Rules for such names therefore name the
class around the layer, so that no order is guessed; the same layers of other classes stay whole, which is logged.
"""

from __future__ import annotations

from pipeflow.tensor.rules import Rule

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
