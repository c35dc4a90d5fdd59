"""The benchmark of a pipeline end to end: errors, what has no figure, speed-ups, ranks, what it refuses."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.models.diffusers.processor import SequenceParallelProcessor
from tests.harness import run_ranks
from tools import bench_pipeline
from tools.pipeline_masks import parse_mask
from tools.pipeline_model import SIZES, make_transformer, twin_of
from tools.pipeline_report import add_speedups

QUICK = ("--size", "tiny", "--device", "cpu", "--rounds", "1", "--steps", "2", "--warm-up", "1")
needs_diffusers = pytest.mark.diffusers


def _run(*flags: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = bench_pipeline.main([*QUICK, *flags])
    return status, out.getvalue(), err.getvalue()


def _measure(folder: Path, *flags: str) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[str, Any]], str]:
    status, out, err = _run("--json", str(folder / "p.json"), "--markdown", str(folder / "p.md"), *flags)
    assert status == 0, err
    return *_read(folder), out


def _read(folder: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[str, Any]]]:
    report = json.loads((folder / "p.json").read_text())
    return report, {(r["kind"], r["strategy"], r["mesh"], r["mask"]): r for r in report["records"]}


@needs_diffusers
def test_one_rank_dense_equals_diffusers_and_masks_do_not(tmp_path: Path) -> None:
    """Guidance is two calls a step; the layers asked for are there; masks move the result more than an error may."""
    flags = ("--mask", "dense", "topk:density=0.2", "sth:density=0.25,seed=1", "--rounds", "2", "--layers", "3")
    report, found, printed = _measure(tmp_path, *flags)
    assert (report["layers"], report["forwards_a_step"], report["tokens"]) == (3, 2, 72)
    assert list(found) == [
        ("diffusers", "none", "1x1", "dense"),
        ("ours", "none", "1x1", "dense"),
        ("ours", "none", "1x1", "topk density 0.2"),
        ("ours", "none", "1x1", "sth 0.25 seed 1"),
    ]
    stock, dense, topk, drawn = found.values()
    assert 0 < dense["error"] < 1e-4
    assert dense["compared_with"] == stock["name"]
    assert dense["density"] == 1
    for sparse in (topk, drawn):
        assert sparse["error"] is None
        assert sparse["off_dense"] > 0.1
        assert 0.15 < sparse["density"] < 0.4
    for record in found.values():
        assert record["fail"] is None
        assert record["seconds"]["n"] == 2
        assert record["step_seconds"]["n"] == 4
        assert record["ms"] == pytest.approx(1e3 * sum(record["seconds"]["all"]) / 2)
        # Steps are parts of the whole.
        assert sum(record["step_seconds"]["all"]) <= sum(record["seconds"]["all"])
        assert record["over_diffusers"] == pytest.approx(stock["ms"] / record["ms"])
    assert "diffusers cp: there is one rank" in printed
    assert "# A pipeline end to end" in (tmp_path / "p.md").read_text()


@needs_diffusers
def test_without_guidance_and_without_diffusers(tmp_path: Path) -> None:
    report, found, _ = _measure(tmp_path, "--guidance-scale", "1", "--backend", "--mask", "dense")
    assert report["forwards_a_step"] == 1
    (only,) = found.values()
    assert only["over_diffusers"] is None
    assert only["ms"] > 0


@needs_diffusers
def test_what_is_wrong_or_missing_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of one token given to its neighbour must be seen through all steps, as must a backend that fails."""
    attend = SequenceParallelProcessor.attend
    monkeypatch.setattr(SequenceParallelProcessor, "attend", lambda self, *x: attend(self, *x).roll(1, 1))
    report, found, printed = _measure(tmp_path, "--mask", "dense", "--backend", "native", "_native_cudnn")
    wrong = found["ours", "none", "1x1", "dense"]
    assert wrong["ms"] is None
    assert wrong["seconds"]["n"] == 1
    assert wrong["fail"].startswith("wrong: off by")
    assert wrong["error"] > 0.1
    assert "diffusers _native_cudnn" in report["missing"]
    assert "wrong: off by" in printed


def _on_ranks(rank: int, world_size: int, folder: str, *flags: str) -> tuple[int, str, str]:
    # Context parallelism of diffusers asks for an accelerator, and then runs on the mesh that it is given.
    count, torch.accelerator.device_count = torch.accelerator.device_count, lambda: 1
    try:
        return _run("--json", f"{folder}/p.json", *flags)
    finally:
        torch.accelerator.device_count = count


