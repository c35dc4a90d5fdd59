"""The model of a run in one process: its clips, its inputs of attention, and that looking on changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.masks import DenseMask, TopKMask
from tests.integration.test_train_image_conditioning import make_data
from tests.reference import attention_reference
from tests.unit.tools.tiny_run import GRID, NUM_HEADS, NUM_LAYERS, SEQLEN, make_run
from tools.attention_inputs import LayerInputs
from tools.trained_run import TrainedRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return TrainedRun(make_run(tmp_path_factory.mktemp("tiny")), device=CPU)


def test_run_knows_its_sizes_and_clips(run: TrainedRun) -> None:
    assert (run.geometry.grid, run.geometry.seqlen, run.geometry.block_size) == (GRID, SEQLEN, 5)
    assert (run.num_layers, run.num_heads, run.weights) == (NUM_LAYERS, NUM_HEADS, "ema")
    assert run.default_samples(4, held_out=True) == [3, 4]
    assert run.default_samples(2, held_out=False) == [0, 1]
    facts = run.describe()
    assert (facts["step"], facts["clips"], facts["held_out"]) == (6, 5, 2)


def test_points_are_clips_at_noise_levels(run: TrainedRun) -> None:
    points = list(run.points([3, 4], [0.8, 0.25]))
    assert [(p.sample, p.step, p.timestep) for p in points] == [(3, 0, 0.8), (3, 1, 0.25), (4, 0, 0.8), (4, 1, 0.25)]
    for point in points:
        data = point.noisy - point.timestep * point.target
        assert float(data.abs().max()) <= 1 + 1e-5, "x_t - t (noise - data) is the clip, in [-1, 1]"
    assert torch.equal(points[0].noisy, next(run.points([3], [0.8])).noisy)


@pytest.mark.parametrize(
    ("samples", "timesteps", "line"),
    [([5], [0.5], "--samples must be clip ids in 0 .. 4, got 5"), ([0], [0.0], "--timesteps must be in \\(0, 1\\]")],
)
def test_points_refuse(run: TrainedRun, samples: list[int], timesteps: list[float], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        list(run.points(samples, timesteps))


def test_velocity_shows_what_attention_computes_and_changes_nothing(run: TrainedRun) -> None:
    (point,) = run.points([3], [0.5])
    plain = run.velocity(point)
    outputs: list[torch.Tensor] = []
    cores = [m for m in run.module.modules() if type(m).__name__ == "DualBalancedAttention"]
    handles = [core.register_forward_hook(lambda _m, _a, out: outputs.append(out.transpose(0, 1))) for core in cores]
    seen: list[LayerInputs] = []
    watched = run.velocity(point, visit=seen.append)
    for handle in handles:
        handle.remove()
    assert torch.equal(plain, watched)
    assert [x.layer for x in seen] == [0, 1]
    for x, out in zip(seen, outputs, strict=True):
        assert x.v is not None
        expected = attention_reference(x.q, x.k, x.v, None, x.scale)[0]
        torch.testing.assert_close(out.double(), expected.flatten(2), atol=1e-5, rtol=1e-5)
    assert not any(core._forward_pre_hooks or core._forward_hooks for core in cores)
    assert torch.equal(run.velocity(point), plain)


def test_velocity_does_not_depend_on_the_order_of_tokens(run: TrainedRun) -> None:
    (point,) = run.points([4], [0.5])
    dense = run.velocity(point)
    torch.testing.assert_close(run.velocity(point, DenseMask(), (2, 2, 2)), dense, atol=1e-5, rtol=1e-5)
    sparse = run.velocity(point, TopKMask(0.2), (2, 2, 2))
    assert float((sparse - dense).abs().max()) > 1e-4
    with pytest.raises(ValueError, match="visit without a cube"):
        run.velocity(point, None, (2, 2, 2), visit=print)


def test_run_takes_other_videos_blocks_and_weights(run: TrainedRun, tmp_path: Path) -> None:
    folder = run.checkpoint.path
    (clip,) = run.describe()["data"]
    other = TrainedRun(folder, device=CPU, weights="model", data=[clip], block_size=4)
    assert (other.geometry.block_size, other.num_held_out, other.weights) == (4, 0, "model")
    assert other.default_samples(2, held_out=True) == [0, 2]
    with pytest.raises(ValueError, match="no checkpoint in"):
        TrainedRun(tmp_path, device=CPU)


def test_a_run_on_latents_with_first_frames_is_measured_as_it_was_trained(tmp_path: Path) -> None:
    """Loss of the run's own model on what training gives it, which a wrong condition would change."""
    folder = make_data(tmp_path) / "start"
    run = TrainedRun(folder, device=CPU, weights="model")
    assert (run.geometry.grid, run.describe()["data"]) == ((3, 3, 5), [str(tmp_path / "latents")])
    (point,) = run.points([2], [0.5])
    assert point.condition is not None
    assert point.condition.shape == (1, 45, 24)
    plain = run.velocity(point)
    assert plain.shape == point.target.shape
    other = dataclasses.replace(point, condition=torch.zeros_like(point.condition))
    assert (run.velocity(other) - plain).abs().max() > 1e-3
    torch.testing.assert_close(run.velocity(point, DenseMask(), (2, 2, 2)), plain, atol=1e-5, rtol=1e-5)
    write_latents(
        tmp_path / "latents" / "z.safetensors",
        torch.zeros(4, 1, 6, 10),
        name="z",
        settings={"vae": 1},
        condition=torch.zeros(6, 1, 6, 10),
    )
    with pytest.raises(ValueError, match="must have one size here"):
        TrainedRun(folder, device=CPU)
