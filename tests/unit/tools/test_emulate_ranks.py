"""Emulated ranks: overlap by hand-made times, bytes and kernels of real plans, and the tool on CPU."""

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
from dbsp_megatron.plan.calibration import reference_calibration
from tools import emulate_ranks
from tools.emulate_ranks import speedups
from tools.sp_cases import SHAPES, MaskChoice
from tools.sp_emulation import EmulatedLayer, RankEmulator, plan_of
from tools.sp_timeline import Machine, MeasuredLinks, RingCosts, StraightLinks, backward_pass, forward_pass

FAST = 1e30


class _ByteLinks:
    """A byte takes a millisecond, between nodes ten."""

    def swap(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        return num_bytes * (10 if network else 1)

    def all_to_all(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        return self.swap(num_bytes, num_ranks, network=network)


def _machine(**more: Any) -> Machine:
    return Machine(**({"links": _ByteLinks(), "ranks_per_node": 99, "copy_bytes_per_ms": FAST} | more))


def _costs(forward: Any, send: Any, calls: tuple[tuple[int, ...], ...] | None = None, **more: Any) -> RingCosts:
    """Costs by rank [U, R, ...]."""
    ms, sent = np.asarray(forward, dtype=float), np.asarray(send, dtype=np.int64)
    size = ms.shape[0] * ms.shape[1]
    nothing = np.zeros((size, size), dtype=np.int64)
    known: dict[str, Any] = {
        "calls": calls or tuple((step,) for step in range(ms.shape[2])),
        "forward": ms,
        "backward": 2 * ms,
        "send_bytes": sent,
        "there": nothing,
        "back": nothing,
        "moves": False,
        "home_bytes": np.zeros((*ms.shape[:2], 2), dtype=np.int64),
        "owner_bytes": np.zeros((*ms.shape[:2], 2), dtype=np.int64),
    }
    return RingCosts(**(known | more))


@pytest.mark.parametrize(
    ("num_bytes", "total"),
    [(0, 7.0), (3, 7.0), (5, 9.0)],
    ids=["no messages", "hidden under the first call", "two longer than the first call"],
)
def test_forward_pass_hides_messages_under_the_call_before(num_bytes: int, total: float) -> None:
    found = forward_pass(_costs([[[3, 4], [3, 4]]], [[[0, num_bytes], [0, num_bytes]]]), _machine())
    assert found.total == pytest.approx(total)
    assert found.compute == pytest.approx(7)
    assert found.exposed == pytest.approx(1 - 7 / total)


def test_forward_pass_lets_ranks_run_apart() -> None:
    """Trap of a lock-step ring: a barrier at every step would take 3 + 3."""
    assert forward_pass(_costs([[[3, 1], [1, 3]]], np.zeros((1, 2, 2))), _machine()).total == pytest.approx(4)


def test_forward_pass_posts_as_far_ahead_as_the_prefetch() -> None:
    costs = _costs([[[1, 1, 6]] * 3], [[[0, 1, 4]] * 3])
    # Two ahead: step 2 follows step 1 on the link, at 1, and is there at 5.
    assert forward_pass(costs, _machine(prefetch=2)).total == pytest.approx(5 + 6)
    # One ahead: step 2 is posted when step 1 is asked for, after the first call; the same moment here.
    assert forward_pass(costs, _machine(prefetch=1)).total == pytest.approx(5 + 6)
    slower = _costs([[[3, 1, 6]] * 3], [[[0, 1, 4]] * 3])
    assert forward_pass(slower, _machine(prefetch=2)).total == pytest.approx(5 + 6)
    assert forward_pass(slower, _machine(prefetch=1)).total == pytest.approx(7 + 6)


def test_forward_pass_joins_chunks_once_all_are_there() -> None:
    costs = _costs([[[2, 6]] * 3], [[[0, 1, 4]] * 3], calls=((0,), (1, 2)))
    assert forward_pass(costs, _machine()).total == pytest.approx(5 + 6)
    # Packed at 0.2 and 1.0, sent until 1.2 and 5.2, joined until 6.2.
    assert forward_pass(costs, _machine(copy_bytes_per_ms=5.0)).total == pytest.approx(6.2 + 6)


def test_forward_pass_waits_for_the_heaviest_rank_in_both_exchanges() -> None:
    there, back = np.array([[0, 2], [1, 0]]), np.array([[0, 3], [4, 0]])
    home, owner = np.array([[[1, 1]], [[1, 1]]]), np.array([[[2, 2]], [[2, 2]]])
    costs = _costs([[[1]], [[5]]], np.zeros((2, 1, 1)), there=there, back=back, home_bytes=home, owner_bytes=owner)
    found = forward_pass(costs, _machine())
    assert found.total == pytest.approx(2 + 5 + 4)
    assert found.exchange == pytest.approx(2 + 4)
    copied = forward_pass(costs, _machine(copy_bytes_per_ms=1.0))
    assert copied.total == pytest.approx(1 + 2 + 2 + 5 + 2 + 4 + 1)
    # Each byte leaves its node.
    assert forward_pass(costs, _machine(ranks_per_node=1)).total == pytest.approx(20 + 5 + 40)


def test_backward_pass_sends_gradients_home_and_waits_for_them() -> None:
    costs = _costs([[[3, 4], [3, 4]]], [[[0, 2], [0, 2]]])
    # Kernels take twice as long; the gradients are fp32 and travel after the last call.
    assert backward_pass(costs, _machine()).total == pytest.approx(6 + 8 + 4)
    with pytest.raises(ValueError, match="was not measured"):
        backward_pass(_costs([[[1]]], [[[0]]], backward=None), _machine())


def test_links_follow_their_curves() -> None:
    straight = StraightLinks(gb_per_s=2.0, latency_us=30.0)
    assert straight.swap(10**6, 4, network=False) == pytest.approx(0.03 + 0.5)
    assert straight.all_to_all(0, 4, network=False) == 0
    calibration = reference_calibration()
    measured = MeasuredLinks(calibration)
    assert measured.all_to_all(10**7, 8, network=False) == pytest.approx(
        calibration.link("all_to_all", 8, "node").time(10**7) / 1e3
    )


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
    costs = emulator.costs(plan)
    assert costs.calls == tuple((step,) for step in range(mesh[1]))
    np.testing.assert_array_equal(costs.forward, plan.loads)
    assert costs.backward is None
    seqlen, heads, row = emulator.layer.mask.seqlen_q, plan.num_heads, 16 * 4
    # All rows of q and out have one owner, and one home.
    assert costs.owner_bytes[..., 1].sum() == costs.home_bytes[..., 1].sum() == seqlen * heads * row
    assert costs.home_bytes[..., 0].sum() == 3 * seqlen * heads * row
    # No rank sends more than its whole chunk in a step.
    chunk = (costs.owner_bytes[..., 0] - costs.owner_bytes[..., 1])[..., None]
    assert np.all(costs.send_bytes <= chunk)
    assert not costs.send_bytes[..., 0].any()


def test_costs_join_small_chunks_as_the_runtime_does() -> None:
    joined = _emulator(kv_gather_mib=512)
    costs = joined.costs(plan_of("ring", (1, 4), joined.layer.mask, {}))
    assert costs.calls == ((0,), (1, 2, 3))


def test_costs_are_measured_once_for_equal_plans() -> None:
    emulator = _emulator(backward=True)
    first = emulator.costs(plan_of("usp", (2, 1), emulator.layer.mask, {}))
    assert emulator.costs(plan_of("ulysses", (2, 1), emulator.layer.mask, {})) is first
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
        *("--link-gbs", "10", "--link-us", "5", "--output", str(tmp_path)),
    )
    assert status == 0, err
    report = json.loads((tmp_path / "emulated.json").read_text())
    assert all(record["emulated"] for record in (*report["records"], *report["speedups"]))
    markdown = (tmp_path / "emulated.md").read_text()
    assert "mulated" in out.splitlines()[0]
    assert "# Emulated" in markdown
    assert "no message was sent" in markdown
    assert (tmp_path / "emulated.png").stat().st_size > 1000
    assert {(r["sp_degree"], r["strategy"], r["mesh"]) for r in report["records"]} == {
        *((2, "ulysses", "2x1"), (2, "ring", "1x2"), (4, "ulysses", "4x1"), (4, "ring", "1x4"), (4, "usp", "2x2")),
        *((size, name, mesh) for name in ("dbsp", "paper") for size, mesh in ((2, "2x1"), (2, "1x2"))),
        *((4, name, mesh) for name in ("dbsp", "paper") for mesh in ("4x1", "2x2", "1x4")),
    }
    for record in report["records"]:
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
    ],
)
def test_main_refuses(flags: tuple[str, ...], message: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert message in err


def _row(strategy: str, mesh: str, ms: float) -> dict[str, Any]:
    return {
        "kind": "st", "density": 0.2, "seed": 0, "sp_degree": 4, "strategy": strategy, "mesh": mesh,
        "attention_ms": ms, "rho": 1.0, "rho_gpu": 1.0, "exposed": 0.0, "efficiency": 2 / ms,
    }  # fmt: skip


def test_speedups_compare_best_meshes() -> None:
    rows = [
        *(_row("ulysses", "4x1", 5.0), _row("ring", "1x4", 6.0), _row("usp", "2x2", 4.5)),
        *(_row("dbsp", "4x1", 3.5), _row("dbsp", "2x2", 3.0), _row("paper", "2x2", 3.6)),
    ]
    (line,) = speedups(rows)
    assert line["speedup"] == pytest.approx(1.5)
    assert line["best_unbalanced"] == "usp"
    assert line["over_paper"] == pytest.approx(1.2)
    assert line["best"]["dbsp"]["mesh"] == "2x2"


def test_plot_speedup_refuses_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records"):
        plot_speedup([], tmp_path / "x.png")
