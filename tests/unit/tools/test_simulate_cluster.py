"""The simulation adds up what the latency model says, and never makes a strategy look better than that."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.observability import plot_scaling as plot_scaling_module
from dbsp_megatron.observability.plot_scaling import plot_meshes, plot_scaling
from dbsp_megatron.observability.plot_style import figure
from dbsp_megatron.plan import AttentionShape, plan_partition
from dbsp_megatron.plan.calibration import reference_calibration
from dbsp_megatron.plan.latency import LatencyModel
from tools import simulate_cluster
from tools.cluster_model import (
    OURS,
    OURS_DECOUPLED,
    PAPER,
    STRATEGIES,
    UNBALANCED,
    UNBALANCED_DECOUPLED,
    Cluster,
    MeshTime,
    best_times,
    cluster_rows,
    simulate,
    single_gpu_ms,
    with_network,
)
from tools.mask_files import MaskSource, generated_sources
from tools.simulate_cluster import main
from tools.structured_masks import make_mask

GEOMETRY = "5x8x9x7x8"
ARGUMENTS = ["--kinds", "sth", "--geometries", GEOMETRY, "--densities", "0.3", "--gpus", "2", "4", "8"]


def _sources(num_layers: int = 1) -> list[MaskSource]:
    return generated_sources(["sth"], [GEOMETRY], [0.3], [0], list(range(num_layers)))


def _cluster(**changes: object) -> Cluster:
    calibration, _ = with_network(reference_calibration(), 50.0, 20.0)
    # Large blocks of a large batch, so that kernels take longer than the latency of a link.
    shape = AttentionShape(batch_size=64, head_dim=128, block_size_q=128, block_size_k=128)
    return Cluster(**{"calibration": calibration, "shape": shape, "gpus_per_node": 4, **changes})


def _one(times: list[MeshTime], mesh: str, strategy: str) -> MeshTime:
    (found,) = (time for time in times if (time.mesh, time.strategy) == (mesh, strategy))
    return found


def test_simulate_equals_the_latency_model() -> None:
    cluster = _cluster(num_layers=3, non_attention_ms=40.0, fixed_ms=2.0)
    times = simulate(_sources(), [4], cluster)
    mask = BlockMask(torch.from_numpy(make_mask("sth", GEOMETRY, 0.3))[None], 128, 128)
    for decoupled, strategy in ((False, UNBALANCED), (True, UNBALANCED_DECOUPLED)):
        model = LatencyModel(cluster.calibration, cluster.shape, ranks_per_node=4, decoupled=decoupled)
        plan = plan_partition(mask, 2, 2, "contiguous", "contiguous")
        got = _one(times, "2x2", strategy)
        forward, backward = (model.predict(plan, backward=back).total_us / 1e3 for back in (False, True))
        assert (got.forward_ms, got.backward_ms) == pytest.approx((forward, backward))
        assert got.attention_ms == pytest.approx(forward + backward)
        assert got.step_ms == pytest.approx(3 * (forward + backward) + 40 / 4 + 2)
        assert got.imbalance == plan.imbalance
    paper = LatencyModel(cluster.calibration, cluster.shape, ranks_per_node=4).predict(
        plan_partition(mask, 2, 2, "paper", "paper")
    )
    assert _one(times, "2x2", PAPER).forward_ms == pytest.approx(paper.total_us / 1e3)


def test_simulate_covers_every_mesh_and_strategy() -> None:
    times = simulate(_sources(), [2, 6], _cluster())
    assert {time.mesh for time in times} == {"2x1", "1x2", "6x1", "3x2", "2x3", "1x6"}
    assert len(times) == 6 * len(STRATEGIES)
    assert {(time.mesh, time.kind) for time in times if time.sp_degree == 6} == {
        ("6x1", "Ulysses"), ("3x2", "hybrid"), ("2x3", "hybrid"), ("1x6", "Ring"),
    }  # fmt: skip


def test_simulate_ours_is_never_slower_than_doing_nothing() -> None:
    times = simulate(_sources(2), [4, 8], _cluster())
    for time in times:
        if time.strategy in (OURS, OURS_DECOUPLED):
            other = UNBALANCED if time.strategy == OURS else UNBALANCED_DECOUPLED
            assert time.attention_ms <= _one(times, time.mesh, other).attention_ms * (1 + 1e-12)
    best = best_times(times, 4)
    assert best[OURS].attention_ms < 0.97 * best[UNBALANCED].attention_ms


def test_simulate_decoupled_is_never_slower() -> None:
    times = simulate(_sources(), [4], _cluster())
    for mesh in ("4x1", "2x2", "1x4"):
        barrier, decoupled = (_one(times, mesh, name) for name in (UNBALANCED, UNBALANCED_DECOUPLED))
        assert decoupled.attention_ms <= barrier.attention_ms * (1 + 1e-12)


def test_simulate_means_over_masks() -> None:
    both = simulate(_sources(2), [2], _cluster())
    alone = [simulate([source], [2], _cluster()) for source in _sources(2)]
    for time in both:
        parts = [_one(times, time.mesh, time.strategy).attention_ms for times in alone]
        assert time.attention_ms == pytest.approx(np.mean(parts))


def test_simulate_forward_only_needs_no_backward() -> None:
    calibration, _ = with_network(reference_calibration(), 50.0, 20.0)
    kernels = tuple(rate for rate in calibration.kernels if rate.direction == "forward")
    cluster = _cluster(calibration=type(calibration)(**{**vars(calibration), "kernels": kernels}), forward_only=True)
    times = simulate(_sources(), [2], cluster)
    assert all(math.isnan(time.backward_ms) and time.attention_ms == time.forward_ms for time in times)


def test_simulate_counts_key_value_memory() -> None:
    times = simulate(_sources(), [5], _cluster())
    block_mib = 2 * 64 * 128 * 128 * 2 / 2**20
    # Seven heads on five ranks, no ring; one head's chunk and the next of a ring of five; the whole ring's.
    assert _one(times, "5x1", UNBALANCED).kv_mib == 2 * 45 * block_mib
    assert _one(times, "1x5", UNBALANCED).kv_mib == 7 * 18 * block_mib
    assert _one(times, "1x5", UNBALANCED_DECOUPLED).kv_mib == 7 * 45 * block_mib


def test_network_slows_what_leaves_the_node() -> None:
    near, far = (simulate(_sources(), [4], _cluster(gpus_per_node=size)) for size in (4, 1))
    for time in near:
        assert _one(far, time.mesh, time.strategy).attention_ms > time.attention_ms


def test_with_network_keeps_what_was_measured() -> None:
    calibration, said = with_network(reference_calibration(), 25.0, 10.0)
    assert calibration.link("p2p", 2, "network").time(10**9) == pytest.approx(10 + 1e9 / 25e3)
    assert "25 GB/s" in said[0]
    assert "not measured" in said[0]
    again, said = with_network(calibration, 1.0, 1.0)
    assert again == calibration
    assert said == []
    with pytest.raises(ValueError, match="--network-gbs and --network-latency-us must be above 0"):
        with_network(calibration, 0.0, 1.0)


def test_cluster_rows_add_replicas() -> None:
    cluster = _cluster(num_layers=2, non_attention_ms=100.0)
    times = simulate(_sources(), [2, 4], cluster)
    alone = single_gpu_ms(_sources(), cluster)
    rows = {(row["gpus"], row["sp_degree"], row["strategy"]): row for row in cluster_rows(times, [2, 4, 8, 12], alone)}
    assert {key[:2] for key in rows} == {(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (12, 2), (12, 4)}
    small, large = rows[4, 4, OURS], rows[12, 4, OURS]
    assert (small["replicas"], large["replicas"]) == (1, 3)
    assert large["samples_per_s"] == pytest.approx(3 * small["samples_per_s"])
    assert large["step_ms"] == small["step_ms"]
    for (_, degree, strategy), row in rows.items():
        best = best_times(times, degree)
        assert row["attention_ms"] == min(
            t.attention_ms for t in times if (t.sp_degree, t.strategy) == (degree, strategy)
        )
        assert row["attention_vs_unbalanced"] == pytest.approx(best[UNBALANCED].attention_ms / row["attention_ms"])
        assert row["attention_vs_paper"] == pytest.approx(best[PAPER].attention_ms / row["attention_ms"])
        assert row["attention_efficiency"] == pytest.approx(alone[0] / degree / row["attention_ms"])
        assert row["attention_efficiency"] < 1
        assert row["attention_efficiency"] < row["step_efficiency"] < 1


@pytest.mark.parametrize(
    ("key", "value"), [("gpus_per_node", 0), ("num_layers", 0), ("non_attention_ms", -1.0), ("fixed_ms", math.inf)]
)
def test_cluster_refuses_numbers_out_of_range(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} must be a finite number of at least"):
        _cluster(**{key: value})


def _picture_is_drawn(path: Path) -> bool:
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    colours = np.unique((pixels * 255).astype(np.int64) @ np.array([65536, 256, 1]))
    return pixels.shape[0] > 300 and pixels.shape[1] > 600 and len(colours) > 50


def test_main_writes_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--sp-degrees", "2", "4", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "Assumptions",
        "not measured on this machine",
        "between nodes: 50 GB/s",
        "Samples per second",
        "vs paper",
    ):
        assert words in printed
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "cluster.csv", "meshes.csv", "meshes.png", "scaling.png", "summary.json",
    ]  # fmt: skip
    assert all(_picture_is_drawn(file) for file in tmp_path.glob("*.png"))
    assert len(list(csv.DictReader((tmp_path / "meshes.csv").open()))) == 5 * len(STRATEGIES)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["cluster"]) == 5 * len(STRATEGIES)
    assert any("no GPU was used" in line for line in summary["assumptions"])


def test_main_takes_a_calibration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration, _ = with_network(reference_calibration(), 5.0, 5.0)
    calibration.save(tmp_path / "machine.json")
    arguments = [*ARGUMENTS, "--sp-degrees", "2", "--forward-only", "--no-plots", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--calibration", str(tmp_path / "machine.json")]) == 0
    assert "between nodes" not in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.png"))


def _explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command line prints, by the tool or by argparse."""
    try:
        status: object = main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8"], "there is no mask to simulate"),
        ([*ARGUMENTS, "--sp-degrees", "3"], "--sp-degrees [3] divide no number of --gpus"),
        ([*ARGUMENTS, "--sp-degrees", "0"], "argument --sp-degrees: must be at least 1, got 0"),
        (["--kinds", "st", "--gpus", "128"], "--sp-degrees are by default the --gpus up to 64, got none of [128]"),
        (["--gpus", "8", "masks.npy"], "argument --gpus: must be whole numbers, got 'masks.npy'; masks first"),
        (["--kinds", "st", "masks.npy"], "--kinds took 'masks.npy' as a value; masks first"),
        (["masks.npy", "--seeds", "1"], "--seeds say what to generate and need --kinds"),
        ([*ARGUMENTS, "--calibration", "missing.json"], "missing.json is no calibration"),
        ([*ARGUMENTS, "--network-gbs", "-1"], "--network-gbs"),
        ([*ARGUMENTS, "--num-layers", "0"], "num_layers must be"),
        ([*ARGUMENTS, "--num-kv-heads", "3"], "num_kv_heads"),
    ],
)
def test_main_explains_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("masks.npy", make_mask("st", GEOMETRY, 0.3))
    (tmp_path / "run" / "partitions").mkdir(parents=True)
    assert words in " ".join(_explained([*arguments, "--output", "out"], capsys).split())
    assert not (tmp_path / "out").exists()


