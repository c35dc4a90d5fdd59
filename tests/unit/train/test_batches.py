"""Micro-batches of latents of several sizes: what they hold, and that cutting a step differently changes nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.config.sections import LoopConfig
from dbsp_megatron.data import BucketPlan, Clip, ClipSource, DataConfig, PixelPatchEncoder, open_dataset
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.batches import ClipLoader, ContextSource, StepBatches, clip_loader
from tests.integration.training import MemoryClips
from tests.reference import max_error
from tests.unit.models.cores import make_model, tiny_config

SIZES = [(1, 4, 2), (3, 2, 4), (1, 4, 2), (2, 2, 2), (1, 4, 2), (3, 2, 4), (1, 4, 2)]
G = 4


def latent_model() -> DiTConfig:
    return tiny_config("cross", in_channels=16, out_channels=16)


def some_latents(folder: Path) -> ClipSource:
    for index, size in enumerate(SIZES):
        latents = torch.randn(16, *size, generator=torch.Generator().manual_seed(index))
        name = f"v{index}.mp4@0"
        write_latents(folder / f"{name}.safetensors", latents, name=name, settings={"vae": 1})
    return open_dataset(DataConfig(latents=str(folder), patch_size=(1, 2, 2)))


def test_load_gives_tokens_grid_and_the_text_of_each_clip(tmp_path: Path) -> None:
    dataset = some_latents(tmp_path / "latents")
    texts = {name: torch.randn(5, 7) for name in ("v0.mp4", "v4.mp4", "context")}
    save_file(texts, tmp_path / "text.safetensors")
    encoder = PixelPatchEncoder((1, 2, 2), dataset.channels)
    loader = ClipLoader(dataset, encoder, ContextSource(latent_model(), str(tmp_path / "text.safetensors")))
    batch = loader.load([4, 2, 0])
    assert batch.grid == (1, 2, 1)
    assert batch.tokens.shape == (3, 2, 64)
    assert torch.equal(encoder.decode(batch.tokens, batch.grid)[1], dataset[2].video)
    assert batch.context is not None
    assert torch.equal(batch.context, torch.stack([texts["v4.mp4"], texts["context"], texts["v0.mp4"]]))
    with pytest.raises(ValueError, match=r"must have one size, got \[\(1, 4, 2\), \(3, 2, 4\)\]"):
        loader.load([0, 1])


def step_gradient(model: VideoDiT, loader: ClipLoader, cuts: list[list[list[int]]]) -> dict[str, Tensor]:
    """Gradient of one step as the trainer has it: sums over micro-batches of all ranks, divided once."""
    model.zero_grad()
    batches = [loader.load(samples) for rank in cuts for samples in rank]
    elements = sum(batch.tokens.numel() for batch in batches)
    for batch in batches:
        draws = {"seed": 0, "samples": batch.samples, "step": 3}
        noise = flow_matching.draw_noise(*batch.tokens.shape[1:], **draws).double()
        t = flow_matching.draw_timesteps(**draws).double()
        data = batch.tokens.double()
        assert batch.context is not None
        out = model(
            flow_matching.interpolate(data, noise, t),
            t,
            grid=batch.grid,
            positions=torch.arange(data.shape[1]),
            context=batch.context.double(),
        )
        weights = flow_matching.loss_weights(t, "min_snr")
        errors = (out - flow_matching.velocity(data, noise)).square().flatten(1).sum(1)
        ((errors * weights).sum() / elements).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("step", range(4))
def test_gradient_of_a_step_does_not_depend_on_how_it_is_cut(tmp_path: Path, step: int) -> None:
    """Mixed steps too, in which data-parallel ranks have clips of different sizes."""
    dataset = some_latents(tmp_path)
    config = latent_model()
    loader = ClipLoader(dataset, PixelPatchEncoder((1, 2, 2), 16), ContextSource(config, ""))
    model = make_model(config)
    plan = BucketPlan(dataset.sizes, G, seed=1)
    expected = step_gradient(model, loader, [[[sample] for sample in plan.sample_ids(step)]])
    for dp_size, micro in ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1)):
        cuts = [plan.slice_for(step, rank, dp_size, micro) for rank in range(dp_size)]
        for name, grad in step_gradient(model, loader, cuts).items():
            assert max_error(grad, expected[name]) < 1e-9 * max(1.0, expected[name].abs().max().item()), name


class _OneReader:
    """Clips whose dataset is not safe for several threads, and says so."""

    channels = 3
    condition_channels = 0
    origin: dict[str, int] | None = None
    digest = "one reader"

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []
        self.sizes = [(1, 2, 2)] * 8
        self.names = [f"c{index}.mp4@0" for index in range(8)]
        self._busy = False

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Clip:
        assert not self._busy, "two threads read at once"
        self._busy = True
        time.sleep(0.005)
        self._busy = False
        return Clip(video=torch.full((3, 1, 2, 2), float(index)), name=self.names[index], index=index)


def test_clips_are_read_by_one_thread_at_a_time() -> None:
    """An evaluation reads while a thread loads the next step."""
    loader = ClipLoader(_OneReader(), PixelPatchEncoder((1, 2, 2), 3), ContextSource(tiny_config("none"), ""))
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda first: loader.load([first, first + 1]), range(0, 8, 2)))
    assert [batch.tokens[:, 0, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_step_is_a_pure_function_of_its_number(tmp_path: Path) -> None:
    """Loaded twice, in another order, in another thread: the same bits; what it draws is keyed by sample and step."""
    dataset = some_latents(tmp_path)
    loader = ClipLoader(dataset, PixelPatchEncoder((1, 2, 2), 16), ContextSource(latent_model(), ""))
    loop = LoopConfig(global_batch_size=G, micro_batch_size=2, seed=7, timestep_sampling="logit_normal")
    plan = BucketPlan(dataset.sizes, G, seed=7)
    steps = [StepBatches(loader, plan, loop, dp_rank=rank, dp_size=2) for rank in range(2)]
    first = [steps[1].load(step) for step in range(4)]
    with ThreadPoolExecutor(1) as pool:
        again = list(pool.map(steps[1].load, reversed(range(4))))[::-1]
    for step, (ours, theirs) in enumerate(zip(first, again, strict=True)):
        assert [batch.clips.samples for batch in ours] == plan.slice_for(step, 1, 2, 2)
        for batch, other in zip(ours, theirs, strict=True):
            assert torch.equal(batch.clips.tokens, other.clips.tokens)
            assert torch.equal(batch.timesteps, other.timesteps)
            assert torch.equal(batch.noise, other.noise)
            keys = {"seed": 7, "samples": batch.clips.samples, "step": step}
            assert torch.equal(batch.noise, flow_matching.draw_noise(*batch.clips.tokens.shape[1:], **keys))
            assert torch.equal(batch.timesteps, flow_matching.draw_timesteps(**keys, sampling="logit_normal"))


def test_a_model_of_pixels_is_given_the_first_frame_of_each_clip() -> None:
    """Seven channels: noisy pixels, a mask of the given frame, the frame; zeros behind it."""
    clips = MemoryClips(3, DataConfig(num_frames=4, height=8, width=12))
    model = tiny_config("none", in_channels=7, out_channels=3, patch_size=(2, 4, 4))
    batch = clip_loader(clips, model, "", "").load([2, 0])
    assert batch.condition is not None
    given = PixelPatchEncoder((2, 4, 4), 4).decode(batch.condition, batch.grid)
    for index, sample in enumerate((2, 0)):
        assert torch.equal(given[index, :1, 0], torch.ones(1, 8, 12))
        assert torch.equal(given[index, 1:, 0], clips[sample].video[:, 0])
    assert not given[:, :, 1:].any()
    assert (
        clip_loader(clips, tiny_config("none", out_channels=3, patch_size=(2, 4, 4)), "", "").load([0]).condition
        is None
    )
