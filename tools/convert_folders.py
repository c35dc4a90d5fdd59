"""What tools/convert_checkpoint.py does: checkpoints of dbsp-train from diffusers folders, and the other way round."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.data import DataConfig
from dbsp_megatron.infer.pipeline import model_from_state
from dbsp_megatron.models.convert import (
    Conversion,
    DiffusersFolder,
    from_diffusers_config,
    from_model_config,
    write_diffusers_folder,
)
from dbsp_megatron.models.convert.folder import CONFIG_NAME, GIB, refuse_existing
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.models.dit.config import model_config_text
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.train.checkpoint import Checkpoint, open_checkpoint, save_checkpoint
from dbsp_megatron.train.checkpoint_folder import list_checkpoints
from dbsp_megatron.train.distributed import World

MODEL_FILE = "model.yaml"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was, or would be, written."""

    output: Path
    """The folder."""
    class_name: str
    """Class of the model in diffusers."""
    num_parameters: int
    """Numbers in all tensors."""
    num_tensors: int
    """Tensors written."""
    num_bytes: int
    """Bytes of them."""
    notes: tuple[str, ...] = ()
    """What a user should know."""
    dry_run: bool = False
    """Nothing was written."""


def import_folder(
    folder: Path, output: Path, *, variant: str | None = None, dtype: str = "keep", dry_run: bool = False
) -> Converted:
    """Make a checkpoint of dbsp-train, and its model file, of a transformer of diffusers.

    Tensors of the same layout stay on disk until they are written; only those that are put together take memory, beside
    what writing a checkpoint takes.

    Args:
        folder: Of the transformer, or of a pipeline.
        output: A folder without checkpoints.
        variant: As of `DiffusersFolder`.
        dtype: Of the written tensors; `keep` leaves each as it is.
        dry_run: Check everything, write nothing.

    Raises:
        ValueError: The model cannot be expressed, files are not whole, or the output holds checkpoints already.
    """
    if list_checkpoints(output) or list_checkpoints(output / "checkpoints"):
        raise ValueError(f"{output} holds checkpoints already; choose another folder")
    with DiffusersFolder(folder, variant) as source:
        conversion = _described(source.config, source.path)
        ignored = conversion.check_theirs(source.shapes, str(source.path))
        cast = _caster(dtype)
        stored = {name: source.dtypes[name] for name in conversion.their_shapes}
        num_bytes = sum(
            torch.Size(shape).numel() * _target(dtype, stored[name]).itemsize
            for name, shape in conversion.their_shapes.items()
        )
        text, model_file = _model_file(conversion), output / MODEL_FILE
        if model_file.exists() and model_file.read_text(encoding="utf-8") != text:
            raise ValueError(f"{model_file} describes another model; choose another folder")
        if not dry_run:
            write_text(model_file, text)
            tensors = {f"model.{name}": cast(tensor) for name, tensor in conversion.to_ours(source.read)}
            state = _state(conversion, model_file)
            save_checkpoint(output / "checkpoints", 0, tensors, state, World(), keep_last=1)
    notes = [f"left out, as diffusers does: {len(ignored)} tensors like {ignored[0]}"] if ignored else []
    return _result(conversion, output, len(conversion.our_shapes), num_bytes, notes, dry_run)


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    weights: str = "model",
    like: Path | None = None,
    dtype: str = "keep",
    max_shard_gib: float = 5.0,
    dry_run: bool = False,
) -> Converted:
    """Make a transformer of diffusers of a checkpoint; in memory are one layer and one file of tensors at a time.

    Args:
        checkpoint: A run folder or a checkpoint folder.
        output: A new or empty folder.
        weights: `model`, or `ema` for the averaged ones.
        like: Folder of a transformer whose config.json is kept. Default: what the checkpoint was imported from, else a
            new one.
        dtype: Of the written tensors; `keep` leaves each as it is.
        max_shard_gib: Largest file, in GiB.
        dry_run: Check everything, write nothing.

    Raises:
        ValueError: diffusers has no such model, the checkpoint is damaged or lacks these weights, the output exists.
    """
    if not max_shard_gib > 0:
        raise ValueError(f"--max-shard-gib must be a number > 0; got {max_shard_gib}")
    refuse_existing(output)
    world = World()
    opened = open_checkpoint(checkpoint, world)
    conversion = from_model_config(model_from_state(opened.state), _kept_config(opened.state, like))
    stored = _stored(opened, weights)
    conversion.check_ours({name: shape for name, (shape, _) in stored.items()}, f"{opened.path} ({weights})")
    kept = {name: stored[name][1] for name in conversion.our_shapes}
    written = {name: _target(dtype, found) for name, found in conversion.their_dtypes(kept).items()}
    sizes = {
        name: torch.Size(conversion.their_shapes[name]).numel() * target.itemsize for name, target in written.items()
    }

    if not dry_run:
        cast = _caster(dtype)
        config = {"_class_name": conversion.class_name, **conversion.config}
        tensors = (
            (name, cast(tensor)) for name, tensor in conversion.to_theirs(_LayerReader(opened, weights, stored).read)
        )
        write_diffusers_folder(output, config, tensors, sizes, max_shard_bytes=int(max_shard_gib * GIB))
    notes = [f"weights of {opened.path} (step {opened.step})"]
    return _result(conversion, output, len(sizes), sum(sizes.values()), notes, dry_run)


