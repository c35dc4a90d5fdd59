"""Cases of a command line, and the settings that give them a density."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dbsp_megatron.masks import DuoMask, SlidingTileMask, SpargeMask, TopKMask, TopPMask
from tools.attention_inputs import Geometry, LayerInputs
from tools.mask_cases import MaskCase, match_density, ordered, parse_case, unique_labels

GEOMETRY = Geometry(grid=(4, 4, 6), seqlen=99, block_size=8)
CPU = torch.device("cpu")


def test_parse_case_reads_settings_cubes_and_labels() -> None:
    case = parse_case("topp:top_p=0.6,min_blocks=2,cube=2x2x4")
    assert case.build() == TopPMask(0.6, 2)
    assert (case.label, case.cube) == ("topp, cubes", (2, 2, 4))
    assert case.settings_text == "top_p 0.6, min_blocks 2, cubes 2x2x4"
    assert parse_case("topk:label=mine").label == "mine"
    assert parse_case("duo:global_heads=0+3").build() == DuoMask((0, 3))
    assert parse_case("sliding_tile:tile=2x2x2,window=3x1x3").build() == SlidingTileMask((2, 2, 2), (3, 1, 3))
    assert parse_case("topk").build() == TopKMask()


def test_parse_case_reads_settings_of_heads() -> None:
    case = parse_case("sliding_tile:tile=2x2x2,window=3x1x3+1x3x1")
    assert case.build() == SlidingTileMask((2, 2, 2), ((3, 1, 3), (1, 3, 1)))
    assert case.settings_text == "tile 2x2x2, window 3x1x3+1x3x1"
    case = parse_case("sparge:top_p=0.5+0.625+1")
    assert case.build() == SpargeMask((0.5, 0.625, 1))
    assert case.settings_text == "top_p 0.5+0.625+1"
    assert parse_case("duo:global_heads=0+1+3").settings_text == "global_heads 0+1+3"
    assert parse_case("duo:global_heads=2").build() == DuoMask((2,))


def test_parse_case_reads_a_yaml_section(tmp_path: Path) -> None:
    path = tmp_path / "duo.yaml"
    path.write_text("mask:\n  method: duo\n  global_heads: [[0], [1, 2]]\n  window_tokens: 9\n  cube: [2, 2, 2]\n")
    case = parse_case(str(path))
    assert case.build() == DuoMask(((0,), (1, 2)), window_tokens=9)
    assert case.cube == (2, 2, 2)
    assert case.settings_text == "global_heads 3 in 2 layers, window_tokens 9, cubes 2x2x2"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nope", "mask methods are dense, topp"),
        ("topp:density=0.3", "topp has no setting 'density', only top_p, min_blocks"),
        ("topp:top_p", "settings are key=value"),
        ("topp:top_p=2", "topp: top_p must be in"),
        ("topp:cube=0x1x1", "cube must be three integers >= 1"),
        ("missing.yaml", "missing.yaml must be YAML"),
    ],
)
def test_parse_case_refuses(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        parse_case(text)


def test_unique_labels_refuses_two_of_a_name() -> None:
    unique_labels([parse_case("topp"), parse_case("topp:cube=2x2x2")])
    with pytest.raises(ValueError, match="'topk' is there twice: add label=NAME"):
        unique_labels([parse_case("topk:density=0.1"), parse_case("topk")])


def test_ordered_permutes_video_tokens_behind_the_text() -> None:
    x = torch.arange(99.0).view(1, 99, 1, 1)
    inputs = LayerInputs(layer=1, step=2, q=x, k=x + 100, v=None, scale=None)
    assert ordered(inputs, GEOMETRY, None) is inputs
    found = ordered(inputs, GEOMETRY, (2, 2, 3))
    assert found.q.flatten()[:3].tolist() == [0, 1, 2]
    # First cube: two frames, two rows, three columns.
    assert (found.q.flatten()[3:15] - 3).tolist() == [0, 1, 2, 6, 7, 8, 24, 25, 26, 30, 31, 32]
    assert torch.equal(found.k, found.q + 100)


def _densities(cases: Sequence[MaskCase]) -> list[float]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn((1, 99, 4, 8), generator=generator) for _ in range(3))
    q = 3 * q.view(1, 9, 11, 4, 8).mean(2, keepdim=True).expand(-1, -1, 11, -1, -1).reshape(1, 99, 4, 8)
    return [case.build().mask(q, k, grid=GEOMETRY.tokens(case.cube), block_size=8, v=v).density for case in cases]


def test_match_density_turns_what_is_left_open() -> None:
    texts = ["topp", "topk", "vsa", "sparge:similarity=-1", "sparse_videogen", "radial", "duo:sink_tokens=0"]
    texts += ["topk:density=0.9,label=fixed", "dense"]
    cases = [parse_case(text) for text in texts]
    matched = match_density(cases, 0.4, GEOMETRY, _densities, device=CPU)
    assert matched[-2:] == cases[-2:]
    for case, density in zip(matched[:-2], _densities(matched[:-2]), strict=True):
        # Rows have 13 blocks, patterns by distance change in larger steps.
        assert density == pytest.approx(0.4, abs=0.12 if case.name in ("sparse_videogen", "radial", "duo") else 0.04)
    assert matched[1].settings["density"] <= 5 / 13 + 1e-9
    assert isinstance(matched[6].settings["window_tokens"], int)


def test_match_density_takes_the_target_itself_where_it_will_do() -> None:
    (matched,) = match_density([parse_case("topk")], 0.6, GEOMETRY, _densities, device=CPU)
    assert matched.settings == {"density": 0.6}


def test_match_density_finds_the_nearest_window() -> None:
    case = parse_case("sliding_tile:tile=2x2x2,cube=2x2x2")
    (matched,) = match_density([case], 0.5, GEOMETRY, _densities, device=CPU)
    (found,) = _densities([matched])
    every = [_densities([case.with_setting("window", (t, h, w))])[0] for t in (1, 3) for h in (1, 3) for w in (1, 3)]
    assert abs(found - 0.5) == pytest.approx(min(abs(density - 0.5) for density in every))


def test_match_density_refuses_what_no_mask_has() -> None:
    with pytest.raises(ValueError, match="--density must be in \\(0, 1\\], got 0"):
        match_density([parse_case("topk")], 0, GEOMETRY, _densities, device=CPU)
