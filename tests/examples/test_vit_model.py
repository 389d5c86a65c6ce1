"""The parts of the vision transformer: their sizes, first weights, stochastic depth, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import model_zoo.vit
import model_zoo.vit.vit
import pipeflow
import vit.build
import vit.initial
from pipeflow.colossalai import nn as col_nn
from pipeflow.tensor import current_tracker, manual_seed
from pipeflow.testing import run_threads
from tests.examples.conftest import kept_numbers
from vit.build import build_stage
from vit.model import Attention, DropPath, PipelineVisionTransformer, ViTBlock, ViTEmbedding, ViTHead, drop_path_of

SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 4, "dim": 16, "depth": 3, "num_heads": 4, "num_classes": 5}


@pytest.mark.parametrize(
    ("preset", "options", "count"),
    [
        ("vit_lite_depth7_patch4_32", {}, 3_722_250),
        ("vit_tiny_patch4_32", {}, 9_532_938),
        ("vit_tiny_patch16_224", {}, 5_717_416),
        ("vit_small_patch16_224", {}, 22_050_664),
        ("vit_small_patch32_224", {}, 22_878_952),
        ("vit_base_patch16_224", {}, 86_567_656),
        ("vit_base_patch16_384", {}, 86_859_496),
        ("vit_base_patch32_224", {}, 88_224_232),
        ("vit_large_patch16_224", {}, 304_326_632),
        ("vit_large_patch16_384", {}, 304_715_752),
        ("vit_large_patch32_224", {}, 306_535_400),
        ("vit_base_patch16_224", {"num_classes": 10, "drop_rate": 0.1, "drop_path_rate": 0.1}, 85_806_346),
    ],
)
def test_presets_have_as_many_weights_as_timm_counts(preset: str, options: dict[str, Any], count: int) -> None:
    model = vit.build.PRESETS[preset](device="meta", **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("name", vit.build.PRESETS)
def test_presets_have_the_names_of_the_model_zoo(name: str) -> None:
    for module in (model_zoo.vit, model_zoo.vit.vit):
        assert getattr(module, name) is vit.build.PRESETS[name]
        with pytest.raises(AttributeError, match="has no attribute 'vit_huge'; its presets are vit_tiny_patch16_224"):
            _ = module.vit_huge


def test_a_preset_takes_the_keywords_of_timm() -> None:
    names: dict[str, Any] = {"drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.3, "embed_dim": 24}
    model = model_zoo.vit.vit_base_patch16_224(device="meta", num_classes=7, **names)
    assert isinstance(model, PipelineVisionTransformer)
    *_, block, norm, head = model.layers
    assert isinstance(block, ViTBlock)
    assert isinstance(head, ViTHead)
    assert [block.dropout.p, block.attention.dropout.p, block.drop_path.p] == pytest.approx([0.1, 0.2, 0.3])
    assert norm.normalized_shape == (24,)
    assert head.classifier.out_features == 7
    plain = vit.build.vit_base_patch16_224(device="meta")
    assert {each.p for each in plain.modules() if isinstance(each, pipeflow.tensor.Dropout)} == {0.0}


def test_a_preset_takes_timms_further_keywords() -> None:
    names: dict[str, Any] = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "drop_rate": 0.3, "qkv_bias": False}
    kinds: dict[str, Any] = {"act_layer": nn.ReLU, "norm_layer": partial(nn.LayerNorm, eps=1e-4), "in_chans": 1}
    always: dict[str, Any] = {"global_pool": "token", "class_token": True, "init_values": None}
    model = vit.build.vit_base_patch16_224(device="meta", **names, **kinds, **always)
    assert isinstance(model, PipelineVisionTransformer)
    embedding, block, *_, norm, _ = model.layers
    assert isinstance(embedding, ViTEmbedding)
    assert isinstance(block, ViTBlock)
    assert (embedding.dropout.p, block.dropout.p) == (0.1, 0.2)
    assert block.attention.query_key_value.bias is None
    assert block.attention.output.bias is not None
    assert isinstance(block.activation, nn.ReLU)
    assert norm.eps == 1e-4
    assert embedding.patches.projection.in_channels == 1


@pytest.mark.parametrize(("weight_init", "largest_weight"), [("jax", 0.0), ("skip", 16**-0.5), ("", 16**-0.5)])
def test_timms_first_weights(weight_init: str, largest_weight: float) -> None:
    model = vit.build.vit_base_patch16_224(weight_init=weight_init, embed_dim=16, num_heads=2, depth=1)
    weights = dict(model.named_parameters())["layers.head.classifier.weight"]
    assert largest(weights) == pytest.approx(largest_weight, rel=0.01)


@pytest.mark.parametrize(
    ("keyword", "value", "what"),
    [
        ("global_pool", "avg", "global_pool='avg' is not supported: this model has 'token'"),
        ("init_values", 1e-5, "init_values=1e-05 is not supported: this model has None"),
        ("weight_init", "moco", "weight_init must be one of '', 'skip', 'jax'"),
        ("act_layer", "mish", "act_layer must be one of 'gelu'"),
        ("norm_layer", nn.BatchNorm1d, "norm_layer must be nn.LayerNorm"),
        ("block_fn", nn.Identity, "does not support block_fn"),
        ("drop_rates", 0.1, "does not support drop_rates"),
    ],
)
def test_timms_keywords_that_cannot_be_honoured_are_refused(keyword: str, value: object, what: str) -> None:
    given: dict[str, Any] = {keyword: value}
    with pytest.raises(pipeflow.UsageError, match=what):
        vit.build.vit_base_patch16_224(device="meta", **given)


def test_the_faces_name_the_parts() -> None:
    parts = model_zoo.vit.vit
    assert (parts.ViTEmbedding, parts.ViTBlock, parts.ViTHead) == (ViTEmbedding, ViTBlock, ViTHead)
    model = parts._create_vit_model(**SIZES)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert list(dict(model.layers.named_children())) == ["embedding", "0", "1", "2", "norm", "head"]


def test_a_model_of_a_users_own_is_made_of_the_parts() -> None:
    """With the keywords, and between the norms, that tutorials use."""
    common: dict[str, Any] = {"dtype": torch.float64, "init_method": "jax"}
    parts = model_zoo.vit.vit
    rates: dict[str, Any] = {"attention_dropout": 0.0, "dropout": 0.1, "drop_path": 0.1, "checkpoint": True}
    layers = nn.Sequential(
        parts.ViTEmbedding(img_size=8, patch_size=4, in_chans=3, embedding_dim=16, dropout=0.1, **common),
        parts.ViTBlock(dim=16, num_heads=4, mlp_ratio=4, activation=functional.gelu, bias=True, **rates, **common),
        col_nn.LayerNorm(normalized_shape=16, eps=1e-6, dtype=torch.float64),
        parts.ViTHead(dim=16, num_classes=5, representation_size=None, bias=True, **common),
    )
    scores = layers(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    scores.square().sum().backward()
    assert scores.shape == (2, 5)
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_a_block_computes_what_torchs_encoder_layer_does() -> None:
    ours = ViTBlock(16, 4, dtype=torch.float64)
    stock = nn.TransformerEncoderLayer(
        16, 4, 64, 0, functional.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=True, dtype=torch.float64
    )

    def per_part(mixed: Tensor) -> Tensor:
        return mixed.view(4, 3, 4, -1).transpose(0, 1).reshape(mixed.shape)  # heads x 3 to 3 x heads

    weights = ours.state_dict()
    kinds, twins = ("weight", "bias"), {"norm1": "norm_1", "norm2": "norm_2", "linear1": "wide", "linear2": "narrow"}
    attention = {f"in_proj_{kind}": per_part(weights[f"attention.query_key_value.{kind}"]) for kind in kinds}
    attention |= {f"out_proj.{kind}": weights[f"attention.output.{kind}"] for kind in kinds}
    stock.self_attn.load_state_dict(attention)
    for name, mine in twins.items():
        stock.get_submodule(name).load_state_dict(ours.get_submodule(mine).state_dict())
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), stock.train()(tokens), rtol=1e-12, atol=1e-12)


def test_attention_computed_with_dropout_is_the_same_attention() -> None:
    layer = Attention(16, 4, dropout=1e-300, dtype=torch.float64)
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(layer.train()(tokens), layer.eval()(tokens), rtol=1e-12, atol=1e-12)


def test_a_representation_is_a_hidden_layer_with_tanh() -> None:
    head = ViTHead(4, 3, representation_size=8)
    tokens = torch.randn(2, 5, 4)
    weights = head.state_dict()
    hidden = functional.linear(tokens[:, 0], weights["representation.weight"], weights["representation.bias"]).tanh()
    expected = functional.linear(hidden, weights["classifier.weight"], weights["classifier.bias"])
    torch.testing.assert_close(head(tokens), expected)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ViTEmbedding(30, 16), "patch_size=16 does not divide image_size=30: resize the images to 16, or"),
        (lambda: PipelineVisionTransformer(8, 16, depth=1), "resize the images to 16, or choose"),
        (lambda: ViTEmbedding(32, 16, flatten=False), "remove it"),
        (lambda: ViTBlock(16, 3), "num_heads=3 does not divide dim=16: choose"),
        (lambda: ViTBlock(16, 4, init_method="jaxx"), "one of 'torch', 'jax', got 'jaxx'"),
        (lambda: vit.build.vit_base_patch16_224(pretrained=True), "remove pretrained"),
        (lambda: vit.build.build_pipeline_vit(4, depth=6, device="meta"), "remove depth"),
        (lambda: vit.build.build_pipeline_vit(2, num_chunks=3, device="meta"), "layers"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(pipeflow.UsageError, match=what):
        make()


def test_heads_that_the_tensor_size_does_not_divide_are_refused() -> None:
    def build() -> None:
        with pytest.raises(pipeflow.UsageError, match=r"num_heads=3 over 2 tensor ranks: choose a tensor size"):
            ViTBlock(12, 3)

    run_threads(build, 2, tensor=2)


def largest(values: Tensor) -> float:
    return float(values.detach().abs().max())


def test_the_weights_of_torch_are_those_of_its_layers() -> None:
    model = dict(build_stage(**{**SIZES, "dim": 64}, init_method="torch").named_parameters())
    assert largest(model["layers.embedding.patches.class_token"]) == 0
    assert float(model["layers.embedding.patches.positions"].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert model["layers.1.norm_1.weight"].eq(1).all()
    assert largest(model["layers.1.norm_1.bias"]) == 0
    layers = {"embedding.patches.projection": 48, "1.wide": 64, "1.narrow": 256, "head.classifier": 64}
    for name, inputs in layers.items():
        for kind in ("weight", "bias"):
            values = model[f"layers.{name}.{kind}"]
            assert 0.7 * inputs**-0.5 < largest(values) <= inputs**-0.5


def test_the_weights_of_jax_are_those_of_the_paper() -> None:
    model = dict(build_stage(**{**SIZES, "dim": 64}, init_method="jax", representation_size=64).named_parameters())
    projection = model["layers.embedding.patches.projection.weight"]
    assert float(projection.detach().std()) == pytest.approx(48**-0.5, rel=0.05)
    assert largest(projection) <= 2 * 48**-0.5 / vit.initial.CUT_DEVIATION
    assert float(model["layers.head.representation.weight"].detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    for name, both in {"attention.query_key_value": 128, "attention.output": 128, "wide": 320, "narrow": 320}.items():
        bound = math.sqrt(6 / both)
        assert 0.98 * bound < largest(model[f"layers.1.{name}.weight"]) <= bound
    for name in ("wide", "narrow"):
        assert float(model[f"layers.1.{name}.bias"].detach().std()) == pytest.approx(1e-6, rel=0.4)
    zeros = ["embedding.patches.projection.bias", "1.attention.output.bias", "head.classifier.weight", "norm.bias"]
    assert [largest(model[f"layers.{name}"]) for name in zeros] == [0.0] * 4
    assert model["layers.norm.weight"].eq(1).all()


def test_parts_made_alone_draw_from_torchs_generator() -> None:
    def block(seed: int) -> Tensor:
        torch.manual_seed(seed)
        weight: Tensor = ViTBlock(16, 4, init_method="jax").wide.weight
        return weight

    assert block(0).equal(block(0))
    assert not block(0).equal(block(1))


def test_each_layer_skips_as_often_as_its_place_in_the_whole_model_says() -> None:
    whole = build_stage(drop_path=0.3, **{**SIZES, "depth": 4}, device="meta")
    rates = [layer.drop_path.p for layer in whole.layers if isinstance(layer, ViTBlock)]
    assert rates == pytest.approx(torch.linspace(0, 0.3, 4).tolist())
    assert drop_path_of(0, 1, 0.5) == 0
    for start, end in ((0, 1), (1, 3), (3, 4)):
        ends: dict[str, Any] = {"first_stage": start == 0, "last_stage": end == 4, "start_idx": start, "end_idx": end}
        stage = build_stage(drop_path=0.3, **{**SIZES, "depth": 4}, **ends, device="meta")
        assert [layer.drop_path.p for layer in stage.layers if isinstance(layer, ViTBlock)] == rates[start:end]


def test_whole_samples_are_dropped_and_the_mean_stays() -> None:
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(4000, 2, 3))
    assert dropped.flatten(1).min(1).values.equal(dropped.flatten(1).max(1).values)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert float(dropped.mean()) == pytest.approx(1, abs=0.05)
    assert DropPath(0.25).eval()(torch.ones(3, 2)).equal(torch.ones(3, 2))
    assert DropPath(0.0)(torch.ones(3, 2)).equal(torch.ones(3, 2))


def test_tensor_ranks_drop_the_same_samples() -> None:
    def drop() -> Tensor:
        manual_seed(3)
        assert current_tracker() is not None
        dropped: Tensor = DropPath(0.5)(torch.ones(64, 2))
        return dropped

    one, other = run_threads(drop, 2, tensor=2)
    assert one.equal(other)
    assert 0 < float((one == 0).float().mean()) < 1


def dropping(checkpoint: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of a block that drops with every probability it has."""
    manual_seed(3)
    block = ViTBlock(16, 4, 4, 0.2, 0.2, 0.5, checkpoint=checkpoint)
    vit.initial.initialize(block, "torch", seed=0)
    tokens = torch.linspace(-1, 1, 4 * 3 * 16).view(4, 3, 16).requires_grad_()
    output = block(tokens)
    output.square().sum().backward()
    assert tokens.grad is not None
    whole = {name: each.grad for name, each in block.named_parameters() if each.grad is not None}
    return output.detach(), {"tokens": tokens.grad, **whole}


def test_a_block_computed_again_drops_the_same() -> None:
    [(kept, expected)] = run_threads(dropping, 1, False)
    [(again, found)] = run_threads(dropping, 1, True)
    few, many = (kept_numbers(dropping, checkpoint) for checkpoint in (True, False))
    assert few < many / 5
    assert again.equal(kept)
    torch.testing.assert_close(found, expected)


def test_what_a_block_drops_leaves_tensor_ranks_in_agreement() -> None:
    (one, first), (other, second) = run_threads(dropping, 2, True, tensor=2)
    assert one.equal(other)
    for name in ("tokens", "norm_1.weight", "norm_2.bias", "narrow.bias"):
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0, msg=name)