class _LayerReader:
    """Reads the tensors of a layer together: every read goes through the headers of all files of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, weights: str, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        self._checkpoint, self._weights, self._stored = checkpoint, weights, stored
        self._held: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the model; each may be asked for once."""
        if name not in self._held:
            layer = _layer_of(name)
            names = [name, *(other for other in self._stored if layer and other != name and _layer_of(other) == layer)]
            made = {other: torch.empty(shape, dtype=dtype) for other in names for shape, dtype in [self._stored[other]]}
            self._checkpoint.load_tensors({f"{self._weights}.{key}": tensor for key, tensor in made.items()}, World())
            self._held = made
        return self._held.pop(name)


def _layer_of(name: str) -> str:
    """`block.layers.N.`; empty for what is in no layer."""
    found = re.match(r"block\.layers\.\d+\.", name)
    return found.group() if found else ""


def _result(
    conversion: Conversion, output: Path, num_tensors: int, num_bytes: int, notes: list[str], dry_run: bool
) -> Converted:
    return Converted(
        output=output,
        class_name=conversion.class_name,
        num_parameters=conversion.num_parameters,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        notes=tuple(notes),
        dry_run=dry_run,
    )


def _described(config: Mapping[str, Any], path: Path) -> Conversion:
    try:
        return from_diffusers_config(config)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_NAME}: {error}") from error


def _target(dtype: str, stored: torch.dtype) -> torch.dtype:
    found: torch.dtype = stored if dtype == "keep" else getattr(torch, dtype)
    return found


def _caster(dtype: str) -> Callable[[Tensor], Tensor]:
    """Conversion to a dtype that refuses to make infinities of large weights."""

    def cast(tensor: Tensor) -> Tensor:
        made = tensor.to(_target(dtype, tensor.dtype))
        if made.dtype != tensor.dtype and not torch.equal(made.isfinite(), tensor.isfinite()):
            raise ValueError(f"--dtype {dtype} cannot hold weights as large as {tensor.abs().max():.3g}; use bfloat16")
        return made

    return cast


def _model_file(conversion: Conversion) -> str:
    head = f"# {conversion.class_name} of diffusers, imported. Parameters: {conversion.num_parameters:,}.\n"
    return head + model_config_text(conversion.model)


def _state(conversion: Conversion, model_file: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors; settings of training are the defaults."""
    return {
        "model": dataclasses.asdict(conversion.model),
        "config": dataclasses.asdict(TrainConfig(model=str(model_file), data=_data(conversion.model))),
        "seed": 0,
        "world_size": 1,
        "has_ema": False,
        "source": conversion.config,
    }


def _data(model: DiTConfig) -> DataConfig:
    """Videos of about the default size, in whole patches."""
    frames, height, width = (int(n) for n in model.patch_size)
    usual = DataConfig()
    return DataConfig(
        patch_size=(frames, height, width),
        num_frames=-(-usual.num_frames // frames) * frames,
        height=-(-usual.height // height) * height,
        width=-(-usual.width // width) * width,
    )


def _kept_config(state: Mapping[str, Any], like: Path | None) -> dict[str, Any] | None:
    """The config.json to keep, if any."""
    if like is None:
        source = state.get("source")
        return dict(source) if isinstance(source, Mapping) else None
    path = (like / "transformer" if (like / "model_index.json").is_file() else like) / CONFIG_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--like: {path} cannot be read as JSON ({error}); give the folder of a transformer"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"--like: {path} must hold a mapping; got {type(found).__name__}")
    return found


def _stored(checkpoint: Checkpoint, weights: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the weights in a checkpoint, by the names of the model's parameters."""
    found = {
        name.removeprefix(f"{weights}."): (entry.shape, entry.dtype)
        for name, entry in checkpoint.stored().items()
        if name.startswith(f"{weights}.")
    }
    if not found:
        raise ValueError(f"{checkpoint.path} holds no {weights} weights; use --weights model")
    return found
