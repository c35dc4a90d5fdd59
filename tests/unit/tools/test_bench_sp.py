"""The sequence-parallel benchmark: two real ranks on CPU, what it makes of its figures, and what it refuses."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron.attention import chunks, exchange
from dbsp_megatron.attention.engines import engine_named
from dbsp_megatron.plan import sparse_imbalance
from tests.harness import run_ranks
from tools import bench_sp, sp_entries
from tools.device_timing import Ranks
from tools.sp_cases import SHAPES, MaskChoice, choices, find_shape, parse_mesh, with_imbalance
from tools.sp_entries import strategy_meshes
from tools.sp_phases import measure_phases, watching
from tools.sp_report import add_ratios, text_report
from tools.sp_rounds import Together

QUICK = ("--device", "cpu", "--rounds", "1", "--budget-ms", "1")


def _run(*flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = bench_sp.main([*QUICK, *flags])
    return status, out.getvalue(), err.getvalue()


def _wrong_paper(entry: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 1.1 if entry.name == "paper" else out


def _on_ranks(rank: int, world_size: int, folder: str) -> tuple[int, str, str]:
    original = sp_entries.StrategyEntry.whole
    sp_entries.StrategyEntry.whole = lambda self, x: _wrong_paper(self, original(self, x))  # type: ignore[method-assign]
    try:
        return _run(
            *("--shape", "tiny", "--kind", "corner", "st", "--seed", "0", "1", "2", "--imbalance", "1.15", "1.6"),
            *("--strategy", "ulysses", "ring", "dbsp", "paper", "--dbsp-set", "replan_gain=0.001"),
            *("--exchange-chunks", "3"),
            *("--json", f"{folder}/sp.json", "--markdown", f"{folder}/sp.md"),
        )
    finally:
        sp_entries.StrategyEntry.whole = original  # type: ignore[method-assign]


@pytest.mark.slow
def test_main_measures_two_ranks_and_gives_no_figure_to_what_is_wrong(tmp_path: Path) -> None:
    results = run_ranks(_on_ranks, 2, str(tmp_path), timeout_s=150)
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[1][1] == "", "only the first rank prints"
    report = json.loads((tmp_path / "sp.json").read_text())
    assert report["num_ranks"] == 2
    assert report["config"]["dbsp_settings"] == {"replan_gain": 0.001}
    assert report["config"]["exchange_chunks"] == 3
    assert {"torch", "dbsp_megatron"} <= set(report["versions"])
    found = {(r["strategy"], r["mesh"], r["direction"]): r for r in report["records"]}
    assert len(found) == len(report["records"]) == 2 * 6
    for (strategy, mesh, direction), record in found.items():
        backward = direction == bench_sp.BOTH
        if strategy == "paper":
            assert record["fail"].startswith("wrong")
            assert record["ms"] is None
            continue
        assert record["fail"] is None
        assert set(record["errors"]) == ({"out", "dq", "dk", "dv"} if backward else {"out"})
        assert record["ms"] > 0
        assert record["efficiency"] == pytest.approx(record["ideal_ms"] / record["ms"])
        assert list(record["phases"]) == (["forward", "backward"] if backward else ["forward"])
        for part in record["phases"].values():
            for rank in range(2):
                pieces = sum(part[name][rank] for name in ("compute", "pack", "exchange", "wait", "rest"))
                assert pieces == pytest.approx(part["total"][rank])
                assert part["compute"][rank] > 0
                assert (part["pack"][rank] > 0) == (mesh == "2x1")
                # Heads travel on one axis, K/V on the other.
                assert (part["exchange"][rank] > 0) == (part["exchange_alone"][rank] > 0) == (mesh == "2x1")
                assert (part["messages_alone"][rank] > 0) == (mesh == "1x2")
        # The own chunk, then that of the other ring rank; three chunks of heads, each exchanged there and back.
        assert len(record["compute_calls_ms"][0]) == (2 if mesh == "1x2" else 3)
        assert record["num_chunks"] == (1 if mesh == "1x2" else 3)
        assert min(record["bytes_sent"]) > 0
        if strategy == "dbsp":
            assert record["rho_after"] < 1.1 < 1.15 <= record["rho_before"] <= 1.6
            same = found["ulysses" if mesh == "2x1" else "ring", mesh, direction]
            assert record["over_same_mesh"] == pytest.approx(same["ms"] / record["ms"])
            assert record["rho_ratio"] == pytest.approx(record["rho_before"] / record["rho_after"])
            assert same["rho_after"] == pytest.approx(record["rho_before"])
    printed, markdown = results[0][1], (tmp_path / "sp.md").read_text()
    assert printed.rstrip().splitlines()[-1].startswith("tiny 16")
    assert "wrong: error of out" in printed
    for title in ("Times of the slowest rank", "Speed-up of balanced strategies", "Command:"):
        assert title in markdown


def test_main_measures_one_process_and_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'yunchang'")

    monkeypatch.setattr(sp_entries, "_import_yunchang", missing)
    status, out, err = _run("--shape", "tiny", "--kind", "dense", "--direction", "forward", "--strategy", "dbsp",
                            "yunchang")  # fmt: skip
    assert status == 0, err
    assert "yunchang 1x1: not installed: ModuleNotFoundError: No module named 'yunchang'" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "huge"), "--shape must be one of wan13_480p"),
        (("--strategy", "dsp"), "--strategy must be of ulysses"),
        (("--mesh", "2x1"), "is not of 1 rank"),
        (("--mesh", "two"), "--mesh must be like 2x1"),
        (("--kind", "stripes"), "--kind must be of dense"),
        (("--density", "0"), "--density must be above 0"),
        (("--dtype", "int8"), "--dtype must be of bfloat16"),
        (("--set", "kv_prefetch"), "take KEY=VALUE"),
        (("--set", "kv_prefetch=0", "--shape", "tiny"), "kv_prefetch must be an integer >= 1"),
        (("--exchange-chunks", "0", "--shape", "tiny"), "exchange_chunks must be an integer >= 1"),
        (("--head-dim", "0"), "--head-dim must be at least 1"),
    ],
)
def test_main_refuses(flags: tuple[str, ...], message: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert message in err


def test_shapes_have_the_published_lengths() -> None:
    assert {name: (shape.seqlen, shape.geometry.heads, shape.head_dim) for name, shape in SHAPES.items()} == {
        "wan13_480p": (32760, 12, 128),
        "wan14_720p": (75600, 40, 128),
        "cog5b": (17776, 48, 64),
        "cog15_768p": (85906, 48, 64),
        "tiny": (203, 6, 16),
    }
    assert find_shape("2x3x4x5", 32).seqlen == 24


def test_with_imbalance_takes_the_first_mask_between_the_bounds_or_the_nearest() -> None:
    shape, meshes = SHAPES["tiny"], [(2, 1), (1, 2)]
    candidates = choices(["random", "corner"], [0.3], range(4))
    values = [[sparse_imbalance(c.make(shape, 16), *mesh) for mesh in meshes] for c in candidates]
    fitting = [i for i, pair in enumerate(values) if all(1.1 <= value <= 1.6 for value in pair)]
    assert fitting
    assert fitting[0] > 0
    chosen, mask = with_imbalance(candidates, shape, 16, meshes, 1.1, 1.6)
    assert chosen == candidates[fitting[0]]
    assert mask.seqlen_q == shape.seqlen
    nearest, _ = with_imbalance(candidates, shape, 16, meshes, 9.0, 9.5)
    assert candidates.index(nearest) == max(range(len(values)), key=lambda i: sum(values[i]))


def test_choices_hold_a_dense_mask_once() -> None:
    assert choices(["dense", "st"], [0.2, 0.4], [0]) == [
        MaskChoice(kind="dense", density=1.0, seed=0),
        MaskChoice(kind="st", density=0.2, seed=0),
        MaskChoice(kind="st", density=0.4, seed=0),
    ]


def test_strategy_meshes_gives_every_strategy_its_own() -> None:
    assert strategy_meshes(["ulysses", "ring", "usp"], 4, []) == [
        ("ulysses", (4, 1)),
        ("ring", (1, 4)),
        ("usp", (2, 2)),
    ]
    assert strategy_meshes(["ulysses", "ring", "dbsp"], 1, []) == [("ulysses", (1, 1)), ("dbsp", (1, 1))]
    assert strategy_meshes(["dbsp", "usp"], 2, [parse_mesh("1x2")]) == [("dbsp", (1, 2))]


def _record(strategy: str, mesh: str, ms: float | None, **more: Any) -> dict[str, Any]:
    known = {"shape": "s", "block_size": 64, "mask": "m", "direction": "forward", "ideal_ms": 4.0, "fail": None}
    return known | {"strategy": strategy, "mesh": mesh, "ms": ms} | more


def test_add_ratios_compares_with_the_same_mesh_and_the_best_unbalanced() -> None:
    phases = {
        "forward": {
            "total": [5.0, 5.5], "compute": [4.4, 4.0], "pack": [0.0, 0.0], "exchange": [1.0, 1.0],
            "wait": [0.0, 0.0], "rest": [0.0, 0.5],
            "exchange_alone": [1.0, 2.0], "messages_alone": [0.5, 0.2],
        }
    }  # fmt: skip
    records = [
        _record("ulysses", "2x1", 6.0, rho_gpu=1.5),
        _record("ring", "1x2", 5.5, rho_gpu=1.3),
        _record("yunchang", "2x1", 5.0),
        _record("dbsp", "2x1", 5.0, rho_before=1.5, rho_after=1.2, rho_gpu=1.2, phases=phases),
        _record("dbsp", "1x2", None),
    ]
    add_ratios(records)
    dbsp = records[3]
    assert dbsp["efficiency"] == pytest.approx(0.8)
    assert dbsp["over_same_mesh"] == pytest.approx(1.2)
    assert dbsp["over_best_unbalanced"] == pytest.approx(1.1)
    assert dbsp["over"]["yunchang 2x1"] == pytest.approx(1.0)
    assert dbsp["rho_ratio"] == pytest.approx(1.25)
    assert dbsp["kept"] == pytest.approx(0.96)
    assert dbsp["rho_gpu_ratio"] == pytest.approx(1.25)
    assert dbsp["exposed"] == pytest.approx(1 - 4.4 / 5.5)
    assert dbsp["overlap"] == pytest.approx(1 - 1.1 / 2.2)
    assert records[0]["exposed"] is None
    assert records[4]["over_same_mesh"] is None


def test_measure_phases_divides_a_call_at_its_collectives_and_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("tools.sp_phases.time.perf_counter", lambda: next(moments) / 1e3)
    monkeypatch.setattr(dist, "all_to_all_single", lambda output, source, *sizes, **options: None)
    engine = engine_named("torch")
    monkeypatch.setattr(type(engine), "forward", lambda self, *args: None)

    def call(_: Any) -> None:
        flat = torch.zeros(4)
        dist.all_to_all_single(torch.empty(4), flat, [4], [4])
        dist.all_to_all_single(torch.empty(4), torch.zeros(4, dtype=torch.int64))
        for _ in range(2):
            engine.forward()
        dist.all_to_all_single(torch.empty(4), flat)

    (report,) = measure_phases([call], Together(Ranks("cpu")), repeats=1)
    # Marks: begin 0, exchange 1-2, engine 3-4 and 5-6, exchange 7-8, end 9; integers are no part of the attention.
    assert report.phases.total == pytest.approx(9)
    assert report.phases.exchange == pytest.approx((1, 1))
    assert report.phases.compute == pytest.approx((1, 1))
    assert report.phases.wait == pytest.approx(1)
    assert report.phases.rest == pytest.approx(4)


def test_measure_phases_counts_what_is_waited_for_and_packing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of heads: messages run beside kernels, and buffers are filled between these."""

    class Work:
        def wait(self) -> bool:
            return True

    moments = iter(range(100))
    monkeypatch.setattr("tools.sp_phases.time.perf_counter", lambda: next(moments) / 1e3)
    monkeypatch.setattr(dist, "all_to_all_single", lambda output, source, *sizes, **options: Work())
    engine = engine_named("torch")
    monkeypatch.setattr(type(engine), "forward", lambda self, *args: None)
    for name in ("pack", "unpack"):
        monkeypatch.setattr(exchange, name, lambda: None)

    runtime: Any = exchange

    def call(_: Any) -> None:
        works = []
        for _ in range(2):
            runtime.pack()
            works.append(dist.all_to_all_single(torch.empty(4), torch.zeros(4), [4], [4], async_op=True))
        for work in works:
            work.wait()
            runtime.unpack()
            engine.forward()

    (report,) = measure_phases([call], Together(Ranks("cpu")), repeats=1)
    # Marks: begin 0, packing 1-2 and 3-4, then twice waiting, unpacking and the engine: 5-10 and 11-16, end 17.
    phases = report.phases
    assert phases.total == pytest.approx(17)
    assert phases.pack == pytest.approx(4)
    assert phases.exchange == pytest.approx((1, 1))
    assert phases.compute == pytest.approx((1, 1))
    # Between the engine calls: 10-11, 12-13, 14-15; before: 0-1, 2-3, 4-5, 6-7, 8-9; after: 16-17.
    assert phases.wait == pytest.approx(3)
    assert phases.rest == pytest.approx(6)
    assert report.exchange_alone > 0


