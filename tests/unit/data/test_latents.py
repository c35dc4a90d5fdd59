"""Files of latents: what is written is read, and nothing that is not whole."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dbsp_megatron.data.latents import (
    FORMAT,
    LatentError,
    find_latents,
    largest_latents,
    read_info,
    read_latents,
    read_with_condition,
    write_latents,
)

SETTINGS = {"vae": {"class": "A", "factor": 0.5}, "frames": 9}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_write_latents_and_read(tmp_path: Path, dtype: torch.dtype) -> None:
    latents = torch.randn(3, 4, 5, 6).permute(1, 0, 2, 3).to(dtype)
    path = tmp_path / "deep" / "a.mp4@16.safetensors"
    write_latents(path, latents, name="a.mp4@16", settings=SETTINGS)
    info = read_info(path)
    assert (info.name, info.shape, info.size, info.settings) == ("a.mp4@16", (4, 3, 5, 6), (3, 5, 6), SETTINGS)
    read = read_latents(info)
    assert read.dtype == torch.float32
    assert torch.equal(read, latents.float())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(read, latents.float())


def test_write_latents_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(LatentError, match="latents of a are not finite in torch.float16; encode in bf16 or fp32"):
        write_latents(path, torch.full((1, 1, 1, 1), 1e6).half(), name="a", settings={})
    with pytest.raises(LatentError, match="fp16, bf16 or fp32"):
        write_latents(path, torch.zeros(1, 1, 1, 1, dtype=torch.float64), name="a", settings={})
    assert not list(tmp_path.iterdir())


def test_read_info_refuses_what_is_not_whole_or_foreign(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_latents(path, torch.randn(2, 3, 4, 5), name="a", settings=SETTINGS)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(LatentError, match=r"a.safetensors: is not readable"):
            read_info(path)
    save_file({"latents": torch.zeros(1, 1, 1, 1)}, path)
    with pytest.raises(LatentError, match="not a file of tools/encode_videos.py"):
        read_info(path)
    with pytest.raises(LatentError, match="b.safetensors: is not readable"):
        read_info(tmp_path / "b.safetensors")


def test_read_latents_refuses_a_file_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_latents(path, torch.randn(2, 3, 4, 5), name="a", settings=SETTINGS)
    info = read_info(path)
    write_latents(path, torch.randn(2, 3, 4, 5), name="a", settings={})
    with pytest.raises(LatentError, match="changed after the start"):
        read_latents(info)
    write_latents(path, torch.zeros(2, 3, 4, 5), name="a", settings=SETTINGS)
    whole = bytearray(path.read_bytes())
    whole[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(whole)
    with pytest.raises(LatentError, match="not finite; remove it"):
        read_latents(info)


def test_find_latents(tmp_path: Path) -> None:
    for name in ("b/x.safetensors", "a.safetensors", ".hidden.safetensors", "b/.x.tmp.safetensors", "n.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1" * len(name))
    found = [str(tmp_path / "a.safetensors"), str(tmp_path / "b" / "x.safetensors")]
    assert find_latents(str(tmp_path)) == found
    assert find_latents(str(tmp_path / "*.safetensors")) == found[:1]
    assert find_latents(str(tmp_path / "**" / "*.safetensors")) == found
    assert find_latents(found[1]) == found[1:]
    for nothing in (tmp_path / "c", tmp_path / "*.mp4", tmp_path / "n.txt"):
        with pytest.raises(LatentError, match="no .safetensors file is there"):
            find_latents(str(nothing))


def test_largest_latents_is_that_of_most_tokens(tmp_path: Path) -> None:
    for index, size in enumerate([(2, 4, 4), (3, 6, 4), (1, 4, 6)]):
        write_latents(tmp_path / f"{index}.safetensors", torch.zeros(2, *size), name=str(index), settings={})
    assert largest_latents(str(tmp_path)).size == (3, 6, 4)


def test_latent_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(LatentError("a", "is\nbad")))
    assert (str(error), error.path) == ("a: is bad", "a")


def test_a_condition_is_kept_beside_the_latents(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    latents, condition = torch.randn(2, 3, 4, 5).bfloat16(), torch.randn(6, 3, 4, 5).bfloat16()
    write_latents(path, latents, name="a", settings=SETTINGS, condition=condition)
    info = read_info(path)
    assert (info.shape, info.condition_channels) == ((2, 3, 4, 5), 6)
    found, beside = read_with_condition(info)
    assert torch.equal(found, latents.float())
    assert beside is not None
    assert torch.equal(beside, condition.float())
    assert torch.equal(read_latents(info), found)
    for wrong in (condition[:, :2], condition.float()):
        with pytest.raises(LatentError, match=r"a condition must be \[K, 3, 4, 5\] in torch.bfloat16"):
            write_latents(path, latents, name="a", settings=SETTINGS, condition=wrong)
    with pytest.raises(LatentError, match="are not finite"):
        write_latents(path, latents, name="a", settings=SETTINGS, condition=condition / 0)
    save_file({"latents": latents, "condition": condition[:, :2].contiguous()}, path, {"format": FORMAT, "name": "a"})
    with pytest.raises(LatentError, match="KeyError"):
        read_info(path)
    header = {"format": FORMAT, "name": "a", "settings": "{}"}
    save_file({"latents": latents, "condition": condition[:, :2].contiguous()}, path, header)
    with pytest.raises(LatentError, match=r"must hold a condition \[K, T, H, W\] of the size of its latents"):
        read_info(path)
    write_latents(path, latents, name="a", settings=SETTINGS)
    with pytest.raises(LatentError, match="changed after the start"):
        read_with_condition(info)
    assert read_with_condition(read_info(path))[1] is None
