"""The list of clips: which, in which order, and what happens to bad files."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.conftest import FrameNumbers, WriteAudio, WriteVideo

av = pytest.importorskip("av", reason="needs PyAV")

from dbsp_megatron.data.config import DataConfig  # noqa: E402
from dbsp_megatron.data.dataset import VideoDataset  # noqa: E402
from dbsp_megatron.data.patches import PixelPatchEncoder  # noqa: E402
from dbsp_megatron.data.video import VideoError  # noqa: E402


def config_for(*paths: Path | str, **settings: Any) -> DataConfig:
    """Clips of 3 frames of 32 x 48 pixels unless told otherwise."""
    settings = {"height": 32, "width": 48, "num_frames": 3, **settings}
    return DataConfig(paths=[str(path) for path in paths], **settings)


def clip_names(dataset: VideoDataset) -> list[str]:
    return [dataset[i].name for i in range(len(dataset))]


@pytest.mark.parametrize(
    ("settings", "clips"),
    [
        ({}, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        ({"frame_stride": 2}, [[0, 2, 4], [6, 8, 10]]),
        ({"frame_stride": 2, "clip_stride": 4}, [[0, 2, 4], [4, 6, 8], [8, 10, 12]]),
        ({"frame_stride": 6}, [[0, 6, 12]]),
        ({"clip_stride": 5, "max_clips_per_file": 2}, [[0, 1, 2], [5, 6, 7]]),
        ({"num_frames": 13}, [list(range(13))]),
        ({"num_frames": 1, "clip_stride": 6}, [[0], [6], [12]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("probe", ["decode", "packets"])
def test_dataset_cuts_clips(
    tmp_path: Path,
    write_video: WriteVideo,
    frame_numbers: FrameNumbers,
    settings: dict[str, Any],
    clips: list[list[int]],
    probe: str,
) -> None:
    path = write_video(tmp_path / "a.mp4", 13, options={"g": "4"})
    dataset = VideoDataset(config_for(path, probe=probe, **settings))
    assert len(dataset) == len(clips)
    for i, clip in enumerate(dataset[i] for i in range(len(dataset))):
        assert clip.index == i
        assert clip.name == f"a.mp4@{clips[i][0]}"
        assert clip.video.shape == (3, len(clips[i]), 32, 48)
        assert clip.video.dtype == torch.float32
        assert frame_numbers(clip.video) == clips[i]


def test_dataset_gives_the_same_bits_every_time(tmp_path: Path, write_video: WriteVideo) -> None:
    for name in ("a.mp4", "b c.mp4", "naïve-日本.mp4"):
        write_video(tmp_path / name, 9, options={"g": "4"})
    config = config_for(tmp_path, height=24, width=24, cache_bytes=0)
    first, second = VideoDataset(config), VideoDataset(config)
    assert first.digest == second.digest
    expected = [first[i] for i in range(len(first))]
    for i in reversed(range(len(second))):
        assert second[i].name == expected[i].name
        assert torch.equal(second[i].video, expected[i].video)
    assert {clip.name.rpartition("@")[0] for clip in expected} == {"a.mp4", "b c.mp4", "naïve-日本.mp4"}


def test_dataset_orders_files_by_entry_and_name_and_drops_duplicates(
    tmp_path: Path, write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one/b.mp4", "one/a.mp4", "two/a.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_video(tmp_path / name, 3)
    (tmp_path / "one" / "link.mp4").symlink_to(tmp_path / "two" / "a.mp4")
    monkeypatch.chdir(tmp_path)
    dataset = VideoDataset(config_for("two", "one", "one/../one/*.mp4", tmp_path / "one" / "b.mp4"))
    assert clip_names(dataset) == ["a.mp4@0", "a.mp4@0", "b.mp4@0"]
    assert dataset.skipped == []


def test_dataset_order_does_not_depend_on_where_the_files_lie(tmp_path: Path, write_video: WriteVideo) -> None:
    """Nodes may mount the same data in different places; their datasets must still agree."""
    for root in ("x", "y/z"):
        (tmp_path / root / "sub").mkdir(parents=True)
        for name in ("b.mp4", "sub/a.mp4"):
            write_video(tmp_path / root / name, 4)
    first, second = (VideoDataset(config_for(tmp_path / root)) for root in ("x", "y/z"))
    assert clip_names(first) == clip_names(second) == ["b.mp4@0", "sub/a.mp4@0"]
    assert first.digest == second.digest


def test_digest_tells_datasets_apart(tmp_path: Path, write_video: WriteVideo) -> None:
    path = write_video(tmp_path / "a.mp4", 9)
    settings: list[dict[str, Any]] = [{}, {"clip_stride": 2}, {"frame_stride": 2}, {"height": 24}, {"num_frames": 2}]
    digests = [VideoDataset(config_for(path, **extra)).digest for extra in settings]
    write_video(path, 10)
    digests.append(VideoDataset(config_for(path)).digest)
    assert len(set(digests)) == 6


@pytest.fixture
def bad_folder(tmp_path: Path, write_video: WriteVideo, write_audio: WriteAudio) -> Path:
    """Two good files among six bad ones."""
    for name in ("good.mp4", "zz.mp4"):
        write_video(tmp_path / name, 6)
    data = write_video(tmp_path / "cut.mp4", 30).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    write_video(tmp_path / "short.mp4", 2)
    write_audio(tmp_path / "sound.mp4")
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "zero.mp4").touch()
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    return tmp_path


BAD_FILES = {
    "cut.mp4": "cannot be opened as a video",
    "gone.mp4": "is not a regular file",
    "short.mp4": "is too short: it has 2 frames, a clip needs 3 (data.num_frames=3, data.frame_stride=1)",
    "sound.mp4": "has no video stream (only audio)",
    "text.mp4": "cannot be opened as a video",
    "zero.mp4": "is empty (0 bytes)",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_dataset_stops_at_a_bad_file_with_one_line(bad_folder: Path, name: str) -> None:
    with pytest.raises(VideoError) as caught:
        VideoDataset(config_for(bad_folder / "good.mp4", bad_folder / name))
    message = str(caught.value)
    assert message.startswith(f"{bad_folder / name}: {BAD_FILES[name]}")
    assert "data.skip_bad_data=true" in message
    assert "\n" not in message


def test_dataset_counts_what_it_skips(bad_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = str(bad_folder / "nowhere" / "*.mp4")
    with caplog.at_level(logging.WARNING):
        dataset = VideoDataset(config_for(bad_folder, nowhere, skip_bad_data=True))
    assert clip_names(dataset) == ["good.mp4@0", "good.mp4@3", "zz.mp4@0", "zz.mp4@3"]
    reasons = dict(dataset.skipped)
    assert len(reasons) == len(dataset.skipped) == 7
    assert "the pattern matches no video file" in reasons[nowhere]
    for name, words in BAD_FILES.items():
        assert reasons[str(bad_folder / name)].startswith(words)
    assert "skipped 7 bad entries" in caplog.text


def test_dataset_stops_when_everything_was_skipped(bad_folder: Path) -> None:
    with pytest.raises(VideoError, match=r"data\.paths: no clip is left.*2 times.*zero\.mp4: is empty"):
        VideoDataset(config_for(bad_folder / "zero.mp4", bad_folder / "text.mp4", skip_bad_data=True))


def test_dataset_reports_a_file_that_vanished(tmp_path: Path, write_video: WriteVideo) -> None:
    path = write_video(tmp_path / "a.mp4", 6)
    dataset = VideoDataset(config_for(path))
    path.unlink()
    with pytest.raises(VideoError, match=r"a\.mp4: does not exist"):
        dataset[1]


def test_dataset_rejects_indices_out_of_range(tmp_path: Path, write_video: WriteVideo) -> None:
    dataset = VideoDataset(config_for(write_video(tmp_path / "a.mp4", 6)))
    for index in (2, -1):
        with pytest.raises(IndexError, match=rf"\[0, 2\), got {index}"):
            dataset[index]
    assert [clip.index for clip in dataset] == [0, 1]  # type: ignore[attr-defined]


def test_cache_is_bounded_by_bytes_and_forgets_the_oldest(
    tmp_path: Path, write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip_bytes = 3 * 3 * 32 * 48 * 4
    path = write_video(tmp_path / "a.mp4", 12)
    dataset = VideoDataset(config_for(path, cache_bytes=2 * clip_bytes + 1))
    decoded: list[int] = []

    def count(info: Any, frames: range, **size: int) -> torch.Tensor:
        decoded.append(frames[0])
        return torch.full((3, 3, 32, 48), float(frames[0]))

    monkeypatch.setattr("dbsp_megatron.data.dataset.read_frames", count)
    for index in (0, 1, 0, 2, 0, 1):
        assert dataset[index].video[0, 0, 0, 0] == 3 * index
    assert decoded == [0, 3, 6, 3]


def test_dataset_survives_pickling(tmp_path: Path, write_video: WriteVideo) -> None:
    """Loader workers that are spawned get the dataset by pickle."""
    dataset = VideoDataset(config_for(write_video(tmp_path / "a.mp4", 6)))
    copy: VideoDataset = pickle.loads(pickle.dumps(dataset))
    assert copy.digest == dataset.digest
    assert torch.equal(copy[1].video, dataset[1].video)


@pytest.mark.parametrize("cache_bytes", [0, 10**9])
def test_cache_is_safe_from_changes_in_place(tmp_path: Path, write_video: WriteVideo, cache_bytes: int) -> None:
    dataset = VideoDataset(config_for(write_video(tmp_path / "a.mp4", 3), cache_bytes=cache_bytes))
    expected = dataset[0].video.clone()
    dataset[0].video.zero_()
    assert torch.equal(dataset[0].video, expected)


def test_dataset_feeds_the_patch_encoder(tmp_path: Path, write_video: WriteVideo) -> None:
    config = config_for(write_video(tmp_path / "a.mp4", 4), num_frames=4, patch_size=(2, 8, 16))
    video = VideoDataset(config)[0].video[None]
    encoder = PixelPatchEncoder(config.patch_size)
    tokens, grid = encoder.encode(video)
    assert grid == (2, 4, 3)
    assert torch.equal(encoder.decode(tokens, grid), video)


def test_dataset_reads_the_demo_clips() -> None:
    config = DataConfig(height=48, width=64, num_frames=5, frame_stride=2, max_clips_per_file=2, patch_size=(1, 8, 8))
    try:
        dataset = VideoDataset(config)
    except VideoError as error:
        if error.path != "demo":
            raise
        pytest.skip(error.reason)
    assert clip_names(dataset) == [
        f"{name}@{start}" for name in ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4") for start in (0, 10)
    ]
    for clip in (dataset[i] for i in range(len(dataset))):
        assert clip.video.shape == (3, 5, 48, 64)
        # Real pictures: neither blank nor repeated.
        assert clip.video.std() > 0.05
        assert all(not torch.equal(clip.video[:, t], clip.video[:, t + 1]) for t in range(4))
