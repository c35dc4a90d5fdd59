"""Videos become files of latents, normalised as the VAE says, of the nearest size, once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.data import DataConfig, PixelPatchEncoder, open_dataset
from dbsp_megatron.data.latents import read_info, read_latents
from dbsp_megatron.data.video import probe_video, read_frames
from dbsp_megatron.infer.video_file import write_mp4
from tools.decode_latents import main as decode
from tools.encode_videos import main, nearest_size
from tools.video_vae import load_vae

pytestmark = pytest.mark.diffusers

CPU = torch.device("cpu")
COG_BLOCKS = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
}
HUNYUAN_BLOCKS = {
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 3,
    "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
}
TINY: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True],
        "latents_mean": [0.1, 0.2, -0.3, 0.4],
        "latents_std": [1.5, 2.0, 0.7, 1.1],
    },
    "AutoencoderKLCogVideoX": {
        "block_out_channels": (8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "temporal_compression_ratio": 2,
        "scaling_factor": 0.7,
        **COG_BLOCKS,
    },
    "AutoencoderKLHunyuanVideo": {
        "block_out_channels": (8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "temporal_compression_ratio": 4,
        "spatial_compression_ratio": 4,
        "scaling_factor": 0.5,
        **HUNYUAN_BLOCKS,
    },
}


@pytest.fixture(scope="module")
def vaes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny VAEs with random weights."""
    import diffusers

    folders = {}
    for kind, config in TINY.items():
        torch.manual_seed(0)
        folders[kind] = tmp_path_factory.mktemp("vae") / "pipeline" / "vae"
        getattr(diffusers, kind)(**config).save_pretrained(folders[kind])
    return folders


