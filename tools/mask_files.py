"""Block masks from files, from run folders and from the generator, one source a layer."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.masks.mask_file import FORMAT, MaskFile, unpack_bits
from dbsp_megatron.observability.metrics import FILE_NAME, read_metrics
from tools.structured_masks import BoolArray, make_mask, parse_geometry

SUFFIXES = (".npy", ".npz", ".safetensors")
_MASK_NAMES = ("mask", "masks", "blocks", "packed")
_RUN_ENTRIES = ("partitions", "samples", "imbalance.npz", FILE_NAME, "config.yaml")
"""What makes a folder a run folder; each is there only in some runs."""
_UNREADABLE = (OSError, ValueError, EOFError, TypeError, KeyError, MemoryError, NotImplementedError, RuntimeError,
               zipfile.BadZipFile, zlib.error)  # fmt: skip
"""What NumPy and zipfile raise for files that are cut short, empty, scrambled or of another kind."""


@dataclass(frozen=True, kw_only=True)
class MaskSource:
    """One layer's mask, loaded when asked for."""

    family: str
    """What the layers of one model have in common: the file, or the arguments of the generator."""
    layer: int
    """Layer within the family."""
    load: Callable[[], BoolArray]
    """Returns bool [H, Nq, Nk]."""

    @property
    def name(self) -> str:
        """Family and layer."""
        return f"{self.family} layer {self.layer}"


def generated_sources(
    kinds: Sequence[str],
    geometries: Sequence[str],
    densities: Sequence[float],
    seeds: Sequence[int],
    layers: Sequence[int],
) -> list[MaskSource]:
    """One source for each combination, layers innermost.

    Raises:
        ValueError: if a geometry is unknown.
    """
    for geometry in geometries:
        parse_geometry(geometry)

    def source(kind: str, geometry: str, density: float, seed: int, layer: int) -> MaskSource:
        return MaskSource(
            family=f"{kind} {geometry} {density:g} seed {seed}",
            layer=layer,
            load=lambda: make_mask(kind, geometry, density, seed, layer),
        )

    return [
        source(kind, geometry, density, seed, layer)
        for kind in kinds
        for geometry in geometries
        for density in densities
        for seed in seeds
        for layer in layers
    ]


def file_sources(path: Path) -> list[MaskSource]:
    """The masks in a file, or in `partitions/` of a run folder.

    `.npy` and `.npz` hold one mask or layers of them, as booleans, as 0 and 1, or packed by `numpy.packbits` along the
    last axis; an array `num_k_blocks` in an `.npz` gives its length before packing, else it is that of the rows. Of an
    `.npz` with several arrays that named mask, masks, blocks or packed is read. `.safetensors` may hold several masks,
    or be a file of the mask methods `file` and `paro`.

    Args:
        path: File or run folder.

    Returns:
        One source for each layer; none for a run folder that saved no masks.

    Raises:
        ValueError: if the path cannot be read, holds no mask or is a folder that no run left behind.
    """
    if path.is_dir():
        if not any((path / entry).exists() for entry in _RUN_ENTRIES):
            raise ValueError(
                f"{path} is no run folder, it has none of {', '.join(_RUN_ENTRIES)}; give the folder of one run, or "
                f"files that end in {', '.join(SUFFIXES)}"
            )
        saved = sorted((path / "partitions").glob("*.npz"))
        return [
            MaskSource(family=path.name, layer=_layer_number(file, index), load=source.load)
            for index, file in enumerate(saved)
            for source in file_sources(file)
        ]
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ValueError(
            f"masks must be a file that ends in {', '.join(SUFFIXES)} or a run folder, got {str(path)!r}; check the "
            "path"
        )
    if path.suffix == ".safetensors" and _is_mask_file(path):
        return _mask_file_sources(path)
    sources = []
    for name, stored, num_k_blocks in _read_arrays(path):
        where = f"{path.name}:{name}" if name else path.name
        layers = _as_layers(stored, num_k_blocks, where)
        sources += [
            MaskSource(family=where, layer=layer, load=lambda layer=layer, layers=layers: layers(layer))  # type: ignore[misc]
            for layer in range(_num_layers(stored))
        ]
    return sources


@dataclass(frozen=True, kw_only=True)
class RecordedImbalance:
    """Imbalance that a run itself measured."""

    what: str
    """Layer, sample, or all layers."""
    num_steps: int
    """Steps behind the means."""
    before: float
    """Mean without a plan."""
    after: float
    """Mean with the plans that were used."""
    worst_before: float
    """Largest of any step without a plan."""
    worst_after: float
    """Largest of any step with the plans that were used."""


def recorded_imbalance(folder: Path) -> list[RecordedImbalance]:
    """Reads what a training or sampling run logged: per layer if it kept that, else the mean over layers.

    Args:
        folder: Run folder.

    Raises:
        ValueError: if an array of the run cannot be read.
    """
    recorded = []
    if (folder / "imbalance.npz").is_file():
        before, after = _read_imbalance(folder / "imbalance.npz")
        recorded = [_recorded(f"layer {layer}", before[:, layer], after[:, layer]) for layer in range(before.shape[1])]
    elif (folder / FILE_NAME).is_file():
        keys = ("sp/imbalance_before", "sp/imbalance_after")
        rows = [row for row in read_metrics(folder) if all(isinstance(row.get(key), (int, float)) for key in keys)]
        if rows:
            columns = (np.array([row[key] for row in rows], dtype=float) for key in keys)
            recorded = [_recorded("mean of layers", *columns)]
    for saved in sorted(folder.glob("samples/**/*.json")):
        try:
            sample = json.loads(saved.read_text(encoding="utf-8"))
            values = [np.array([float(sample[key])]) for key in ("imbalance_before", "imbalance_after")]
        except (ValueError, KeyError, TypeError):
            continue
        recorded.append(_recorded(f"sample {saved.stem}", *values))
    return recorded


