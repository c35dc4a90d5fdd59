"""Folders in which diffusers keeps a transformer: config.json, and weights in one safetensors file or several."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dbsp_megatron.observability.atomic_file import atomic_path, write_text

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored in, by safetensors' names; others (fp8, int8) need scales that the name does not give."""
GIB = 1024**3


class DiffusersFolder:
    """A transformer on disk; tensors are read when they are asked for, and nothing is downloaded.

    Args:
        path: Folder with config.json and the weights, or that of a pipeline whose `transformer` is meant.
        variant: As in diffusers: `fp16` reads `diffusion_pytorch_model.fp16.safetensors`.

    Attributes:
        path: The folder of the transformer.
        config: Contents of config.json.
        shapes: Shape of each tensor, by name.
        dtypes: Dtype of each tensor, by name.

    Raises:
        ValueError: Files are missing, damaged, or not safetensors.
    """

    def __init__(self, path: Path, variant: str | None = None) -> None:
        self.path = path / "transformer" if (path / "model_index.json").is_file() else path
        self.config = self._read_json(CONFIG_NAME)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Any] = {}
        self._open = ExitStack()
        try:
            for name in self._file_names(f".{variant}" if variant else ""):
                self._add(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DiffusersFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._open.close()

    def read(self, name: str) -> Tensor:
        """A tensor, in the dtype in which it is stored; its memory is that of the file."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); give the folder of a transformer") from error
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path} must hold a mapping; got {type(found).__name__}")
        return found

    def _file_names(self, variant: str) -> list[str]:
        """Files with weights, by the index if there is one, as in diffusers."""
        index = f"{WEIGHTS_NAME}.safetensors.index{variant}.json"
        single = f"{WEIGHTS_NAME}{variant}.safetensors"
        if (self.path / index).is_file():
            weight_map = self._read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{self.path / index} must map names of tensors to files (weight_map)")
            names = sorted({str(name) for name in weight_map.values()})
            outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
            if outside:
                raise ValueError(f"{self.path / index} must name safetensors files beside it; got {outside[0]!r}")
            absent = [name for name in names if not (self.path / name).is_file()]
            if absent:
                raise ValueError(f"{self.path} lacks {', '.join(absent)}, which {index} names; copy the folder again")
            self._index: dict[str, str] | None = {str(key): str(value) for key, value in weight_map.items()}
            return names
        self._index = None
        if (self.path / single).is_file():
            return [single]
        other = sorted(path.name for path in self.path.glob("*") if path.suffix in (".bin", ".safetensors", ".pt"))
        raise ValueError(
            f"{self.path} must hold {single} or {index}; it holds {', '.join(other) or 'no weights'}. Pickles (.bin) "
            "are not read: save them again with safe_serialization=True; for weights named like X.fp16.safetensors "
            "give the variant fp16"
        )

    def _add(self, name: str) -> None:
        path = self.path / name
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is no intact safetensors file: {error}") from error
        keys = set(file.keys())
        if self._index is not None:
            listed = {key for key, value in self._index.items() if value == name}
            odd = sorted(keys ^ listed)
            if odd:
                raise ValueError(f"{path} and the index do not agree about {odd[0]}; copy the folder again")
        for key in sorted(keys):
            part = file.get_slice(key)
            if part.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{path}: {key} must be one of {', '.join(DTYPES)}; got {part.get_dtype()}. Quantised weights are "
                    "not converted"
                )
            self._files[key] = file
            self.shapes[key] = tuple(part.get_shape())
            self.dtypes[key] = DTYPES[part.get_dtype()]


def refuse_existing(path: Path) -> None:
    """Refuse to write over what somebody may still need.

    Raises:
        ValueError: The path exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} must be a new or empty folder; it is not. Choose another one, or remove it")


def write_diffusers_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    sizes: Mapping[str, int],
    *,
    max_shard_bytes: int = 5 * GIB,
) -> None:
    """Write a transformer as diffusers does; the folder appears whole or not at all.

    At most one file's tensors are in memory at a time.

    Args:
        path: A new or empty folder.
        config: Contents of config.json, with `_class_name`.
        tensors: Names and tensors, one after another.
        sizes: Bytes of each of them, by name, in the same order.
        max_shard_bytes: Where a file ends; with less in all there is one file and no index.

    Raises:
        ValueError: The folder is not empty, or the tensors are not those of `sizes`.
    """
    refuse_existing(path)
    shards = _cut(sizes, max_shard_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        _write_shards(partial, shards, tensors, sizes)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: _file_name(i, len(shards)) for i, names in enumerate(shards) for name in names},
            }
            write_text(partial / f"{WEIGHTS_NAME}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        write_text(partial / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True) + "\n")
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cut(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names of the tensors of each file, in order; a tensor that is larger than a file has one of its own."""
    shards: list[list[str]] = []
    used = limit + 1
    for name, size in sizes.items():
        if used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _file_name(index: int, count: int) -> str:
    part = f"-{index + 1:05d}-of-{count:05d}" if count > 1 else ""
    return f"{WEIGHTS_NAME}{part}.safetensors"


def _write_shards(
    folder: Path, shards: list[list[str]], tensors: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int]
) -> None:
    given = iter(tensors)
    for index, names in enumerate(shards):
        held: dict[str, Tensor] = {}
        for name in names:
            found, tensor = next(given, ("nothing", torch.empty(0)))
            if found != name or tensor.nbytes != sizes[name]:
                raise ValueError(f"expected {name} of {sizes[name]} bytes; got {found} of {tensor.nbytes} bytes")
            held[name] = tensor.contiguous()
        with atomic_path(folder / _file_name(index, len(shards))) as temporary:
            save_file(held, temporary, metadata={"format": "pt"})
    for name, _ in given:
        raise ValueError(f"expected no tensor after the last; got {name}")
