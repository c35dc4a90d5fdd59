"""The file of a PlanCache: plans of a mesh, and head sums that any other mesh can start from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.partition import PartitionPlan

_FORMAT = 2


@dataclass(frozen=True, eq=False)
class SavedLayer:
    """What a file holds of one entry."""

    layer: int
    key: Hashable
    plan: PartitionPlan | None
    """The plan, for the mesh and layout it was made for."""
    head_blocks: IntArray | None
    """int64 [H], dense blocks of each head, of the newest counts; None where no counts were known."""


def write_layers(path: str | os.PathLike[str], layers: Iterable[SavedLayer]) -> None:
    """Writes layers as JSON, atomically.

    Args:
        path: File to write or replace.
        layers: What to write.

    Raises:
        ValueError: if a key is not built from None, booleans, numbers, strings and tuples.
    """
    entries = [
        {
            "layer": saved.layer,
            "key": _key_to_json(saved.key),
            "plan": None if saved.plan is None else json.loads(saved.plan.to_json()),
            "head_blocks": None if saved.head_blocks is None else saved.head_blocks.tolist(),
        }
        for saved in layers
    ]
    write_text(path, json.dumps({"format": _FORMAT, "entries": entries}, separators=(",", ":")) + "\n")


def read_layers(path: str | os.PathLike[str]) -> list[SavedLayer]:
    """Reads what `write_layers` wrote.

    Args:
        path: File to read.

    Raises:
        ValueError: if the file is not such a file.
    """
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError(f"format is {stored['format']!r}, not {_FORMAT}")
        return [_layer(item) for item in stored["entries"]]
    except (KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} holds no plans: {error}; pass a file that save() wrote") from error


def _layer(item: dict[str, Any]) -> SavedLayer:
    plan, sums = item["plan"], item["head_blocks"]
    return SavedLayer(
        checked_count("layer", item["layer"], minimum=0),
        _key_from_json(item["key"]),
        None if plan is None else PartitionPlan.from_json(json.dumps(plan)),
        None if sums is None else checked_array("head_blocks", sums, (None,)),
    )


def _key_to_json(key: Hashable) -> Any:
    """Tuples become lists; nothing else in a key may be a list, so the way back is unique."""
    if isinstance(key, tuple):
        return [_key_to_json(item) for item in key]
    if isinstance(key, float) and not math.isfinite(key):
        raise ValueError(f"a key must hold finite numbers to be saved, got {key!r}; pass such a key")
    if key is None or isinstance(key, (bool, int, float, str)):
        return key
    raise ValueError(
        f"a key must be built from None, booleans, numbers, strings and tuples to be saved, got "
        f"{type(key).__name__}; pass such a key"
    )


def _key_from_json(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(_key_from_json(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a key cannot be {type(value).__name__}")
