"""Micro-batches of latents of several sizes: what they hold, and that cutting a step differently changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.data import BucketPlan, ClipSource, DataConfig, PixelPatchEncoder, open_dataset
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.batches import ClipLoader, ContextSource
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
