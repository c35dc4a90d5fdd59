"""The tool reports what the planner says, for fresh, stale and shared plans, and writes what it promises."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.observability import MetricLogger, RunFolder, plot_imbalance
from dbsp_megatron.observability.plot_imbalance import BASELINE, plot_drift, plot_moved, plot_policies
from dbsp_megatron.observability.plot_style import figure
from dbsp_megatron.plan import Goal, Workload, plan_loads, plan_partition, sparse_imbalance
from tools.mask_files import MaskSource, generated_sources
from tools.measure_imbalance import main, summarise
from tools.plan_masks import SHARED, Measurement, Options, measure, parse_mesh, policy_pair
from tools.structured_masks import drift_mask, make_mask

ROOT = Path(__file__).parents[3]
GEOMETRY = "5x8x9x7x8"
KIND_ARGUMENTS = ["--kinds", "sth", "--geometries", GEOMETRY, "--densities", "0.3", "--repeats", "2"]


def _block_mask(layer: int = 0, kind: str = "sth") -> BlockMask:
    return BlockMask(torch.from_numpy(make_mask(kind, GEOMETRY, 0.3, layer=layer))[None])


def _sources(layers: list[int], kind: str = "sth") -> list[MaskSource]:
    return generated_sources([kind], [GEOMETRY], [0.3], [0], layers)


def _one(results: list[Measurement], **wanted: object) -> Measurement:
    (found,) = (row for row in results if all(getattr(row, key) == value for key, value in wanted.items()))
    return found


@pytest.mark.parametrize("policy", ["paper", "auto", "stripe", "hot_stripe", "split", "lpt_swap+minimal_move"])
def test_measure_equals_direct_planning(policy: str) -> None:
    options = Options(meshes=((2, 3), (7, 1)), policies=(policy,), repeats=2, num_kv_heads=7)
    results = measure(_sources([0]), options)
    head, block = policy_pair(policy)
    for mesh in options.meshes:
        name = f"{mesh[0]}x{mesh[1]}"
        assert _one(results, mesh=name, policy=BASELINE).imbalance == sparse_imbalance(_block_mask(), *mesh)
        plan = plan_partition(_block_mask(), *mesh, head, block, goal=Goal(num_kv_heads=7))
        got = _one(results, mesh=name, policy=policy)
        for key in ("imbalance", "imbalance_gpu", "imbalance_paper", "moved_q_fraction", "moved_kv_fraction"):
            assert getattr(got, key) == getattr(plan, key), key
        assert got.extra_kv_copies == plan.extra_kv_copies(7)
        assert got.cuts == len(plan.head_items) - 7
        assert (got.heads, got.q_blocks, got.k_blocks) == (7, 45, 45)
        assert got.plan_ms > 0


def test_measure_judges_stale_plans_on_the_drifted_mask() -> None:
    options = Options(meshes=((2, 2),), policies=("auto",), repeats=1, drifts=(0.0, 0.2), drift_seed=5)
    results = measure(_sources([0]), options)
    plan = plan_partition(_block_mask(), 2, 2)
    later = BlockMask(torch.from_numpy(drift_mask(_block_mask().numpy()[0], 0.2, 5))[None])
    loads = plan_loads(plan, Workload.from_mask(later, plan.q_block_home, plan.kv_block_home, 4))
    stale = dataclasses.replace(plan, loads=loads)
    got = _one(results, policy="auto", drift=0.2)
    assert (got.imbalance, got.imbalance_gpu) == (stale.imbalance, stale.imbalance_gpu)
    assert got.imbalance_gpu > plan.imbalance_gpu
    assert math.isnan(got.plan_ms)
    assert {row.imbalance for row in results if row.policy == "auto" and row.drift == 0} == {plan.imbalance}
    assert _one(results, policy=BASELINE, drift=0.2).imbalance == sparse_imbalance(later, 2, 2)


def test_measure_shares_one_layout_between_layers() -> None:
    options = Options(meshes=((1, 4),), policies=("contiguous+stripe",), repeats=1, shared_layout=True)
    results = measure(_sources([0, 1, 2], kind="hot_rows"), options)
    for layer in range(3):
        shared, striped = (_one(results, layer=layer, policy=policy) for policy in (SHARED, "contiguous+stripe"))
        # A stripe of four gives all hot rows to one ring rank.
        assert striped.imbalance_gpu > 1.3
        assert shared.imbalance_gpu < 1.1
    assert _one(results, layer=0, policy=SHARED).moved_kv_fraction == 0


def test_measure_refuses_a_shared_layout_of_rectangles() -> None:
    source = MaskSource(family="f", layer=0, load=lambda: np.ones((2, 5, 7), bool))
    with pytest.raises(ValueError, match="as many q-blocks as k-blocks, f layer 0 has 5 and 7"):
        measure([source], Options(meshes=((1, 2),), shared_layout=True))


def test_measure_takes_rectangles_and_empty_masks() -> None:
    sources = [
        MaskSource(family="wide", layer=0, load=lambda: np.tri(5, 9, dtype=bool)[None].repeat(3, axis=0)),
        MaskSource(family="empty", layer=0, load=lambda: np.zeros((3, 6, 6), bool)),
    ]
    results = measure(sources, Options(meshes=((2, 2),), policies=("auto",), repeats=1))
    assert _one(results, mask="empty", policy="auto").imbalance == 1
    wide = _one(results, mask="wide", policy="auto")
    assert wide.imbalance <= _one(results, mask="wide", policy=BASELINE).imbalance
    assert (wide.q_blocks, wide.k_blocks) == (5, 9)


def test_summarise_takes_mean_and_max_over_masks() -> None:
    results = measure(_sources([0, 1]), Options(meshes=((2, 2),), policies=("auto",), repeats=1))
    before, after = summarise(results)
    values = [sparse_imbalance(_block_mask(layer), 2, 2) for layer in (0, 1)]
    assert before["num_masks"] == 2
    assert before["imbalance_mean"] == pytest.approx(np.mean(values))
    assert before["imbalance_max"] == max(values)
    assert before["plan_ms_mean"] is None
    assert after["plan_ms_max"] > 0


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("paper", ("paper", "paper")),
        ("auto", ("auto", "auto")),
        ("split", ("split", "auto")),
        ("hot_stripe", ("auto", "hot_stripe")),
        ("contiguous+stripe", ("contiguous", "stripe")),
    ],
)
def test_policy_pair_completes_one_name(name: str, pair: tuple[str, str]) -> None:
    assert policy_pair(name) == pair


@pytest.mark.parametrize("name", ["best", "best+stripe", "split+", "paper+split", ""])
def test_policy_pair_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="policies must be HEAD\\+BLOCK"):
        policy_pair(name)


@pytest.mark.parametrize("text", ["8", "8x0", "0x8", "4x2x1", "axb"])
def test_parse_mesh_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="meshes must be Ulysses x Ring"):
        parse_mesh(text)


def _picture_is_drawn(path: Path) -> bool:
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    colours = np.unique((pixels * 255).astype(np.int64) @ np.array([65536, 256, 1]))
    return pixels.shape[0] > 300 and pixels.shape[1] > 600 and len(colours) > 50


def test_main_writes_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*KIND_ARGUMENTS, "--layers", "0", "1", "--ranks", "4", "--policies", "paper", "auto", "--drift", "0.1"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rho_gpu" in printed
    assert "Stale plans" in printed
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "drift.png", "imbalance.csv", "imbalance.png", "moved.png", "summary.json",
    ]  # fmt: skip
    assert all(_picture_is_drawn(file) for file in tmp_path.glob("*.png"))
    rows = list(csv.DictReader((tmp_path / "imbalance.csv").open()))
    # 2 layers, 3 meshes, 3 policies, fresh and stale
    assert len(rows) == 36
    assert {row["mesh"] for row in rows} == {"4x1", "2x2", "1x4"}
    assert float(rows[0]["imbalance"]) == sparse_imbalance(_block_mask(), 4, 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["options"]["meshes"] == [[4, 1], [2, 2], [1, 4]]
    assert len(summary["summary"]) == 18


def test_main_measures_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path, "r")
    with MetricLogger(folder) as metrics:
        metrics.log(1, {"sp/imbalance_before": 1.4, "sp/imbalance_after": 1.2})
    output = tmp_path / "out"
    assert main([str(folder.path), "--ranks", "2", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "1.4000" in printed
    assert "saved no masks" in printed
    assert [file.name for file in output.iterdir()] == ["summary.json"]
    assert json.loads((output / "summary.json").read_text())["recorded"][str(folder.path)][0]["before"] == 1.4
    folder.save_arrays("partitions/layer_03", mask=make_mask("sth", GEOMETRY, 0.3))
    assert main([str(folder.path), "--ranks", "2", "--repeats", "1", "--no-plots", "--output", str(output)]) == 0
    assert re.search(r"^r +3 +2x1 +auto", capsys.readouterr().out, re.MULTILINE)
    assert not list(output.glob("*.png"))


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
        ([], "there is no mask"),
        (["missing.npy"], "must be a file that ends in"),
        ([*KIND_ARGUMENTS, "--policies", "best"], "policies must be HEAD+BLOCK"),
        ([*KIND_ARGUMENTS, "--meshes", "4"], "meshes must be Ulysses x Ring"),
        ([*KIND_ARGUMENTS, "--ranks", "4", "0"], "argument --ranks: must be at least 1, got 0"),
        ([*KIND_ARGUMENTS, "--repeats", "0"], "argument --repeats: must be at least 1, got 0"),
        (["--ranks", "8", "masks.npy"], "argument --ranks: must be whole numbers, got 'masks.npy'; masks first"),
        (["--drift", "0.1", "run"], "argument --drift: must be numbers, got 'run'; masks first"),
        (["--policies", "paper", "masks.npy"], "--policies took 'masks.npy' as a value; masks first"),
        (["--policies", "paper", "run"], "--policies took 'run' as a value; masks first"),
        (["--kinds", "st", "masks.npy"], "--kinds took 'masks.npy' as a value; masks first"),
        (["--meshes", "2x2", "masks.npy"], "--meshes took 'masks.npy' as a value; masks first"),
        (["masks.npy", "--layers", "0"], "--layers say what to generate and need --kinds"),
        (["masks.npy", "--seeds", "0", "--densities", "0.2"], "--densities, --seeds say what to generate and need"),
        (["--geometries", "wan720"], "--geometries say what to generate and need --kinds"),
        (["masks.npy", "."], "is no run folder, it has none of"),
        (["--kinds", "odd"], "kind must be one of"),
        (["--kinds", "st", "--geometries", "odd"], "geometry must be one of"),
        ([*KIND_ARGUMENTS, "--drift", "2"], "drift must be in [0, 1]"),
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


def test_help_says_that_masks_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "masks first, then options" in " ".join(capsys.readouterr().out.split())


def test_main_takes_files_and_kinds_together(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", make_mask("st", GEOMETRY, 0.3))
    arguments = [str(tmp_path / "m.npy"), *KIND_ARGUMENTS, "--layers", "3", "--meshes", "2x1", "--no-plots"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    names = json.loads((tmp_path / "out" / "summary.json").read_text())["masks"]
    assert names == ["m.npy layer 0", f"sth {GEOMETRY} 0.3 seed 0 layer 3"]


def _drawn(module: Any, draw: Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that a function draws."""
    made = []

    @contextmanager
    def kept(*arguments: Any) -> Iterator[Any]:
        with figure(*arguments) as drawn:
            made.append(drawn)
            yield drawn

    monkeypatch.setattr(module, "figure", kept)
    draw(path)
    return made[0]


