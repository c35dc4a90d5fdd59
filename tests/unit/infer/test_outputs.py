"""Outputs: pictures to the pixel, comparisons, and when one counts as there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbsp_megatron.infer.outputs import (
    SETTINGS,
    forget,
    is_done,
    media_file,
    with_suffix,
    write_comparison,
    write_media,
    write_settings,
)


def test_write_media_writes_an_image_to_the_pixel(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    pixels = torch.randint(0, 256, (3, 1, 7, 5), generator=torch.Generator().manual_seed(0))
    path = media_file(tmp_path / "a.b", is_video=False)
    assert write_media(pixels / 127.5 - 1, path, 0) == "png"
    assert path.name == "a.b.png"
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), pixels[:, 0].permute(1, 2, 0).numpy())


def test_write_media_writes_a_video(tmp_path: Path) -> None:
    path = media_file(tmp_path / "a", is_video=True)
    assert write_media(torch.zeros(3, 4, 16, 16), path, 8) in ("libx264", "mpeg4")
    assert path.read_bytes()[4:8] == b"ftyp"


def test_write_comparison_shows_pairs_of_frames(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    dense, sparse = torch.full((3, 9, 96, 96), -0.5), torch.full((3, 9, 96, 96), 0.5)
    write_comparison(dense, sparse, tmp_path / "c.png")
    with Image.open(tmp_path / "c.png") as image:
        sheet = np.asarray(image)
    # Frames 0, 3, 5 and 8 in rows, each dense on the left: 64 of 255, then 191.
    row = sheet[sheet.shape[0] // 8]
    assert [int(value) for value in (row[len(row) // 4][0], row[3 * len(row) // 4][0])] == [64, 191]
    assert sheet.shape[0] > 4 * 96


def test_is_done_needs_both_files_and_equal_settings(tmp_path: Path) -> None:
    stem = tmp_path / "a"
    media = media_file(stem, is_video=False)
    assert not is_done(stem, media, {"steps": 3})
    write_media(torch.zeros(3, 1, 4, 4), media, 0)
    assert not is_done(stem, media, {"steps": 3}), "the settings come last"
    write_settings(stem, {SETTINGS: {"steps": 3, "size": (1, 2), "seed": 9}})
    assert is_done(stem, media, {"steps": 3, "size": (1, 2), "seed": 9})
    assert is_done(stem, media, {"steps": 3}), "what is not asked for does not count"
    assert not is_done(stem, media, {"steps": 3}, ["compared"]), "without what is asked for it is not whole"
    with pytest.raises(ValueError, match=r"a.png exists and was made with other settings: steps was 3, is 4; name"):
        is_done(stem, media, {"steps": 4, "seed": 9})
    forget(stem)
    assert not is_done(stem, media, {"steps": 3})
    forget(stem)
    with_suffix(stem, ".json").write_text("{")
    assert not is_done(stem, media, {"steps": 3})
    write_settings(stem, {SETTINGS: {"steps": 3}})
    media.unlink()
    assert not is_done(stem, media, {"steps": 3})
