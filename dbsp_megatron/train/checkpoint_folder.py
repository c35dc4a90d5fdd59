"""What checkpoints of all formats share: folders that are whole or absent, and a manifest that tells damage.

A checkpoint is a folder `step_00000010`. It is written under another name and renamed when complete. Beside the
tensors it holds `state.json`, and sizes and SHA-256 of all files in `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.train.distributed import World

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_FOLDER = re.compile(r"step_(\d{8})")

logger = get_logger(__name__)


def begin(folder: Path, step: int, world: World) -> Path:
    """An empty folder to write the checkpoint of a step into; collective.

    Args:
        folder: holds the `step_*` folders; shared by all ranks.
        step: number of optimizer steps done.
        world: all ranks.
    """
    partial = folder / f".partial-{_name(step)}"
    if world.is_main:
        for left in folder.glob(".partial-step_*"):  # of processes that died while they wrote
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    return partial


def publish(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    world: World,
    *,
    keep_last: int,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Turn what was written into the checkpoint of a step, point `latest` at it and remove the oldest; collective.

    Args:
        folder: as in `begin`.
        step: as in `begin`.
        state: what is kept beside the tensors, JSON values only.
        world: all ranks, whose files are complete.
        keep_last: how many checkpoints stay.
        known: entries of the manifest that this rank has already.

    Returns:
        The final folder.
    """
    final, partial = folder / _name(step), folder / f".partial-{_name(step)}"
    if world.is_main:
        _write_json(partial / STATE, {"format_version": FORMAT_VERSION, "step": step, **state})
    entries = {file: entry for part in world.gather(dict(known or {})) for file, entry in part.items()}
    files = sorted(path.name for path in partial.iterdir() if path.name not in entries)
    entries |= over_ranks(files, lambda file: describe(partial / file), world)
    if world.is_main:
        _write_json(partial / MANIFEST, {"files": entries})
        _sync_folder(partial)
        replaced = folder / f".replaced-{_name(step)}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        write_text(folder / "latest", final.name + "\n")
        _sync_folder(folder)
        for old in list_checkpoints(folder)[keep_last:]:
            shutil.rmtree(old)
    world.barrier()
    return final


def _name(step: int) -> str:
    return f"step_{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder with this name is a finished checkpoint."""
    return _FOLDER.fullmatch(name) is not None


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoint folders, newest first; half-written ones have another name."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if is_checkpoint_name(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def foreign_note(path: Path) -> str:
    """What to say, after "no checkpoint is here", of a folder that Megatron-LM wrote; empty for all others.

    Such folders are `iter_*`, in one that has `latest_checkpointed_iteration.txt`.
    """
    inside = [path, *sorted(path.glob("iter_*"))]
    if not (path / "latest_checkpointed_iteration.txt").is_file() and not any(
        (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*")) for folder in inside
    ):
        return ""
    return (
        "; it was written by Megatron-LM, without the state.json and manifest.json that a run is checked by: load it "
        "in Megatron and write its weights by dbsp_megatron.train.checkpoint.save_checkpoint, see docs/megatron.md"
    )


def move_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it does not take the place of a good one."""
    number = 0
    while (target := path.with_name(f"damaged-{path.name}" + (f".{number}" if number else ""))).exists():
        number += 1
    os.rename(path, target)
    logger.warning("%s is kept as %s", path, target.name)


def find_fault(path: Path, world: World) -> str | None:
    """Why the files of a checkpoint cannot be used, agreed by all ranks; None if all are intact."""
    expected: Any = None
    fault = None
    if world.is_main:
        try:
            expected = json.loads((path / MANIFEST).read_text())["files"]
            if STATE not in expected:
                fault = f"{MANIFEST} does not list {STATE}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = f"{MANIFEST} is missing or unreadable ({type(error).__name__})"
    expected, fault = world.broadcast((expected, fault))
    if fault is not None:
        return str(fault)
    verdicts = over_ranks(sorted(expected), lambda file: _compare(path / file, expected[file]), world)
    return next((verdict for verdict in verdicts.values() if verdict is not None), None)


def _compare(path: Path, entry: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes, the manifest says {entry['bytes']}"
    if describe(path)["sha256"] != entry["sha256"]:
        return f"{path.name} does not have the SHA-256 of the manifest"
    return None


def describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest: its size and SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def over_ranks(files: list[str], work: Callable[[str], Any], world: World) -> dict[str, Any]:
    """Apply `work` to each file on one rank and give all ranks all results: hashing is the slow part."""
    mine = {file: work(file) for file in files[world.rank :: world.size]}
    return {file: value for part in world.gather(mine) for file, value in part.items()}


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
