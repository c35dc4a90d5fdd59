"""Continuing a run: one process at a time in its folder, and with settings that mean the same training."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.observability import get_logger
from dbsp_megatron.train.checkpoint import Checkpoint
from dbsp_megatron.train.distributed import World

_FREE_SECTIONS = ("sp", "parallel", "run", "wandb")
"""Settings that do not change what is trained."""
_FREE_KEYS = frozenset(
    f"train.{key}"
    for key in ("steps", "micro_batch_size", "precision", "device", "recompute", "checkpoint_every", "keep_last")
) | {
    "train.engine",
    "train.compile",
    "train.async_checkpoint",
    "train.checkpoint_format",
    "train.log_every",
    "train.eval_every",
    "train.check",
    "train.timeout_s",
    "data.cache_bytes",
    "data.prefetch_batches",
    "data.probe",
}
_FIXED_KEYS = frozenset(
    f"data.{key}"
    for key in ("height", "width", "num_frames", "frame_stride", "clip_stride", "max_clips_per_file", "patch_size")
) | {"train.seed", "optim.name", "lora.rank", "lora.targets", "lora.modules_to_save"}
"""A change of these makes another data set or another noise of the same steps."""

logger = get_logger(__name__)


@contextmanager
def run_lock(folder: Path, world: World) -> Iterator[None]:
    """Hold the run folder: a second run of the same name would mix its files with these; collective.

    Raises:
        ValueError: on every rank: another process holds it, or it cannot be written.
    """
    handle, problem = _lock(folder) if world.is_main else (-1, None)
    try:
        problem = world.broadcast(problem)
        if problem is not None:
            raise ValueError(problem)
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def _lock(folder: Path) -> tuple[int, str | None]:
    """Handle of the locked file (-1 if there is none), and why it could not be locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return -1, f"run.root: cannot write {folder} ({error.strerror}); choose another run.root or run.name"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 100).decode(errors="replace").strip() or "another process"
        return handle, f"run.name: {folder} is in use by {holder}; wait for it to end or choose another run.name"
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()}\n".encode())
    return handle, None


def check_continuation(state: Mapping[str, Any], config: TrainConfig, model: DiTConfig, *, is_main: bool) -> None:
    """Compare a checkpoint's settings with those of the run that wants to go on from it.

    Settings that would make another training under the old name are refused, other changes are named in one warning.

    Args:
        state: the checkpoint's JSON state.
        config: the new run, its seed as asked for (-1: any).
        model: the new run's model.
        is_main: whether this rank logs.

    Raises:
        ValueError: model, data or seed differ.
    """
    saved, asked = _flat(state["config"]), _flat(dataclasses.asdict(config))
    changed = [key for key in asked if key in saved and saved[key] != asked[key]]
    changed = [key for key in changed if key.split(".")[0] not in _FREE_SECTIONS and key not in _FREE_KEYS]
    if config.train.seed == -1 and "train.seed" in changed:
        changed.remove("train.seed")
    fixed = [key for key in changed if key in _FIXED_KEYS]
    # A checkpoint has an average or has none.
    if "train.ema_decay" in changed and not (saved["train.ema_decay"] and asked["train.ema_decay"]):
        fixed.append("train.ema_decay")
    neutral = {"recompute", "init_seed"}
    ours, theirs = _flat({"model": dataclasses.asdict(model)}), _flat({"model": state["model"]})
    fixed += [
        key for key in ours if theirs.get(key, ours[key]) != ours[key] and key.removeprefix("model.") not in neutral
    ]
    told = saved | theirs, asked | ours
    if fixed:
        raise ValueError(
            f"run.name={config.run.name} holds a checkpoint of another training: {_differences(fixed, *told)}; choose "
            "another run.name (run.resume=PATH starts from this checkpoint), or the settings it was made with"
        )
    if changed and is_main:
        logger.warning("the run goes on with other settings than before: %s", _differences(changed, *told))


def _differences(keys: list[str], saved: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} was {saved.get(key)!r}, is {asked.get(key)!r}" for key in keys)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; tuples as lists, as JSON gives them back."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def resolve_seed(seed: int, checkpoint: Checkpoint | None, world: World) -> int:
    """The run's seed: as given, else the checkpoint's, else one drawn by rank 0 for all; collective."""
    if seed >= 0:
        if checkpoint is not None and checkpoint.state["seed"] != seed:
            logger.warning("train.seed=%d differs from the checkpoint's %d", seed, checkpoint.state["seed"])
        return seed
    if checkpoint is not None:
        return int(checkpoint.state["seed"])
    return int(world.broadcast(random.SystemRandom().randrange(2**31)))
