"""What each sample of an image-to-video model starts from.

Legend: N tokens, K channels of a condition in a token.
"""

from __future__ import annotations

from torch import Tensor

from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.data.condition import condition_tokens, pixel_condition
from dbsp_megatron.data.latents import LatentInfo, read_with_condition
from dbsp_megatron.data.sources import VideoFile, expand_entry
from dbsp_megatron.data.video import probe_video, read_frames
from dbsp_megatron.infer.space import SampleSpace, first_frame_files
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.train.batches import ImageFeatures


class FirstFrames:
    """The first frames that a configuration names; samples take them in turns.

    Args:
        sample: `first_frame` and `image_context`.
        model: what is given them.
        space: what it makes.

    Raises:
        ValueError: a file is missing, or does not fit.
    """

    def __init__(self, sample: SampleConfig, model: DiTConfig, space: SampleSpace) -> None:
        self._model, self._space = model, space
        self._files: list[LatentInfo] | list[VideoFile] = []
        if model.condition_channels and space.is_latent:
            self._files = first_frame_files(sample.first_frame, model)
        elif model.condition_channels:
            self._files = expand_entry(sample.first_frame)
        self.names = [file.name if isinstance(file, LatentInfo) else f"{file.name}@0" for file in self._files]
        self._images: ImageFeatures | None = None
        if model.image_dim is not None:
            self._images = ImageFeatures(model, sample.image_context, self.names or None)
            self.names = self.names or self._images.names

    def name(self, index: int) -> str | None:
        """Name of what a sample starts from; None if it starts from noise alone."""
        return self.names[index % len(self.names)] if self.names else None

    def condition(self, index: int) -> Tensor | None:
        """Tokens [1, N, K] of a sample's first frame, fp32 on the CPU; None for a model that takes none.

        Raises:
            ValueError: the file cannot be read.
        """
        if not self._files:
            return None
        file = self._files[index % len(self._files)]
        if isinstance(file, LatentInfo):
            condition = read_with_condition(file)[1]
        else:
            frames, height, width = self._space.size
            first = read_frames(probe_video(file.path, max_frames=1), range(1), height=height, width=width)
            video = first.new_zeros(len(first), frames, height, width)
            video[:, :1] = first
            condition = pixel_condition(video, self._model.condition_channels)
        return None if condition is None else condition_tokens(condition[None], self._model.patch_size)

    def image_context(self, index: int) -> Tensor | None:
        """Image features [1, L, image_dim] of a sample, fp32 on the CPU; None for a model without an image."""
        name = self.name(index)
        return None if self._images is None or name is None else self._images.for_clips([name])
