"""Probing and decoding of real files, good and bad."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.data.conftest import FrameNumbers, WriteAudio, WriteVideo

av = pytest.importorskip("av", reason="needs PyAV")

from dbsp_megatron.data.video import VideoError, probe_video, read_frames  # noqa: E402

FORMATS = [
    ("mp4", "mpeg4", "yuv420p", {"g": "5"}),
    ("mp4", "libx264", "yuv420p", {"g": "7", "bf": "2"}),
    ("mkv", "libx264", "yuv444p", {"g": "7", "bf": "2"}),
    ("mkv", "ffv1", "bgr0", {}),
    ("mkv", "libx265", "yuv420p", {"g": "6", "x265-params": "log-level=none"}),
    ("ts", "mpeg2video", "yuv420p", {"g": "6", "bf": "2"}),
    ("avi", "mpeg4", "yuv420p", {"g": "6", "bf": "2"}),
    ("webm", "libvpx", "yuv420p", {"g": "6", "qmin": "0", "qmax": "63"}),
]


def plain_decode(path: Path) -> Tensor:
    """All frames by PyAV alone: float32 [3, T, H, W] in [-1, 1]."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2).float() / 127.5 - 1


@pytest.mark.parametrize("probe", ["decode", "packets"])
@pytest.mark.parametrize(
    ("suffix", "codec", "pix_fmt", "options"), FORMATS, ids=lambda v: str(v) if isinstance(v, str) else ""
)
def test_read_frames_equals_a_plain_decode_from_any_start(
    tmp_path: Path,
    write_video: WriteVideo,
    frame_numbers: FrameNumbers,
    suffix: str,
    codec: str,
    pix_fmt: str,
    options: dict[str, str],
    probe: str,
) -> None:
    """Seeking must not change a bit: open groups of pictures, reordered frames and missing time stamps included."""
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    path = write_video(tmp_path / f"a.{suffix}", 23, size=(34, 50), codec=codec, pix_fmt=pix_fmt, options=options)
    expected = plain_decode(path)
    assert expected.shape == (3, 23, 34, 50)
    info = probe_video(str(path), probe=probe)
    assert info.num_frames == 23
    for start in (0, 1, 4, 5, 6, 7, 11, 12, 17, 19):
        indices = [i for i in (start, start + 1, start + 4) if i < 23]
        video = read_frames(info, indices, height=34, width=50)
        assert video.dtype == torch.float32
        assert torch.equal(video, expected[:, indices])
        assert frame_numbers(video) == indices


