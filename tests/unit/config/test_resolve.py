"""Degrees, batch and model are checked against one another and the number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbsp_megatron.config import InferConfig, TrainConfig
from dbsp_megatron.config.resolve import count_parameters, resolve_mesh, with_degrees
from dbsp_megatron.config.sections import LoopConfig, SampleConfig
from dbsp_megatron.data import DataConfig
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.models.dit.config import load_model_config
from dbsp_megatron.strategy import SequenceParallelConfig

# torch.device remembers the constructors it redirects when it is first used: that must be before a fixture wraps them.
with torch.device("meta"):
    torch.empty(0)


@pytest.mark.parametrize(
    ("strategy", "degrees", "world", "expected"),
    [
        ("dbsp", ("auto", "auto"), 4, (4, 1, 1)),
        ("dbsp", ("auto", "auto"), 8, (4, 2, 1)),
        ("dbsp", (2, "auto"), 8, (2, 4, 1)),
        ("dbsp", (2, 2), 8, (2, 2, 2)),
        ("usp", ("auto", 3), 6, (2, 3, 1)),
        ("ulysses", ("auto", "auto"), 4, (4, 1, 1)),
        ("ulysses", (2, "auto"), 4, (2, 1, 2)),
        ("ring", ("auto", 2), 4, (1, 2, 2)),
        ("none", ("auto", "auto"), 4, (1, 1, 4)),
    ],
)
def test_resolve_mesh(
    strategy: str, degrees: tuple[int | str, int | str], world: int, expected: tuple[int, int, int]
) -> None:
    """Six heads: an automatic Ulysses degree of 8 would leave two ranks without any."""
    sp = SequenceParallelConfig(strategy=strategy, ulysses_degree=degrees[0], ring_degree=degrees[1])  # type: ignore[arg-type]
    mesh = resolve_mesh(sp, world, num_heads=6)
    assert (mesh.ulysses_degree, mesh.ring_degree, mesh.dp_size) == expected
    assert with_degrees(sp, mesh).ring_degree == expected[1]


@pytest.mark.parametrize(
    ("strategy", "degrees", "world"),
    [("dbsp", (3, "auto"), 4), ("dbsp", (4, 2), 4), ("none", (2, "auto"), 4), ("ulysses", (2, 2), 4)],
)
def test_resolve_mesh_refuses(strategy: str, degrees: tuple[int, int | str], world: int) -> None:
    sp = SequenceParallelConfig(strategy=strategy, ulysses_degree=degrees[0], ring_degree=degrees[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sp\."):
        resolve_mesh(sp, world, num_heads=6)


def _train_config(ulysses: int = 1, ring: int = 1, **loop: int) -> TrainConfig:
    """The small model on clips of 8 x 64 x 64 pixels, in blocks of 48 tokens."""
    return TrainConfig(
        data=DataConfig(patch_size=load_model_config("dit_debug").patch_size),
        sp=SequenceParallelConfig(ulysses_degree=ulysses, ring_degree=ring, block_size=48),
        train=LoopConfig(**loop),  # type: ignore[arg-type]
    )


def test_train_config_describes_the_run() -> None:
    config = _train_config(2, 2, global_batch_size=4, steps=11)
    resolved = config.validate(8)
    blocks = -(-resolved.num_tokens // 48)
    text = resolved.describe()
    assert "8 = 2 data parallel x 4 sequence parallel" in text
    assert "ulysses 2 x ring 2" in text
    assert f"{blocks // 4} to {blocks // 4 + 1} of {blocks} (block size 48)" in text
    assert "3 of 6" in text
    assert "4 clips per step = 2 x 2 micro-batches of 1" in text
    assert f"{count_parameters(load_model_config('dit_debug')):,} parameters" in text


def test_count_parameters_allocates_nothing() -> None:
    """The largest model here has more weights than a test machine has memory for."""
    with torch.device("meta"):
        assert torch.empty(1).is_meta  # else the next line would fill the memory
    assert count_parameters(load_model_config("wan2_1_14b")) > 13e9


def test_train_config_refuses_batches_that_do_not_divide() -> None:
    config = _train_config(2, 1)
    with pytest.raises(ValueError, match=r"train\.global_batch_size must be a multiple .* got 1; use 2"):
        config.validate(4)


def test_train_config_refuses_models_of_other_tokens() -> None:
    with pytest.raises(
        ValueError, match=r"model=wan2_1_1_3b takes 16 channels, the pixels of the data have 3; .* data\.latents names"
    ):
        TrainConfig(model="wan2_1_1_3b").validate(1)
    with pytest.raises(
        ValueError, match=r"data\.patch_size must be the patch size .* of model=dit_debug, got \[2, 2, 2\]"
    ):
        TrainConfig(data=DataConfig(patch_size=(2, 2, 2))).validate(1)


def test_train_config_takes_latents_of_the_channels_of_the_model(tmp_path: Path) -> None:
    """The grid that memory and time are estimated for is that of the largest clip."""
    for index, size in enumerate([(3, 4, 6), (5, 4, 6), (1, 8, 6)]):
        write_latents(tmp_path / f"{index}.safetensors", torch.zeros(16, *size), name=str(index), settings={})
    data = DataConfig(latents=str(tmp_path), patch_size=(1, 2, 2))
    assert TrainConfig(model="wan2_1_1_3b", data=data).validate(1).grid == (5, 2, 3)
    with pytest.raises(ValueError, match=r"dit_debug takes 3 channels, the latents .* have 16; .* leave out data\.lat"):
        TrainConfig(data=data).validate(1)
    with pytest.raises(ValueError, match=r"data\.patch_size must be the patch size \[1, 2, 2\] of model=wan2_1_1_3b"):
        TrainConfig(model="wan2_1_1_3b", data=DataConfig(latents=str(tmp_path))).validate(1)
    with pytest.raises(ValueError, match="no .safetensors file is there"):
        TrainConfig(model="wan2_1_1_3b", data=DataConfig(latents=str(tmp_path / "x"))).validate(1)
    model = tmp_path / "to_video.yaml"
    model.write_text(
        "{hidden_size: 16, num_layers: 1, num_heads: 2, head_dim: 8, patch_size: [1, 2, 2], in_channels: 16, "
        "out_channels: 4}"
    )
    with pytest.raises(ValueError, match="must predict the 16 channels of the latents, got 4; flow"):
        TrainConfig(model=str(model), data=data).validate(1)


def test_train_config_tells_what_is_given_of_a_first_frame(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"

    def of_channels(channels: int) -> TrainConfig:
        model.write_text(
            "{hidden_size: 16, num_layers: 1, num_heads: 2, patch_size: [1, 4, 4], out_channels: 3, "
            f"in_channels: {channels}}}"
        )
        return TrainConfig(model=str(model))

    for channels in (3, 6, 7):
        assert of_channels(channels).validate(1).grid == (8, 16, 16)
    with pytest.raises(
        ValueError, match=r"takes 2 channels beside the 3 noisy ones, the pixels .* give 3 or 4 of their"
    ):
        of_channels(5).validate(1)


def test_infer_config_refuses_text_settings_without_text() -> None:
    model = load_model_config("dit_debug")
    for sample, named in ((SampleConfig(guidance_scale=3.0), "guidance_scale"), (SampleConfig(context="a"), "context")):
        with pytest.raises(ValueError, match=rf"sample\.{named}"):
            InferConfig(checkpoint="x", sample=sample).validate(1, model, (1, 2, 2))
