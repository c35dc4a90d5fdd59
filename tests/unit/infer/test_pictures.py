"""Pictures: turned as diffusers turns them, refused before anything runs, told apart by what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_megatron.infer.pictures import check_picture, picture_digest, read_picture

pytestmark = pytest.mark.diffusers


def _save(path: Path, orientation: int, shade: int = 0) -> Path:
    from PIL import Image

    picture = Image.new("RGBA", (6, 4), (shade, 20, 30, 255))
    picture.putpixel((0, 0), (250, 0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(path, exif=exif)
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
def test_read_picture_turns_as_diffusers_does(orientation: int, tmp_path: Path) -> None:
    from diffusers.utils import load_image

    path = _save(tmp_path / "a.png", orientation)
    picture = read_picture(str(path))
    assert picture.mode == "RGB"
    assert picture.size == ((6, 4) if orientation < 5 else (4, 6))
    assert picture.tobytes() == load_image(str(path)).tobytes()


def test_check_picture_refuses_what_is_none(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.png", 1)
    check_picture(str(path), "here")
    (tmp_path / "half.png").write_bytes(path.read_bytes()[:60])
    (tmp_path / "text.png").write_text("a cat")
    for name, says in (("half.png", "cannot be read"), ("text.png", "cannot be read"), ("no.png", "there is none at")):
        with pytest.raises(ValueError, match=f"line 3: image must be a picture file, .*{says}"):
            check_picture(str(tmp_path / name), "line 3")


def test_picture_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first, other = _save(tmp_path / "a.png", 1), _save(tmp_path / "b.png", 1, shade=9)
    same = tmp_path / "c.png"
    same.write_bytes(first.read_bytes())
    assert picture_digest(str(first)) == picture_digest(str(same)) != picture_digest(str(other))
    assert picture_digest("") == ""
