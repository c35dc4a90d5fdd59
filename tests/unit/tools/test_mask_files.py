"""Masks are read from every form that tools promise, and what is no mask is refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dbsp_megatron.masks import write_masks
from dbsp_megatron.observability import MetricLogger, RunFolder
from tools.mask_files import file_sources, generated_sources, recorded_imbalance
from tools.structured_masks import BoolArray, make_mask


@pytest.fixture
def masks() -> BoolArray:
    """Three layers, three heads, 11 blocks (not a whole number of packed bytes)."""
    return np.stack([make_mask("sth", "3x4x7x3x8", 0.4, layer=layer) for layer in range(3)])


def _loaded(path: Path) -> list[BoolArray]:
    return [source.load() for source in file_sources(path)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_file_sources_reads_npy(tmp_path: Path, masks: BoolArray, packed: bool, num_layers: int) -> None:
    stored = masks[0] if num_layers == 1 else masks
    np.save(tmp_path / "m.npy", np.packbits(stored, axis=-1) if packed else stored)
    loaded = _loaded(tmp_path / "m.npy")
    assert len(loaded) == num_layers
    assert all(mask.dtype == np.bool_ for mask in loaded)
    assert np.array_equal(np.stack(loaded), masks[:num_layers])


def test_file_sources_reads_zeros_and_ones(tmp_path: Path, masks: BoolArray) -> None:
    np.save(tmp_path / "m.npy", masks[1].astype(np.int32))
    assert np.array_equal(_loaded(tmp_path / "m.npy")[0], masks[1])


def test_file_sources_reads_npz_by_name_or_alone(tmp_path: Path, masks: BoolArray) -> None:
    np.savez(tmp_path / "named.npz", mask=masks[2], scale=np.ones(3))
    np.savez(tmp_path / "alone.npz", whatever=masks)
    assert np.array_equal(_loaded(tmp_path / "named.npz")[0], masks[2])
    assert len(_loaded(tmp_path / "alone.npz")) == 3


def test_file_sources_unpacks_rectangles(tmp_path: Path, masks: BoolArray) -> None:
    wide = np.concatenate([masks, masks[..., :2]], axis=-1)
    np.savez(tmp_path / "m.npz", packed=np.packbits(wide, axis=-1), num_k_blocks=13)
    assert np.array_equal(np.stack(_loaded(tmp_path / "m.npz")), wide)


def test_file_sources_reads_safetensors(tmp_path: Path, masks: BoolArray) -> None:
    save_file({"all": masks}, tmp_path / "one.safetensors")
    save_file({"b": masks[1], "a": masks[0].astype(np.uint8)}, tmp_path / "two.safetensors")
    assert np.array_equal(np.stack(_loaded(tmp_path / "one.safetensors")), masks)
    sources = file_sources(tmp_path / "two.safetensors")
    assert [source.name for source in sources] == ["two.safetensors:a layer 0", "two.safetensors:b layer 0"]
    assert np.array_equal(sources[1].load(), masks[1])


def test_file_sources_reads_files_of_mask_methods(tmp_path: Path, masks: BoolArray) -> None:
    """Their bits are packed from the lowest, and the orders of heads are no masks."""
    path = tmp_path / "paro.safetensors"
    given = {layer: torch.from_numpy(masks[layer]) for layer in (0, 2)}
    write_masks(path, given, seqlen=11 * 8, block_size=8, orders={0: [0, 1, 2], 2: [5, 4, 3]})
    sources = file_sources(path)
    assert [source.layer for source in sources] == [0, 2]
    assert all(np.array_equal(source.load(), masks[source.layer]) for source in sources)


def test_file_sources_keeps_one_block_apart_from_packed_bits(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", np.ones((2, 1, 1), np.uint8))
    np.save(tmp_path / "packed.npy", np.packbits(np.ones((2, 1, 1), bool), axis=-1))
    assert all(_loaded(tmp_path / name)[0].all() for name in ("plain.npy", "packed.npy"))


def test_file_sources_reads_partitions_of_a_run(tmp_path: Path, masks: BoolArray) -> None:
    folder = RunFolder(tmp_path, "r")
    for layer in (0, 7):
        folder.save_arrays(f"partitions/layer_{layer:02d}", mask=masks[0], head_owner=np.zeros(3, int))
    sources = file_sources(folder.path)
    assert [(source.family, source.layer) for source in sources] == [("r", 0), ("r", 7)]
    assert np.array_equal(sources[1].load(), masks[0])


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("m.npy", np.zeros((4, 4), bool), "of shape \\[H, N, N\\] or \\[L, H, N, N\\], got bool \\[4, 4\\]"),
        ("m.npy", np.zeros((2, 4, 4)), "got float64"),
        ("m.npy", np.zeros((2, 0, 4), bool), "got bool \\[2, 0, 4\\]"),
        ("m.npy", np.full((2, 4, 4), 3), "holds other numbers than 0 and 1"),
        ("m.npy", np.full((2, 40, 4), 200, np.uint8), "not the 5 bytes of 40 packed blocks"),
        ("m.npy", np.array([None, 1], dtype=object), "cannot be read"),
        ("m.txt", np.zeros((2, 4, 4), bool), "must be a file that ends in .npy, .npz, .safetensors"),
    ],
)
def test_file_sources_refuses_what_is_no_mask(tmp_path: Path, name: str, array: np.ndarray, words: str) -> None:
    with (tmp_path / name).open("wb") as file:
        np.save(file, array, allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        file_sources(tmp_path / name)


@pytest.mark.parametrize("name", ["m.npy", "m.npz", "m.safetensors"])
def test_file_sources_refuses_garbage_and_missing_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="check the path"):
        file_sources(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x00\x01 no mask")
    with pytest.raises(ValueError, match="cannot be read"):
        file_sources(tmp_path / name)


@pytest.mark.parametrize("name", ["m.npy", "m.npz", "m.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95, 0.999])
def test_file_sources_refuses_files_cut_short(tmp_path: Path, masks: BoolArray, name: str, share: float) -> None:
    path = tmp_path / name
    if path.suffix == ".npz":
        np.savez_compressed(path, packed=np.packbits(masks, axis=-1), num_k_blocks=11)
    elif path.suffix == ".npy":
        np.save(path, masks)
    else:
        save_file({"a": masks[0], "b": masks[1]}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{name} cannot be read: .*; if it was cut short, copy or make it again"):
        file_sources(path)


def test_file_sources_refuses_scrambled_archives(tmp_path: Path, masks: BoolArray) -> None:
    """The directory of the archive is whole, its content is not; every byte in turn."""
    path = tmp_path / "m.npz"
    np.savez_compressed(path, mask=masks[0])
    whole = path.read_bytes()
    refused = []
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            file_sources(path)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) // 6
    assert all(path.name in message for message in refused)


def test_file_sources_goes_by_content_where_the_suffix_is_wrong(tmp_path: Path, masks: BoolArray) -> None:
    np.savez(tmp_path / "archive.npz", mask=masks[0])
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    np.save(tmp_path / "array.npy", masks[0])
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    assert np.array_equal(_loaded(tmp_path / "archive.npy")[0], masks[0])
    assert np.array_equal(_loaded(tmp_path / "array.npz")[0], masks[0])


def test_file_sources_refuses_folders_of_no_run(tmp_path: Path, masks: BoolArray) -> None:
    np.save(tmp_path / "m.npy", masks)
    with pytest.raises(ValueError, match="is no run folder, it has none of partitions, samples, .*; give the folder"):
        file_sources(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    assert file_sources(tmp_path) == []


def test_recorded_imbalance_refuses_unreadable_arrays(tmp_path: Path) -> None:
    path = tmp_path / "imbalance.npz"
    np.savez(path, before=np.ones((4, 3)), after=np.ones((4, 3)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="imbalance.npz cannot be read"):
        recorded_imbalance(tmp_path)
    for stored in ({"before": np.ones(3)}, {"before": np.array(["a"]), "after": np.array(["b"])}):
        np.savez(path, **stored)
        with pytest.raises(ValueError, match="imbalance.npz cannot be read"):
            recorded_imbalance(tmp_path)
    np.savez(path, before=np.ones((4, 3)), after=np.ones((4, 2)))
    with pytest.raises(ValueError, match="must have one shape .steps, layers., got .4, 3. and .4, 2."):
        recorded_imbalance(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="imbalance.npz cannot be read"):
        recorded_imbalance(tmp_path)


def test_file_sources_refuses_unnamed_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=np.ones(3), b=np.ones(3))
    with pytest.raises(ValueError, match="must hold an array named mask, masks, blocks, packed, or one only, got a, b"):
        file_sources(tmp_path / "m.npz")


def test_generated_sources_combines_all(masks: BoolArray) -> None:
    sources = generated_sources(["st", "sth"], ["3x4x7x3x8"], [0.4], [0], [0, 2])
    assert [source.name for source in sources][1:3] == [
        "st 3x4x7x3x8 0.4 seed 0 layer 2",
        "sth 3x4x7x3x8 0.4 seed 0 layer 0",
    ]
    assert np.array_equal(sources[3].load(), masks[2])
    with pytest.raises(ValueError, match="geometry must be one of"):
        generated_sources(["st"], ["nowhere"], [0.4], [0], [0])


def test_recorded_imbalance_prefers_layers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    with MetricLogger(folder) as metrics:
        metrics.log(1, {"sp/imbalance_before": 1.4, "sp/imbalance_after": 1.2})
        metrics.log(2, {"sp/imbalance_before": 1.6, "sp/imbalance_after": 1.1})
    (row,) = recorded_imbalance(folder.path)
    assert (row.what, row.num_steps) == ("mean of layers", 2)
    assert (row.before, row.after) == pytest.approx((1.5, 1.15))
    assert (row.worst_before, row.worst_after) == (1.6, 1.2)
    before = np.array([[1.5, 2.0], [1.5, 1.0]])
    folder.save_arrays("imbalance", steps=np.array([1, 2]), before=before, after=before - 0.5)
    rows = recorded_imbalance(folder.path)
    assert [(row.what, row.before, row.worst_after) for row in rows] == [("layer 0", 1.5, 1.0), ("layer 1", 1.5, 1.5)]


def test_recorded_imbalance_reads_samples(tmp_path: Path) -> None:
    (tmp_path / "samples" / "step_9").mkdir(parents=True)
    values = {"imbalance_before": 1.3, "imbalance_after": 1.05}
    (tmp_path / "samples" / "step_9" / "0.json").write_text(json.dumps(values))
    (tmp_path / "samples" / "step_9" / "other.json").write_text("[]")
    (row,) = recorded_imbalance(tmp_path)
    assert (row.what, row.before, row.after) == ("sample 0", 1.3, 1.05)