def clip(frames: int, height: int, width: int) -> Tensor:
    ramp = torch.linspace(-1, 1, width).expand(3, frames, height, width).clone()
    return ramp.roll(1, 2) * torch.linspace(0.3, 1, frames)[:, None, None]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A wide video of 11 frames, and a tall one of 6 in a folder below."""
    folder = tmp_path / "my_clips"
    (folder / "tall").mkdir(parents=True)
    write_mp4(clip(11, 18, 32), folder / "wide.mp4", 8)
    write_mp4(clip(6, 36, 20), folder / "tall" / "b.mp4", 8)
    return folder


def run(vae: Path, videos: Path, output: Path, *more: str) -> int:
    words = [str(videos), "--vae", str(vae), "--output", str(output), "--device", "cpu", "--num-frames", "5"]
    return main([*words, "--size", "16x24", "--size", "24x16", "--dtype", "fp32", *more])


@pytest.mark.parametrize("kind", TINY)
def test_latents_are_those_of_diffusers_normalised_by_its_own_figures(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, kind: str
) -> None:
    import diffusers

    output = tmp_path / "latents"
    assert run(vaes[kind].parent, videos, output) == 0
    names = ["tall/b.mp4@0", "wide.mp4@0", "wide.mp4@5"]
    dataset = open_dataset(DataConfig(latents=str(output), patch_size=(1, 1, 1)))
    assert [dataset[i].name for i in range(len(dataset))] == names
    vae = getattr(diffusers, kind).from_pretrained(vaes[kind])
    with torch.no_grad():
        for index, (start, size) in enumerate([(0, (24, 16)), (0, (16, 24)), (5, (16, 24))]):
            info = probe_video(str(videos / names[index].partition("@")[0]))
            pixels = read_frames(info, range(start, start + 5), height=size[0], width=size[1])
            plain = vae.encode(pixels[None]).latent_dist.mode()
            if kind == "AutoencoderKLWan":
                mean, std = (
                    torch.tensor(TINY[kind][key]).view(1, 4, 1, 1, 1) for key in ("latents_mean", "latents_std")
                )
                expected = (plain - mean) * (1.0 / std)
            else:
                expected = plain * TINY[kind]["scaling_factor"]
            torch.testing.assert_close(dataset[index].video, expected[0])
    assert len(set(dataset.sizes)) == 2
    tokens, grid = PixelPatchEncoder((1, 2, 2), dataset.channels).encode(dataset[0].video[None])
    assert tokens.shape == (1, grid[0] * grid[1] * grid[2], 16)


def pipeline_condition(kind: str, folder: Path, first: Tensor, frames: int) -> Tensor:
    """What the pipeline of diffusers gives its transformer beside the noise, [1, K, t, h, w]."""
    from types import SimpleNamespace

    import diffusers

    vae = getattr(diffusers, kind).from_pretrained(folder)
    height, width = first.shape[-2:]
    parts: dict[str, Any] = {"tokenizer": None, "text_encoder": None, "vae": vae}
    if kind == "AutoencoderKLWan":
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        wan = diffusers.WanImageToVideoPipeline(**parts, scheduler=scheduler)
        wan.vae_scale_factor_temporal, wan.vae_scale_factor_spatial = 2, 2
        condition: Tensor = wan.prepare_latents(
            first[None], 1, 4, height, width, frames, torch.float32, CPU, torch.Generator()
        )[1]
        return condition
    transformer = SimpleNamespace(config=SimpleNamespace(patch_size_t=None))
    cog = diffusers.CogVideoXImageToVideoPipeline(
        **parts, transformer=None, scheduler=diffusers.CogVideoXDDIMScheduler()
    )
    cog.transformer = transformer
    # It draws from the posterior; its mode is what we write.
    vae.encode = lambda x, encode=vae.encode: SimpleNamespace(latents=encode(x).latent_dist.mode())
    found: Tensor = cog.prepare_latents(
        first[None], 1, 4, frames, height, width, torch.float32, CPU, torch.Generator()
    )[1]
    return found.transpose(1, 2)


@pytest.mark.parametrize("kind", ["AutoencoderKLWan", "AutoencoderKLCogVideoX"])
def test_first_frames_are_given_as_the_pipelines_give_them(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "latents"
    assert run(vaes[kind], videos, output, "--first-frame", "--posterior", "sample") == 0
    dataset = open_dataset(DataConfig(latents=str(output), patch_size=(1, 1, 1)))
    assert dataset.condition_channels == (6 if kind == "AutoencoderKLWan" else 4)
    info = probe_video(str(videos / "wide.mp4"))
    for index, start in ((1, 0), (2, 5)):
        clip = dataset[index]
        assert clip.name == f"wide.mp4@{start}"
        first = read_frames(info, range(start, start + 1), height=16, width=24)[:, 0]
        expected = pipeline_condition(kind, vaes[kind], first, 5)
        assert clip.condition is not None
        torch.testing.assert_close(clip.condition, expected[0])
    assert run(vaes[kind], videos, output, "--posterior", "sample") == 2
    assert "made with other settings, got another condition" in capsys.readouterr().err


def test_first_frames_need_a_vae_whose_models_take_them(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(vaes["AutoencoderKLHunyuanVideo"], videos, tmp_path / "x", "--first-frame") == 2
    assert "--first-frame needs a VAE of AutoencoderKLWan or AutoencoderKLCogVideoX" in capsys.readouterr().err
    vae = load_vae(vaes["AutoencoderKLCogVideoX"], device=CPU, dtype=torch.float32)
    vae.module.register_to_config(invert_scale_latents=True)
    with pytest.raises(ValueError, match="got invert_scale_latents=true"):
        vae.encode_first_frame(clip(5, 16, 24))


@pytest.mark.parametrize("kind", TINY)
def test_decode_undoes_the_normalisation(vaes: dict[str, Path], kind: str) -> None:
    vae = load_vae(vaes[kind], device=CPU, dtype=torch.float32)
    video = clip(5, 16, 24)
    with torch.no_grad():
        plain = vae.module.encode(video[None]).latent_dist.mode()
        expected = vae.module.decode(plain).sample[0].clamp(-1, 1)
    torch.testing.assert_close(vae.decode(vae.encode(video)), expected, rtol=1e-4, atol=1e-4)


def test_decoded_files_show_what_the_vae_makes_of_the_clip(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, decoded = tmp_path / "latents", tmp_path / "decoded"
    assert run(vaes["AutoencoderKLWan"], videos, output) == 0
    words = [str(output), "--output", str(decoded), "--device", "cpu", "--limit", "2", "--vae"]
    assert decode([*words, str(vaes["AutoencoderKLWan"].parent)]) == 0
    names = ["tall/b.mp4@0", "wide.mp4@0"]
    assert sorted(path.relative_to(decoded).as_posix() for path in decoded.rglob("*.mp4")) == [
        f"{n}.mp4" for n in names
    ]
    info = probe_video(str(decoded / "wide.mp4@0.mp4"))
    assert (info.num_frames, info.aspect) == (5, 24 / 16)
    assert decode([*words, str(vaes["AutoencoderKLCogVideoX"])]) == 2
    assert "b.mp4@0.safetensors: was made by a VAE of another class" in capsys.readouterr().err


def test_a_stopped_command_goes_on(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vae, output = vaes["AutoencoderKLWan"], tmp_path / "latents"
    for part, summary in (("1/2", "2 clips encoded, 0 were there"), ("0/2", "1 clips encoded, 0 were there")):
        assert run(vae, videos, output, "--part", part) == 0
        assert summary in capsys.readouterr().out
    files = sorted(output.rglob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in files]
    whole = read_latents(read_info(files[1]))
    files[1].write_bytes(files[1].read_bytes()[:-2])
    assert run(vae, videos, output) == 0
    assert "1 clips encoded, 2 were there" in capsys.readouterr().out
    torch.testing.assert_close(read_latents(read_info(files[1])), whole)
    assert [files[i].stat().st_mtime_ns == times[i] for i in range(3)] == [True, False, True]
    assert run(vae, videos, output, "--posterior", "sample") == 2
    assert "must not hold files made with other settings, got another seed" in capsys.readouterr().err
    assert sorted(path for path in output.rglob("*") if path.is_file()) == files


def test_a_draw_of_the_posterior_depends_on_seed_and_clip_alone(
    vaes: dict[str, Path], videos: Path, tmp_path: Path
) -> None:
    vae, found = vaes["AutoencoderKLCogVideoX"], []
    for folder, more in (("a", ()), ("b", ("--part", "1/2")), ("c", ("--seed", "1"))):
        assert run(vae, videos, tmp_path / folder, "--posterior", "sample", *more) == 0
        found.append(read_latents(read_info(tmp_path / folder / "wide.mp4@5.safetensors")))
    torch.testing.assert_close(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 0.01


def test_each_video_gets_the_most_frames_it_has(vaes: dict[str, Path], videos: Path, tmp_path: Path) -> None:
    output = tmp_path / "latents"
    more = ("--num-frames", "9", "--num-frames", "3", "--dtype", "bf16", "--max-clips-per-file", "1")
    assert run(vaes["AutoencoderKLWan"], videos, output, *more) == 0
    infos = {info.name: info for info in map(read_info, sorted(output.rglob("*.safetensors")))}
    assert {name: info.shape for name, info in infos.items()} == {
        "wide.mp4@0": (4, 5, 8, 12),
        "tall/b.mp4@0": (4, 3, 12, 8),
    }
    assert {info.dtype for info in infos.values()} == {"bfloat16"}
    assert infos["wide.mp4@0"].settings["frames"] == [0, 9, 1]


def test_nearest_size_compares_ratios() -> None:
    sizes = [(480, 832), (832, 480), (640, 640)]
    assert [nearest_size(aspect, sizes) for aspect in (16 / 9, 9 / 16, 1.0, 1.2, 0.1)] == [
        sizes[0],
        sizes[1],
        sizes[2],
        sizes[2],
        sizes[1],
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--num-frames", "8"), "--num-frames must be a multiple of 2 plus 1 for this VAE, got 8; use 7 or 9"),
        (("--size", "16x25"), "--size must be multiples of 2 for this VAE, got 16x25; use 16x26"),
        (("--frame-stride", "3"), "b.mp4: is too short: it has 6 frames, a clip needs 13 .* or use --skip-bad-data"),
    ],
)
def test_main_refuses(
    vaes: dict[str, Path], videos: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    assert run(vaes["AutoencoderKLWan"], videos, tmp_path / "latents", *more) == 2
    error = capsys.readouterr().err
    assert error.startswith("encode_videos: ")
    assert re.search(message, error)
    if "--frame-stride" in more:
        assert run(vaes["AutoencoderKLWan"], videos, tmp_path / "latents", *more, "--skip-bad-data") == 0
        assert "0 clips encoded, 0 were there, 2 videos skipped" in capsys.readouterr().out


def test_load_vae_refuses_other_folders(vaes: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vae must be a local folder with a config.json"):
        load_vae(tmp_path / "none", device=CPU, dtype=torch.float32)
    config = json.loads((vaes["AutoencoderKLWan"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must have its weights in .safetensors files"):
        load_vae(tmp_path, device=CPU, dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(ValueError, match="must hold one of AutoencoderKLWan, .* got _class_name 'AutoencoderKL'"):
        load_vae(tmp_path, device=CPU, dtype=torch.float32)


def test_two_videos_of_one_name_are_refused(vaes: dict[str, Path], videos: Path, tmp_path: Path, capsys: Any) -> None:
    vae = vaes["AutoencoderKLWan"]
    assert (
        main(
            [
                str(videos),
                str(videos / "wide.mp4"),
                "--vae",
                str(vae),
                "--output",
                str(tmp_path / "x"),
                "--num-frames",
                "5",
                "--size",
                "16x16",
            ]
        )
        == 2
    )
    assert "must have different names, got wide.mp4 2 times" in capsys.readouterr().err
