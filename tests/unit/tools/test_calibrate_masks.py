"""Calibration: orders, masks and global heads against slow twins, files that the methods read back, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from dbsp_megatron.config.cli import parse_infer
from dbsp_megatron.masks import (
    DuoMask,
    FileMask,
    MaskConfig,
    MaskFile,
    ParoMask,
    TokenGrid,
    TopPMask,
    build_mask_method,
)
from dbsp_megatron.masks.head_order import axis_orders
from tests.unit.tools.tiny_run import BLOCK_SIZE, GRID, SEQLEN, make_run, write_dumps
from tools.calibrate_masks import choose_orders, global_heads, heaviest_blocks, main

NUM_BLOCKS = 8
SIZES = ["--grid", "4", "3", "3", "--block-size", "5", "--device", "cpu"]


def _main(what: str, folder: Path, *words: str, output: str = "made.safetensors") -> Path:
    dumps = [str(path) for path in write_dumps(folder)]
    assert main([what, "--dumps", *dumps, *SIZES, "--output", str(folder / output), *words]) == 0
    return folder / output


def _weights(x: dict[str, Tensor], layer: int) -> Tensor:
    """Softmax weights of all samples of a dump, fp64 [2, 4, S, S]."""
    q, k = x[f"q.{layer}"].double(), x[f"k.{layer}"].double().repeat_interleave(2, 2)
    return (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).softmax(-1)


def _all_weights(folder: Path, layer: int) -> Tensor:
    return torch.cat([_weights(load_file(folder / f"step_{step}.safetensors"), layer) for step in (0, 1)])


def _pool(weights: Tensor) -> Tensor:
    """Mean over queries of sums over keys, [..., N, N]."""
    rows = [x.mean(-2, keepdim=True) for x in weights.split(BLOCK_SIZE, -2)]
    return torch.cat([x.sum(-1, keepdim=True) for x in torch.cat(rows, -2).split(BLOCK_SIZE, -1)], -1)


def _slow_mask(score: Tensor, count: int) -> Tensor:
    """The best block of each row, then the best of the rest, one by one."""
    chosen = torch.zeros(score.shape, dtype=torch.bool)
    flat, best = score.flatten(0, -2), score.flatten(0, -2).argmax(-1)
    chosen.view(-1, score.shape[-1])[torch.arange(len(flat)), best] = True
    rest = sorted((-float(x), place) for place, x in enumerate(score.flatten()) if not chosen.flatten()[place])
    for _, place in rest[: max(0, count - len(flat))]:
        chosen.view(-1)[place] = True
    return chosen


def test_heaviest_blocks_fills_every_row_first() -> None:
    score = torch.rand((3, 5, 5), generator=torch.Generator().manual_seed(0))
    for count in (1, 15, 23, 75, 99):
        got = heaviest_blocks(score, count)
        assert torch.equal(got, _slow_mask(score, count))
        assert int(got.sum()) == min(75, max(15, count))
    ties = heaviest_blocks(torch.zeros((1, 2, 3)), 3)
    assert ties.tolist() == [[[True, True, False], [True, False, False]]]


def test_choose_orders_breaks_ties_and_shares_key_heads() -> None:
    first = torch.tensor([[0.1, 0.9, 0.9], [0.9, 0.1, 0.0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    second = torch.tensor([[0.0, 0.1, 0.2], [0.0, 0.0, 0.0], [0.3, 0.1, 0.3], [0.3, 0.1, 0.3]])
    assert choose_orders(first, second, 4) == [2, 0, 0, 0]
    # The first two heads together: 0.5, 0.5, 0.45.
    assert choose_orders(first, second, 2) == [1, 1, 0, 0]
    assert choose_orders(torch.tensor([[0.0, 1.0], [0.2, 0.3]]), torch.zeros((2, 2)), 1) == [1, 1]


def test_global_heads_are_those_that_lose_most() -> None:
    far = np.array([[0.5, 0.1, 0.9], [0.9, 0.2, 0.5]])
    assert global_heads(far, 3) == [[0, 2], [0]]
    assert global_heads(far, 0) == [[], []]


def test_paro_is_the_best_order_and_the_heaviest_blocks(tmp_path: Path) -> None:
    made = _main("paro", tmp_path, "--density", "0.4", "--small", "0.3", "--filled", "0.6")
    file, places = MaskFile(made), axis_orders(TokenGrid(*GRID), SEQLEN)
    assert (file.seqlen, file.block_size, file.grid) == (SEQLEN, BLOCK_SIZE, GRID)
    report = json.loads(made.with_suffix(".json").read_text())
    assert report["digest"] == file.digest
    method = build_mask_method(MaskConfig(method="paro", path=str(made)))
    assert isinstance(method, ParoMask)
    chosen = []
    for layer in (0, 1):
        weights = _all_weights(tmp_path, layer)
        shares = torch.zeros((4, 6))
        for order in range(6):
            own = weights[:, :, places[order]][..., places[order]]
            for head in range(4):
                parts = [part for rows in own[:, head].split(BLOCK_SIZE, -2) for part in rows.split(BLOCK_SIZE, -1)]
                empty = [(part < 0.3 / SEQLEN).double().mean((1, 2)) >= 0.6 for part in parts]
                shares[head, order] = torch.stack(empty).double().mean()
        orders = file.orders(layer).tolist()
        for group in (0, 2):
            assert orders[group] == orders[group + 1]
            both = shares[group : group + 2].mean(0)
            assert float(both[orders[group]]) == pytest.approx(float(both.max()))
        np.testing.assert_allclose(report["layers"][layer]["empty_share"], shares, atol=1e-6)
        own = torch.stack([weights[:, h, places[o]][..., places[o]] for h, o in enumerate(orders)], 1)
        q = torch.zeros((1, SEQLEN, 4, 1))
        mask = method.mask(q, q[:, :, :2], layer, 0, TokenGrid(*GRID), BLOCK_SIZE).blocks[0]
        assert torch.equal(mask, _slow_mask(_pool(own).mean(0), round(0.4 * 256)))
        chosen += orders
    assert len(set(chosen)) > 1


def test_paro_may_judge_orders_by_weight(tmp_path: Path) -> None:
    made = _main("paro", tmp_path, "--criterion", "mass", "--density", "0.2")
    report = json.loads(made.with_suffix(".json").read_text())
    for row in report["layers"]:
        kept = np.array(row["kept_mass"]).reshape(2, 2, 6).mean(1)
        assert kept[[0, 1], row["orders"][::2]] == pytest.approx(kept.max(1))


def test_duo_names_the_heads_with_most_weight_far_away(tmp_path: Path) -> None:
    words = ("--sink-tokens", "3", "--window-tokens", "4", "--density", "0.6")
    made = _main("duo", tmp_path, *words, output="duo.yaml")
    far = np.zeros((2, 4))
    for layer in (0, 1):
        weights = _all_weights(tmp_path, layer)
        for i in range(SEQLEN):
            for j in range(3, SEQLEN):
                far[layer] += weights[:, :, i, j].mean(0).numpy() / SEQLEN * (abs(i - j) > 4)
    report = json.loads(made.with_suffix(".json").read_text())
    np.testing.assert_allclose(report["far_mass"], far, atol=1e-6)
    section = yaml.safe_load(made.read_text())["mask"]
    heads = section["global_heads"]
    count = sum(map(len, heads))
    chosen = sorted(far[layer, head] for layer in (0, 1) for head in heads[layer])
    assert chosen == pytest.approx(sorted(far.flatten())[-count:])
    method = DuoMask(tuple(map(tuple, heads)), section["sink_tokens"], section["window_tokens"])
    nothing = torch.zeros((1, SEQLEN, 4, 1))
    density = np.mean([method.mask(nothing, nothing, layer, block_size=BLOCK_SIZE).density for layer in (0, 1)])
    assert report["density"] == pytest.approx(density)
    step = (1 - report["local_density"]) / 8
    assert abs(density - 0.6) <= step / 2 + 1e-9


def test_duo_with_shared_heads_is_a_config_file(tmp_path: Path) -> None:
    words = (
        "--sink-tokens",
        "3",
        "--window-tokens",
        "4",
        "--density",
        "0.6",
        "--shared-heads",
        "--cube",
        "2",
        "3",
        "3",
    )
    made = _main("duo", tmp_path, *words, output="duo.yaml")
    mask = parse_infer(["--config", str(made), "--checkpoint", "somewhere"]).config.mask
    assert (mask.method, mask.sink_tokens, mask.window_tokens, mask.cube) == ("duo", 3, 4, (2, 3, 3))
    method = build_mask_method(mask)
    assert isinstance(method, DuoMask)
    assert len(method.global_heads) in (1, 2)


@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
def test_file_keeps_what_a_method_picks_most_often(tmp_path: Path, cube: tuple[int, int, int] | None) -> None:
    text = "topp:top_p=0.5" if cube is None else "topp:top_p=0.5,cube=2x2x2"
    made = _main("file", tmp_path, "--method", text)
    grid = TokenGrid(*GRID, cube=cube)
    order = grid.locate(torch.arange(SEQLEN), 0).raster
    method = build_mask_method(MaskConfig(method="file", path=str(made)))
    assert isinstance(method, FileMask)
    assert method.file.grid == grid
    for layer in (0, 1):
        often, mass = torch.zeros((4, 8, 8)), torch.zeros((4, 8, 8), dtype=torch.float64)
        for step in (0, 1):
            x = load_file(tmp_path / f"step_{step}.safetensors")
            q, k = x[f"q.{layer}"][:, order], x[f"k.{layer}"][:, order]
            often += TopPMask(0.5).mask(q, k, layer, step, grid, BLOCK_SIZE).blocks.float().sum(0)
            mass += _pool(_weights(x, layer)[:, :, order][..., order]).sum(0) / 4
        q = torch.zeros((1, SEQLEN, 4, 1))
        got = method.mask(q, q, layer, 0, grid, BLOCK_SIZE).blocks[0]
        for head in range(4):
            expected = _slow_mask(often[head].double() * 2 + mass[head], round(float(often[head].sum() / 4)))
            assert torch.equal(got[head], expected)


def test_main_calibrates_a_trained_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    words = ["--run", str(run), "--device", "cpu", "--num-samples", "2", "--timesteps", "0.5"]
    made = tmp_path / "paro.safetensors"
    assert main(["paro", *words, "--output", str(made)]) == 0
    report = json.loads(made.with_suffix(".json").read_text())
    assert report["inputs"]["samples"] == [0, 1], "clips of training, not the held-out ones"
    first = made.read_bytes()
    assert main(["paro", *words, "--output", str(made)]) == 0
    assert made.read_bytes() == first
    method = build_mask_method(MaskConfig(method="paro", path=str(made)))
    assert method.head_orders(1, 0, 3, 3, SEQLEN, TokenGrid(*GRID)) is not None or not any(
        report["layers"][1]["orders"]
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["paro", "--output", "x.yaml"], "--output must end in .safetensors for paro"),
        (["duo", "--output", "x.safetensors"], "--output must end in .yaml or .yml for duo"),
        (["paro", "--output", "x.safetensors", "--density", "0"], "--density must be in (0, 1], got 0"),
        (["duo", "--output", "x.yaml", "--sink-tokens", "-1"], "sink_tokens must be an integer >= 0, got -1"),
        (["duo", "--output", "x.yaml", "--window-tokens", "9" * 20], "window_tokens must be at most 2147483647"),
        (["file", "--output", "x.safetensors", "--method", "nope"], "mask methods are dense"),
        (["file", "--output", "x.safetensors", "--method", "file:path=no"], "path=no must be a file of block masks"),
        (["paro", "--output", "x.safetensors", "--grid", "4", "3", "4"], "pass their own --grid"),
    ],
)
def test_main_refuses_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dumps = [str(path) for path in write_dumps(tmp_path)]
    assert main([words[0], "--dumps", *dumps, *SIZES, *words[1:]]) == 2
    captured: Any = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


def test_main_refuses_methods_with_orders_and_dumps_without_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = _main("paro", tmp_path, "--density", "0.4", "--small", "0.3", "--filled", "0.6")
    dumps = [str(path) for path in write_dumps(tmp_path)]
    output = ["--output", str(tmp_path / "other.safetensors")]
    assert main(["file", "--dumps", *dumps, *SIZES, *output, "--method", f"paro:path={made}"]) == 2
    assert "has token orders of its own" in capsys.readouterr().err
    assert main(["paro", "--dumps", *dumps, *output, "--device", "cpu"]) == 2
    assert "--dumps needs --grid and --block-size" in capsys.readouterr().err
