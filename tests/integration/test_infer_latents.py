"""Models of latents are sampled: into files that decode, from first frames, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dbsp_megatron.config import InferConfig
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.data import DataConfig, PixelPatchEncoder, open_dataset
from dbsp_megatron.data.latents import read_info, read_latents
from dbsp_megatron.data.video import probe_video, read_frames
from dbsp_megatron.infer.__main__ import main as infer_main
from dbsp_megatron.infer.pipeline import SamplingPipeline
from dbsp_megatron.infer.video_file import write_mp4
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.strategy import SequenceParallelConfig
from dbsp_megatron.train.flow_matching import draw_noise
from tests.harness import run_ranks
from tests.integration.test_train_image_conditioning import MODEL, i2v_config, make_data, open_trainer
from tests.integration.training import MemoryClips, make_config, make_trainer, this_world, whole_state, with_run
from tests.unit.models.cores import DenseCore


def sampling(root: Path, mesh: tuple[int, int] = (1, 1), method: str = "dense", **sample: Any) -> InferConfig:
    first = {"first_frame": str(root / "latents"), "image_context": str(root / "images.safetensors")}
    settings: dict[str, Any] = {"steps": 3, "num_samples": 2, "device": "cpu", "seed": 4, **first}
    return InferConfig(
        checkpoint=str(root / "start"),
        sp=SequenceParallelConfig(ulysses_degree=mesh[0], ring_degree=mesh[1], block_size=5),
        mask=MaskConfig(method="dense") if method == "dense" else MaskConfig(top_p=0.5),
        sample=SampleConfig(**{"context": str(root / "text.safetensors"), **settings, **sample}),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of image to video on latents."""
    root = make_data(tmp_path_factory.mktemp("sampled"))
    texts = load_file(root / "text.safetensors")
    save_file(texts | {"negative": -2 * torch.ones(6, 7)}, root / "text.safetensors")
    return root


def _sample(
    rank: int, world_size: int, root: Path, meshes: list[tuple[int, int]], more: dict[str, Any]
) -> list[Tensor]:
    """The second sample on each mesh."""
    return [SamplingPipeline(sampling(root, mesh, **more), this_world()).sample(1)[0] for mesh in meshes]


def reference_sample(root: Path, scale: float) -> Tensor:
    """The second sample in fp64 by Euler steps, from the files of the second clip and the definition of guidance."""
    trainer = open_trainer(with_run(i2v_config(root), name="reference"))
    model = VideoDiT(trainer.model_config, core_attention=DenseCore).double()
    tensors = {name.removeprefix("model."): x for name, x in whole_state(trainer).items() if name.startswith("model.")}
    model.load_state_dict(tensors)
    name = "v1.mp4@1"
    condition = load_file(root / "latents" / f"{name}.safetensors")["condition"][None].double()
    given = PixelPatchEncoder((1, 2, 2), 6).encode(condition)[0]
    image = load_file(root / "images.safetensors")[name][None].double()
    texts = load_file(root / "text.safetensors")
    x = draw_noise(45, 16, seed=4, samples=[1], step=0).double()
    for step in range(3):
        t = torch.tensor([1 - step / 3], dtype=torch.float64)
        with torch.no_grad():
            positive, negative = (
                model(
                    torch.cat([x, given], dim=-1),
                    t,
                    grid=(3, 3, 5),
                    positions=torch.arange(45),
                    context=texts[key][None].double(),
                    image_context=image,
                )
                for key in ("context", "negative")
            )
        x = x - (negative + scale * (positive - negative)) / 3
    return PixelPatchEncoder((1, 2, 2), 4).decode(x, (3, 3, 5))[0]


@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_samples_are_those_of_the_definition_for_any_number_of_ranks(root: Path, mode: str) -> None:
    more = {"sampler": "euler", "guidance_scale": 3.0, "guidance_mode": mode}
    expected = reference_sample(root, 3.0)
    assert expected.shape == (4, 3, 6, 10)
    (alone,) = _sample(0, 1, root, [(1, 1)], more)
    # Guidance by 3 and random weights multiply the rounding of fp32.
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=1e-4)
    for ranks, meshes in ((2, [(2, 1), (1, 2)]), (3, [(3, 1), (1, 3)])):
        for samples in run_ranks(_sample, ranks, root, meshes, more, timeout_s=200):
            for sample in samples:
                torch.testing.assert_close(sample, alone, rtol=0, atol=1e-5)


def test_sparse_samples_of_the_second_order_do_not_depend_on_ranks(root: Path) -> None:
    """Blocks move between ranks as counts are known; first frames move with them."""
    more = {"method": "topp", "steps": 4}
    (alone,) = _sample(0, 1, root, [(1, 1)], more)
    for samples in run_ranks(_sample, 4, root, [(2, 2), (4, 1), (2, 1)], more, timeout_s=200):
        for sample in samples:
            torch.testing.assert_close(sample, alone, rtol=0, atol=1e-4)


def test_samples_depend_on_their_first_frame_and_image(root: Path) -> None:
    pipeline = SamplingPipeline(sampling(root), this_world())
    first = pipeline.sample(0)[0]
    assert torch.equal(pipeline.sample(0)[0], first)
    other = sampling(root, first_frame=str(root / "latents" / "v1.mp4@1.safetensors"))
    assert not torch.equal(SamplingPipeline(other, this_world()).sample(0)[0], first)
    # Five files: the sixth sample starts from the first one again.
    assert [pipeline.first_frames.name(index) for index in (0, 4, 5)] == ["v0.mp4@0", "v4.mp4@4", "v0.mp4@0"]


