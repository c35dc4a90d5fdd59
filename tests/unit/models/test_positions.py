"""Where tokens are: added sinusoids or rows of a table, rotation over a base grid, and no rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.models.dit.config import DiTConfig, load_model_config, model_config_text
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.models.dit.positions import sincos_features
from dbsp_megatron.models.dit.rope import apply_rotary, rotary_angles, spread_over
from tests.harness import run_ranks
from tests.unit.models.cores import GRID, TEXT_LEN, DenseCore, gradients, make_inputs, make_model, tiny_config
from tests.unit.models.test_model_ranks import run_whole, sequence_parallel_rank, strided, uneven

LEARNED: dict[str, Any] = {"position_embedding": "learned", "position_grid": GRID}
SINCOS: dict[str, Any] = {"position_embedding": "sincos", "position_scales": (1.5, 1.875), "rope_axes": (0, 0, 0)}


@pytest.mark.parametrize("text_len", [0, 4])
def test_sincos_features_equal_their_formula(text_len: int) -> None:
    grid, features, scales = (2, 3, 5), 32, (1.5, 2.0)
    whole = sincos_features(torch.arange(text_len + 30), grid, text_len, features, scales)
    assert whole.dtype == torch.float32
    assert torch.equal(whole[:text_len], torch.zeros(text_len, features))
    for position in range(30):
        t, h, w = position // 15 / 1.5, position // 5 % 3 / 2.0, position % 5 / 2.0
        row: list[float] = []
        for coordinate, channels in ((t, 8), (w, 12), (h, 12)):
            angles = [coordinate * 10000 ** (-i / (channels // 2)) for i in range(channels // 2)]
            row += [float(torch.tensor(a).double().sin()) for a in angles]
            row += [float(torch.tensor(a).double().cos()) for a in angles]
        torch.testing.assert_close(whole[text_len + position], torch.tensor(row), rtol=0, atol=1e-6)
    for shard in (torch.tensor([text_len + 29, 0, 7]), torch.arange(0)):
        assert torch.equal(sincos_features(shard, grid, text_len, features, scales), whole[shard])


@pytest.mark.diffusers
@pytest.mark.parametrize("base", [(30, 45), (4, 7)])
def test_spread_over_is_that_of_the_pipeline(base: tuple[int, int]) -> None:
    """Of every grid of up to 12 x 12 patches; at the base itself patches are counted."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    torch.testing.assert_close(torch.tensor(spread_over(base, base)), torch.tensor([(0.0, 1.0), (0.0, 1.0)]))
    for height in range(1, 13, 3):
        for width in range(1, 13, 3):
            region = get_resize_crop_region_for_grid((height, width), base[1], base[0])
            cos, sin = get_3d_rotary_pos_embed(16, region, (height, width), 2)
            ours = rotary_angles(torch.arange(2 * height * width), (2, height, width), (4, 6, 6), 1e4, base)
            for mine, other in zip(ours, (cos, sin), strict=True):
                torch.testing.assert_close(mine.repeat_interleave(2, dim=1), other, rtol=0, atol=1e-5)


def test_no_rotation_leaves_queries_alone() -> None:
    cos, sin = rotary_angles(torch.arange(6), (1, 2, 3), (0, 0, 0), 1e4)
    assert cos.shape == sin.shape == (6, 0)
    x = torch.randn(6, 2, 3, 8)
    assert torch.equal(apply_rotary(x, cos[:, None, None], sin[:, None, None]), x)
    with pytest.raises(ValueError, match="one row per token"):
        apply_rotary(x[:4], cos[:, None, None], sin[:, None, None])


def _shuffled(config: DiTConfig, order: Tensor) -> dict[str, Any]:
    inputs = make_inputs(config)
    positions = inputs["positions"][order]
    video = positions[positions >= config.sequence_text_len] - config.sequence_text_len
    return inputs | {"positions": positions, "video_tokens": inputs["video_tokens"][:, video]}


