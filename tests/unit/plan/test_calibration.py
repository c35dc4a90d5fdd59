"""Calibration: nearest rates and curves, the file and its checks, the built-in reference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbsp_megatron.plan.calibration import Calibration, reference_calibration
from tests.unit.plan.rate_cases import make_calibration, make_curve, make_rate


def test_kernel_returns_what_was_measured() -> None:
    calibration = make_calibration()
    assert calibration.kernel("forward", "bfloat16", 4, 2, 2) is calibration.kernels[0]
    assert calibration.kernel("backward", "bfloat16", 4, 2, 2) is calibration.kernels[1]


def test_kernel_scales_the_nearest_and_says_so() -> None:
    wide = make_rate(block_size_q=8, block_size_k=8, block_us=9.0)
    made = make_calibration(kernels=(make_rate(), wide)).kernel("forward", "float16", 12, 6, 10)
    assert (made.block_us, made.row_us, made.launch_us) == pytest.approx((9.0 * 3 * 60 / 64, 0.1 * 3 * 6 / 8, 5.0))
    assert (made.dtype, made.head_dim, made.block_size_q, made.block_size_k) == ("float16", 12, 6, 10)
    assert "scaled from bfloat16, head_dim 4, blocks 8x8 to float16, head_dim 12, blocks 6x10" in made.note


def test_kernel_prefers_the_type_then_the_area_then_the_faster_engine() -> None:
    kernels = (
        make_rate(dtype="float16", engine="other_type"),
        make_rate(head_dim=8, engine="slow", block_us=3.0),
        make_rate(head_dim=8, engine="fast", block_us=2.0),
        make_rate(block_size_q=4, engine="other_area"),
    )
    calibration = make_calibration(kernels=kernels)
    assert calibration.kernel("forward", "bfloat16", 4, 2, 2).engine == "fast"
    assert calibration.kernel("forward", "float16", 4, 2, 2).engine == "other_type"
    assert calibration.kernel("forward", "bfloat16", 8, 2, 2, engine="slow").block_us == 3.0


def test_kernel_refuses_a_direction_that_was_not_measured() -> None:
    calibration = make_calibration(kernels=(make_rate(),))
    with pytest.raises(ValueError, match="no backward rate .there is: made_up forward.; measure it"):
        calibration.kernel("backward", "bfloat16", 4, 2, 2)
    with pytest.raises(ValueError, match="no fa4 forward rate"):
        calibration.kernel("forward", "bfloat16", 4, 2, 2, engine="fa4")


def test_files_without_multiprocessors_stay_readable_both_ways(tmp_path: Path) -> None:
    """Files that do not say how many there are hold the keys that they always held."""
    plain, said = make_calibration(), make_calibration(num_multiprocessors=132)
    assert "num_multiprocessors" not in plain.to_json()
    assert Calibration.from_json(plain.to_json()) == plain
    said.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").num_multiprocessors == 132
    assert reference_calibration().num_multiprocessors == 132
    for value in (0, -1, 1.5, "many"):
        with pytest.raises(ValueError, match="num_multiprocessors must be an integer of at least 1"):
            make_calibration(num_multiprocessors=value)


@pytest.mark.parametrize("name", ["head_dim", "block_size_q", "block_size_k"])
@pytest.mark.parametrize("value", [0, -4, 2.5, None])
def test_kernel_refuses_impossible_sizes(name: str, value: Any) -> None:
    sizes = {"head_dim": 4, "block_size_q": 2, "block_size_k": 2, name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value}"):
        make_calibration().kernel("forward", "bfloat16", **sizes)


@pytest.mark.parametrize("dtype", ["float64", None, []])
def test_kernel_refuses_unknown_types(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        make_calibration().kernel("forward", dtype, 4, 2, 2)


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5])
def test_link_refuses_impossible_groups(num_ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"num_ranks must be an integer of at least 1, got {num_ranks}"):
        make_calibration().link("p2p", num_ranks, "node")


def test_link_takes_the_nearest_group_size() -> None:
    links = tuple(make_curve("p2p", 1.0, 1.0, num_ranks=n) for n in (2, 8, 64))
    calibration = make_calibration(links=links)
    assert [calibration.link("p2p", n, "node").num_ranks for n in (1, 3, 4, 6, 23, 100)] == [2, 2, 8, 8, 64, 64]


def test_link_never_replaces_a_scope() -> None:
    calibration = make_calibration(links=(make_curve("p2p", 1.0, 1.0),))
    with pytest.raises(ValueError, match=r"no p2p curve of scope 'network' \(there is: p2p \(node\)\); measure"):
        calibration.link("p2p", 2, "network")
    with pytest.raises(ValueError, match="measure it with `torchrun --nproc_per_node 2 tools/fit_latency.py`, or"):
        calibration.link("all_to_all", 2, "node")


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    calibration = make_calibration(note="a note")
    calibration.save(tmp_path / "new" / "machine.json")
    assert Calibration.load(tmp_path / "new" / "machine.json") == calibration
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["machine.json"]


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Returns what replaces one entry of the stored calibration."""

    def change(stored: Any) -> None:
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("kernels", 1, "block_us", value=-1.0), "kernels[1]: block_us must be a finite number above 0"),
        (put("kernels", 0, "row_us", value=float("nan")), "kernels[0]: row_us"),
        (put("kernels", 0, "r_squared", value=0.5), "kernels[0]: r_squared must be between 0.9 and 1, got 0.5"),
        (put("kernels", 0, "block_us", value="1"), "kernels[0]: block_us"),
        (put("kernels", 0, "speed", value=1), "kernels[0]: has unknown keys speed"),
        (put("kernels", 0, value=7), "kernels[0]: must be an object"),
        (put("kernels", value={}), "kernels must be a list"),
        (put("kernels", 0, "block_us", value=10**400), "kernels[0]: block_us must be a finite number"),
        (put("kernels", 0, "engine", value=5), "kernels[0]: engine must be text, got 5"),
        (put("kernels", 1, "dtype", value=["bfloat16"]), "kernels[1]: dtype must be one of float32, bfloat16"),
        (put("kernels", 1, "dtype", value="int8"), "kernels[1]: dtype must be one of float32, bfloat16"),
        (put("kernels", 1, "note", value=None), "kernels[1]: note must be text"),
        (put("links", 1, "scope", value={}), "links[1]: scope must be one of node, network"),
        (put("machine", value=3), "the calibration: machine must be text, got 3"),
        (put("note", value=None), "the calibration: note must be text, got None"),
        (put("versions", value="2.11"), "the calibration: versions must map names to versions, got '2.11'"),
        (put("versions", "torch", value=2.11), "the calibration: versions['torch'] must be text, got 2.11"),
        (put("links", 2, "time_us", value=[9.0, 8.0]), "links[2]: the curve must rise"),
        (put("links", 0, "time_us", value=[float("inf"), 8.0]), "links[0]: time_us must be a finite number"),
        (put("links", 0, "num_bytes", value=[1, 2.5]), "links[0]: num_bytes must be an integer"),
        (put("plan_us", value=-3), "the calibration: plan_us must be a finite number of at least 0"),
        (put("format", value=9), "object of format 1"),
        (put("extra", value=9), "the calibration: has unknown keys extra"),
        (lambda stored: stored.pop("machine"), "machine"),
        (lambda stored: stored.pop("links"), "links must be a list"),
        (lambda stored: stored["kernels"][0].pop("row_us"), "kernels[0]:"),
    ],
)
def test_load_names_the_bad_entry(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    stored = json.loads(make_calibration().to_json())
    change(stored)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        Calibration.load(path)
    assert str(error.value).startswith(f"{path} is no calibration: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": None}, "kernels must hold KernelRate objects, got None"),
        ({"links": (make_rate(),)}, "links must hold LinkCurve objects"),
        ({"versions": {1: "2"}}, "a name in versions must be text, got 1"),
    ],
)
def test_calibration_refuses_other_objects(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_calibration(**changes)


def test_load_refuses_what_is_no_file_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no calibration"):
        Calibration.load(tmp_path / "absent.json")
    for text in ("[" * 200_000, '{"kernels":' * 200_000, "1" * 10_000):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(ValueError, match="deep.json is no calibration"):
            Calibration.load(tmp_path / "deep.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary.json is no calibration"):
        Calibration.load(tmp_path / "binary.json")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ValueError, match="is no calibration: a calibration must be JSON text"):
        Calibration.load(tmp_path / "torn.json")


