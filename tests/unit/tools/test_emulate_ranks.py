"""Emulated ranks: bytes and kernels of real plans in chunks of heads, and the tool on CPU."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron.observability.plot_speedup import plot_speedup
from dbsp_megatron.plan import AttentionShape, plan_traffic
from tools import emulate_ranks
from tools.sp_cases import SHAPES, MaskChoice, find_shape
from tools.sp_emulation import EmulatedLayer, RankEmulator, plan_of
from tools.sp_emulation_report import speedups, text_report


def _emulator(backward: bool = False, **more: Any) -> RankEmulator:
    mask = MaskChoice(kind="corner", density=0.4, seed=1).make(SHAPES["tiny"], 16)
    known: dict[str, Any] = {
        "mask": mask,
        "head_dim": 16,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "engine": "auto",
        "backward": backward,
        "repeats": 1,
        "kv_gather_mib": 0,
    }
    return RankEmulator(EmulatedLayer(**(known | more)))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1), (1, 3)])
@pytest.mark.parametrize("strategy", ["usp", "dbsp"])
def test_costs_give_every_rank_the_work_of_the_plan(
    mesh: tuple[int, int], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense blocks stand for milliseconds: what a rank computes is what the plan says of it."""

    def blocks(self: RankEmulator, schedule: Any, num_q: int, num_heads: int, *rest: Any) -> np.ndarray:
        counted = [float(call.pattern.blocks.sum()) for call in schedule.calls]
        for call in schedule.calls:
            assert call.pattern.blocks.shape[1] == num_heads
        return np.array([counted, counted])

    monkeypatch.setattr(RankEmulator, "_time_rank", blocks)
    emulator = _emulator()
    plan = plan_of(strategy, mesh, emulator.layer.mask, {})
    (costs,) = emulator.costs(plan)
    assert costs.calls == tuple((step,) for step in range(mesh[1]))
    np.testing.assert_array_equal(costs.forward, plan.loads)
    assert costs.backward is None
    seqlen, heads, row = emulator.layer.mask.seqlen_q, plan.num_heads, 16 * 4
    # All rows of q and out have one owner, and one home.
    assert costs.owner_bytes[..., 1].sum() == costs.home_bytes[..., 1].sum() == seqlen * heads * row
    # K and V of a cut head are sent to each of its ranks.
    assert costs.home_bytes[..., 0].sum() == (3 * heads + 2 * plan.extra_kv_copies()) * seqlen * row
    # No rank sends more than its whole chunk in a step.
    chunk = (costs.owner_bytes[..., 0] - costs.owner_bytes[..., 1])[..., None]
    assert np.all(costs.send_bytes <= chunk)
    assert not costs.send_bytes[..., 0].any()


