"""AxialDiT in one process: parameter counts, places, refusals, and the function of the published Latte."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.dsp import Axis, Link, explain, plan_stages, unit_plan_of
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.models.axial import AxialConfig, AxialDiT
from dbsp_megatron.models.axial.layer import axial_stages
from dbsp_megatron.models.axial.positions import space_features, time_features
from dbsp_megatron.models.axial.sparse import SparseAttention
from dbsp_megatron.models.build import build_model
from dbsp_megatron.models.convert import from_model_config
from dbsp_megatron.models.dit import VideoDiT, load_model_config
from dbsp_megatron.models.dit.config import model_config_text, model_from_fields
from tests.distributed.axial_models import build, inputs, tiny
from tests.unit.models.test_published_models import Weights, tokens_of
from tools.explain_layout import understand

COUNTS = {
    "stdit3_xl_2": 1_207_643_936,
    "latte_xl_2": 1_057_246_880,
    "open_sora_plan_1_1": 1_057_246_880,
    "axial_k3": 966_194_512,
}


def _count(name: str) -> int:
    with torch.device("meta"):
        config = load_model_config(name)
        assert isinstance(config, AxialConfig)
        model = AxialDiT(config, pg_collection=ProcessGroupCollection(tp=None, cp=None, pp=None))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_models_are_counted_exactly(name: str) -> None:
    """The head of each YAML file says what is left out."""
    assert _count(name) == COUNTS[name]


def test_stdit3_has_the_parameters_that_its_description_adds_up_to() -> None:
    c, text = 1152, 4096
    linear = lambda a, b: a * b + b  # noqa: E731
    block = linear(c, 3 * c) + 2 * 72 + linear(c, c)  # attention with norms of queries and keys
    block += linear(c, c) + linear(c, 2 * c) + linear(c, c)  # attention to the text
    block += linear(c, 4 * c) + linear(4 * c, c) + 6 * c
    ends = linear(16, c) + 2 * (linear(256, c) + linear(c, c)) + linear(c, 6 * c)
    ends += linear(text, c) + linear(c, c) + linear(c, 32) + 2 * c
    assert 56 * block + ends == COUNTS["stdit3_xl_2"]


@pytest.mark.diffusers
def test_latte_has_the_parameters_of_diffusers() -> None:
    from diffusers import LatteTransformer3DModel

    with torch.device("meta"):
        theirs = LatteTransformer3DModel(
            num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=28,
            cross_attention_dim=1152, attention_bias=True, sample_size=64, patch_size=2, norm_eps=1e-6,
            activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False,
            caption_channels=4096, video_length=16,
        )  # fmt: skip
    assert sum(parameter.numel() for parameter in theirs.parameters()) == COUNTS["latte_xl_2"]


@pytest.mark.diffusers
@torch.no_grad()
def test_axial_dit_computes_what_latte_does() -> None:
    from diffusers import LatteTransformer3DModel

    frames, height, width, heads, head_dim, text_dim = 3, 2, 4, 2, 16, 7
    hidden = heads * head_dim
    theirs = LatteTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=head_dim, in_channels=3, out_channels=6, num_layers=2,
        cross_attention_dim=hidden, attention_bias=True, sample_size=12, patch_size=2, norm_eps=1e-6,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False,
        caption_channels=text_dim, video_length=frames,
    )  # fmt: skip
    config = dataclasses.replace(
        load_model_config("latte_xl_2"), hidden_size=hidden, num_layers=4, num_heads=heads, head_dim=head_dim,
        ffn_hidden_size=4 * hidden, in_channels=3, out_channels=6, text_dim=text_dim, text_len=5, space_base=6,
    )  # fmt: skip
    assert isinstance(config, AxialConfig)
    ours = AxialDiT(config)
    weights = Weights(theirs, ours)
    weights.layer("patch_embed", "pos_embed.proj")
    for i in (1, 2):
        weights.layer(f"time_embed.linear_{i}", f"adaln_single.emb.timestep_embedder.linear_{i}")
        weights.layer(f"text_proj.linear_{i}", f"caption_projection.linear_{i}")
    weights.layer("time_proj", "adaln_single.linear")
    for index in range(4):
        layer = f"block.layers.{index}"
        block = f"{'temporal_' if index % 2 else ''}transformer_blocks.{index // 2}"
        table = weights.theirs[f"{block}.scale_shift_table"]
        weights.put(f"{layer}.attention_norm.table", table[:3])
        weights.put(f"{layer}.mlp_norm.table", table[3:])
        weights.attention(f"{layer}.self_attention", f"{block}.attn1")
        if not index % 2:
            weights.layer(f"{layer}.cross_attention.linear_q", f"{block}.attn2.to_q")
            weights.qkv(f"{layer}.cross_attention.linear_kv", (f"{block}.attn2.to_k", f"{block}.attn2.to_v"))
            weights.layer(f"{layer}.cross_attention.linear_proj", f"{block}.attn2.to_out.0")
        weights.mlp(f"{layer}.mlp", f"{block}.ff")
    weights.put("output.table", weights.theirs["scale_shift_table"])
    weights.layer("output.proj", "proj_out")
    assert not weights.unset
    video = torch.randn(2, 3, frames, 2 * height, 2 * width)
    context, timestep = torch.randn(2, 5, text_dim), torch.tensor([0.25, 0.75])
    expected = theirs(video, timestep * 1000, context).sample
    b, c, t, h, w = video.shape
    tokens = video.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
    got = ours(tokens, timestep, grid=(frames, height, width), context=context)
    torch.testing.assert_close(got, tokens_of(expected, channels_last=True), rtol=1e-4, atol=1e-4)


def test_space_features_follow_the_published_formulas() -> None:
    """Columns first; `area` is the square with as many tokens."""
    rows, columns = torch.tensor([0, 2, 1]), torch.tensor([3, 0, 4])
    got = space_features(rows, columns, (3, 5), 8, "base", 32)
    for index in range(3):
        wanted: list[float] = []
        for place, length in ((columns, 5), (rows, 3)):
            at = float(place[index]) * 32 / length
            wanted += [math.sin(at), math.sin(at / 100), math.cos(at), math.cos(at / 100)]
        torch.testing.assert_close(got[index], torch.tensor(wanted))
    area = space_features(rows, columns, (3, 5), 8, "area", 32)
    # Open-Sora: index / (sqrt(h * w pixels) / 512) * round(sqrt(h * w)) / length, with 16 pixels a patch.
    at = 3 / (math.sqrt(3 * 16 * 5 * 16) / 512) * 4 / 5
    torch.testing.assert_close(area[0, 0], torch.tensor(math.sin(at)))


def test_time_features_are_scaled() -> None:
    got = time_features(torch.tensor([6]), 4, 3.0)
    torch.testing.assert_close(got[0], torch.tensor([math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]))


def test_an_image_has_no_time_features() -> None:
    """As published: one frame is told nothing of its place."""
    config = tiny("latte_xl_2")
    given, _ = inputs(config, (1, 2, 3), 2)
    plain = build(dataclasses.replace(config, time_positions=False))
    assert torch.equal(build(config)(**given), plain(**given))
    video, _ = inputs(config, (2, 2, 3), 2)
    assert not torch.allclose(build(config)(**video), plain(**video))


def test_a_layer_mixes_tokens_along_its_dim_only() -> None:
    """A changed token reaches others of its frame through layers along S, and of its place through layers along T."""
    for dims in (("S", "T"), ("T", "S")):
        config = tiny("axial_debug", attention_dims=dims, num_layers=1, rope_dims=())
        model = build(config)
        given, _ = inputs(config, (3, 2, 2), 1)
        moved = given["video_tokens"].clone()
        moved[0, 5] += 1.0  # frame 1, place 1
        changed = (model(**given) != model(**given | {"video_tokens": moved})).any(-1)[0].nonzero().flatten().tolist()
        assert changed == ([4, 5, 6, 7] if dims[0] == "S" else [1, 5, 9])


def test_fps_changes_the_prediction() -> None:
    config = tiny("stdit3_xl_2")
    given, _ = inputs(config, (2, 2, 2), 2)
    model = build(config)
    same = torch.full((2,), 24.0, dtype=torch.float64)
    assert torch.equal(model(**given), model(**given, fps=same))
    assert not torch.allclose(model(**given), model(**given, fps=same / 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dims": ("T",)}, "attention_dims must name all dims"),
        ({"attention_dims": ("T", "S", "H")}, "attention_dims must name all dims"),
        ({"rope_dims": ("H",)}, "rope_dims must name some of"),
        ({"text": "joint"}, "text must be none or cross"),
        ({"text_dims": ("Q",)}, "text_dims must name some of"),
        ({"space_positions": "odd"}, "space_positions must be one of"),
        ({"fps": 0.0}, "fps must be > 0"),
        ({"position_embedding": "sincos"}, "position_embedding must be none"),
    ],
)
def test_wrong_descriptions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(load_model_config("stdit3_xl_2"), **changes)


def test_descriptions_survive_yaml_and_state(tmp_path: Any) -> None:
    config = load_model_config("stdit3_xl_2")
    assert model_from_fields(dataclasses.asdict(config)) == config
    path = tmp_path / "copy.yaml"
    path.write_text(model_config_text(config))
    assert load_model_config(path) == config


def test_sparse_attention_computes_the_blocks_of_each_mask() -> None:
    """Head dim 24, which kernels see as 32; batch entries have masks of their own."""
    q, k, v = torch.randn(3, 11, 2, 4, 24, dtype=torch.float64)
    method = TopKMask(density=0.4)
    mask = method.mask(q.transpose(0, 1), k.transpose(0, 1), block_size=2)
    assert not torch.equal(mask.blocks[0], mask.blocks[1])
    got = SparseAttention(method=method, block_size=2, engine="torch")(q, k, v, 0)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / 24**0.5
    weights = scores.masked_fill(~mask.to_dense(), float("-inf")).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2), rtol=0, atol=1e-10)


def test_short_dims_are_attended_densely() -> None:
    sparse = SparseAttention(method=TopKMask(density=0.4), block_size=3)
    assert not sparse.takes(11)
    assert sparse.takes(12)


def test_other_builders_refuse_the_description() -> None:
    """A model of another kind would be built from the same numbers in silence."""
    config = tiny("stdit3_xl_2")
    with pytest.raises(ValueError, match="VideoDiT is described by a DiTConfig, got AxialConfig"):
        VideoDiT(config)
    with pytest.raises(ValueError, match="AxialDiT is described by a AxialConfig, got DiTConfig"):
        AxialDiT(load_model_config("dit_debug"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AxialConfig, whose layers attend along one dim each, is not converted"):
        from_model_config(config)
    assert type(build_model(config)) is AxialDiT
    assert type(build_model(load_model_config("dit_debug"))) is VideoDiT


def test_explain_says_that_it_does_not_know_the_model() -> None:
    config = parse_train(["--model", "axial_debug", "--sp-strategy", "dsp", "--data.patch_size", "[1,4,4]"]).config
    with pytest.raises(ValueError, match="attends along one dim at a time, which is not explained here"):
        understand(config, 2)


@pytest.mark.parametrize("places", [405, 1590, 3600])
def test_fifteen_frames_on_64_ranks_are_attended_in_units(places: int) -> None:
    """Nothing is switched; 90 % and more of the ranks' time is used instead of 23 %."""
    config = load_model_config("stdit3_xl_2")
    assert isinstance(config, AxialConfig)
    lengths = {"T": 15, "S": places}
    plan = plan_stages(axial_stages(config), lengths, [Link(axis=Axis("dsp", 64))])
    assert [step.in_units for step in plan.steps] == [True, False] * 28
    assert plan.num_switches == 0
    assert explain(plan, quiet=True).count("attention in units over dsp:64") == 28
    assert unit_plan_of((15, places), 1, 64, config.num_heads).utilisation >= 0.9
    # What all else of a layer is computed on: an even share of the places, to within one.
    assert plan.start.share() * 64 < 1.11
    whole = plan_stages(axial_stages(config, in_units=False), lengths, [Link(axis=Axis("dsp", 64))])
    assert max(step.compute.share() for step in whole.steps) == 1 / 15


def test_frames_that_balance_are_switched() -> None:
    config = load_model_config("stdit3_xl_2")
    assert isinstance(config, AxialConfig)
    for frames, ranks in ((16, 8), (30, 8), (120, 64)):
        plan = plan_stages(axial_stages(config), {"T": frames, "S": 3600}, [Link(axis=Axis("dsp", ranks))])
        in_units = any(step.in_units for step in plan.steps)
        assert in_units == (-(-frames // ranks) * ranks > 1.1 * frames), (frames, ranks)
        assert (plan.num_switches == 55) != in_units
