"""Auto: candidate meshes, calibrations, counts it asks for; MeshSelection on one rank."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.arguments import add_dbsp_args, config_from_args
from dbsp_megatron.config.cli import parse_infer, parse_train
from dbsp_megatron.config.resolve import resolve_mesh, with_degrees
from dbsp_megatron.plan import block_homes
from dbsp_megatron.strategy import get_strategy
from dbsp_megatron.strategy.auto import Auto
from dbsp_megatron.strategy.machine import default_calibration
from dbsp_megatron.strategy.selection import RECHECK_STEPS, MeshSelection
from tests.reference import FP32_ATOL, attention_reference, expand_blocks, max_error, random_blocks, random_qkv
from tests.unit.strategy.auto_cases import compute_bound_calibration


def _auto(size: int, **options: Any) -> Auto:
    made = get_strategy("auto")(SequenceParallelConfig(strategy="auto", **options), size)
    assert isinstance(made, Auto)
    return made


@pytest.mark.parametrize(
    ("size", "given", "meshes"),
    [
        (1, {}, ((1, 1),)),
        (6, {}, ((6, 1), (3, 2), (2, 3), (1, 6))),
        (6, {"ring_degree": 3}, ((2, 3),)),
        (6, {"ulysses_degree": 6, "ring_degree": 1}, ((6, 1),)),
    ],
)
def test_meshes_are_all_factorisations_unless_a_degree_is_given(
    size: int, given: dict[str, int], meshes: tuple[tuple[int, int], ...]
) -> None:
    assert _auto(size, **given).meshes == meshes


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_one_layout_deals_blocks_evenly_to_the_rings_of_every_mesh(size: int) -> None:
    """Of every P consecutive blocks each ring rank has P / R, whatever R."""
    strategy = _auto(size)
    homes = block_homes(3 * size, *strategy.layout_degrees, strategy.layout_policy)
    for ulysses, ring in strategy.meshes:
        windows = (homes // ulysses).reshape(3, size)
        for window in windows:
            counts = [int((window == rank).sum()) for rank in range(ring)]
            assert counts == [ulysses] * ring


def test_impossible_degrees_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sp\.ulysses_degree=4"):
        _auto(6, ulysses_degree=4)


def test_counts_by_row_serve_the_mesh_with_the_largest_ulysses_degree() -> None:
    """20 heads are enough for Ulysses 2, not for 8; with a given mesh only that one counts."""
    assert _auto(8).needs_row_tiles(20)
    assert not _auto(8, ulysses_degree=2).needs_row_tiles(20)
    assert not _auto(8, head_policy="lpt_swap").needs_row_tiles(20)
    assert _auto(8, head_policy="lpt_swap", block_policy="minimal_move").needs_row_tiles(20)


@pytest.mark.parametrize(("policy", "layout", "moves"), [
    ("auto", "stripe", "auto"),
    ("hot_stripe", "stripe", "home"),
    ("contiguous", "contiguous", "home"),
    ("paper", "contiguous", "paper"),
    ("step_aware", "stripe", "step_aware"),
])  # fmt: skip
def test_block_policies_are_those_of_dbsp(policy: str, layout: str, moves: str) -> None:
    strategy = _auto(4, block_policy=policy)
    assert strategy.layout_policy == layout
    assert strategy.policies == ("auto", moves)
    assert strategy.needs_mask_on_host == (policy == "paper")
    assert strategy.calibrates_layout == (policy in ("auto", "hot_stripe"))


def test_blocks_stay_home_where_no_mesh_has_a_ring() -> None:
    """A policy that moves blocks would ask for the whole mask, which is not counted there."""
    for policy in ("paper", "minimal_move", "step_aware"):
        strategy = _auto(4, ulysses_degree=4, block_policy=policy)
        assert strategy.policies == ("auto", "home")
        assert not strategy.needs_mask_on_host


def test_default_rates_serve_ranks_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between nodes they assume a network, which their note tells."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    strategy = _auto(8)
    strategy.prepare(range(8))
    assert strategy.ranks_per_node == 4
    assert "assumed network" in strategy.calibration.note
    # Every second rank, as tensor parallelism of two leaves them.
    strategy.prepare(range(0, 16, 2))
    assert strategy.ranks_per_node == 2


def test_a_calibration_without_a_network_is_refused_across_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    compute_bound_calibration().save(path)
    strategy = _auto(4, calibration=str(path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    strategy.prepare(range(4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"sp\.calibration=.*'network'.*fit_latency"):
        strategy.prepare(range(4))


def test_a_calibration_of_nodes_with_one_rank_needs_no_links_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = default_calibration()
    path = tmp_path / "calibration.json"
    links = tuple(link for link in full.links if link.scope == "network")
    replace(full, links=links).save(path)
    strategy = _auto(4, calibration=str(path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    strategy.prepare(range(4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"sp\.calibration=.*'node'"):
        strategy.prepare(range(4))


def test_prepare_tells_calibrations_apart_by_content(tmp_path: Path) -> None:
    found = []
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        compute_bound_calibration(factor).save(tmp_path / name)
        found.append(_auto(2, calibration=str(tmp_path / name)).prepare(range(2)))
    assert found[0] == found[1] != found[2]
    configs = [SequenceParallelConfig(calibration=name) for name in ("a", "b")]
    assert configs[0].digest == configs[1].digest


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}'])
def test_a_file_that_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"calibration\.json is no calibration"):
        SequenceParallel(SequenceParallelConfig(strategy="auto", calibration=str(path)))


@pytest.mark.parametrize("value", ["", 3, True])
def test_config_refuses_what_is_no_path(value: Any) -> None:
    with pytest.raises(ValueError, match=r"sp\.calibration must be the path of a file"):
        SequenceParallelConfig(calibration=value)


def test_default_calibration_is_that_of_one_node_and_a_network() -> None:
    made = default_calibration()
    assert {link.scope for link in made.links} == {"node", "network"}
    assert made.link("p2p", 16, "network").time(50_000_000) == pytest.approx(1020, rel=1e-6)


@pytest.mark.parametrize(("parse", "more"), [(parse_train, []), (parse_infer, ["--checkpoint", "a"])])
def test_command_lines_take_the_strategy_and_its_calibration(parse: Any, more: list[str]) -> None:
    config = parse(["--sp-strategy", "auto", "--sp.calibration", "rates.json", *more]).config
    assert (config.sp.strategy, config.sp.calibration) == ("auto", "rates.json")


def test_flags_of_training_scripts_reach_the_config() -> None:
    flags = ["--sp-strategy", "auto", "--sp-calibration", "rates.json"]
    config = config_from_args(add_dbsp_args(argparse.ArgumentParser()).parse_args(flags))
    assert (config.strategy, config.calibration) == ("auto", "rates.json")


def test_resolve_leaves_degrees_to_the_layers() -> None:
    """Numbers in their place would fix the mesh."""
    sp = SequenceParallelConfig(strategy="auto")
    mesh = resolve_mesh(sp, 4, num_heads=3)
    assert mesh.choices == ((4, 1), (2, 2), (1, 4))
    assert with_degrees(sp, mesh) == sp
    fixed = SequenceParallelConfig(strategy="auto", ring_degree=2)
    mesh = resolve_mesh(fixed, 4, num_heads=3)
    assert mesh.choices == ()
    assert with_degrees(fixed, mesh).ulysses_degree == 2


def _sp() -> tuple[SequenceParallel, MeshSelection]:
    sp = SequenceParallel(SequenceParallelConfig(strategy="auto", block_size=16))
    sp.layout(45)
    assert isinstance(sp._planning, MeshSelection)
    return sp, sp._planning


def test_one_rank_attends_as_the_reference() -> None:
    sp, _ = _sp()
    q, k, v, _ = random_qkv(3, 2, 45, 4, 8, num_kv_heads=2)
    blocks = random_blocks(3, 2, 4, 3, 3)
    want = attention_reference(q, k, v, expand_blocks(blocks, 16, 16, 45, 45))[0]
    assert max_error(sp.attention(q, k, v, mask=BlockMask(blocks, 16, 16, 45, 45)), want) <= FP32_ATOL
    assert sp.stats()["sp/mesh"] == "U1R1:1"


def test_a_mask_that_stays_is_chosen_for_anew_only_now_and_then() -> None:
    sp, planning = _sp()
    q, k, v, _ = random_qkv(3, 1, 45, 2, 8)
    digests = []
    for step in range(RECHECK_STEPS + 2):
        sp.begin_step(step)
        sp.attention(q, k, v)
        (family,) = planning._families.values()
        digests.append(family.selector.digest)
    assert len(set(digests)) == 2
    assert digests.index(digests[-1]) == RECHECK_STEPS


def test_the_backward_pass_counts_from_the_step_after_it_was_seen() -> None:
    """A forward pass without gradients, recomputed with them, is the one of a training step."""
    sp, planning = _sp()
    q, k, v, _ = random_qkv(3, 1, 45, 2, 8)
    predicted = []
    for step in range(2):
        sp.begin_step(step)
        with torch.no_grad():
            sp.attention(q, k, v)
        (family,) = planning._families.values()
        predicted.append((family.training, sp.stats()["sp/predicted_ms"]))
        sp.attention(q.requires_grad_(), k, v)
        assert list(planning._families.values()) == [family]
    assert [training for training, _ in predicted] == [False, True]
    # What is told is the forward time, in both.
    assert predicted[1][1] == pytest.approx(predicted[0][1], rel=0.1)


@pytest.mark.parametrize(("block_q", "nest"), [(16, True), (8, True), (12, False), (32, False)])
def test_masks_that_do_not_nest_in_the_layout_leave_no_ring(block_q: int, nest: bool) -> None:
    sp, planning = _sp()
    seen = []
    legal = planning._legal_meshes
    planning._strategy = _auto(4)
    planning._strategy.prepare([0])

    def record(call: Any) -> Any:
        seen.extend(legal(call))
        return [(1, 1)]

    planning._legal_meshes = record  # type: ignore[method-assign]
    q, k, v, _ = random_qkv(3, 1, 45, 2, 8)
    blocks = torch.ones(1, 2, -(-45 // block_q), 3, dtype=torch.bool)
    sp.attention(q, k, v, mask=BlockMask(blocks, block_q, 16, 45, 45))
    assert seen == ([(4, 1), (2, 2), (1, 4)] if nest else [(4, 1)])


def test_counts_that_a_plan_serves_as_well_are_no_reason_to_choose_again() -> None:
    """Other counts on one rank are always balanced; the selector is asked again when a comparison is due."""
    sp, planning = _sp()
    q, k, v, _ = random_qkv(3, 1, 45, 2, 8)
    digests = set()
    for step in range(3):
        sp.begin_step(step)
        sp.attention(q, k, v, mask=BlockMask(random_blocks(step, 1, 2, 3, 3), 16, 16, 45, 45))
        (family,) = planning._families.values()
        digests.add(family.selector.digest)
    assert len(digests) == 1
    assert sp.stats()["sp/plan_reuse"] == pytest.approx(2 / 3)