PLANS = [{"head_policy": "lpt_swap"}, {"head_policy": "split", "block_policy": "minimal_move"}]


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_chunks_share_out_the_work_and_the_bytes_of_a_plan(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(self: RankEmulator, schedule: Any, *rest: Any) -> np.ndarray:
        return np.array([[float(call.pattern.blocks.sum()) for call in schedule.calls]] * 2)

    monkeypatch.setattr(RankEmulator, "_time_rank", blocks)
    emulator = _emulator(backward=True)
    plan = plan_of("dbsp", (2, 2), emulator.layer.mask, settings)
    cut = settings["head_policy"] == "split"
    assert bool(plan.num_split_heads) == cut
    (whole,), chunks = emulator.costs(plan), emulator.costs(plan, 3)
    assert len(chunks) == 3
    np.testing.assert_array_equal(sum(chunk.forward for chunk in chunks), plan.loads)
    for name in ("there", "back", "owner_bytes"):
        np.testing.assert_array_equal(sum(getattr(chunk, name) for chunk in chunks), getattr(whole, name))
    home = np.sum([chunk.home_bytes for chunk in chunks], axis=0)
    np.testing.assert_array_equal(home[..., :2], whole.home_bytes[..., :2])
    # Gradients of heads that are cut are added, in whole tensors.
    assert (home[..., 2].sum() > whole.home_bytes[..., 2].sum()) == cut
    # Heads of a chunk may read fewer blocks than all heads do.
    assert np.all(sum(chunk.send_bytes for chunk in chunks) <= whole.send_bytes)
    assert whole.send_bytes.sum() > 0


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_bytes_are_those_of_the_traffic_of_a_plan(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are all full, as the traffic counts them."""
    monkeypatch.setattr(RankEmulator, "_time_rank", lambda self, schedule, *rest: np.zeros((2, len(schedule.calls))))
    emulator = _emulator(mask=MaskChoice(kind="corner", density=0.4, seed=1).make(find_shape("4x4x8x6"), 8))
    plan = plan_of("dbsp", (2, 2), emulator.layer.mask, settings)
    traffic = plan_traffic(plan, AttentionShape(head_dim=16, block_size_q=8, block_size_k=8, dtype_bytes=4))
    (costs,) = emulator.costs(plan)
    np.testing.assert_array_equal(costs.there, traffic.forward_bytes)
    np.testing.assert_array_equal(costs.back, traffic.return_bytes)
    assert costs.moves == bool(plan.moved_q_blocks.size)


def test_costs_join_small_chunks_as_the_runtime_does() -> None:
    joined = _emulator(kv_gather_mib=512)
    (costs,) = joined.costs(plan_of("ring", (1, 4), joined.layer.mask, {}))
    assert costs.calls == ((0,), (1, 2, 3))


def test_costs_are_measured_once_for_equal_plans() -> None:
    emulator = _emulator(backward=True)
    found = emulator.costs(plan_of("usp", (2, 1), emulator.layer.mask, {}))
    assert emulator.costs(plan_of("ulysses", (2, 1), emulator.layer.mask, {})) is found
    assert len(emulator.costs(plan_of("usp", (2, 1), emulator.layer.mask, {}), 3)) == 3
    (first,) = found
    assert first.backward is not None
    assert first.forward.shape == first.backward.shape == (2, 1, 1)
    assert first.forward.min() > 0
    assert first.backward.min() > 0


def test_plan_of_settles_the_layout() -> None:
    mask = MaskChoice(kind="hot_rows", density=0.4, seed=0).make(SHAPES["tiny"], 8)
    plain = plan_of("dbsp", (1, 2), mask, {"block_policy": "stripe"})
    settled = plan_of("dbsp", (1, 2), mask, {})
    assert settled.imbalance_gpu < plain.imbalance_gpu


def _run(*flags: str) -> tuple[int, str, str]:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = emulate_ranks.main(["--shape", "tiny", "--device", "cpu", *flags])
    return status, out.getvalue(), err.getvalue()


def test_main_emulates_and_says_so_everywhere(tmp_path: Path) -> None:
    status, out, err = _run(
        *("--ranks", "2", "4", "--kind", "corner", "--density", "0.3", "--repeats", "1", "--backward"),
        *("--link-gbs", "10", "--link-us", "5", "--output", str(tmp_path), "--exchange-chunks", "2"),
    )
    assert status == 0, err
    report = json.loads((tmp_path / "emulated.json").read_text())
    assert all(record["emulated"] for record in (*report["records"], *report["speedups"]))
    markdown = (tmp_path / "emulated.md").read_text()
    assert "mulated" in out.splitlines()[0]
    assert "# Emulated" in markdown
    assert "no message was sent" in markdown
    for words in ("as published, against ours in chunks", "both in chunks", "both in one chunk"):
        assert words in out
        assert words in markdown
    assert (tmp_path / "emulated.png").stat().st_size > 1000
    assert {(r["sp_degree"], r["strategy"], r["mesh"]) for r in report["records"]} == {
        *((2, "ulysses", "2x1"), (2, "ring", "1x2"), (4, "ulysses", "4x1"), (4, "ring", "1x4"), (4, "usp", "2x2")),
        *((size, name, mesh) for name in ("dbsp", "paper") for size, mesh in ((2, "2x1"), (2, "1x2"))),
        *((4, name, mesh) for name in ("dbsp", "paper") for mesh in ("4x1", "2x2", "1x4")),
    }
    for record in report["records"]:
        chunks = 1 if record["mesh"].startswith("1x") else 2
        assert (record["chunks"], record["num_chunks"]) == (chunks, chunks if record["strategy"] == "dbsp" else 1)
        name = "in_chunks_ms" if record["strategy"] == "dbsp" else "one_chunk_ms"
        assert record["attention_ms"] == record[name]
        assert (record["in_chunks_ms"] == record["one_chunk_ms"]) == (chunks == 1)
        assert record["attention_ms"] == pytest.approx(record["forward_ms"] + record["backward_ms"])
        assert record["attention_ms"] >= record["compute_ms"] > 0
        assert record["efficiency"] == pytest.approx(record["alone_ms"] / record["sp_degree"] / record["attention_ms"])


def test_main_begins_no_mask_over_the_budget(tmp_path: Path) -> None:
    flags = ("--ranks", "2", "--kind", "random", "--density", "0.3", "--output", str(tmp_path))
    status, _, err = _run(*flags, "--budget-s", "-1")
    assert (status, "nothing was emulated" in err) == (1, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--link-gbs", "10"), "--link-gbs and --link-us go together"),
        (("--link-gbs", "0", "--link-us", "1"), "--link-gbs must be above 0"),
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--kind", "stripes"), "--kind must be of dense"),
        (("--dtype", "int8"), "--dtype must be of bfloat16"),
        (("--calibration", "nowhere.json"), "nowhere.json"),
        (("--ranks-per-node", "0"), "--ranks-per-node must be at least 1"),
        (("--exchange-chunks", "0"), "--exchange-chunks must be auto or at least 1"),
        (("--exchange-chunks", "few"), "--exchange-chunks must be auto or at least 1"),
    ],
)
def test_main_refuses(flags: tuple[str, ...], message: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert message in err


def test_main_chooses_chunks_as_the_runtime_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan, the call, and the links of the command line; a ring of all ranks is not asked for."""
    asked = []

    def choose(plan: Any, shape: Any, calibration: Any, ranks_per_node: int) -> int:
        assert (shape.num_heads, shape.seqlen, shape.dtype) == (6, 203, torch.float32)
        assert calibration.link("all_to_all", 2, "node").time(10**6) == pytest.approx(30 + 500)
        assert ranks_per_node == 2
        asked.append(plan.ulysses_degree)
        return 3

    monkeypatch.setattr(emulate_ranks, "choose_num_chunks", choose)
    status, _, err = _run(
        *("--ranks", "2", "--kind", "corner", "--density", "0.3", "--repeats", "0", "--no-paper", "--no-plots"),
        *("--link-gbs", "2", "--link-us", "30", "--output", str(tmp_path)),
    )
    assert status == 0, err
    report = json.loads((tmp_path / "emulated.json").read_text())
    assert report["exchange_chunks"] == "auto"
    assert asked == [2, 2]
    chunks = {(r["strategy"], r["mesh"]): (r["chunks"], r["num_chunks"]) for r in report["records"]}
    assert chunks == {
        ("ulysses", "2x1"): (3, 1), ("dbsp", "2x1"): (3, 3), ("ring", "1x2"): (1, 1), ("dbsp", "1x2"): (1, 1)
    }  # fmt: skip


def _row(strategy: str, mesh: str, ms: float, chunked: float | None = None, one: float | None = None) -> dict[str, Any]:
    return {
        "kind": "st", "density": 0.2, "seed": 0, "sp_degree": 4, "strategy": strategy, "mesh": mesh,
        "attention_ms": ms, "rho": 1.0, "rho_gpu": 1.0, "exposed": 0.0, "efficiency": 2 / ms,
        "num_chunks": 3 if strategy == "dbsp" else 1, "chunks": 3, "in_chunks_ms": chunked or ms,
        "one_chunk_ms": one or ms,
    }  # fmt: skip


def test_speedups_compare_best_meshes() -> None:
    rows = [
        *(_row("ulysses", "4x1", 5.0, 3.6), _row("ring", "1x4", 6.0), _row("usp", "2x2", 4.5, 4.2)),
        *(_row("dbsp", "4x1", 3.5, one=3.6), _row("dbsp", "2x2", 3.0, one=4.0), _row("paper", "2x2", 3.6, 3.3)),
    ]
    (line,) = speedups(rows)
    assert line["speedup"] == pytest.approx(1.5)
    assert line["best_unbalanced"] == "usp"
    assert line["over_paper"] == pytest.approx(1.2)
    assert line["best"]["dbsp"]["mesh"] == "2x2"
    # With chunks for all of them, Ulysses is the best that is unbalanced; with one for each, ours is best on 4x1.
    assert line["speedup_in_chunks"] == pytest.approx(1.2)
    assert line["over_paper_in_chunks"] == pytest.approx(1.1)
    assert line["best_in_chunks_ms"]["ulysses"] == {"mesh": "4x1", "chunks": 3, "ms": 3.6}
    assert line["speedup_in_one_chunk"] == pytest.approx(1.25)
    assert line["over_paper_in_one_chunk"] == pytest.approx(1.0)
    assert line["best_one_chunk_ms"]["dbsp"] == {"mesh": "4x1", "chunks": 1, "ms": 3.6}


def test_text_report_ends_with_speed_ups_in_all_three_ways() -> None:
    rows = [_row("ulysses", "4x1", 6.0, 4.5), _row("dbsp", "4x1", 3.0, one=4.0)]
    names = ("direction", "shape", "heads", "head_dim", "block_size", "dtype", "exchange_chunks", "links", "what")
    report = {name: name for name in names} | {"seqlen": 1, "devices": ["x"], "git": None, "skipped": []}
    lines = text_report(report | {"speedups": speedups(rows)}).splitlines()[-3:]
    assert [line.split()[-4:] for line in lines] == [
        ["2.000"] * 3 + ["-"],
        ["1.500"] * 3 + ["-"],
        ["1.500"] * 3 + ["-"],
    ]


def test_plot_speedup_refuses_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records"):
        plot_speedup([], tmp_path / "x.png")