def test_main_says_how_to_measure_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(reference_calibration(), links=()).save(tmp_path / "machine.json")
    arguments = [*ARGUMENTS, "--calibration", str(tmp_path / "machine.json"), "--output", str(tmp_path / "out")]
    assert "`torchrun --nproc_per_node 2 tools/fit_latency.py`" in _explained(arguments, capsys)
    assert not (tmp_path / "out").exists()
    # A single GPU sends nothing.
    assert main([*arguments, "--sp-degrees", "1", "--no-plots"]) == 0
    assert "links inside a node" not in capsys.readouterr().out


def test_main_prints_the_note_and_titles_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = "cpu (arch, 3 cores), 1 node(s) of 2 rank(s)"
    note = "tools/fit_latency.py --quick: median error on masks that were not fitted: 40% (worst 77%)"
    replace(reference_calibration(), machine=machine, note=note).save(tmp_path / "machine.json")
    titles = []
    for name in ("plot_scaling", "plot_meshes"):
        monkeypatch.setattr(simulate_cluster, name, lambda *_, title: titles.append(title))
    arguments = [*ARGUMENTS, "--sp-degrees", "2", "--calibration", str(tmp_path / "machine.json")]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert f"calibration: {machine} ({note})" in capsys.readouterr().out
    assert titles == [f"Predicted attention, forward and backward\ncalibrated on {machine}"] * 2


