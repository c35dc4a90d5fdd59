"""Every mask method in training and sampling: alike on any mesh; and the order of tokens changes speed, not results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config import InferConfig, TrainConfig
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.infer.__main__ import _parse
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.masks import METHODS, MaskConfig, TokenGrid, write_masks
from dbsp_megatron.strategy import SequenceParallelConfig
from tests.harness import run_ranks
from tests.integration.training import MODEL, make_config, make_trainer, this_world, train
from tests.reference import random_blocks

GRID, HEADS, NUM = (4, 3, 3), 3, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.4, "ramp": "linear", "ramp_steps": 3},
    "vsa": {"density": 0.4, "cube": (2, 2, 2)},
    "sparse_videogen": {"density": 0.2, "sample_rows": 9, "cube": (2, 2, 2)},
    "sliding_tile": {"tile": (2, 2, 2), "window": (1, 1, 1), "cube": (2, 2, 2)},
    "radial": {"width": 0.3},
    "duo": {"global_heads": (1,), "sink_tokens": 2, "window_tokens": 4, "dense_layers": 1},
}


def _write_files(folder: Path) -> None:
    """Masks for both layers of the test model; in `paro` heads have orders of their own."""
    masks = {layer: random_blocks(layer, 1, HEADS, NUM, NUM)[0] for layer in range(2)}
    for mask in masks.values():
        mask.diagonal(dim1=1, dim2=2).fill_(True)
    for name, orders in (("file", None), ("paro", {0: (5, 0, 3), 1: (1, 2, 2)})):
        path = folder / f"{name}.safetensors"
        write_masks(path, masks, seqlen=36, block_size=5, grid=GRID, orders=orders)


def _config(root: Path, method: str, **options: Any) -> TrainConfig:
    settings = dict(SETTINGS.get(method, {}))
    if method in ("file", "paro"):
        settings["path"] = str(root / f"{method}.safetensors")
    return dataclasses.replace(make_config(root, **options), mask=MaskConfig(method=method, **settings))


def _train_all(rank: int, world_size: int, root: Path, mesh: tuple[int, int]) -> dict[str, tuple[list[float], Any]]:
    """Losses of four steps, and the mask of the last layer in the last."""
    results = {}
    for name in METHODS:
        trainer = make_trainer(_config(root, name, ulysses=mesh[0], ring=mesh[1], steps=4))
        losses = [trainer.train_step(step)["train/loss"] for step in range(4)]
        results[name] = (losses, trainer.sharded.sp.layer_mask(1)[0])
    return results


def test_methods_train_alike_on_any_mesh(tmp_path: Path) -> None:
    """Losses and masks of four steps, fixed orders of tokens and heads included."""
    _write_files(tmp_path)
    alone = _train_all(0, 1, tmp_path, (1, 1))
    # Methods differ (file and paro by the order of heads alone), or one mesh against another would say nothing of them.
    assert len({mask.tobytes() for _, mask in alone.values()}) == len(METHODS) - 1
    for runs in run_ranks(_train_all, 4, tmp_path, (2, 2), timeout_s=300):
        for name, (losses, mask) in runs.items():
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[name][0]), rtol=1e-5, atol=0)
            # A few steps on, rounding may have moved a score over a threshold.
            assert (mask != alone[name][1]).mean() <= 0.01, name


def _dense_in_cubes(
    rank: int, world_size: int, root: Path, mesh: tuple[int, int], cubes: list[tuple[int, int, int] | None]
) -> list[tuple[list[float], Tensor]]:
    results = []
    for cube in cubes:
        config = make_config(root, ulysses=mesh[0], ring=mesh[1], steps=3)
        results.append(train(dataclasses.replace(config, mask=MaskConfig(method="dense", cube=cube))))
    return results


@pytest.mark.parametrize("text", ["none", "joint"])
def test_the_order_of_tokens_does_not_change_a_dense_run(tmp_path: Path, text: str) -> None:
    """Positions, noise and targets go with their tokens, cubes that do not divide the grid included (Trap B25)."""
    if text == "joint":
        (tmp_path / "model.yaml").write_text(MODEL.replace("text: none", "text: joint\ntext_dim: 6\ntext_len: 4"))
    (raster,) = _dense_in_cubes(0, 1, tmp_path, (1, 1), [None])
    cubes = [(2, 2, 2), (3, 2, 1)]
    others = _dense_in_cubes(0, 1, tmp_path, (1, 1), cubes)
    others += run_ranks(_dense_in_cubes, 4, tmp_path, (2, 2), cubes, timeout_s=200)[0]
    for losses, final in others:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(raster[0]), rtol=1e-5, atol=0)
        torch.testing.assert_close(final, raster[1], rtol=0, atol=1e-4)


def _sample(rank: int, world_size: int, root: Path, mesh: tuple[int, int], masks: list[MaskConfig]) -> list[Tensor]:
    sp = SequenceParallelConfig(strategy="dbsp", ulysses_degree=mesh[0], ring_degree=mesh[1], block_size=5)
    sample = SampleConfig(steps=2, device="cpu")
    made = []
    for mask in masks:
        config = InferConfig(checkpoint=str(root / "run"), sp=sp, mask=mask, sample=sample)
        made.append(SamplingPipeline(config, this_world()).sample(0)[0])
    return made


def test_videos_do_not_depend_on_the_order_of_tokens_or_the_mesh(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tmp_path))
    trainer.train_step(0)
    trainer.steps_done = 1
    trainer.save()
    masks = [MaskConfig(method="dense", cube=cube) for cube in (None, (2, 2, 2), (3, 2, 1))]
    first, *others = _sample(0, 1, tmp_path, (1, 1), masks)
    for video in others + run_ranks(_sample, 4, tmp_path, (2, 2), masks, timeout_s=200)[0]:
        torch.testing.assert_close(video, first, rtol=0, atol=1e-4)


def test_infer_takes_the_mask_of_training_unless_another_is_named(tmp_path: Path) -> None:
    """Settings of the trained method do not follow to another, where they would be refused."""
    trained = MaskConfig(method="topk", density=0.4, cube=(2, 2, 2), dense_steps=3)
    config = dataclasses.asdict(dataclasses.replace(make_config(tmp_path), mask=trained))
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"model": {}, "config": config}))
    words = ["--checkpoint", str(folder)]
    assert _parse(words)[0].config.mask == trained
    assert _parse([*words, "--mask.density", "0.5"])[0].config.mask == dataclasses.replace(trained, density=0.5)
    radial = MaskConfig(method="radial", cube=(2, 2, 2), dense_steps=3)
    assert _parse([*words, "--sp-mask", "radial"])[0].config.mask == radial
    wide = _parse([*words, "--sp-mask", "radial", "--mask.width", "2"])[0].config.mask
    assert wide == dataclasses.replace(radial, width=2.0)
    with pytest.raises(ValueError, match="mask.width=2.0 does not belong to mask.method=topk"):
        _parse([*words, "--mask.width", "2"])


def test_a_grid_in_cubes_is_what_methods_see(tmp_path: Path) -> None:
    """With tiles as cubes and blocks of as many tokens, rows hold the window's tiles and no more."""
    config = make_config(tmp_path)
    mask = MaskConfig(method="sliding_tile", tile=(1, 3, 3), window=(1, 1, 1), cube=(1, 3, 3))
    config = dataclasses.replace(config, mask=mask, sp=dataclasses.replace(config.sp, block_size=9))
    trainer = make_trainer(config)
    trainer.train_step(0)
    blocks = trainer.sharded.sp.layer_mask(0)[0]
    assert blocks.shape == (3, 4, 4)
    assert (blocks == torch.eye(4, dtype=torch.bool).numpy()).all()
    assert TokenGrid(*GRID, cube=mask.cube).cube == (1, 3, 3)