def test_run_writes_latents_and_settings(root: Path, tmp_path: Path) -> None:
    pipeline = SamplingPipeline(sampling(root), this_world())
    assert pipeline.run(tmp_path / "out") == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"sample_000{index}.{end}" for index in (0, 1) for end in ("json", "safetensors")]
    info = read_info(tmp_path / "out" / "sample_0001.safetensors")
    assert (info.shape, info.settings["vae"], info.settings["sampled"]["index"]) == ((4, 3, 6, 10), 1, 1)
    assert torch.equal(read_latents(info), pipeline.sample(1)[0])
    settings = json.loads((tmp_path / "out" / "sample_0001.json").read_text())
    assert (settings["first_frame"], settings["frames_height_width"]) == ("v1.mp4@1", None)


def test_dry_run_describes_the_sampling(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", str(root / "start"), "--dry-run", "--sample.device", "cpu"]
    first = ["--sample.first_frame", str(root / "latents")]
    with pytest.raises(SystemExit) as end:
        infer_main([*words, *first, "--sample.image_context", str(root / "images.safetensors")])
    assert end.value.code == 0
    assert "45 (3 x 3 x 5 patches)" in capsys.readouterr().out
    for missing, line in (
        (words, "sample.first_frame must name"),
        ([*words, *first], "sample.image_context must name"),
    ):
        with pytest.raises(SystemExit) as end:
            infer_main(missing)
        assert end.value.code == 2
        assert line in capsys.readouterr().err


def test_a_model_of_pixels_starts_from_a_video_or_picture(tmp_path: Path) -> None:
    from PIL import Image

    text = "text: none\nqk_norm: rms_head\nmodulation: linear\npatch_size: [1, 8, 8]\nin_channels: 7\nout_channels: 3\n"
    text += "hidden_size: 24\nnum_layers: 2\nnum_heads: 3\nhead_dim: 8\ntime_freq_dim: 16\n"
    (tmp_path / "model.yaml").write_text(text)
    trainer = make_trainer(make_config(tmp_path))
    with torch.no_grad():
        for parameter in trainer.engine.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    trainer.train_step(0)
    trainer.steps_done = 1
    trainer.save()
    write_mp4(MemoryClips(1, DataConfig(height=24, width=24, num_frames=4))[0].video, tmp_path / "a.mp4", 8)
    first = read_frames(probe_video(str(tmp_path / "a.mp4")), range(1), height=24, width=24)
    picture = ((first[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0)
    Image.fromarray(picture.numpy()).save(tmp_path / "b.png")
    samples = []
    for name in ("a.mp4", "b.png"):
        sample = {"first_frame": str(tmp_path / name), "context": "", "image_context": ""}
        config = dataclasses.replace(sampling(tmp_path, **sample), checkpoint=str(tmp_path / "run"))
        pipeline = SamplingPipeline(config, this_world())
        condition = pipeline.first_frames.condition(0)
        assert condition is not None
        given = PixelPatchEncoder((1, 8, 8), 4).decode(condition, pipeline.grid)[0]
        torch.testing.assert_close(given[1:, :1], first, rtol=0, atol=1 / 127)
        assert not given[:, 1:].any()
        samples.append(pipeline.sample(0)[0])
    assert samples[0].shape == (3, 4, 24, 24)
    torch.testing.assert_close(samples[1], samples[0], rtol=0, atol=1e-2)


@pytest.mark.diffusers
def test_samples_of_a_trained_run_decode_to_video(tmp_path: Path) -> None:
    """From videos to latents with first frames, a step of training, a sample of another size, and its video."""
    import diffusers

    from tests.unit.tools.test_encode_videos import TINY, clip
    from tools.decode_latents import main as decode
    from tools.encode_videos import main as encode

    torch.manual_seed(0)
    vae = tmp_path / "vae"
    diffusers.AutoencoderKLWan(**TINY["AutoencoderKLWan"]).save_pretrained(vae)
    (tmp_path / "clips").mkdir()
    write_mp4(clip(10, 16, 24), tmp_path / "clips" / "a.mp4", 8)
    shared = ["--vae", str(vae), "--device", "cpu", "--size", "16x24", "--first-frame"]
    for folder, frames in (("latents", "5"), ("longer", "9")):
        words = [str(tmp_path / "clips"), "--output", str(tmp_path / folder), "--num-frames", frames]
        assert encode([*words, *shared]) == 0
    text = MODEL.format(channels=10).replace("image_dim: 5\n", "")
    (tmp_path / "model.yaml").write_text(text)
    config = dataclasses.replace(
        make_config(tmp_path, strategy="none", global_batch_size=1),
        data=DataConfig(latents=str(tmp_path / "latents"), patch_size=(1, 2, 2)),
    )
    trainer = open_trainer(config)
    trainer.train_step(0)
    trainer.steps_done = 1
    trainer.save()
    assert open_dataset(config.data).origin == trainer._origin
    output = tmp_path / "out"
    sample = {"first_frame": str(tmp_path / "longer"), "image_context": "", "context": "", "num_samples": 1}
    infer = dataclasses.replace(sampling(tmp_path, **sample), checkpoint=str(tmp_path / "run"))
    assert SamplingPipeline(infer, this_world()).run(output) == 0
    assert decode([str(output), "--vae", str(vae), "--output", str(tmp_path / "video"), "--device", "cpu"]) == 0
    assert os.listdir(tmp_path / "video") == ["sample_0000.mp4"]
    info = probe_video(str(tmp_path / "video" / "sample_0000.mp4"))
    assert (info.num_frames, info.aspect) == (9, 24 / 16)