def test_plot_moved_puts_every_policy_at_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that move nothing stand at 0, told apart by their markers."""
    records = [
        {"policy": policy, "mesh": "2x2", "imbalance": 1.01, "imbalance_gpu": 1.002, "moved_q_fraction": moved}
        for policy in ("paper", "auto", "split")
        for moved in (0.0, 0.125)
    ]
    drawn = _drawn(plot_imbalance, lambda path: plot_moved(records, path), tmp_path / "m.png", monkeypatch)
    for axes in drawn.axes:
        dots = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
        assert [list(line.get_xdata()) for line in dots] == [[0.0, 12.5]] * 3
        assert len({line.get_marker() for line in dots}) == 3
        assert len([tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]) >= 2


def test_tool_gives_the_same_figures_in_every_process(tmp_path: Path) -> None:
    arguments = [*KIND_ARGUMENTS, "--meshes", "2x2", "--no-plots", "--output"]
    assert main([*arguments, str(tmp_path / "here")]) == 0
    command = [sys.executable, str(ROOT / "tools" / "measure_imbalance.py"), *arguments, str(tmp_path / "there")]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here, there = (
        [{**row, "plan_ms": None} for row in csv.DictReader((tmp_path / name / "imbalance.csv").open())]
        for name in ("here", "there")
    )
    assert here == there
    assert len(here) == 3


def test_pictures_refuse_to_be_empty(tmp_path: Path) -> None:
    for draw in (plot_policies, plot_moved, plot_drift):
        with pytest.raises(ValueError, match="no records to draw"):
            draw([], tmp_path / "empty.png")
