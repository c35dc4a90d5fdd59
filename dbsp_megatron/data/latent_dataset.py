"""A fixed, ordered list of clips that were encoded by a VAE beforehand, of one size or of several."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dbsp_megatron.data.clip import Clip
from dbsp_megatron.data.config import DataConfig
from dbsp_megatron.data.latents import LatentError, LatentInfo, find_latents, read_info, read_with_condition
from dbsp_megatron.data.patches import PixelPatchEncoder

logger = logging.getLogger(__name__)

_READERS = 16


class LatentDataset:
    """Latents of all files of `config.latents`, by index, in the order of their paths.

    The list is made at the start and depends on the files and the config only, so all ranks see the same one (`digest`
    compares them).

    Attributes:
        config: the settings; `latents`, `patch_size` and `skip_bad_data` count.
        channels: C of all clips.
        condition_channels: K of all clips, what an image-to-video model is given beside them; 0 for none.
        origin: of the largest clip.
        skipped: (path, reason) of everything left out; filled only with `config.skip_bad_data`.

    Raises:
        LatentError: a file cannot be used and `skip_bad_data` is off, nothing is left, or files do not belong together.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.skipped: list[tuple[str, str]] = []
        paths = find_latents(config.latents)
        # Headers are small: the time goes into waiting for a network file system, one file after the other.
        with ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(self._info, paths))
        self._clips = [info for info in found if isinstance(info, LatentInfo)]
        for bad in (entry for entry in found if isinstance(entry, LatentError)):
            self._skip(bad)
        if not self._clips:
            path, reason = self.skipped[0]
            raise LatentError(config.latents, f"no clip is left, all were skipped; the first: {path}: {reason}")
        if self.skipped:
            path, reason = self.skipped[0]
            logger.warning("skipped %d bad files of data.latents; the first: %s: %s", len(self.skipped), path, reason)
        self.channels = self._clips[0].shape[0]
        self.condition_channels = self._clips[0].condition_channels
        largest = max(range(len(self._clips)), key=lambda index: (math.prod(self._clips[index].size), -index))
        self.origin: Mapping[str, Any] | None = self._clips[largest].origin
        self._check_alike()

    def _info(self, path: str) -> LatentInfo | LatentError:
        try:
            info = read_info(path)
            PixelPatchEncoder(self.config.patch_size, info.shape[0]).grid_for(*info.size)
        except LatentError as error:
            return error
        except ValueError as error:
            return LatentError(path, f"does not fit data.patch_size: {error}")
        return info

    def _skip(self, error: LatentError) -> None:
        if not self.config.skip_bad_data:
            raise LatentError(
                error.path, f"{error.reason}; fix or remove it, or set data.skip_bad_data=true to leave out bad data"
            ) from error
        self.skipped.append((error.path, error.reason))

    def _check_alike(self) -> None:
        """Numbers of another VAE, or normalised otherwise, would train without complaint."""
        first = self._clips[0]
        for info in self._clips:
            if info.shape[0] != first.shape[0] or info.settings.get("vae") != first.settings.get("vae"):
                raise LatentError(
                    info.path,
                    f"was made by another VAE, or normalised otherwise, than {first.path}; keep them in folders of "
                    "their own",
                )
            if info.condition_channels != first.condition_channels:
                raise LatentError(
                    info.path,
                    f"has {info.condition_channels} channels of a condition, {first.path} has "
                    f"{first.condition_channels}; encode all of them with --first-frame, or none",
                )

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """T, H, W of every clip, by index."""
        return [info.size for info in self._clips]

    @property
    def digest(self) -> str:
        """Hex string over names, sizes and settings: equal on two ranks only if they have the same clips."""
        parts = [
            f"{info.name} {info.shape} {info.dtype} {info.condition_channels} "
            f"{json.dumps(info.settings, sort_keys=True)}"
            for info in self._clips
        ]
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    @property
    def names(self) -> list[str]:
        """Name of every clip, by index."""
        return [info.name for info in self._clips]

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> Clip:
        """Read a clip.

        Args:
            index: position in [0, len(self)).

        Raises:
            IndexError: the index is out of range.
            LatentError: the file changed or is damaged.
        """
        if not 0 <= index < len(self._clips):
            raise IndexError(f"clip index must be in [0, {len(self._clips)}), got {index}")
        info = self._clips[index]
        latents, condition = read_with_condition(info)
        return Clip(video=latents, name=info.name, index=index, condition=condition)