def _recorded(what: str, before: NDArray[Any], after: NDArray[Any]) -> RecordedImbalance:
    finite = np.isfinite(before) & np.isfinite(after)
    before, after = before[finite], after[finite]
    if not before.size:
        return RecordedImbalance(what=what, num_steps=0, **dict.fromkeys(_FIGURES, math.nan))
    figures = (float(figure) for figure in (before.mean(), after.mean(), before.max(), after.max()))
    return RecordedImbalance(what=what, num_steps=before.size, **dict(zip(_FIGURES, figures, strict=True)))


_FIGURES = ("before", "after", "worst_before", "worst_after")


def _layer_number(path: Path, index: int) -> int:
    digits = path.stem.rsplit("_", 1)[-1]
    return int(digits) if digits.isdecimal() else index


def _load(path: Path) -> Any:
    """An array, or the open archive of several, whatever the file is called."""
    try:
        return np.load(path, allow_pickle=False)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    why = " ".join(str(error).split()) or type(error).__name__
    return ValueError(
        f"{path} cannot be read: {why}; if it was cut short, copy or make it again, and save plain arrays with "
        "numpy.save, numpy.savez or safetensors"
    )


def _read_imbalance(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Imbalance before and after planning, float64 [steps, layers]."""
    loaded = _load(path)
    try:
        with loaded as arrays:
            before, after = (np.atleast_2d(np.asarray(arrays[key], dtype=float)) for key in ("before", "after"))
    except (*_UNREADABLE, AttributeError) as error:
        raise _unreadable(path, error) from error
    if before.ndim != 2 or before.shape != after.shape:
        raise ValueError(
            f"{path}: before and after must have one shape [steps, layers], got {list(before.shape)} and "
            f"{list(after.shape)}; remove the file, the run's {FILE_NAME} has the means"
        )
    return before, after


def _is_mask_file(path: Path) -> bool:
    """Whether `write_masks` made it, which packs bits in another order than NumPy."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as opened:
            return FORMAT in (opened.metadata() or {})
    except (SafetensorError, *_UNREADABLE) as error:
        raise _unreadable(path, error) from error


def _mask_file_sources(path: Path) -> list[MaskSource]:
    """Layers of a file of the mask methods `file` and `paro`."""
    file = MaskFile(path)

    def load(layer: int) -> BoolArray:
        return unpack_bits(file.packed(layer), file.num_blocks).numpy()

    return [
        MaskSource(family=path.name, layer=layer, load=lambda layer=layer: load(layer))  # type: ignore[misc]
        for layer in sorted(file.layers)
    ]


def _read_arrays(path: Path) -> list[tuple[str, NDArray[Any], int | None]]:
    """Name, array and length of the packed axis (if the file says it) of every mask in the file."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
        except (SafetensorError, *_UNREADABLE, AttributeError) as error:
            raise _unreadable(path, error) from error
        if not tensors:
            raise ValueError(f"{path} holds no tensor; save masks as bool [H, N, N] or [L, H, N, N]")
        return [(name if len(tensors) > 1 else "", tensor, None) for name, tensor in sorted(tensors.items())]
    loaded = _load(path)
    if isinstance(loaded, np.ndarray):
        return [("", loaded, None)]
    with loaded as arrays:
        names = [name for name in arrays.files if name != "num_k_blocks"]
        known = names if len(names) == 1 else [name for name in _MASK_NAMES if name in names]
        if not known:
            raise ValueError(
                f"{path} must hold an array named {', '.join(_MASK_NAMES)}, or one only, got "
                f"{', '.join(names) or 'none'}; rename the mask"
            )
        try:
            length = int(arrays["num_k_blocks"]) if "num_k_blocks" in arrays.files else None
            return [("", arrays[known[0]], length)]
        except _UNREADABLE as error:
            raise _unreadable(path, error) from error


def _num_layers(stored: NDArray[Any]) -> int:
    return stored.shape[0] if stored.ndim == 4 else 1


def _as_layers(stored: NDArray[Any], num_k_blocks: int | None, where: str) -> Callable[[int], BoolArray]:
    """Returns a function from layer to bool [H, Nq, Nk]; arrays stay packed until then."""
    if stored.ndim not in (3, 4) or 0 in stored.shape or stored.dtype.kind not in "bui":
        raise ValueError(
            f"{where}: a mask must be bool, 0 and 1 or packed bits of shape [H, N, N] or [L, H, N, N], got "
            f"{stored.dtype} {list(stored.shape)}; save one mask for each head"
        )
    layers = stored if stored.ndim == 4 else stored[None]
    num_rows, width = layers.shape[-2:]
    length = num_rows if num_k_blocks is None else num_k_blocks
    if stored.dtype == np.uint8 and width == -(-length // 8) and (width != length or bool((layers > 1).any())):
        return lambda layer: np.unpackbits(layers[layer], axis=-1, count=length).view(np.bool_)
    if stored.dtype != np.bool_ and not bool(((layers == 0) | (layers == 1)).all()):
        raise ValueError(
            f"{where}: {stored.dtype} {list(stored.shape)} holds other numbers than 0 and 1 and its last axis is not "
            f"the {-(-length // 8)} bytes of {length} packed blocks; save booleans, or num_k_blocks beside packed bits"
        )
    return lambda layer: np.ascontiguousarray(layers[layer]).astype(np.bool_)
