"""Sampled videos do not depend on the mesh; guidance does not depend on how it is batched."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.config import InferConfig
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.strategy import SequenceParallelConfig
from tests.harness import run_ranks
from tests.integration.training import MODEL, make_config, make_trainer, save_first_step, this_world


def _saved_run(root: Path, text: str = "none") -> None:
    """A run of one step."""
    if text != "none":
        size = "\ntext_len: 4" if text == "joint" else ""
        (root / "model.yaml").write_text(MODEL.replace("text: none", f"text: {text}\ntext_dim: 6{size}"))
    save_first_step(make_trainer(make_config(root, ema_decay=0.5)))


def sampling_config(root: Path, mesh: tuple[int, int] = (1, 1), **sample: object) -> InferConfig:
    settings: dict[str, object] = {"steps": 3, "num_samples": 2, "device": "cpu", "seed": 4}
    return InferConfig(
        checkpoint=str(root / "run"),
        sp=SequenceParallelConfig(ulysses_degree=mesh[0], ring_degree=mesh[1], block_size=5),
        mask=MaskConfig(top_p=0.5),
        sample=SampleConfig(**(settings | sample)),  # type: ignore[arg-type]
    )


def _sample(rank: int, world_size: int, root: Path, meshes: list[tuple[int, int]]) -> list[Tensor]:
    """The second video on each mesh."""
    return [SamplingPipeline(sampling_config(root, mesh), this_world()).sample(1)[0] for mesh in meshes]


def test_videos_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    _saved_run(tmp_path)
    alone = _sample(0, 1, tmp_path, [(1, 1)])[0]
    assert alone.shape == (3, 4, 24, 24)
    assert alone.std() > 0.1
    for videos in run_ranks(_sample, 4, tmp_path, [(2, 2), (4, 1), (2, 1)], timeout_s=200):
        for video in videos:
            torch.testing.assert_close(video, alone, rtol=0, atol=1e-4)


def test_videos_depend_on_their_index_seed_and_weights_only(tmp_path: Path) -> None:
    _saved_run(tmp_path)
    pipeline = SamplingPipeline(sampling_config(tmp_path), this_world())
    first, second = pipeline.sample(0)[0], pipeline.sample(1)[0]
    assert (first - second).abs().max() > 0.1
    assert torch.equal(pipeline.sample(0)[0], first)
    for change in ({"seed": 5}, {"weights": "model"}, {"sampler": "euler"}):
        other = SamplingPipeline(sampling_config(tmp_path, **change), this_world()).sample(0)[0]
        assert not torch.equal(other, first), change


def test_reuse_report_replays_rules_on_the_steps(tmp_path: Path) -> None:
    """One decision for each layer and step; videos are the same with and without the report."""
    _saved_run(tmp_path)
    plain = SamplingPipeline(sampling_config(tmp_path, num_samples=1, steps=4), this_world())
    reporting = SamplingPipeline(sampling_config(tmp_path, num_samples=1, steps=4, reuse_report=True), this_world())
    assert torch.equal(plain.sample(0)[0], reporting.sample(0)[0])
    reporting.run(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "sample_0000.json").read_text())
    rows = {row["rule"]: row for row in settings["reuse_rules"]}
    assert set(rows) == {"gain", "paper", "never"}
    assert [layer["meshes"] for layer in settings["layers"]] == [{"U1R1": 4}, {"U1R1": 4}]
    assert {(row["decisions"], row["hit_rate"]) for row in rows.values()} == {(8, 0.75)}
    assert (tmp_path / "out" / "sample_0000.reuse.md").read_text().startswith("| rule | decisions |")


def _reuse(rank: int, world_size: int, root: Path) -> list[tuple[float, float]]:
    """Share of plans that a run kept, and that of our rule replayed on its counts, by counts of either step."""
    shares = []
    for plan_counts in ("previous", "current"):
        found = []
        for report in (False, True):
            config = sampling_config(root, (2, 1), num_samples=1, steps=8, reuse_report=report)
            config = dataclasses.replace(config, sp=dataclasses.replace(config.sp, plan_counts=plan_counts))
            found.append(SamplingPipeline(config, this_world()).sample(0)[1].summary())
        (ours,) = (row for row in found[1]["reuse_rules"] if row["rule"] == "gain")
        shares.append((found[0]["plan_reuse"], ours["hit_rate"]))
    return shares


def test_replayed_rule_decides_as_the_run_does(tmp_path: Path) -> None:
    """The report waits for counts that the run does not wait for, and must not tell of another run."""
    _saved_run(tmp_path)
    for shares in run_ranks(_reuse, 2, tmp_path, timeout_s=120):
        for run, replayed in shares:
            assert 0 < run < 0.9, "some plans are kept, some made anew"
            assert replayed == pytest.approx(run)


def test_run_writes_video_picture_and_settings(tmp_path: Path) -> None:
    _saved_run(tmp_path)
    pipeline = SamplingPipeline(sampling_config(tmp_path, num_samples=1, num_frames=3, height=16), this_world())
    assert pipeline.run(tmp_path / "out") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["sample_0000.json", "sample_0000.mp4", "sample_0000.png"]
    settings = json.loads((tmp_path / "out" / "sample_0000.json").read_text())
    assert settings["frames_height_width"] == [3, 16, 24]
    assert (settings["weights"], settings["checkpoint_step"], settings["config"]["sample"]["steps"]) == ("ema", 1, 3)


@pytest.mark.parametrize("text", ["cross", "joint"])
def test_guidance_is_the_same_batched_and_in_sequence(tmp_path: Path, text: str) -> None:
    """Trap B93: scales 1.5 and 7 on a model with text; 1 turns guidance off."""
    _saved_run(tmp_path, text)
    generator = torch.Generator().manual_seed(2)
    contexts = {name: torch.randn(4, 6, generator=generator) for name in ("context", "negative")}
    save_file(contexts, tmp_path / "text.safetensors")

    def sample(scale: float, mode: str) -> Tensor:
        config = sampling_config(
            tmp_path, context=str(tmp_path / "text.safetensors"), guidance_scale=scale, guidance_mode=mode
        )
        return SamplingPipeline(config, this_world()).sample(0)[0]

    off = sample(1.0, "auto")
    for scale in (1.5, 7.0):
        batched, sequential = sample(scale, "batched"), sample(scale, "sequential")
        torch.testing.assert_close(batched, sequential, rtol=0, atol=1e-4)
        assert (batched - off).abs().max() > 1e-3


def test_shorter_negative_text_is_used_unpadded(tmp_path: Path) -> None:
    """Trap B93: the negative text of a cross-attention model may have another length."""
    _saved_run(tmp_path, "cross")
    save_file({"context": torch.ones(4, 6), "negative": torch.ones(2, 6) * 2}, tmp_path / "text.safetensors")
    config = sampling_config(tmp_path, context=str(tmp_path / "text.safetensors"), guidance_scale=3.0)
    assert SamplingPipeline(config, this_world()).sample(0)[0].isfinite().all()
    batched = dataclasses.replace(config, sample=dataclasses.replace(config.sample, guidance_mode="batched"))
    with pytest.raises(ValueError, match="contexts of one shape"):
        SamplingPipeline(batched, this_world()).sample(0)
