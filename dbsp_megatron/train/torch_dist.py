"""Reads checkpoints of megatron-core's `dist_checkpointing` (format `torch_dist`), as data and without megatron-core.

Tensors lie in `*.distcp` files, what they are in `.metadata`, a pickle, and what is no tensor in `common.pt` or among
the tensors. Pickles can hold code, and torch and megatron-core load some of these without a guard. Here `.metadata`
may name nothing but classes that describe tensors, and all else must load with `weights_only=True`, before anybody
else loads it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

COMMON = "common.pt"
_MARKER = "metadata.json"
_METADATA = ".metadata"
_STATE_PREFIX = "optimizer.state."
_MASTERS = ("param", "fp32_param")
"""What versions of megatron-core call master weights."""
_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
}
"""Names that `.metadata` may refer to: descriptions of tensors, and nothing that acts."""

_UNREADABLE = (
    *(OSError, EOFError, pickle.UnpicklingError, RuntimeError),
    *(LookupError, TypeError, AttributeError, ValueError),
)
"""What loading a damaged or foreign file may raise."""


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor in a checkpoint.

    Attributes:
        key: its name in the files.
        shape: of the whole.
        dtype: as stored.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def is_format_of(path: Path) -> bool:
    """Whether a checkpoint folder is of this format."""
    return (path / _MARKER).exists()


def master_key(name: str) -> str:
    """Key of a parameter's master weight."""
    return f"{_STATE_PREFIX}{_MASTERS[0]}.{name}"


def state_key(kind: str, name: str) -> str:
    """Key of a tensor of `Engine.state` that belongs to a parameter.

    Args:
        kind: `ema`, or `optim.<moment>`.
        name: of the parameter.
    """
    moment = kind.removeprefix("optim.")
    return f"{kind}.{name}" if moment == kind else f"{_STATE_PREFIX}{moment}.{name}"


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """What a checkpoint holds, by the names of `Engine.state`; of weights the masters, where there are any."""
    entries = {
        key: StoredTensor(key, tuple(entry.size), entry.properties.dtype)
        for key, entry in _read_metadata(path).state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    found: dict[str, StoredTensor] = {}
    for key, entry in entries.items():
        kind, _, name = key.removeprefix(_STATE_PREFIX).partition(".")
        if not key.startswith(_STATE_PREFIX):
            if kind == "ema":
                found[key] = entry
            else:
                found.setdefault(f"model.{key}", entry)
        elif kind in _MASTERS:
            found[f"model.{name}"] = entry
        else:
            found[f"optim.{kind}.{name}"] = entry
    return found


def find_code(path: Path) -> str | None:
    """Why the files of a checkpoint cannot be loaded as data; None if they can."""
    what = f"{_METADATA} cannot be read as a description of tensors"
    try:
        metadata = _read_metadata(path)
        what = f"{COMMON} does not load with weights_only=True"
        torch.load(path / COMMON, map_location="cpu", weights_only=True)
        for index, place in (metadata.storage_data or {}).items():
            if isinstance(metadata.state_dict_metadata.get(index.fqn), dcp.BytesStorageMetadata):
                what = f"{index.fqn} in {place.relative_path} does not load with weights_only=True"
                torch.load(_read_bytes(path, place), map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{what} ({reason}); it may hold code: use a checkpoint of a run you trust"
    return None


def write_common(path: Path, values: Mapping[str, Any]) -> None:
    """Write `common.pt`, if megatron-core has not: older versions look for it there, newer ones first.

    Args:
        path: the checkpoint folder.
        values: numbers, strings and containers of them.
    """
    if (path / COMMON).exists():
        return
    with (path / COMMON).open("wb") as file:
        torch.save(dict(values), file)
        file.flush()
        os.fsync(file.fileno())


class Reader(dcp.FileSystemReader):
    """`FileSystemReader` that takes nothing but data from `.metadata`. Tensors it loads with `weights_only=True`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of all tensors."""
        metadata = _read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _read_bytes(path: Path, place: _StorageInfo) -> io.BytesIO:
    if place.transform_descriptors:
        raise ValueError(f"it is stored as {', '.join(place.transform_descriptors)}")
    with (path / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return io.BytesIO(file.read(place.length))


def _read_metadata(path: Path) -> Metadata:
    found = _DataUnpickler(io.BytesIO((path / _METADATA).read_bytes())).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found
