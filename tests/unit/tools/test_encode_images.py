"""First frames become the features that Wan's pipeline would give its model, under the names of the clips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dbsp_megatron.data.video import probe_video, read_frames
from dbsp_megatron.infer.video_file import write_mp4
from tools.encode_images import main

pytestmark = pytest.mark.diffusers

NAMES = ["b.mp4@0", "sub/a.mp4@0", "sub/a.mp4@4"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random CLIP vision model and its image processor."""
    import transformers

    folder = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=12, patch_size=4)
    transformers.CLIPVisionModel(config).save_pretrained(folder / "image_encoder")
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    processor.save_pretrained(folder / "image_processor")
    return folder


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "my_clips"
    (folder / "sub").mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    write_mp4(torch.rand((3, 8, 16, 32), generator=generator) * 2 - 1, folder / "sub" / "a.mp4", 8)
    write_mp4(torch.rand((3, 4, 16, 16), generator=generator) * 2 - 1, folder / "b.mp4", 8)
    return folder


def run(folder: Path, videos: Path, output: Path, *more: str) -> int:
    words = [str(videos), "--encoder", str(folder), "--output", str(output), "--num-frames", "4", "--device", "cpu"]
    return main([*words, "--size", "16x16", "--size", "16x32", "--dtype", "fp32", *more])


def test_features_are_those_of_wans_pipeline(pipeline: Path, videos: Path, tmp_path: Path) -> None:
    import diffusers
    import transformers
    from PIL import Image

    output = tmp_path / "images.safetensors"
    assert run(pipeline, videos, output) == 0
    tensors = load_file(output)
    assert sorted(tensors) == NAMES
    wan = diffusers.WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        image_processor=transformers.CLIPImageProcessor.from_pretrained(pipeline / "image_processor"),
        image_encoder=transformers.CLIPVisionModel.from_pretrained(pipeline / "image_encoder").eval(),
    )
    for name in NAMES:
        path, _, start = name.partition("@")
        info = probe_video(str(videos / path))
        width = 32 if path == "sub/a.mp4" else 16
        frame = read_frames(info, range(int(start), int(start) + 1), height=16, width=width)[:, 0]
        picture = Image.fromarray(((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
        with torch.no_grad():
            expected = wan.encode_image(picture, torch.device("cpu"))[0]
        assert expected.shape == (10, 8)
        torch.testing.assert_close(tensors[name], expected)


def test_the_same_command_again_keeps_the_file(
    pipeline: Path, videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "images.safetensors"
    assert run(pipeline, videos, output) == 0
    before = output.stat().st_mtime_ns
    assert run(pipeline, videos, output) == 0
    assert "3 first frames were encoded already" in capsys.readouterr().out
    assert output.stat().st_mtime_ns == before
    assert run(pipeline, videos, output, "--clip-stride", "2") == 0
    assert sorted(load_file(output)) == ["b.mp4@0", "sub/a.mp4@0", "sub/a.mp4@2", "sub/a.mp4@4"]


def test_main_refuses(pipeline: Path, videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pipeline, videos, tmp_path / "images.pt") == 2
    assert "--output must end in .safetensors" in capsys.readouterr().err
    output = tmp_path / "images.safetensors"
    assert run(tmp_path, videos, output) == 2
    assert "--encoder must be a local folder with a config.json" in capsys.readouterr().err
    assert run(pipeline, videos, output, "--num-frames", "9", "--frame-stride", "2") == 2
    assert "b.mp4: is too short" in capsys.readouterr().err
    assert run(pipeline, videos, output, "--frame-stride", "9", "--skip-bad-data") == 2
    assert "must give at least one clip" in capsys.readouterr().err
    (pipeline / "image_processor").rename(tmp_path / "elsewhere")
    assert run(pipeline, videos, output) == 2
    assert "must have a preprocessor_config.json beside or in it" in capsys.readouterr().err
