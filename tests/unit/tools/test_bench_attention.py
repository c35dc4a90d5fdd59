"""The attention benchmark: tiny runs on CPU, wrong results that must not get figures, and refusals."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask
from tests.reference import attention_reference, expand_blocks
from tools import attention_baselines, bench_attention
from tools.attention_baselines import NotInstalledError
from tools.attention_cases import DENSE, KINDS, AttentionCase, Passes, UnfitError, make_blocks, ours
from tools.attention_check import AttentionSample, sample_attention
from tools.attention_rounds import Clock, Timing, balanced_order, time_in_turns

SEQLEN, HEADS, DIM, BLOCK = 75, 4, 16, 16
TINY = (
    *("--device", "cpu", "--seqlen", str(SEQLEN), "--heads", str(HEADS), "--head-dim", str(DIM)),
    *("--block-size", str(BLOCK), "--density", "0.4", "--rounds", "2", "--budget-ms", "1"),
)


def _run(*flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = bench_attention.main([*TINY, *flags])
    return status, out.getvalue(), err.getvalue()


def _case(kv_heads: int = 2, block_sizes: tuple[int, int] = (BLOCK, 32), dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(5)
    num_q, num_k = (-(-SEQLEN // size) for size in block_sizes)
    blocks = make_blocks("skew", HEADS, num_q, num_k, 0.5, generator)
    # A query head has no keys in its last rows.
    blocks[:, 0, 1:][:, -1:] = False
    q, k, v, dout = (
        torch.randn((1, SEQLEN, heads, DIM), generator=generator).to(dtype)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    mask = BlockMask(blocks, *block_sizes, SEQLEN, SEQLEN)
    return AttentionCase(q=q, k=k, v=v, dout=dout, mask=mask, directions=("forward", "backward"))


def test_main_measures_and_writes_everything(tmp_path: Path) -> None:
    files = {flag: tmp_path / "new" / f"bench.{flag}" for flag in ("json", "markdown", "png")}
    flags = [*("--json", str(files["json"])), *("--markdown", str(files["markdown"])), *("--plot", str(files["png"]))]
    engines = ("ours", "torch", "deterministic", "resume", "triton_portable", "flash_attn_4")
    status, out, err = _run(
        *("--engine", *engines, "--density", "0.4", "1.0", "--kind", "topk", "local", "--kv-heads", "2", *flags)
    )
    assert status == 0, err
    report = json.loads(files["json"].read_text())
    measured = {
        (row["kind"], row["density"], row["direction"], row["implementation"]): row
        for row in report["records"]
        if row["tflops"] is not None
    }
    masks = {("topk", 0.4), ("local", 0.4), (DENSE, 1.0)}
    assert {key[:2] for key in measured} == masks
    assert {key[2:] for key in measured} == {
        *((direction, name) for direction in ("forward", "backward") for name in ("ours", "torch")),
        ("forward", "resume"),
        ("backward", "deterministic"),
    }
    for (_, _, direction, _), row in measured.items():
        assert row["errors"].keys() == ({"out", "lse"} if direction == "forward" else {"dq", "dk", "dv"})
        assert max(row["errors"].values()) < 1e-5
        assert len(row["round_ms"]) == 2
        assert row["tflops_p10"] <= row["tflops"] <= row["tflops_p90"]
        # All of them are ours.
        assert row["ratio"] is None
    dense = measured[DENSE, 1.0, "forward", "ours"]
    assert dense["pairs"] == HEADS * SEQLEN**2
    assert dense["pair_density"] == 1
    assert {(row["kind"], row["density"]) for row in report["lists"]} == masks
    assert report["config"]["kv_heads"] == 2
    assert {"torch", "dbsp_megatron"} <= report["versions"].keys()
    assert "commit" in report["git"]
    assert files["png"].stat().st_size > 0
    for text in (out, files["markdown"].read_text()):
        assert f"{SEQLEN} tokens, {HEADS} heads (2 for keys and values) of {DIM}" in text
        assert text.count("cpu is not a CUDA device") == 2  # of triton_portable and flash_attn_4, once each
        assert "share of our forward pass" in text


def test_main_names_a_missing_library_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_baselines, "_require_cuda", lambda case: None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    status, out, _ = _run("--engine", "ours", "flash_attn_4", "--block-size", "128", "--kind", "topk", "skew")
    assert status == 0
    assert out.count("flash_attn_4: not installed: flash_attn.cute.interface cannot be imported") == 1
    assert out.count("not installed") == 1


def _wrong(case: AttentionCase) -> Passes:
    right = ours(case)
    if right.forward is None or right.backward is None:
        raise AssertionError("ours has both passes")
    forward, backward = right.forward, right.backward

    def heads_moved() -> tuple[Tensor, Tensor | None]:
        out, lse = forward()
        return out.roll(1, dims=2), lse

    def keys_doubled() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward()
        return dq, 2 * dk, 2 * dv

    return Passes(forward=heads_moved, backward=keys_doubled)


def _broken(case: AttentionCase) -> Passes:
    def forward() -> tuple[Tensor, Tensor]:
        raise RuntimeError("kernel\n  failed")

    return Passes(forward=forward)


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (_wrong, ["wrong: error of out ", "wrong: error of dk 1, dv 1"]),
        (_broken, ["RuntimeError: kernel failed", "has no backward pass for this case"]),
    ],
)
def test_main_gives_wrong_and_broken_implementations_no_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[AttentionCase], Passes], reasons: list[str]
) -> None:
    monkeypatch.setitem(bench_attention.IMPLEMENTATIONS, "cudnn", make)
    status, out, _ = _run("--engine", "ours", "cudnn", "--json", str(tmp_path / "bench.json"))
    assert status == 0
    records = json.loads((tmp_path / "bench.json").read_text())["records"]
    assert [row["tflops"] is None for row in records] == [False, True, False, True]
    for row, reason in zip([row for row in records if row["implementation"] == "cudnn"], reasons, strict=True):
        assert row["fail"].startswith(reason)
        assert row["fail"] in out
    assert [row["ratio"] for row in records if row["implementation"] == "ours"] == [None, None]


def test_main_fails_if_nothing_can_be_measured() -> None:
    status, out, err = _run("--engine", "cudnn_dense", "vsa_triton")
    assert status == 1
    assert "cpu is not a CUDA device" in out
    assert "no implementation gave a figure" in err


def test_ratios_are_over_the_best_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Variants of ours are no others of ours."""
    ms = {"ours": 1.0, "torch": 0.5, "cudnn": 1.5, "flash_attn_4": 4.0}
    for name in ("cudnn", "flash_attn_4"):
        monkeypatch.setitem(bench_attention.IMPLEMENTATIONS, name, ours)

    def timed(calls: Mapping[str, Any], *_: Any) -> tuple[dict[str, Timing], dict[str, float]]:
        return {name: Timing(round_ms=(ms[name],), calls=1) for name in calls}, {"sm_mhz": 1500.0, "power_w": 600.0}

    monkeypatch.setattr(bench_attention, "time_in_turns", timed)
    file = tmp_path / "bench.json"
    status, out, _ = _run("--engine", *ms, "--direction", "backward", "--json", str(file))
    assert status == 0
    records = {row["implementation"]: row for row in json.loads(file.read_text())["records"]}
    found = {name: (row["best_other"], row["ratio"]) for name, row in records.items()}
    assert found == {
        "ours": ("cudnn", pytest.approx(1.5)),
        "torch": ("cudnn", pytest.approx(3.0)),
        "cudnn": ("torch", pytest.approx(1 / 3)),
        "flash_attn_4": ("torch", pytest.approx(1 / 8)),
    }
    assert records["ours"]["over"] == {"cudnn": pytest.approx(1.5), "flash_attn_4": pytest.approx(4.0)}
    # 10 operations a pair and column of the head dim.
    assert records["ours"]["tflops"] == pytest.approx(10 * DIM * records["ours"]["pairs"] / 1e9)
    assert "(1.500)" in out
    assert "1500" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "ours", "fa3"], "--engine must be of ours, .* got 'fa3'"),
        (["--kind", "random"], "--kind must be of topk, skew, local, got 'random'"),
        (["--direction", "forward", "sideways"], "--direction must be of forward, backward, got 'sideways'"),
        (["--dtype", "int8"], "--dtype must be of .* got 'int8'"),
        (["--seqlen", "0"], "--seqlen must be at least 1, got 0"),
        (["--kv-heads", "3"], "--kv-heads must divide --heads, got 3 and 4"),
        (["--density", "1.5"], "--density must be above 0 and at most 1, got 1.5"),
        (["--density", "nan"], "--density must be above 0 and at most 1, got nan"),
        (["--block-size", "64y32"], "--block-size must be whole numbers"),
        (["--block-size", "-8"], "--block-size must be whole numbers"),
        (["--budget-ms", "nan"], "--budget-ms must be a number above 0, got nan"),
        (["--plot", "speeds.svg"], "--plot writes a PNG file"),
        (["--json", "{folder}"], "--json .* is a folder: name a file in it"),
    ],
)
def test_main_refuses_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    status, out, err = _run(*(flag.format(folder=tmp_path) for flag in flags))
    assert status == 2
    assert not out
    with pytest.raises(ValueError, match=message):
        raise ValueError(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_main_refuses_cuda_where_there_is_none() -> None:
    status, _, err = _run("--device", "cuda")
    assert status == 2
    assert "pass --device cpu" in err


@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_sample_attention_is_the_reference(kv_heads: int) -> None:
    case = _case(kv_heads)
    sample = sample_attention(case, 256, 20, torch.Generator().manual_seed(1))
    assert sample.heads == (0, HEADS - 1)
    assert sample.kv_heads == tuple(sorted({0, kv_heads - 1}))
    assert torch.equal(sample.rows, torch.arange(SEQLEN))
    assert len(sample.keys) == len(set(sample.keys.tolist())) == 20
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    allowed = expand_blocks(case.mask.blocks, *case.block_size, SEQLEN, SEQLEN)
    out, lse = attention_reference(q, k, v, allowed)
    # There is an empty row in what is looked at.
    assert torch.isneginf(sample.expected["lse"]).any()
    dq, dk, dv = torch.autograd.grad((out * case.dout.double()).sum(), (q, k, v))
    out, lse = out.detach(), lse.detach()
    errors = sample.errors_forward(out, lse) | sample.errors_backward(dq, dk, dv)
    assert max(errors.values()) < 1e-12
    assert sample.wrong(errors) is None


def test_sample_attention_in_small_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case()
    whole: list[AttentionSample] = []
    pieces: list[AttentionSample] = []
    for found, limit in ((whole, 2**25), (pieces, 7 * SEQLEN)):
        monkeypatch.setattr("tools.attention_check._MAX_SCORES", limit)
        for directions in (("forward", "backward"), ("forward",)):
            sample = sample_attention(replace(case, directions=directions), 30, 10, torch.Generator().manual_seed(1))
            found.append(sample)
    assert [sorted(sample.expected) for sample in whole] == [["dk", "dq", "dv", "lse", "out"], ["lse", "out"]]
    for one, other in zip(whole, pieces, strict=True):
        assert len(one.rows) == 30
        for name, x in one.expected.items():
            torch.testing.assert_close(x, other.expected[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda found: found["out"][:, 40:].mul_(1.1), "out"),
        (lambda found: found["out"][0, 3].fill_(float("nan")), "out"),
        (lambda found: found["lse"][:, -1].add_(0.05), "lse"),
        (lambda found: found["lse"].nan_to_num_(neginf=-1e30), "lse"),
        (lambda found: found["lse"][0, 0, 0].fill_(float("-inf")), "lse"),
        (lambda found: found["dq"][:, :, 0].zero_(), "dq"),
        (lambda found: found["dk"][:, :BLOCK].zero_(), "dk"),
        (lambda found: found["dv"][:, :, -1].neg_(), "dv"),
        (lambda found: found["dv"].fill_(float("inf")), "dv"),
    ],
)
def test_sample_finds_what_is_wrong(spoil: Callable[[dict[str, Tensor]], object], name: str) -> None:
    case = _case(HEADS)
    sample = sample_attention(case, 256, 128, torch.Generator().manual_seed(1))
    passes = ours(case)
    if passes.forward is None or passes.backward is None:
        raise AssertionError("ours has both passes")
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (*passes.forward(), *passes.backward()), strict=True))
    found = {key: x.clone() for key, x in found.items() if x is not None}
    spoil(found)
    errors = sample.errors_forward(found["out"], found["lse"])
    errors |= sample.errors_backward(found["dq"], found["dk"], found["dv"])
    wrong = sample.wrong(errors)
    assert wrong is not None
    assert wrong.startswith(f"wrong: error of {name} ")
    assert "," not in wrong