@needs_diffusers
@pytest.mark.timeout(200)
def test_ranks_agree_with_one_another_and_with_diffusers(tmp_path: Path) -> None:
    flags = ("--mask", "dense", "sth:density=0.25", "--strategy", "none", "ulysses", "usp", "ring", "dbsp")
    results = run_ranks(_on_ranks, 2, str(tmp_path), *flags, timeout_s=150)
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[1][1] == "", "only the first rank prints"
    report, found = _read(tmp_path)
    assert "lse" in report["missing"]["diffusers cp ring native"]
    assert report["missing"]["usp"].endswith("it is ulysses or ring there")
    parallel = found["diffusers cp", "ulysses", "2x1", "dense"]
    assert parallel["error"] < 1e-4
    assert parallel["num_ranks"] == 2
    meshes = (("none", "1x1"), ("ulysses", "2x1"), ("ring", "1x2"), ("dbsp", "2x1"), ("dbsp", "1x2"))
    for strategy, mesh in meshes:
        for mask in ("dense", "sth 0.25 seed 0"):
            record = found["ours", strategy, mesh, mask]
            assert record["fail"] is None
            assert record["num_ranks"] == (1 if strategy == "none" else 2)
            if (strategy, mask) != ("none", "sth 0.25 seed 0"):
                assert record["error"] < 1e-4
            else:
                assert record["error"] is None
    sparse = {(s, m): r for (kind, s, m, mask), r in found.items() if mask.startswith("sth")}
    assert sparse["ulysses", "2x1"]["rho_after"] == sparse["ulysses", "2x1"]["rho_before"]
    balanced = sparse["dbsp", "2x1"]
    assert balanced["rho_after"] < balanced["rho_before"] == sparse["ulysses", "2x1"]["rho_before"]
    assert balanced["over_same_mesh"] == pytest.approx(sparse["ulysses", "2x1"]["ms"] / balanced["ms"])
    assert len(found) == 2 + 2 * len(meshes)


def test_speedups_compare_equal_masks_and_blocks() -> None:
    def record(name: str, ms: float | None, **other: Any) -> dict[str, Any]:
        usual = {"kind": "ours", "strategy": "dbsp", "mesh": "2x1", "mask": "sth", "block_size": 64}
        return {**usual, "name": name, "ms": ms, **other}

    records = [
        record("stock", 8.0, kind="diffusers", strategy="none", mask="dense", block_size=None),
        record("slow stock", 9.0, kind="diffusers", strategy="none", mask="dense", block_size=None),
        record("cp", 5.0, kind="diffusers cp", strategy="ulysses", mask="dense", block_size=None),
        record("ulysses", 4.0, strategy="ulysses"),
        record("ring", 3.0, strategy="ring", mesh="1x2"),
        record("other mask", 1.0, strategy="ulysses", mask="dense"),
        record("other blocks", 1.0, strategy="ulysses", block_size=128),
        record("dbsp", 2.0),
        record("failed", None),
    ]
    add_speedups(records)
    found = records[7]
    assert (found["over_diffusers"], found["over_diffusers_cp"]) == (4.0, 2.5)
    assert (found["over_same_mesh"], found["over_best_unbalanced"]) == (2.0, 1.5)
    assert found["over"]["slow stock"] == 4.5
    assert (records[3]["over_same_mesh"], records[8]["over_diffusers"], records[8]["over"]) == (None, None, {})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--size", "huge"), "--size must be of wan13_480p"),
        (("--strategy", "fastest"), "--strategy must be of none"),
        (("--context-parallel", "unified"), "--context-parallel must be of ulysses, ring"),
        (("--mask", "topk:share=1"), "has no setting 'share'"),
        (("--mask", "sth:share=1"), "a drawn mask takes density=0.25"),
        (("--mask", "sth:density=2"), "--density must be above 0"),
        (("--mask", "topk:density=0.2,cube=1x2x2"), "leave cube out"),
        (("--steps", "0"), "must be at least 1"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--dtype", "float64"), "--dtype must be of"),
        (("--set", "engine"), "KEY=VALUE"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: tuple[str, ...], says: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert says in err


def test_masks_are_named_by_what_they_are() -> None:
    labels = [parse_mask(text).label for text in ("dense", "sparge", "topk:density=0.2", "sth", "sth:seed=2")]
    assert labels == ["dense", "sparge", "topk density 0.2", "sth 0.25 seed 0", "sth 0.25 seed 2"]


@needs_diffusers
@pytest.mark.parametrize(
    ("name", "weights", "tokens", "frames", "pixels"),
    [("wan13_480p", 1_418_996_800, 32_760, 81, (480, 832)), ("wan14_720p", 14_288_491_584, 75_600, 81, (720, 1280))],
)
def test_sizes_are_the_published_ones(
    name: str, weights: int, tokens: int, frames: int, pixels: tuple[int, int]
) -> None:
    size = SIZES[name]
    model = make_transformer(size, None, 0, torch.device("meta"), "bfloat16")
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert (size.shape.seqlen, size.num_frames, size.pixels) == (tokens, frames, pixels)
    assert size.latent_shape == (1, 16, 21, pixels[0] // 8, pixels[1] // 8)
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.blocks[0].scale_shift_table.dtype == torch.float32


@needs_diffusers
def test_twins_share_weights_and_nothing_else() -> None:
    model = make_transformer(SIZES["tiny"], None, 0, torch.device("cpu"), "float32")
    twin = twin_of(model)
    assert all(one is other for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert not set(map(id, model.modules())) & set(map(id, twin.modules()))
    processors = zip(model.attn_processors.values(), twin.attn_processors.values(), strict=True)
    assert all(one is not other for one, other in processors)
