"""What a checkpoint samples, by its state and the files that the settings name, and in which size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.config import InferConfig
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.data.latents import write_latents
from dbsp_megatron.infer.space import sample_space
from tests.unit.models.cores import tiny_config

VAE = {"class": "A", "posterior": "mode"}
MODEL = tiny_config("none", in_channels=4, out_channels=4)
TO_VIDEO = tiny_config("none", in_channels=9, out_channels=4)
SEEN = {"shape": [4, 3, 6, 10], "pixels": [9, 48, 80], "vae": VAE}


def config(**sample: Any) -> InferConfig:
    return InferConfig(checkpoint="runs/a", sample=SampleConfig(**sample))


def state(latents: Any = None, folder: str = "", **data: int) -> dict[str, Any]:
    sizes = {"num_frames": 8, "height": 64, "width": 32}
    found = {"config": {"data": sizes | {"latents": folder} | data}, "latents": latents}
    result: dict[str, Any] = json.loads(json.dumps(found))
    return result


def write(folder: Path, name: str, size: tuple[int, int, int], pixels: Any = (9, 48, 80), **more: Any) -> None:
    settings = {"vae": more.pop("vae", VAE)}
    if pixels:
        settings |= {"frames": [16, 16 + 2 * pixels[0], 2], "size": list(pixels[1:])}
    write_latents(folder / f"{name}.safetensors", torch.zeros(4, *size), name=name, settings=settings, **more)


def test_pixels_have_the_size_of_training_or_of_the_settings() -> None:
    model = tiny_config("none", in_channels=3, out_channels=3)
    space = sample_space(config(), state(), model)
    assert (space.size, space.pixels, space.is_latent, space.channels) == ((8, 64, 32), (8, 64, 32), False, 3)
    assert sample_space(config(num_frames=2, width=8), state(), model).size == (2, 64, 8)


def test_latents_have_the_size_of_training_or_of_settings_in_pixels() -> None:
    seen = state(SEEN, "latents")
    space = sample_space(config(), seen, MODEL)
    assert (space.size, space.pixels, space.is_latent, space.vae) == ((3, 6, 10), (9, 48, 80), True, VAE)
    space = sample_space(config(num_frames=21, height=64, width=80), seen, MODEL)
    assert (space.size, space.pixels) == ((6, 8, 10), (21, 64, 80))
    assert sample_space(config(num_frames=1), seen, MODEL).size == (1, 6, 10)


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        ({"num_frames": 8}, r"sample\.num_frames must be a multiple of 4 plus 1 .* got 8; use 5 or 9"),
        ({"num_frames": 3}, r"got 3; use 1 or 5"),
        ({"height": 50}, r"sample\.height must be a multiple of 8 for the latents of this run, got 50; use 48 or 56"),
        ({"width": 3}, r"got 3; use 8 or 16"),
    ],
)
def test_sizes_between_latents_are_refused(sample: dict[str, int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        sample_space(config(**sample), state(SEEN, "latents"), MODEL)


def test_sizes_in_pixels_need_latents_that_say_what_they_stand_for() -> None:
    for pixels in (None, [1, 48, 80]):
        shape = [4, 1, 6, 10] if pixels else [4, 3, 6, 10]
        seen = state({"shape": shape, "pixels": pixels, "vae": VAE}, "latents")
        assert sample_space(config(), seen, MODEL).pixels == (None if pixels is None else (1, 48, 80))
        with pytest.raises(ValueError, match=r"sample\.num_frames=5 is in pixels, and it is not known how many"):
            sample_space(config(num_frames=5), seen, MODEL)


def test_files_say_what_the_checkpoint_does_not(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint=runs/a makes latents of 4 channels .* set sample\.latents to files"
    ):
        sample_space(config(), state(), MODEL)
    write(tmp_path, "a", (1, 6, 10), (1, 48, 80))
    write(tmp_path, "b", (3, 6, 10))
    # A checkpoint of before, while the files of training are there.
    assert sample_space(config(), state(None, str(tmp_path)), MODEL).size == (3, 6, 10)
    for known in (None, SEEN | {"shape": [4, 5, 5, 5]}):
        space = sample_space(config(latents=str(tmp_path)), state(known), MODEL)
        assert (space.size, space.pixels, space.vae) == ((3, 6, 10), (9, 48, 80), VAE)
    with pytest.raises(ValueError, match=r"sample\.latents must name latents of 5 channels for this model, got 4"):
        sample_space(config(latents=str(tmp_path)), state(), tiny_config("none", in_channels=5, out_channels=5))


def test_a_first_frame_has_the_size_and_the_vae(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample\.first_frame must name what to start from, got nothing"):
        sample_space(config(), state(SEEN), TO_VIDEO)
    with pytest.raises(ValueError, match=r"sample\.first_frame=x needs a model of image to video"):
        sample_space(config(first_frame="x"), state(SEEN), MODEL)
    condition = torch.ones(5, 2, 6, 8)
    write(tmp_path, "a", (2, 6, 8), (5, 48, 64), condition=condition, vae=VAE | {"posterior": "sample"})
    first = config(first_frame=str(tmp_path))
    for known in (None, SEEN):
        assert sample_space(first, state(known), TO_VIDEO).size == (2, 6, 8)
    with pytest.raises(ValueError, match=r"must be those of the first frame, latents of \[2, 6, 8\], got \[3, 6, 8\]"):
        sample_space(config(first_frame=str(tmp_path), num_frames=9), state(SEEN), TO_VIDEO)
    with pytest.raises(ValueError, match=r"sample\.first_frame must be made by the VAE of training"):
        sample_space(first, state(SEEN | {"vae": {"class": "B"}}), TO_VIDEO)
    write(tmp_path, "b", (2, 6, 10), (5, 48, 80), condition=torch.ones(5, 2, 6, 10))
    with pytest.raises(ValueError, match=r"must name files of one size, got \(2, 6, 8\) and \(2, 6, 10\) in .*b\.safe"):
        sample_space(first, state(SEEN), TO_VIDEO)
    write(tmp_path, "a", (2, 6, 8))
    with pytest.raises(
        ValueError, match=r"must hold 5 channels of a condition for this model, got 0 in .*--first-frame"
    ):
        sample_space(first, state(SEEN), TO_VIDEO)