@pytest.mark.parametrize(
    "times", [(0.31, 0.37), (0.3, 0.9), (2.1, 2.15), (11, 700), (0.02, 0.021), (1e-4, 3e3), (5, 5)]
)
def test_plot_meshes_labels_three_places_or_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: tuple[float, float]
) -> None:
    made = []

    @contextmanager
    def kept(*arguments: Any) -> Iterator[Any]:
        with figure(*arguments) as drawn:
            made.append(drawn)
            yield drawn

    monkeypatch.setattr(plot_scaling_module, "figure", kept)
    records = [
        {"sp_degree": 2, "mesh": mesh, "strategy": "ours", "attention_ms": ms}
        for mesh, ms in zip(("2x1", "1x2"), times, strict=True)
    ]
    plot_meshes(records, tmp_path / "meshes.png")
    (axes,) = made[0].axes
    low, high = axes.get_ylim()
    labels = [label.get_text() for label, tick in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
              if low <= tick <= high]  # fmt: skip
    assert 3 <= len(set(labels)) == len(labels) <= 9
    assert all(float(label) > 0 for label in labels)


def test_pictures_refuse_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records to draw"):
        plot_scaling([], 1.0, tmp_path / "empty.png")
    with pytest.raises(ValueError, match="no records to draw"):
        plot_meshes([], tmp_path / "empty.png")