def test_read_frames_seeks_instead_of_decoding_from_the_start(
    tmp_path: Path, write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = probe_video(str(write_video(tmp_path / "a.mp4", 28, options={"g": "5"})))
    assert info.keyframes == tuple(range(0, 28, 5))

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("decoded from the start")

    expected = plain_decode(tmp_path / "a.mp4")[:, 22:25]
    monkeypatch.setattr("dbsp_megatron.data.video._frames_from_start", fail)
    assert torch.equal(read_frames(info, [22, 23, 24], height=32, width=48), expected)


@pytest.mark.parametrize(
    "size", [(32, 48), (16, 24), (17, 13), (64, 96), (40, 20), (7, 90), (1, 1)], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_read_frames_covers_and_crops_about_the_centre(
    tmp_path: Path, write_video: WriteVideo, size: tuple[int, int]
) -> None:
    path = write_video(tmp_path / "a.mkv", 3, size=(32, 48), codec="ffv1", pix_fmt="bgr0")
    height, width = size
    scale = max(height / 32, width / 48)
    new = max(height, round(32 * scale)), max(width, round(48 * scale))
    expected = F.interpolate(
        plain_decode(path).transpose(0, 1), size=new, mode="bilinear", antialias=True, align_corners=False
    )
    top, left = (new[0] - height) // 2, (new[1] - width) // 2
    expected = expected[:, :, top : top + height, left : left + width].transpose(0, 1)
    video = read_frames(probe_video(str(path)), [0, 1, 2], height=height, width=width)
    assert video.shape == (3, 3, height, width)
    assert video.min() >= -1
    assert video.max() <= 1
    torch.testing.assert_close(video, expected)


def test_read_frames_keeps_the_shown_aspect_of_anamorphic_video(tmp_path: Path) -> None:
    """Pixels twice as wide as high: a circle of the scene must stay a circle."""
    with av.open(str(tmp_path / "wide.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=25, options={"qmin": "2", "qmax": "2"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = 2
        image = np.zeros((32, 32, 3), dtype=np.uint8)
        image[8:24, 12:20] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    video = read_frames(probe_video(str(tmp_path / "wide.mp4")), [0], height=32, width=32)
    bright = video[0, 0] > 0
    assert bright[16].sum() == bright[:, 16].sum() == 16


def test_read_frames_counts_frames_of_variable_rate_video(
    tmp_path: Path, write_video: WriteVideo, frame_numbers: FrameNumbers
) -> None:
    pts = [0, 40, 50, 300, 301, 800, 840, 900, 1500, 1501]
    path = write_video(tmp_path / "vfr.mkv", 10, codec="ffv1", pix_fmt="bgr0", pts=pts)
    info = probe_video(str(path))
    assert info.frame_pts == tuple(pts)
    assert frame_numbers(read_frames(info, range(1, 10, 3), height=32, width=48)) == [1, 4, 7]


@pytest.mark.parametrize("indices", [[], [-1], [5], [2, 1], [1, 1]], ids=str)
def test_read_frames_rejects_indices(tmp_path: Path, write_video: WriteVideo, indices: list[int]) -> None:
    info = probe_video(str(write_video(tmp_path / "a.mp4", 5)))
    with pytest.raises(ValueError, match=r"strictly ascending in \[0, 5\)"):
        read_frames(info, indices, height=32, width=48)


def test_probe_video_does_not_believe_the_container(tmp_path: Path, write_video: WriteVideo) -> None:
    path = write_video(tmp_path / "a.avi", 9)
    data = bytearray(path.read_bytes())
    length = data.index(b"strh") + 8 + 32
    assert int.from_bytes(data[length : length + 4], "little") == 9
    data[length : length + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(data)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 1000
    assert probe_video(str(path)).num_frames == 9
    assert probe_video(str(path), probe="packets").num_frames == 9


def test_probe_video_stops_after_max_frames(tmp_path: Path, write_video: WriteVideo) -> None:
    path = str(write_video(tmp_path / "a.mp4", 12))
    assert probe_video(path, max_frames=5).num_frames == 5
    assert probe_video(path, max_frames=50).num_frames == 12


def check_rejected(path: Path, words: str, probe: str = "decode") -> None:
    """Probing must fail with one line that starts with the path."""
    with pytest.raises(VideoError, match=words) as caught:
        probe_video(str(path), probe=probe)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


@pytest.mark.parametrize("probe", ["decode", "packets"])
def test_probe_video_rejects_files_that_are_no_video(tmp_path: Path, write_audio: WriteAudio, probe: str) -> None:
    (tmp_path / "text.mp4").write_text("a shopping list\n" * 50)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "link.mp4").symlink_to(tmp_path / "gone.mp4")
    check_rejected(tmp_path / "text.mp4", "cannot be opened as a video", probe)
    check_rejected(tmp_path / "empty.mp4", r"is empty \(0 bytes\)", probe)
    check_rejected(tmp_path / "missing.mp4", "does not exist", probe)
    check_rejected(tmp_path / "link.mp4", "is not a regular file", probe)
    check_rejected(tmp_path, "is not a regular file", probe)
    check_rejected(write_audio(tmp_path / "audio.mp4"), r"has no video stream \(only audio\)", probe)
    song = write_audio(tmp_path / "song.mp4", cover=True)
    check_rejected(song, r"no video stream \(only audio, cover picture\)", probe)


@pytest.mark.parametrize("probe", ["decode", "packets"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("index_first", [True, False], ids=["index-first", "index-last"])
def test_probe_video_rejects_truncated_files(
    tmp_path: Path, write_video: WriteVideo, index_first: bool, share: float, probe: str
) -> None:
    options = {"movflags": "faststart"} if index_first else {}
    path = write_video(tmp_path / "cut.mp4", 20, size=(64, 64), container_options=options)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    check_rejected(path, r"cut short|cannot be opened", probe)


@pytest.mark.parametrize("probe", ["decode", "packets"])
def test_probe_video_rejects_files_cut_between_packets(tmp_path: Path, write_video: WriteVideo, probe: str) -> None:
    """FFmpeg reports a clean end of file here."""
    path = write_video(tmp_path / "cut.mp4", 20, container_options={"movflags": "faststart"})
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    end = (packets[11].pos or 0) + packets[11].size
    path.write_bytes(path.read_bytes()[:end])
    check_rejected(path, r"is cut short \(\d+ bytes are missing\)", probe)


@pytest.mark.parametrize("probe", ["decode", "packets"])
def test_probe_video_leaves_out_frames_hidden_by_an_edit_list(
    tmp_path: Path, write_video: WriteVideo, frame_numbers: FrameNumbers, probe: str
) -> None:
    """Trimmed files keep frames that must not be shown: they are neither counted nor taken for a cut."""
    path = write_video(tmp_path / "trim.mp4", 20, codec="libx264", options={"bf": "2", "g": "5"})
    data = bytearray(path.read_bytes())
    entry = data.index(b"elst") + 12
    data[entry : entry + 8] = (400).to_bytes(4, "big") + (1024 + 9 * 512).to_bytes(4, "big")
    path.write_bytes(data)
    info = probe_video(str(path), probe=probe)
    assert info.num_frames == 10
    assert frame_numbers(read_frames(info, range(10), height=32, width=48)) == list(range(9, 19))
    assert frame_numbers(read_frames(info, [7, 8], height=32, width=48)) == [16, 17]


def test_probe_video_accepts_junk_behind_the_last_box(tmp_path: Path, write_video: WriteVideo) -> None:
    path = write_video(tmp_path / "a.mp4", 5)
    path.write_bytes(path.read_bytes() + b"\x7f" * 40)
    assert probe_video(str(path)).num_frames == 5


def test_probe_video_rejects_damage_inside_a_frame(tmp_path: Path, write_video: WriteVideo) -> None:
    """FFmpeg would hide the damage and show a repeated or grey picture."""
    path = write_video(tmp_path / "bad.mp4", 12, size=(64, 64), options={"g": "3"})
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    begin, size = packets[6].pos or 0, packets[6].size
    data = bytearray(path.read_bytes())
    data[begin + size // 3 : begin + size] = b"\xff" * (size - size // 3)
    path.write_bytes(data)
    assert plain_decode(path).shape[1] == 12
    check_rejected(path, "is damaged")
    info = probe_video(str(path), probe="packets")
    with pytest.raises(VideoError, match="is damaged"):
        read_frames(info, [6, 7, 8], height=64, width=64)


def test_read_frames_reports_a_file_that_shrank(tmp_path: Path, write_video: WriteVideo) -> None:
    path = write_video(tmp_path / "a.mp4", 12)
    info = probe_video(str(path))
    write_video(path, 5)
    with pytest.raises(VideoError, match="only 5 frames decode"):
        read_frames(info, [3, 7], height=32, width=48)
    path.unlink()
    with pytest.raises(VideoError, match="does not exist"):
        read_frames(info, [3], height=32, width=48)


def test_video_error_is_one_line_and_survives_pickling() -> None:
    """Ranks and loader workers hand errors on by pickle."""
    error = VideoError("a b.mp4", "broken\n in two")
    copy: VideoError = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, VideoError)
    assert isinstance(copy, ValueError)
    assert str(copy) == str(error) == "a b.mp4: broken in two"
    assert (copy.path, copy.reason) == ("a b.mp4", "broken in two")
