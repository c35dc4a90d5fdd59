"""Checkpoints that hold no pickles of code, are whole or absent, and load under any number of ranks.

Two formats share folder, `state.json` and manifest (`checkpoint_folder.py`). `native`: tensors in safetensors files,
written by torch.distributed.checkpoint, each tensor once, whichever rank writes it. `torch_dist`: what megatron-core's
`dist_checkpointing` writes (`engines/megatron_checkpoint.py`). Which one a folder is shows in the folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.train import torch_dist
from dbsp_megatron.train.checkpoint_folder import (
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    begin,
    find_fault,
    foreign_note,
    is_checkpoint_name,
    list_checkpoints,
    move_aside,
    publish,
)
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.state import StateTensor, hand_out, owned, turns
from dbsp_megatron.train.torch_dist import StoredTensor

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder and its JSON state."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def is_torch_dist(self) -> bool:
        """Whether megatron-core's `dist_checkpointing` wrote the tensors."""
        return torch_dist.is_format_of(self.path)

    def stored(self) -> dict[str, StoredTensor]:
        """What tensors there are, by the names of `Engine.state`."""
        if self.is_torch_dist:
            return torch_dist.stored_tensors(self.path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            metadata = dcp.HuggingFaceStorageReader(str(self.path)).read_metadata().state_dict_metadata
        return {
            name: StoredTensor(name, tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }

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
        present = self.present(tensors, world, may_differ)
        split = [name for name in present if not isinstance(tensors[name], Tensor)]
        mine = {name: torch.empty(tensors[name].shape) for name in turns(split, group)}
        wanted: dict[str, Tensor] = mine | {name: t for name in present if isinstance(t := tensors[name], Tensor)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                if self.is_torch_dist:
                    reader: dcp.StorageReader = torch_dist.Reader(self.path)
                else:
                    reader = dcp.HuggingFaceStorageReader(str(self.path))
                by_key = {present[name]: tensor for name, tensor in wanted.items()}
                dcp.load(by_key, storage_reader=reader, no_dist=world.size == 1)
        except (dcp.CheckpointException, RuntimeError, ValueError, AssertionError) as error:
            raise self.misfit(error) from error
        hand_out(tensors, mine, group, split, world.device)

    def misfit(self, error: BaseException) -> ValueError:
        """What to raise where the tensors are not those of the model."""
        reason = str(error).strip().splitlines()
        return ValueError(
            f"{self.path} does not fit this model: {reason[-1] if reason else type(error).__name__}; "
            "use the model configuration it was written with"
        )

    def present(self, names: Iterable[str], world: World, may_differ: Callable[[str], bool]) -> dict[str, str]:
        """Key in the files by name, for those of `names` that are to be read; says in one line each what differs.

        Args:
            names: what a model asks for.
            world: all ranks, of which the first logs.
            may_differ: as of `load_tensors`.
        """
        stored, names = self.stored(), list(names)
        lacking = [name for name in names if name not in stored and may_differ(name)]
        kinds = {name.split(".")[0] for name in names}
        asked = set(names)
        unused = [name for name in stored if name not in asked and may_differ(name) and name.split(".")[0] in kinds]
        if lacking and world.is_main:
            logger.warning("%s lacks %s: they keep their initial values", self.path, _name_some(lacking))
        if unused and world.is_main:
            logger.warning("%s also holds %s, which this model has no place for", self.path, _name_some(unused))
        return {name: stored[name].key if name in stored else name for name in names if name not in lacking}


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
    partial = begin(folder, step, world)
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
            raise OSError(f"cannot write the checkpoint of step {step} in {folder}: {reason}") from error
    world.barrier()
    return publish(folder, step, state, world, keep_last=keep_last)


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
    refused: dict[Path, str] = {}
    for name in names:
        fault = _fault(Path(name), world)
        if fault is None:
            if set_aside and world.is_main:
                for path in refused:
                    move_aside(path)
            world.barrier()
            return _read(Path(name))
        refused[Path(name)] = fault
        if world.is_main:
            logger.warning("checkpoint refused: %s: %s", name, fault)
    if names:
        newest, fault = next(iter(refused.items()))
        raise ValueError(
            f"run.resume: none of the {len(names)} checkpoints in {folder} is intact ({newest.name}: {fault}); "
            "restore one, or move the folder away to start anew"
        )
    return None


def open_checkpoint(path: Path, world: World) -> Checkpoint:
    """The checkpoint in `path`, or the newest good one if `path` holds several.

    Raises:
        ValueError: `path` holds no intact checkpoint.
    """
    is_single = world.broadcast((path / MANIFEST).exists() or is_checkpoint_name(path.name))
    if is_single:
        fault = _fault(path, world)
        if fault is not None:
            raise ValueError(
                f"checkpoint refused: {path}: {fault}; restore it from a copy, or choose another checkpoint"
            )
        return _read(path)
    found = find_checkpoint(path, world) or find_checkpoint(path / "checkpoints", world)
    if found is None:
        raise ValueError(
            f"no checkpoint in {path}: expected a folder step_*, or one that holds such folders{foreign_note(path)}"
        )
    return found


def _fault(path: Path, world: World) -> str | None:
    """Why a checkpoint cannot be used, agreed by all ranks; None if it is intact, and data only."""
    fault = find_fault(path, world)
    if fault is not None or not torch_dist.is_format_of(path):
        return fault
    found: str | None = world.broadcast(torch_dist.find_code(path) if world.is_main else None)
    return found


def _read(path: Path) -> Checkpoint:
    state = json.loads((path / STATE).read_text())
    if state.get("format_version") != FORMAT_VERSION:
        found = state.get("format_version")
        raise ValueError(f"{path} has format version {found}, this version of dbsp_megatron reads {FORMAT_VERSION}")
    return Checkpoint(path=path, step=state["step"], state=state)
