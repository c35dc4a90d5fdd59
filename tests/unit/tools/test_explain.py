"""What `tools/explain.py` says is what would run: groups, tokens, bytes and times, and the refusals of dbsp-train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.masks.mask_file import write_masks
from dbsp_megatron.plan import (
    AttentionShape,
    LatencyModel,
    Workload,
    block_homes,
    plan_traffic,
    plan_workload,
    reference_calibration,
)
from dbsp_megatron.strategy.machine import default_calibration
from dbsp_megatron.train.__main__ import main as train_main
from tools import explain
from tools.explain_advice import duration
from tools.explain_layout import expand_hosts, ranks_text
from tools.structured_masks import make_mask

DEMO = ["--config", "launch/demo.yaml", "--train.device", "cpu"]
DEMO_BLOCKS, DEMO_HEADS = 40, 6


def _facts(*words: str) -> dict[str, Any]:
    return explain.explain([*DEMO, *words])


def _groups(facts: dict[str, Any], name: str) -> Any:
    return next(kind for kind in facts["groups"] if kind["name"] == name)


def _warnings(*words: str) -> str:
    return "\n".join(f"{entry['what']} -> {entry['remedy']}" for entry in _facts(*words)["warnings"])


def test_groups_name_every_rank_of_sixteen() -> None:
    facts = _facts("--world-size", "16", "--hosts", "gpu[01-02]", "--train.global_batch_size", "8")
    mesh = facts["mesh"]
    assert (mesh["data"], mesh["sequence"], mesh["ulysses"], mesh["ring"]) == (4, 4, 2, 2)
    assert (mesh["hosts"], mesh["gpus_per_node"]) == (["gpu01", "gpu02"], 8)
    assert _groups(facts, "ulysses")["groups"] == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    ring = _groups(facts, "ring")
    assert ring["groups"][:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert ring["nodes"][-1] == ("gpu02",)
    assert _groups(facts, "data")["groups"] == tuple(tuple(range(p, 16, 4)) for p in range(4))
    assert [kind["num_across_nodes"] for kind in facts["groups"]] == [0, 0, 0, 4]
    for kind in facts["groups"]:
        assert sorted(rank for group in kind["groups"] for rank in group) == list(range(16))


def test_groups_that_cross_nodes_are_counted() -> None:
    words = ["--world-size", "16", "--sp.ulysses_degree", "4", "--sp.ring_degree", "4"]
    facts = _facts(*words, "--gpus-per-node", "2")
    assert _groups(facts, "ulysses")["num_across_nodes"] == 4
    assert _groups(facts, "ulysses")["nodes"][1] == ("node2", "node3")
    assert [kind["num_across_nodes"] for kind in _facts(*words, "--gpus-per-node", "4")["groups"]] == [0, 4, 1, 0]


def test_auto_degrees_follow_the_node_as_they_do_in_a_run() -> None:
    words = ["--world-size", "8", "--sp.ulysses_degree", "auto", "--sp.ring_degree", "auto"]
    assert [_facts(*words, "--gpus-per-node", "2")["mesh"][axis] for axis in ("ulysses", "ring")] == [2, 4]
    assert [_facts(*words, "--gpus-per-node", "4")["mesh"][axis] for axis in ("ulysses", "ring")] == [4, 2]


def test_tokens_are_those_of_the_layout() -> None:
    facts = _facts("--world-size", "4", "--sp.block_size", "48")
    homes = block_homes(14, 2, 2, "stripe")
    tokens = [sum(min(48, 640 - 48 * block) for block in np.flatnonzero(homes == rank)) for rank in range(4)]
    assert facts["tokens"]["tokens"] == tuple(tokens)
    assert sum(tokens) == 640
    assert facts["tokens"]["blocks"] == tuple(np.bincount(homes).tolist())


@pytest.mark.parametrize(
    "words",
    [
        ["--world-size", "6"],
        ["--world-size", "16"],
        ["--world-size", "4", "--sp.strategy", "dsp"],
        ["--world-size", "4", "--sp.strategy", "ulysses"],
        ["--world-size", "4", "--mask.top_p", "2"],
        ["--world-size", "4", "--nothing.such", "1"],
        ["--world-size", "0"],
        ["--world-size", "4", "--model", "wan2_1_1_3b"],
    ],
)
def test_main_refuses_what_training_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([*DEMO, *words]) == 2
    found = capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train_main([*DEMO, *words, "--dry-run"])
    assert ended.value.code == 2
    assert found.err == capsys.readouterr().err
    assert found.out == ""
    assert len(found.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-node", "0"], "--gpus-per-node must be >= 1, got 0"),
        (["--gpus-per-node", "3"], "--world-size must be a multiple of --gpus-per-node=3, got 4"),
        (["--hosts", "a,b,c"], "--hosts must hold equally many of the 4 processes, got 3 hosts"),
        (["--hosts", "a,b", "--gpus-per-node", "4"], "--hosts must name 1 hosts for 4 processes of 4 a node, got 2"),
        (["--time", "soon"], "--time must be like 30, 4:00:00 or 1-12:00:00, got 'soon'"),
        (["--density", "0"], "--density must be above 0 and at most 1"),
        (["--mask-kind", "plaid"], "--mask-kind must be one of"),
        (["--mask-file", "nothing.npz"], "'nothing.npz'"),
        (["--sp.calibration", "nothing.json"], "nothing.json is no calibration"),
        (["--mask.method", "file", "--mask.top_p", "null", "--mask.path", "no.safetensors"], "no.safetensors"),
    ],
)
def test_main_refuses_what_it_cannot_explain(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main([*DEMO, "--world-size", "4", *words]) == 2
    assert message in capsys.readouterr().err


def _mask_file(folder: Path, num_layers: int = 1) -> tuple[Path, np.ndarray]:
    layers = [make_mask("lognormal", f"8x8x10x{DEMO_HEADS}x16", 0.3, layer=layer) for layer in range(num_layers)]
    path = folder / "masks.npz"
    np.savez(path, masks=np.stack(layers))
    return path, np.stack(layers)


def _model() -> LatencyModel:
    shape = AttentionShape(batch_size=2, num_kv_heads=6, head_dim=16, block_size_q=16, block_size_k=16, dtype_bytes=4)
    return LatencyModel(default_calibration(), shape, ranks_per_node=4, dtype="float32", decoupled=True)


def test_times_are_those_of_the_latency_model(tmp_path: Path) -> None:
    path, layers = _mask_file(tmp_path, 2)
    words = ["--world-size", "4", "--sp.strategy", "usp", "--mask-file", str(path)]
    facts = _facts(*words)
    model, homes = _model(), block_homes(DEMO_BLOCKS, 2, 2, "contiguous")
    plans = []
    for layer in layers:
        workload = Workload.from_mask(BlockMask(torch.from_numpy(layer)[None], 16, 16), homes, homes, 4)
        plans.append(
            plan_workload(workload, ulysses_degree=2, ring_degree=2, head_policy="contiguous", block_policy="home")
        )
    forward, backward = (np.mean([model.predict(p, backward=b).total_us for p in plans]) / 1e3 for b in (False, True))
    time = facts["time"]
    assert (time["forward_ms"], time["backward_ms"]) == pytest.approx((forward, backward))
    assert time["attention_ms"] == pytest.approx(4 * (forward + backward))
    assert time["step_ms"] == pytest.approx(time["attention_ms"] + time["other_ms"] + time["exposed_reduce_ms"])
    used = next(option for option in facts["meshes"] if option["ulysses_degree"] == 2)
    assert used["usp_ms"] == pytest.approx(forward + backward)
    assert used["rho_before"] == pytest.approx(np.mean([plan.imbalance for plan in plans]))
    recomputed = _facts(*words, "--train.recompute", "true", "--train.global_batch_size", "6")["time"]
    assert recomputed["attention_ms"] == pytest.approx(3 * 4 * (2 * forward + backward))
    assert facts["masks"]["measured"]
    assert facts["masks"]["density"] == pytest.approx(layers.mean())
    rates = [model.rate(direction) for direction in ("forward", "backward")]
    alone = np.mean([sum(float(r.time_us(2 * m.sum(), 2 * DEMO_HEADS * DEMO_BLOCKS)) for r in rates) for m in layers])
    assert time["alone_ms"] == pytest.approx(alone / 1e3)


def test_bytes_by_link_add_up(tmp_path: Path) -> None:
    path, (layer,) = _mask_file(tmp_path)
    words = ["--world-size", "4", "--mask-file", str(path), "--sp.head_policy", "contiguous"]
    facts, apart = _facts(*words), _facts(*words, "--gpus-per-node", "2")
    homes = block_homes(DEMO_BLOCKS, 2, 2, "stripe")
    workload = Workload.from_mask(BlockMask(torch.from_numpy(layer)[None], 16, 16), homes, homes, 4)
    plan = plan_workload(workload, ulysses_degree=2, ring_degree=2, head_policy="contiguous", block_policy="home")
    traffic = plan_traffic(plan, _model().shape)
    exchanged = int(traffic.forward_bytes.sum() + traffic.return_bytes.sum())
    passed = int(traffic.ring_hop_bytes.sum())
    whole, cut = (next(o for o in f["meshes"] if o["ulysses_degree"] == 2) for f in (facts, apart))
    assert (whole["mib_inside_nodes"], whole["mib_between_nodes"]) == pytest.approx(((exchanged + passed) / 2**20, 0))
    # Ulysses groups stay inside, rings of two are between.
    assert cut["mib_inside_nodes"] == pytest.approx(exchanged / 2**20)
    assert cut["mib_between_nodes"] == pytest.approx(passed / 2**20)


def test_a_calibration_is_used_and_named(tmp_path: Path) -> None:
    made = replace(reference_calibration(), machine="a machine of mine", note="")
    slow = tuple(replace(rate, block_us=100 * rate.block_us) for rate in made.kernels)
    replace(made, kernels=slow).save(tmp_path / "machine.json")
    words = ["--world-size", "4", "--sp.strategy", "usp"]
    time = _facts(*words, "--sp.calibration", str(tmp_path / "machine.json"))["time"]
    assert (time["machine"], time["measured"]) == ("a machine of mine", True)
    assert time["alone_ms"] > 20 * _facts(*words)["time"]["alone_ms"]


def test_auto_shows_the_mesh_predicted_to_be_fastest() -> None:
    facts = _facts(
        "--world-size", "4", "--sp.strategy", "auto", "--sp.ulysses_degree", "auto", "--sp.ring_degree", "auto"
    )
    order = [option["auto_ms"] for option in facts["meshes"]]
    assert order == sorted(order)
    assert facts["mesh"]["chosen_by_layer"]
    first = facts["meshes"][0]
    assert (facts["mesh"]["ulysses"], facts["mesh"]["ring"]) == (first["ulysses_degree"], first["ring_degree"])
    assert facts["time"]["forward_ms"] + facts["time"]["backward_ms"] == pytest.approx(first["auto_ms"])


@pytest.mark.parametrize(
    ("mask", "density", "measured"),
    [
        (["--mask.method", "dense"], 1.0, True),
        (["--mask.method", "duo"], None, True),
        (["--mask.method", "topk", "--mask.density", "0.2"], 0.2, False),
        (["--mask.method", "sparge", "--density", "0.5"], 0.5, False),
        (["--mask-kind", "band", "--density", "1"], 1.0, False),
    ],
)
def test_masks_are_those_of_the_method(mask: list[str], density: float | None, measured: bool) -> None:
    words = mask if "--mask-kind" in mask else [*mask, "--mask.top_p", "null"]
    found = _facts("--world-size", "4", *words)["masks"]
    if density is None:
        # One head of six is dense, the others see 16 + 33 of 40 blocks or fewer.
        assert 1 / 6 < found["density"] < 1
    else:
        assert found["density"] == pytest.approx(density, abs=0.08)
    assert found["measured"] == measured


def test_masks_of_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    mask = torch.rand(DEMO_HEADS, DEMO_BLOCKS, DEMO_BLOCKS, generator=torch.Generator().manual_seed(1)) < 0.2
    write_masks(path, dict.fromkeys(range(4), mask), seqlen=640, block_size=16, grid=(8, 8, 10))
    by_method = ["--mask.method", "file", "--mask.top_p", "null", "--mask.path", str(path)]
    for words in (by_method, ["--mask-file", str(path)]):
        found = _facts("--world-size", "4", *words)["masks"]
        assert found["density"] == pytest.approx(float(mask.float().mean()))
        assert found["measured"]
    with pytest.raises(ValueError, match="block_size"):
        _facts("--world-size", "4", "--mask-file", str(path), "--sp.block_size", "32")
    with pytest.raises(ValueError, match="make masks for it"):
        _facts("--world-size", "4", *by_method, "--sp.block_size", "32")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sp.ulysses_degree", "4", "--sp.ring_degree", "1", "--gpus-per-node", "2"], "Ulysses group(s) of 4 cross"),
        (["--sp.ulysses_degree", "2", "--sp.ring_degree", "2", "--gpus-per-node", "2"], "ring group(s) of 2 cross"),
        (["--sp.strategy", "usp", "--sp.ulysses_degree", "4", "--sp.ring_degree", "1"], "6 heads do not divide"),
        (["--world-size", "8", "--sp.ulysses_degree", "8", "--sp.ring_degree", "1"], "8: heads are cut"),
        (["--sp.block_size", "320"], "2 of 4 ranks hold no token"),
        (["--sp.block_size", "140"], "ranks hold 140 to 220 tokens"),
        (["--sp.block_size", "80"], "only 2.0 blocks a rank"),
        (["--memory-gib", "0.02"], "0.02 GiB -> set train.recompute=true"),
        (["--memory-gib", "0.002"], "alone take"),
        (["--sp.memory_budget_mib", "1"], "more than sp.memory_budget_mib=1"),
        ([], "4 ranks are many for 640 tokens"),
        (["--data.paths", "[nothing_such.mp4]"], "nothing_such.mp4"),
        (["--train.device", "cuda"], "times are those of an assumed machine"),
        (["--train.device", "cuda"], "because of sp.block_size=16 (64 or 128), train.precision=fp32"),
    ],
)
def test_warnings_say_what_is_wrong(words: list[str], said: str) -> None:
    world = [] if "--world-size" in words else ["--world-size", "4"]
    assert said in _warnings(*world, *words)


@pytest.mark.parametrize(
    ("every", "steps", "said"),
    [
        (0, 10**9, "train.checkpoint_every=0 saves at the end only"),
        (10**8, 10**9, "it would never get on"),
        (1, 10**9, "jobs of 00:01:00"),
        (0, 120, None),
    ],
)
def test_warnings_compare_with_the_time_of_the_job(every: int, steps: int, said: str | None) -> None:
    words = ["--train.checkpoint_every", str(every), "--train.steps", str(steps), "--time", "1"]
    text = _warnings("--world-size", "4", *words)
    assert (said in text) if said else ("job" not in text)


def test_better_settings_are_faster(tmp_path: Path) -> None:
    words = ["--world-size", "4", "--sp.ulysses_degree", "1", "--sp.ring_degree", "4"]
    facts = _facts(*words)
    (first, *_) = facts["better"]
    assert "sp.strategy=" in first["remedy"]
    best = min(min(option["dbsp_ms"], option["auto_ms"]) for option in facts["meshes"])
    now = facts["time"]["forward_ms"] + facts["time"]["backward_ms"]
    assert f"{1 - best / now:.0%} less time" in first["what"]
    assert _facts("--world-size", "1", "--sp.ulysses_degree", "1", "--sp.ring_degree", "1")["better"] == []


def test_text_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DEMO, "--world-size", "16", "--train.global_batch_size", "8", "--time", "10"]
    assert explain.main(words) == 0
    text = capsys.readouterr().out
    assert explain.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for said in (
        f"{facts['run']['parameters']:,} parameters",
        "16 = 4 data x 4 sequence parallel, 2 node(s) of 8",
        "dbsp: 2 ulysses x 2 ring",
        f"density {facts['masks']['density']:.3f} (expected)",
        f"assumed: {facts['time']['machine']}",
        f"{facts['time']['forward_ms']:.3g} ms forward",
        *(entry["remedy"] for entry in facts["warnings"] + facts["better"]),
        *facts["time"]["assumptions"],
        *(f"{option['rho_after']:.3f}" for option in facts["meshes"]),
        *(part["note"] for part in facts["memory"]["parts"]),
    ):
        assert said in text, said
    assert "... 4 more" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert explain.main(["--help"]) == 0
    assert "--mask-file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("a,b[9-10]-x,c.d", ["a", "b9-x", "b10-x", "c.d"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_expand_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["gpu[1-", "gpu[2-1]", "gpu[x]", "a,a", "", "a b"])
def test_expand_hosts_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="--hosts must be"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("2-0:0:1", 172801)],
)
def test_seconds_reads_what_sbatch_does(text: str, seconds: int) -> None:
    assert explain.seconds(text) == seconds


def test_ranks_text_and_duration() -> None:
    assert [ranks_text(ranks) for ranks in ([0, 1, 2, 3], [4, 5], [0, 8], list(range(0, 64, 8)))] == [
        "0-3",
        "4,5",
        "0,8",
        "0,8,16,...,56",
    ]
    assert [duration(s) for s in (0.25, 3661, 90061)] == ["0.25 s", "01:01:01", "1 d 01:01:01"]