@pytest.mark.parametrize(
    ("direction", "block_size", "density", "tflops"),
    [
        ("forward", 128, 0.25, 607),
        ("forward", 128, 1.0, 622),
        ("forward", 64, 0.1, 540),
        ("backward", 128, 0.1, 509),
        ("backward", 64, 0.25, 454),
    ],
)
def test_reference_calibration_gives_the_throughput_back(
    direction: str, block_size: int, density: float, tflops: float
) -> None:
    rate = reference_calibration().kernel(direction, "bfloat16", 128, block_size, block_size)
    rows = 12 * 32768 // block_size
    blocks = density * rows * 32768 / block_size
    flops = blocks * (4 if direction == "forward" else 10) * 128 * block_size**2
    assert flops / float(rate.time_us(blocks, rows)) / 1e6 == pytest.approx(tflops, rel=0.07)


def test_reference_calibration_says_that_it_is_no_measurement_of_this_machine() -> None:
    calibration = reference_calibration()
    assert Calibration.from_json(calibration.to_json()) == calibration
    assert "not measured on this machine" in calibration.note
    assert all("derived from" in rate.note for rate in calibration.kernels)
    assert 128e6 / calibration.link("all_to_all", 8, "node").time(128e6) / 1e3 == pytest.approx(278)
    assert 256e6 / calibration.link("p2p", 8, "node").time(256e6) / 1e3 == pytest.approx(301)
    with pytest.raises(ValueError, match="scope 'network'"):
        calibration.link("p2p", 8, "network")
