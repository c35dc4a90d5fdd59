"""The benchmark of models over space and time: real ranks on CPU, bytes and errors, what it refuses and predicts."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tools import bench_dsp, dsp_entries
from tools.dsp_entries import STRATEGIES
from tools.dsp_model import SHAPES, find_shape
from tools.dsp_report import used_line
from tools.link_bytes import counting

QUICK = ("--device", "cpu", "--rounds", "1", "--budget-ms", "1")


def _run(*flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = bench_dsp.main([*QUICK, *flags])
    return status, out.getvalue(), err.getvalue()


def _on_ranks(rank: int, world_size: int, folder: str, *flags: str) -> tuple[int, str, str]:
    files = ("--json", f"{folder}/dsp.json", "--markdown", f"{folder}/dsp.md")
    return _run("--head-dim", "4", "--pairs", "2", *files, *flags)


def _measure(folder: Path, world_size: int, *flags: str) -> tuple[dict[str, Any], dict[tuple[str, ...], Any], str]:
    results = run_ranks(_on_ranks, world_size, str(folder), *flags, timeout_s=150)
    assert [status for status, _, _ in results] == [0] * world_size, results
    assert [out for _, out, _ in results[1:]] == [""] * (world_size - 1), "only the first rank prints"
    report = json.loads((folder / "dsp.json").read_text())
    return report, {(r["shape"], r["strategy"], r["direction"]): r for r in report["records"]}, results[0][1]


def test_all_ways_agree_and_send_what_the_formulas_say(tmp_path: Path) -> None:
    """Two ranks, fp64, lengths that divide: bytes in those of a switch of a stream of M bytes, M/N (N - 1)/N."""
    report, found, printed = _measure(tmp_path, 2, "--dtype", "float64", "--ranks-per-node", "1", "--shape", "4x8x4")
    assert len(found) == len(report["records"]) == 2 * len(STRATEGIES)
    for (_, strategy, direction), record in found.items():
        assert record["fail"] is None
        assert 0 < record["error"] < 1e-12
        assert record["ms"] > 0
        assert record["efficiency"] == pytest.approx(record["ideal_ms"] / record["ms"])
        assert record["sent_between_nodes"] == record["sent_expected"]
        assert record["sent_inside_node"] == [0, 0]
        both = direction == bench_dsp.BOTH
        # Two pairs: a switch before each block but the first. Ring and Megatron-SP do not shrink with N.
        switches = {
            "dsp": 3, "dsp units": 8, "ulysses": 8, "ulysses everywhere": 16, "ring": 8 * (1.5 if both else 1),
            "megatron": 32,
        }  # fmt: skip
        whole = 4 * 8 * 16 * 8
        assert record["m_bytes"] == whole
        sent = switches[strategy] * (1 + both) * whole // 4
        assert record["sent_expected"] == [sent, sent]
    assert "Part of the ranks" in (tmp_path / "dsp.md").read_text()
    last = printed.rstrip().splitlines()[-1]
    assert last == "4x8x4: 4 frames on 64 ranks: 6.2% used with whole frames, 25.0% in (frame, head) units"


def test_bytes_of_three_ranks_on_two_nodes_in_half_precision(tmp_path: Path) -> None:
    """Heads, frames and places do not divide; a ring sends gradients in fp32; the third rank is a node of its own."""
    _, found, _ = _measure(tmp_path, 3, "--dtype", "bfloat16", "--ranks-per-node", "2", "--shape", "tiny")
    for record in found.values():
        sums = [a + b for a, b in zip(record["sent_inside_node"], record["sent_between_nodes"], strict=True)]
        assert sums == record["sent_expected"]
        assert record["sent_inside_node"][2] == 0
        assert min(record["sent_inside_node"][:2]) > 0
        assert min(record["sent_between_nodes"]) > 0


def _wrong(rank: int, world_size: int) -> tuple[int, str, str]:
    formula = dsp_entries.UlyssesEverywhereEntry.expected_bytes
    dsp_entries.UnitsEntry.part, kept = lambda self, x: kept(self, x) * 1.01, dsp_entries.UnitsEntry.part  # type: ignore[method-assign]
    dsp_entries.UlyssesEverywhereEntry.expected_bytes = lambda self, backward: [1, 2]  # type: ignore[method-assign]
    try:
        return _run("--shape", "tiny", "--pairs", "1", "--dtype", "float64", "--strategy", *STRATEGIES[:4])
    finally:
        dsp_entries.UlyssesEverywhereEntry.expected_bytes = formula  # type: ignore[method-assign]
        dsp_entries.UnitsEntry.part = kept  # type: ignore[method-assign]


def test_what_is_wrong_has_no_figure() -> None:
    (status, printed, _), _ = run_ranks(_wrong, 2, timeout_s=120)
    assert status == 1
    lines = [line for line in printed.splitlines() if line.startswith("tiny ") and "forward " in line]
    assert ["wrong" in line for line in lines] == [False, True, False, True]
    assert "tiny, forward, dsp units: wrong: out is off by" in printed
    assert "the formula says [1, 2]" in printed


def test_one_process_is_measured_too() -> None:
    status, printed, err = _run("--shape", "tiny", "--pairs", "1", "--dtype", "float64")
    assert status == 0, (printed, err)


def _counts(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    found = []
    x = torch.zeros(6, dtype=torch.float32)
    for call in (
        lambda: dist.all_to_all_single(torch.empty(sum([1 + rank] * 3)), x, [1 + rank] * 3, [1, 2, 3]),
        lambda: dist.all_to_all_single(torch.empty(3, 2), x.view(3, 2)),
        lambda: dist.all_gather_into_tensor(torch.empty(18), x),
        lambda: dist.all_gather([torch.empty(6)] * 3, x),
        lambda: dist.all_gather([torch.empty(6, dtype=torch.int64)] * 3, x.long()),
        lambda: [work.wait() for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, (rank + 1) % 3), dist.P2POp(dist.irecv, torch.empty(6), (rank - 1) % 3),
        ])],
    ):  # fmt: skip
        with counting(2) as sent:
            call()
        found.append((sent.inside, sent.between, sent.collectives))
    with counting(2), pytest.raises(RuntimeError, match="bytes of all_reduce are not counted"):
        dist.all_reduce(x)
    dist.all_reduce(x)
    return found


def test_counting_knows_peers_and_nodes() -> None:
    first, second, third = run_ranks(_counts, 3)
    assert first == [(8, 12, 1), (8, 8, 1), (24, 24, 1), (24, 24, 1), (0, 0, 0), (24, 0, 1)]
    assert second == [(4, 12, 1), (8, 8, 1), (24, 24, 1), (24, 24, 1), (0, 0, 0), (0, 24, 1)]
    assert third == [(0, 12, 1), (0, 16, 1), (0, 48, 1), (0, 48, 1), (0, 0, 0), (0, 24, 1)]


def test_units_use_64_ranks_for_15_frames() -> None:
    """Predicted: 93.8 % instead of 23.4 %."""
    row = bench_dsp.ranks_used(SHAPES["240p_2s"], 64)
    assert row["units"] >= 0.9
    assert used_line(row) == (
        "240p_2s: 15 frames on 64 ranks: 23.4% used with whole frames, 93.8% in (frame, head) units"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "huge"), "--shape must be of 240p_2s"),
        (("--shape", "0x4x4"), "--shape must be of 240p_2s"),
        (("--strategy", "usp"), "--strategy must be of 'dsp'"),
        (("--dtype", "int8"), "--dtype must be of bfloat16"),
        (("--head-dim", "0"), "--head-dim must be at least 1"),
        (("--pairs", "0"), "--pairs must be at least 1"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--simulate", "0"), "--simulate and --ranks-per-node must be at least 1"),
        (("--json", "."), "is a folder"),
    ],
)
def test_main_refuses(flags: tuple[str, ...], message: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert message in err


def test_shapes_are_those_of_the_models() -> None:
    found = {name: (shape.frames, shape.places, shape.channels) for name, shape in SHAPES.items() if name != "tiny"}
    assert found == {
        "240p_2s": (15, 405, 1152),
        "480p_2s": (15, 1590, 1152),
        "480p_8s": (60, 1590, 1152),
        "720p_16s": (120, 3600, 1152),
        "64x4096": (64, 4096, 1152),
    }
    assert find_shape("3x5x2", head_dim=8, batch=2, pairs=4).elements == 2 * 3 * 5 * 16


def test_ways_with_pytorchs_attention_agree(tmp_path: Path) -> None:
    """All but ring; bytes are those of the formulas, as with the block-sparse engine."""
    report, found, _ = _measure(tmp_path, 2, "--dtype", "float64", "--shape", "4x8x4", "--attention", "sdpa")
    assert {strategy for _, strategy, _ in found} == set(STRATEGIES) - {"ring"}
    assert "use --attention blocks" in report["missing"]["ring, 4x8x4"]
    for record in found.values():
        assert record["fail"] is None
        assert record["sent_inside_node"] == record["sent_expected"]
