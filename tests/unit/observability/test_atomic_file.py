"""Files are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_megatron.observability.atomic_file import atomic_path, set_aside, write_text


def test_atomic_path_leaves_the_old_file_when_the_writer_fails(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_text(target, "old")

    def half_write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half_write()
    assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_atomic_path_keeps_the_suffix_and_makes_folders(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.png"
    with atomic_path(target) as temporary:
        assert temporary.suffix == ".png"
        assert temporary.parent == target.parent
        temporary.write_bytes(b"x")
        assert not target.exists()
    assert target.read_bytes() == b"x"


def test_set_aside_takes_the_first_free_number(tmp_path: Path) -> None:
    target = tmp_path / "metrics.jsonl"
    for text in ("one", "two"):
        target.write_text(text)
        set_aside(target)
    assert not target.exists()
    assert (tmp_path / "metrics.1.jsonl").read_text() == "one"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "two"
