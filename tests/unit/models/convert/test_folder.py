"""Folders of diffusers: single and sharded, whole or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dbsp_megatron.models.convert import DiffusersFolder, write_diffusers_folder
from dbsp_megatron.models.convert.folder import WEIGHTS_NAME
from tests.unit.models.convert.cases import (
    CASES,
    conversion_of,
    load_theirs,
    make_inputs,
    make_theirs,
    run_theirs,
    save_theirs,
)

INDEX = f"{WEIGHTS_NAME}.safetensors.index.json"
SINGLE = f"{WEIGHTS_NAME}.safetensors"


def _tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.full((3,), 0.5, dtype=torch.float16),
        "d": torch.arange(12.0).view(3, 4)[:, 1:],  # not contiguous
    }


def _write(path: Path, limit: int = 1 << 30, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    tensors = _tensors() if tensors is None else tensors
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_diffusers_folder(path, {"_class_name": "X"}, tensors.items(), sizes, max_shard_bytes=limit)
    return tensors


@pytest.mark.parametrize("limit", [1 << 30, 32, 1])
def test_write_and_read_keep_names_dtypes_and_bits(limit: int, tmp_path: Path) -> None:
    """One file; two files of at most 32 bytes and one of a larger tensor; a file for each tensor."""
    wanted = _write(tmp_path / "x", limit)
    files = sorted(path.name for path in (tmp_path / "x").iterdir())
    count = {1 << 30: 1, 32: 3, 1: 4}[limit]
    names = [f"{WEIGHTS_NAME}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert files == sorted(["config.json", *([SINGLE] if count == 1 else [INDEX, *names])])
    with DiffusersFolder(tmp_path / "x") as folder:
        assert folder.config == {"_class_name": "X"}
        read = {name: folder.read(name) for name in folder.shapes}
        assert folder.dtypes == {name: tensor.dtype for name, tensor in wanted.items()}
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(read[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.diffusers
@pytest.mark.parametrize("size", ["10GB", "20KB"])
def test_diffusers_reads_what_we_write_and_we_what_it_writes(size: str, tmp_path: Path) -> None:
    case = CASES["wan t2v"]
    theirs = save_theirs(case, tmp_path / "a", max_shard_size=size)
    assert (tmp_path / "a" / INDEX).exists() is (size == "20KB")
    with DiffusersFolder(tmp_path / "a") as folder:
        sizes = {name: folder.read(name).nbytes for name in folder.shapes}
        tensors = ((name, folder.read(name)) for name in folder.shapes)
        limit = 1 << 30 if size == "10GB" else 20_000
        write_diffusers_folder(tmp_path / "b", folder.config, tensors, sizes, max_shard_bytes=limit)
    assert (tmp_path / "b" / INDEX).exists() is (size == "20KB")
    again = load_theirs(case.class_name, tmp_path / "b")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    inputs = make_inputs(case, conversion_of(case).model)
    assert torch.equal(run_theirs(case, again, inputs), run_theirs(case, theirs, inputs))


@pytest.mark.diffusers
def test_a_pipeline_folder_and_a_variant_are_found(tmp_path: Path) -> None:
    theirs = make_theirs(CASES["wan t2v"])
    theirs.save_pretrained(tmp_path / "transformer", variant="fp16", max_shard_size="20KB")
    (tmp_path / "model_index.json").write_text("{}")
    with DiffusersFolder(tmp_path, "fp16") as folder:
        assert folder.path == tmp_path / "transformer"
        assert folder.shapes.keys() == theirs.state_dict().keys()
    with pytest.raises(
        ValueError, match=r"must hold diffusion_pytorch_model.safetensors or .*fp16-00001.*variant fp16"
    ):
        DiffusersFolder(tmp_path)


def test_write_diffusers_folder_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    tensors = _tensors()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    given = ((name, tensor) for name, tensor in tensors.items() if name != "b")
    with pytest.raises(ValueError, match=r"expected b of 8 bytes; got c of 6 bytes"):
        write_diffusers_folder(tmp_path / "x", {}, given, sizes, max_shard_bytes=24)
    with pytest.raises(ValueError, match=r"expected d of 36 bytes; got nothing"):
        write_diffusers_folder(tmp_path / "x", {}, list(tensors.items())[:3], sizes)
    with pytest.raises(ValueError, match=r"expected no tensor after the last; got e"):
        write_diffusers_folder(tmp_path / "x", {}, [*tensors.items(), ("e", torch.ones(1))], sizes)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    _write(tmp_path / "x")  # an empty folder may be there
    with pytest.raises(ValueError, match="x must be a new or empty folder"):
        _write(tmp_path / "x")
    with DiffusersFolder(tmp_path / "x") as folder:
        assert len(folder.shapes) == 4


def _refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusersFolder(path)


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path, r"config.json cannot be read")
    config = tmp_path / "config.json"
    config.write_text("{")
    _refused(tmp_path, r"config.json is not JSON")
    config.write_text("[]")
    _refused(tmp_path, r"config.json must hold a mapping; got list")
    config.write_text("{}")
    _refused(tmp_path, r"it holds no weights")
    (tmp_path / f"{WEIGHTS_NAME}.bin").write_bytes(b"\x80")
    _refused(tmp_path, rf"it holds {WEIGHTS_NAME}.bin. Pickles \(.bin\) are not read")
    save_file({"a": torch.ones(3)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-1])
    _refused(tmp_path, rf"{SINGLE} is no intact safetensors file")
    save_file({"a": torch.ones(3), "b.scale": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    _refused(tmp_path, r"b.scale must be one of F64, F32, F16, BF16; got F8_E4M3. Quantised weights")


def test_an_index_must_fit_its_files(tmp_path: Path) -> None:
    _write(tmp_path / "x", limit=32)
    index = tmp_path / "x" / INDEX
    good = json.loads(index.read_text())
    first = good["weight_map"]["a"]

    def refused(weight_map: object, message: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        _refused(tmp_path / "x", message)

    refused({}, r"must map names of tensors to files")
    refused(good["weight_map"] | {"a": "../secret.safetensors"}, r"files beside it; got '../secret.safetensors'")
    refused(good["weight_map"] | {"a": "a.bin"}, r"files beside it; got 'a.bin'")
    refused(good["weight_map"] | {"e": first}, r"the index do not agree about e")
    refused({name: file for name, file in good["weight_map"].items() if name != "b"}, r"do not agree about b")
    index.write_text(json.dumps(good))
    (tmp_path / "x" / first).unlink()
    _refused(tmp_path / "x", rf"lacks {first}, which {INDEX} names")


def test_a_file_that_is_open_may_be_read_after_close(tmp_path: Path) -> None:
    wanted = _write(tmp_path / "x")
    with DiffusersFolder(tmp_path / "x") as folder:
        read = folder.read("a")
    assert torch.equal(read, wanted["a"])
    assert load_file(tmp_path / "x" / SINGLE).keys() == wanted.keys()
