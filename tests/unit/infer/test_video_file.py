"""Written videos can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbsp_megatron.infer.video_file import write_mp4


@pytest.mark.parametrize(("height", "width"), [(32, 48), (33, 47)])
def test_write_mp4_round_trips(tmp_path: Path, height: int, width: int) -> None:
    """Odd sizes are padded by one pixel; values outside [-1, 1] are clipped."""
    import av

    levels = torch.tensor([-1.5, -0.5, 0.0, 0.5, 1.5])
    video = levels.view(1, -1, 1, 1).expand(3, -1, height, width)
    assert write_mp4(video, tmp_path / "out" / "a.mp4", fps=5) in ("libx264", "mpeg4")
    with av.open(str(tmp_path / "out" / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 5
    assert [frame.shape for frame in frames] == [(height + height % 2, width + width % 2, 3)] * 5
    expected = [0, 64, 128, 191, 255]
    assert all(abs(frame.mean() - level) < 6 for frame, level in zip(frames, expected, strict=True))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.mp4"]