@pytest.mark.parametrize("kind", [*KINDS, DENSE])
def test_make_blocks_is_as_dense_as_asked_and_leaves_no_row_empty(kind: str) -> None:
    made = [make_blocks(kind, 6, 40, 60, 0.2, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*made)
    blocks = made[0]
    assert blocks.shape == (1, 6, 40, 60)
    assert blocks.any(-1).all()
    share = float(blocks.float().mean())
    assert share == pytest.approx(1.0 if kind == DENSE else 0.2, rel=0.15)
    rows, heads = blocks.sum(-1)[0], blocks.sum((-1, -2))[0]
    if kind == "skew":
        assert heads[-1] > 3 * heads[0]
        assert rows[-1].max() > 2 * rows[-1].float().mean()
        assert blocks[..., 0].all()
    else:
        assert len(set(rows.flatten().tolist())) == 1
    if kind == "topk":
        assert not torch.equal(blocks[0, 0], blocks[0, 1])
    if kind == "local":
        runs = blocks[0, 0].int().diff(dim=-1).abs().sum(-1)
        assert (runs <= 2).all()


def test_num_pairs_counts_short_blocks_by_their_tokens() -> None:
    for sizes in ((16, 32), (64, 16), (128, 128)):
        case = _case(block_sizes=sizes)
        allowed = expand_blocks(case.mask.blocks, *case.block_size, SEQLEN, SEQLEN)
        assert case.num_pairs() == int(allowed.sum())


def test_time_in_turns_runs_everyone_untimed_before_its_turn() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings, state = time_in_turns(calls, Clock(torch.device("cpu")), 2, 1e-9)
    assert state == {}
    assert {name: len(timing.round_ms) for name, timing in timings.items()} == dict.fromkeys("abc", 2)
    assert {timing.calls for timing in timings.values()} == {1}
    assert "".join(order[-12:]) == "aabbccbbccaa"


@pytest.mark.parametrize(("count", "turns"), [(2, 2), (4, 4), (6, 6), (3, 6), (5, 10)])
def test_balanced_order_lets_everyone_follow_everyone(count: int, turns: int) -> None:
    names = "abcdef"[:count]
    orders = [balanced_order(names, turn) for turn in range(turns)]
    assert all(sorted(order) == list(names) for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) == 1


def test_timing_gives_rates_of_rounds() -> None:
    rates = Timing(round_ms=(1.0, 2.0, 4.0), calls=3).tflops(8e9)
    assert rates == {
        "tflops": pytest.approx(14 / 3),
        "tflops_p10": pytest.approx(2.4),
        "tflops_p90": pytest.approx(7.2),
    }


@pytest.mark.parametrize("name", sorted(attention_baselines.BASELINES))
def test_baselines_are_refused_on_cpu(name: str) -> None:
    with pytest.raises(UnfitError, match="cpu is not a CUDA device"):
        attention_baselines.BASELINES[name](_case())


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("flash_attn_4", {}, "blocks are 128 x 128"),
        ("cudnn", {}, "blocks are 64 x 64 or 128 x 128"),
        ("cudnn", {"block_sizes": (64, 64)}, "75 tokens are no whole blocks of 64"),
        ("flex", {"block_sizes": (64, 128)}, "multiples of 128"),
        ("vsa_triton", {}, "blocks are 64 x 64"),
        ("vsa_tk", {"block_sizes": (64, 64)}, "75 tokens are no whole blocks of 64 x 64"),
        ("fa4_dense", {}, "density 1 only"),
        ("cudnn_dense", {}, "density 1 only"),
    ],
)
def test_baselines_name_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, name: str, case: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(attention_baselines, "_require_cuda", lambda case: None)
    with pytest.raises(UnfitError, match=reason):
        attention_baselines.BASELINES[name](_case(**case))


def test_baselines_without_their_library_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_baselines, "_require_cuda", lambda case: None)
    for module in ("flash_attn.cute.interface", "cutlass.cute"):
        monkeypatch.setitem(sys.modules, module, None)
    case = _case(block_sizes=(128, 128))
    for name in ("flash_attn_4", "cudnn"):
        with pytest.raises(NotInstalledError, match="cannot be imported"):
            attention_baselines.BASELINES[name](case)


def test_outputs_that_cannot_be_made_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flag, name in (("--markdown", "file/a.md"), ("--json", "file/deeper/a.json"), ("--plot", "file/a.png")):
        status, out, said = _run("--engine", "torch", flag, str(tmp_path / name))
        assert status == 2
        assert f"{flag} {tmp_path / name} cannot be made" in said
        assert not out


def test_block_sizes_that_are_no_numbers_are_refused() -> None:
    status, _, said = _run("--engine", "torch", "--block-size", "16x")
    assert status == 2
    assert "--block-size must be whole numbers" in said