@pytest.mark.parametrize("text", ["cross", "joint"])
@pytest.mark.parametrize("added", [LEARNED, SINCOS, {"rope_base_grid": (5, 4)}])
def test_positions_follow_their_tokens(text: str, added: dict[str, Any]) -> None:
    """In another order of tokens, outputs are in that order, and they depend on where tokens are."""
    config = tiny_config(text, **added)
    model, inputs = make_model(config), make_inputs(config)
    whole = model(**inputs)
    order = torch.randperm(len(inputs["positions"]), generator=torch.Generator().manual_seed(2))
    shuffled = _shuffled(config, order)
    video = shuffled["positions"][shuffled["positions"] >= config.sequence_text_len] - config.sequence_text_len
    torch.testing.assert_close(model(**shuffled), whole[:, video], rtol=1e-5, atol=1e-5)
    plain = {"position_embedding": "none", "position_grid": None, "rope_base_grid": None}
    other = VideoDiT(tiny_config(text, **(added | plain)), core_attention=DenseCore).double()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if k != "position.weight"})
    assert (other(**inputs) - whole).abs().max() > 1e-3


@pytest.mark.parametrize("split", ["strided", "uneven"])
@pytest.mark.parametrize("added", [LEARNED, SINCOS])
def test_sequence_parallel_equals_one_process(added: dict[str, Any], split: str) -> None:
    """Rows of the table get their gradient from the rank that holds the token, text included."""
    config = tiny_config("joint", **added)
    length = TEXT_LEN + GRID[0] * GRID[1] * GRID[2]
    parts = strided(length, 2) if split == "strided" else uneven(length)
    expected, expected_grads = run_whole(config, make_inputs(config))
    ranks = run_ranks(sequence_parallel_rank, len(parts), config, parts, None, timeout_s=240)
    for result in ranks:
        torch.testing.assert_close(result["out"], expected[:, result["video"]])
        assert result["all"] == 3 * config.num_layers
    for name, grad in expected_grads.items():
        torch.testing.assert_close(
            sum(result["grads"][name] for result in ranks), grad, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_learned_positions_start_at_zero_and_take_one_grid() -> None:
    config = tiny_config("joint", **LEARNED)
    model = VideoDiT(config, core_attention=DenseCore)
    assert model.position is not None
    assert model.position.weight is not None
    assert model.position.weight.shape == (TEXT_LEN + 18, config.hidden_size)
    assert not model.position.weight.any()
    inputs = make_inputs(config, torch.float32)
    with pytest.raises(ValueError, match=r"grid must be position_grid \(2, 3, 3\).*got \(3, 2, 3\)"):
        model(**(inputs | {"grid": (3, 2, 3)}))
    model = make_model(config)
    model(**make_inputs(config)).square().sum().backward()
    assert (gradients(model)["position.weight"].abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_axes": (0, 0, 4)}, r"sum to head_dim 8, or three zeros; got \(0, 0, 4\)"),
        ({"rope_base_grid": (5, 0)}, r"rope_base_grid must be 2 integers >= 1, or null; got \(5, 0\)"),
        ({"position_embedding": "learned"}, r"position_grid must be given with position_embedding: learned"),
        ({"position_grid": (1, 2, 3)}, r"position_grid must be given with .* learned, and only then"),
        ({"position_embedding": "learned", "position_grid": (1, 2)}, r"position_grid must be 3 integers >= 1"),
        ({"position_embedding": "absolute"}, r"position_embedding must be one of none, sincos, learned"),
        ({"position_scales": (1.0, 0.0)}, r"position_scales must be a number > 0; got 0.0"),
        ({"position_scales": (1.0,)}, r"position_scales must be two numbers"),
        (
            {"position_embedding": "sincos", "hidden_size": 40, "head_dim": 10},
            r"hidden_size must be a multiple of 16 with position_embedding: sincos; got 40",
        ),
    ],
)
def test_config_names_positions_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("cross", **change)


def test_model_config_text_is_read_back(tmp_path: Any) -> None:
    for text, change in (("joint", LEARNED), ("cross", SINCOS | {"image_dim": 9}), ("none", {"norm_eps": 3e-7})):
        config = tiny_config(text, **change)
        (tmp_path / "model.yaml").write_text(model_config_text(config))
        assert load_model_config(tmp_path / "model.yaml") == config
