"""Clips of latents: which, in which order, in whose channel order, and what happens to bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dbsp_megatron.data import DataConfig, LatentError, PixelPatchEncoder, open_dataset
from dbsp_megatron.data.latent_dataset import LatentDataset
from dbsp_megatron.data.latents import write_latents

VAE = {"vae": {"class": "A"}}


def write_some(folder: Path, *sizes: tuple[int, int, int], channels: int = 16) -> dict[str, torch.Tensor]:
    """Files in an order of names that is not the order of sizes."""
    made = {}
    for index, size in enumerate(sizes):
        name = f"v{index}.mp4@{index}"
        made[name] = torch.randn(channels, *size, generator=torch.Generator().manual_seed(index))
        write_latents(folder / f"{name}.safetensors", made[name], name=name, settings=VAE | {"frames": size[0]})
    return made


def config_for(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(latents=str(folder), **{"patch_size": (1, 2, 2), **settings})


def test_latent_dataset_reads_its_files(tmp_path: Path) -> None:
    made = write_some(tmp_path, (3, 4, 6), (1, 6, 4), (3, 4, 6))
    dataset = open_dataset(config_for(tmp_path))
    assert isinstance(dataset, LatentDataset)
    assert len(dataset) == 3
    assert dataset.channels == 16
    assert dataset.sizes == [(3, 4, 6), (1, 6, 4), (3, 4, 6)]
    for index, (name, latents) in enumerate(made.items()):
        clip = dataset[index]
        assert (clip.name, clip.index) == (name, index)
        assert torch.equal(clip.video, latents)
    with pytest.raises(IndexError, match=r"\[0, 3\), got 3"):
        dataset[3]


def test_digest_depends_on_the_files_and_not_on_their_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_some(tmp_path / folder, (1, 2, 2), (1, 4, 2))
    first, second = (LatentDataset(config_for(tmp_path / folder)) for folder in ("a", "b"))
    assert first.digest == second.digest
    write_some(tmp_path / "b", (1, 2, 4))
    assert LatentDataset(config_for(tmp_path / "b")).digest != first.digest


def test_tokens_of_latents_are_what_a_patch_convolution_reads(tmp_path: Path) -> None:
    """A Conv3d patch embedding, as diffusers' video models have it, is a linear layer on our tokens."""
    write_some(tmp_path, (4, 4, 6))
    latents = LatentDataset(config_for(tmp_path))[0].video[None].double()
    for patch in ((1, 2, 2), (2, 2, 3)):
        weight = torch.randn(7, 16, *patch, dtype=torch.float64)
        expected = F.conv3d(latents, weight, stride=patch).flatten(2).transpose(1, 2)
        tokens, grid = PixelPatchEncoder(patch, 16).encode(latents)
        assert grid == tuple(n // p for n, p in zip((4, 4, 6), patch, strict=True))
        torch.testing.assert_close(F.linear(tokens, weight.flatten(1)), expected)


@pytest.mark.parametrize("fault", ["damaged", "odd size"])
def test_bad_files_stop_the_run_or_are_left_out(tmp_path: Path, fault: str) -> None:
    write_some(tmp_path, (1, 2, 2), (1, 4, 2))
    path = tmp_path / "v0.mp4@0.safetensors"
    if fault == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
        reason = "is not readable"
    else:
        write_latents(path, torch.zeros(16, 1, 3, 2), name="v0", settings=VAE)
        reason = "does not fit data.patch_size: the number of height must be a positive multiple of the patch size 2"
    with pytest.raises(LatentError, match=f"v0.mp4@0.safetensors: {reason}.*set data.skip_bad_data=true"):
        LatentDataset(config_for(tmp_path))
    dataset = LatentDataset(config_for(tmp_path, skip_bad_data=True))
    assert [dataset[i].name for i in range(len(dataset))] == ["v1.mp4@1"]
    assert dataset.skipped[0][0] == str(path)
    (tmp_path / "v1.mp4@1.safetensors").write_bytes(b"")
    with pytest.raises(LatentError, match="no clip is left, all were skipped"):
        LatentDataset(config_for(tmp_path, skip_bad_data=True))


@pytest.mark.parametrize("change", ["channels", "vae"])
def test_files_of_two_encoders_are_refused(tmp_path: Path, change: str) -> None:
    write_some(tmp_path, (1, 2, 2), (1, 2, 2))
    channels, vae = (8, VAE) if change == "channels" else (16, {"vae": {"class": "B"}})
    write_latents(tmp_path / "z.safetensors", torch.zeros(channels, 1, 2, 2), name="z", settings=vae)
    with pytest.raises(LatentError, match=r"z.safetensors: was made by another VAE, .* than .*v0"):
        LatentDataset(config_for(tmp_path, skip_bad_data=True))


def test_sizes_of_pixels_do_not_count_with_latents(tmp_path: Path) -> None:
    assert DataConfig(latents=str(tmp_path), height=63, patch_size=(1, 2, 2)).height == 63
    with pytest.raises(ValueError, match="data.height must be a multiple"):
        DataConfig(height=63, patch_size=(1, 2, 2))


def test_conditions_of_all_clips_or_of_none(tmp_path: Path) -> None:
    write_some(tmp_path, (1, 2, 2), (1, 2, 2), channels=4)
    for name in ("y", "z"):
        with_condition = {"settings": VAE, "condition": torch.ones(5, 1, 2, 2)}
        write_latents(tmp_path / f"{name}.safetensors", torch.zeros(4, 1, 2, 2), name=name, **with_condition)
    with pytest.raises(LatentError, match=r"y.safetensors: has 5 channels of a condition, .*v0.* has 0; encode all"):
        LatentDataset(config_for(tmp_path))
    for path in tmp_path.glob("v*"):
        path.unlink()
    dataset = LatentDataset(config_for(tmp_path))
    assert (dataset.channels, dataset.condition_channels, dataset.names) == (4, 5, ["y", "z"])
    condition = dataset[1].condition
    assert condition is not None
    assert torch.equal(condition, torch.ones(5, 1, 2, 2))
