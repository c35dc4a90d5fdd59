"""Checkpoints that hold no pickles, are whole or absent, and load under any number of ranks.

A checkpoint is a folder `step_00000010`: tensors in safetensors files, written by torch.distributed.checkpoint, each
tensor once, whichever rank writes it; everything else in `state.json`; sizes and SHA-256 of all files in
`manifest.json`. It is written under another name and renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.state import StateTensor, hand_out, owned, turns

FORMAT_VERSION = 1
_FOLDER = re.compile(r"step_(\d{8})")
_MANIFEST = "manifest.json"
_STATE = "state.json"

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder and its JSON state."""

    path: Path
    step: int
    state: dict[str, Any]

    def load_tensors(
        self,
        tensors: Mapping[str, StateTensor],
        world: World,
        *,
        may_differ: Callable[[str], bool] = lambda name: False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Fill `tensors` in place, by name; every rank calls.

        Args:
            tensors: what to fill; the checkpoint may hold more. Of split tensors each is read by one rank of `group`.
            world: all ranks.
            group: ranks with the same names, which share split tensors; None if nothing is split.
            may_differ: names that only one of model and checkpoint may have. Those that the checkpoint lacks stay as
                they are, those that the model lacks are left out; both are said in one line.

        Raises:
            ValueError: a name or shape is not in the checkpoint.
        """
        split = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
        wanted: dict[str, Tensor] = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                reader = dcp.HuggingFaceStorageReader(str(self.path))
                stored = reader.read_metadata().state_dict_metadata
                lacking = [name for name in tensors if name not in stored and may_differ(name)]
                split = [name for name in split if name not in lacking]
                mine = {name: torch.empty(tensors[name].shape) for name in turns(split, group)}
                wanted = {name: tensor for name, tensor in wanted.items() if name not in lacking} | mine
                dcp.load(wanted, storage_reader=reader, no_dist=world.size == 1)
        except (dcp.CheckpointException, RuntimeError, ValueError, AssertionError) as error:
            reason = str(error).strip().splitlines()
            raise ValueError(
                f"{self.path} does not fit this model: {reason[-1] if reason else type(error).__name__}; "
                "use the model configuration it was written with"
            ) from error
        hand_out(tensors, mine, group, split, world.device)
        kinds = {name.split(".")[0] for name in tensors}
        unused = [name for name in stored if name not in tensors and may_differ(name) and name.split(".")[0] in kinds]
        if lacking and world.is_main:
            logger.warning("%s lacks %s: they keep their initial values", self.path, _name_some(lacking))
        if unused and world.is_main:
            logger.warning("%s also holds %s, which this model has no place for", self.path, _name_some(unused))


def _name_some(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({names[0]}{', ...' if len(names) > 1 else ''})"


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, StateTensor],
    state: Mapping[str, Any],
    world: World,
    *,
    keep_last: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `step`, point `latest` at it and remove the oldest; every rank calls.

    Args:
        folder: holds the `step_*` folders; shared by all ranks.
        step: number of optimizer steps done.
        tensors: by name, at least one dim each; each is written by one rank, split ones as a whole.
        state: what else to keep, JSON values only.
        world: all ranks.
        keep_last: how many checkpoints stay.
        group: ranks with the same names, which share split tensors; None if nothing is split.

    Returns:
        The final folder.
    """
    whole = {key: tensor.detach() for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    whole |= owned(tensors, group, [key for key in tensors if key not in whole])
    name = f"step_{step:08d}"
    final, partial = folder / name, folder / f".partial-{name}"
    if world.is_main:
        for left in folder.glob(".partial-step_*"):  # of processes that died while they wrote
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    with warnings.catch_warnings():
        # One process without a process group is a supported case, not a mistake to warn about.
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.save(
                whole,
                storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True),
                process_group=world.group,
                no_dist=world.size == 1,
            )
        except dcp.CheckpointException as error:
            reason = next((str(cause[0]) for cause in error.failures.values()), type(error).__name__)
            raise OSError(f"cannot write the checkpoint {final}: {reason}") from error
    if world.is_main:
        _write_json(partial / _STATE, {"format_version": FORMAT_VERSION, "step": step, **state})
    world.barrier()
    files = sorted(path.name for path in partial.iterdir())
    entries = _over_ranks(files, lambda file: _describe(partial / file), world)
    if world.is_main:
        _write_json(partial / _MANIFEST, {"files": entries})
        _sync_folder(partial)
        replaced = folder / f".replaced-{name}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        write_text(folder / "latest", name + "\n")
        _sync_folder(folder)
        for old in list_checkpoints(folder)[keep_last:]:
            shutil.rmtree(old)
    world.barrier()
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoint folders, newest first; half-written ones have another name."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def find_checkpoint(folder: Path, world: World, *, set_aside: bool = False) -> Checkpoint | None:
    """Newest checkpoint whose files are all intact, the same on every rank; None if there is none at all.

    Damaged ones are named in one log line each and skipped.

    Args:
        folder: holds the `step_*` folders.
        world: all ranks.
        set_aside: rename damaged ones that are newer to `damaged-step_*`, so that they do not take the place of a good
            one among the last that are kept.

    Raises:
        ValueError: there are checkpoints but none is intact.
    """
    names = world.broadcast([str(path) for path in list_checkpoints(folder)] if world.is_main else None)
    refused: list[Path] = []
    for name in names:
        fault = _fault(Path(name), world)
        if fault is None:
            if set_aside and world.is_main:
                for path in refused:
                    _move_aside(path)
            world.barrier()
            return _read(Path(name))
        refused.append(Path(name))
        if world.is_main:
            logger.warning("checkpoint refused: %s: %s", name, fault)
    if names:
        raise ValueError(
            f"run.resume: none of the {len(names)} checkpoints in {folder} is intact; restore one, "
            "or move the folder away to start anew"
        )
    return None


def _move_aside(path: Path) -> None:
    number = 0
    while (target := path.with_name(f"damaged-{path.name}" + (f".{number}" if number else ""))).exists():
        number += 1
    os.rename(path, target)
    logger.warning("%s is kept as %s", path, target.name)


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """The checkpoint in `path`, or the newest good one if `path` holds several.

    Raises:
        ValueError: `path` holds no intact checkpoint.
    """
    is_single = world.broadcast((path / _MANIFEST).exists() or _FOLDER.fullmatch(path.name) is not None)
    if is_single:
        fault = _fault(path, world)
        if fault is not None:
            raise ValueError(f"checkpoint refused: {path}: {fault}")
        return _read(path)
    found = find_checkpoint(path, world) or find_checkpoint(path / "checkpoints", world)
    if found is None:
        raise ValueError(f"no checkpoint in {path}: expected a folder step_*, or one that holds such folders")
    return found


def _fault(path: Path, world: World) -> str | None:
    """Why a checkpoint cannot be used, agreed by all ranks; None if it is intact."""
    expected: Any = None
    fault = None
    if world.is_main:
        try:
            expected = json.loads((path / _MANIFEST).read_text())["files"]
            if _STATE not in expected:
                fault = f"{_MANIFEST} does not list {_STATE}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = f"{_MANIFEST} is missing or unreadable ({type(error).__name__})"
    expected, fault = world.broadcast((expected, fault))
    if fault is not None:
        return str(fault)
    verdicts = _over_ranks(sorted(expected), lambda file: _compare(path / file, expected[file]), world)
    return next((verdict for verdict in verdicts.values() if verdict is not None), None)


def _compare(path: Path, entry: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes, the manifest says {entry['bytes']}"
    if _describe(path)["sha256"] != entry["sha256"]:
        return f"{path.name} does not have the SHA-256 of the manifest"
    return None


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def _over_ranks(files: list[str], work: Callable[[str], Any], world: World) -> dict[str, Any]:
    """Apply `work` to each file on one rank and give all ranks all results: hashing is the slow part."""
    mine = {file: work(file) for file in files[world.rank :: world.size]}
    return {file: value for part in world.gather(mine) for file, value in part.items()}


def _read(path: Path) -> Checkpoint:
    state = json.loads((path / _STATE).read_text())
    if state.get("format_version") != FORMAT_VERSION:
        found = state.get("format_version")
        raise ValueError(f"{path} has format version {found}, this version of dbsp_megatron reads {FORMAT_VERSION}")
    return Checkpoint(path=path, step=state["step"], state=state)


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