def _packing() -> list[Any]:
    """What the runtime packs and unpacks with."""
    return [*(vars(exchange)[name] for name in ("pack", "unpack", "unpack_sum")), vars(chunks)["pack"]]


def test_watching_leaves_everything_as_it_was() -> None:
    before = (dist.all_to_all_single, dist.batch_isend_irecv, dict(vars(engine_named("torch"))))
    packing = _packing()
    with watching(torch.device("cpu")):
        assert dist.all_to_all_single is not before[0]
        assert "forward" in vars(engine_named("torch"))
        assert not any(now is then for now, then in zip(_packing(), packing, strict=True))
    assert _packing() == packing
    assert (dist.all_to_all_single, dist.batch_isend_irecv, vars(engine_named("torch"))) == before


def test_text_report_ends_with_the_speed_ups() -> None:
    records = [
        _record("ulysses", "2x1", 6.0, rho_after=1.5, rho_gpu=1.5),
        _record("dbsp", "2x1", 5.0, rho_before=1.5, rho_after=1.2, rho_gpu=1.2),
    ]
    add_ratios(records)
    config = {"dtype": "bfloat16", "rounds": 1, "budget_ms": 1.0, "exchange_chunks": "auto"}
    text = text_report(
        {"config": config, "num_ranks": 2, "devices": ["x"], "git": None, "missing": {}, "records": records}
    )
    assert text.splitlines()[-1].split()[-6:] == ["1.200", "1.250", "0.960", "1.250", "1.200", "0.800"]
