"""Saved plans: the same mesh goes on as before, others start from head sums, other files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbsp_megatron.plan import PartitionPlan, PlanCache, Workload, block_homes, plan_workload
from dbsp_megatron.plan.cache_file import SavedLayer, read_layers, write_layers
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.replan import ReplanRule
from tests.unit.plan.plan_cases import random_mask, workload_in

MESH = (4, 2)
KEYS = [None, "dense", 3, ((3, 480), 0.5, True, None), ()]


class MeshPlanner:
    """Plans for one mesh and remembers what it was asked."""

    def __init__(self, mesh: tuple[int, int]) -> None:
        self.mesh = mesh
        self.asked: list[Workload] = []

    def __call__(self, workload: Workload) -> PartitionPlan:
        self.asked.append(workload)
        return plan_workload(workload, ulysses_degree=self.mesh[0], ring_degree=self.mesh[1])


def cache_for(mesh: tuple[int, int], **options: Any) -> tuple[PlanCache, MeshPlanner]:
    planner = MeshPlanner(mesh)
    return PlanCache(planner, mesh=mesh, **options), planner


def homes_of(
    mesh: tuple[int, int], layout: str = "stripe", num_q: int = 12, num_k: int = 11
) -> tuple[IntArray, IntArray]:
    return block_homes(num_q, *mesh, layout), block_homes(num_k, *mesh, layout)


def saved_run(path: Path, num_layers: int = 3) -> list[PartitionPlan]:
    """Writes the cache of a run on 4 x 2 ranks and returns its plans."""
    cache, _ = cache_for(MESH)
    plans = [
        cache.plan_for(layer, 5, workload_in(random_mask(layer, 9, 12, 11), *MESH), key="video", homes=homes_of(MESH))[
            0
        ]
        for layer in range(num_layers)
    ]
    cache.save(path)
    return plans


def test_load_on_same_mesh_goes_on_without_planning(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    plans = saved_run(path)
    cache, planner = cache_for(MESH)
    cache.load(path)
    for layer, plan in enumerate(plans):
        assert cache.knows(layer, "video", homes_of(MESH))
        loaded, reused = cache.plan_for(layer, 5, key="video", homes=homes_of(MESH))
        assert reused
        assert loaded.to_json() == plan.to_json()
    assert not planner.asked
    # Known counts of a loaded layer leave nothing to do.
    assert (
        cache.plan_for(0, 6, workload_in(random_mask(0, 9, 12, 11), *MESH), key="video")[0].to_json()
        == plans[0].to_json()
    )


@pytest.mark.parametrize("mesh", [(2, 4), (8, 1), (1, 8), (2, 2), (3, 1), (4, 3), (16, 2), (5, 7)])
def test_load_on_other_mesh_plans_from_head_sums(tmp_path: Path, mesh: tuple[int, int]) -> None:
    """Fewer ranks, more ranks than blocks, and the same ranks as U and R exchanged."""
    path = tmp_path / "plans.json"
    saved_run(path)
    cache, planner = cache_for(mesh)
    cache.load(path)
    homes = homes_of(mesh)
    for layer in range(3):
        sums = random_mask(layer, 9, 12, 11).blocks.sum(dim=(0, 2, 3)).numpy()
        assert cache.knows(layer, "video", homes)
        plan, reused = cache.plan_for(layer, 0, key="video", homes=homes)
        assert not reused
        assert (plan.ulysses_degree, plan.ring_degree, plan.num_heads) == (*mesh, 9)
        for have, want in zip((plan.q_block_home, plan.kv_block_home), homes, strict=True):
            np.testing.assert_array_equal(have, want)
        np.testing.assert_array_equal(planner.asked[layer].head_blocks, sums)
        assert plan.loads.sum() == sums.sum()
        # Micro-batches of the step get the same plan.
        assert cache.plan_for(layer, 0, key="video", homes=homes)[0] is plan
    assert len(planner.asked) == 3
    # Real counts are judged as usual.
    real = workload_in(random_mask(0, 9, 12, 11), *mesh)
    assert cache.plan_for(0, 1, real, key="video", homes=homes)[0].num_heads == 9


@pytest.mark.parametrize("mesh", [(2, 4), (2, 2)])
def test_load_on_other_mesh_without_homes_knows_nothing(tmp_path: Path, mesh: tuple[int, int]) -> None:
    path = tmp_path / "plans.json"
    saved_run(path)
    cache, planner = cache_for(mesh)
    cache.load(path)
    assert not cache.knows(0, "video")
    with pytest.raises(ValueError, match="layer 0 has no plan and no counts at step 0"):
        cache.plan_for(0, 0, key="video")
    assert not planner.asked


def test_load_uses_nothing_of_other_layer_or_key(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    saved_run(path)
    for mesh in (MESH, (2, 2)):
        cache, planner = cache_for(mesh)
        cache.load(path)
        for layer, key in ((3, "video"), (0, None), (0, "image"), (0, ("video",))):
            assert not cache.knows(layer, key, homes_of(mesh))
            with pytest.raises(ValueError, match=f"layer {layer} has no plan and no counts"):
                cache.plan_for(layer, 0, key=key, homes=homes_of(mesh))
        assert not planner.asked


@pytest.mark.parametrize("homes", [homes_of(MESH, "contiguous"), homes_of(MESH, num_q=20, num_k=22)])
def test_load_in_other_layout_or_shape_does_not_use_plan(tmp_path: Path, homes: tuple[IntArray, IntArray]) -> None:
    """Same mesh and key; the head sums still tell which heads are heavy."""
    path = tmp_path / "plans.json"
    (old, *_) = saved_run(path)
    cache, planner = cache_for(MESH)
    cache.load(path)
    plan, reused = cache.plan_for(0, 0, key="video", homes=homes)
    assert not reused
    assert plan.digest != old.digest
    np.testing.assert_array_equal(plan.q_block_home, homes[0])
    assert len(planner.asked) == 1


def test_load_of_layer_without_sums_on_other_mesh_knows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    (plan,) = saved_run(path, 1)
    write_layers(path, [SavedLayer(0, "video", plan, None)])
    cache, _ = cache_for((2, 2))
    cache.load(path)
    assert not cache.knows(0, "video", homes_of((2, 2)))


def test_save_keeps_head_sums_that_were_not_used_yet(tmp_path: Path) -> None:
    """A run on another mesh may be stopped and saved before it came to every layer."""
    path = tmp_path / "plans.json"
    saved_run(path)
    between, _ = cache_for((2, 2))
    between.load(path)
    between.plan_for(0, 0, key="video", homes=homes_of((2, 2)))
    between.save(path)
    cache, _ = cache_for((2, 4))
    cache.load(path)
    assert [cache.knows(layer, "video", homes_of((2, 4))) for layer in range(3)] == [True] * 3


def test_load_keeps_what_saved_plan_reached(tmp_path: Path) -> None:
    """On the counts it was made for, a loaded plan loses nothing against the last fresh plan: itself."""
    path = tmp_path / "plans.json"
    counts = workload_in(random_mask(0, 2, 6, 6, spread=2.0), 4, 1)
    cache, _ = cache_for((4, 1))
    assert cache.plan_for(0, 0, counts)[0].imbalance > 1.02
    cache.save(path)
    again, _ = cache_for((4, 1), rule=ReplanRule(policy="never"))
    again.load(path)
    assert again.plan_for(0, 1, counts)[1]
    assert again.regret == 0.0


def test_load_respects_capacity_and_replaces_contents(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    saved_run(path, 5)
    cache, _ = cache_for(MESH, capacity=2)
    cache.plan_for(9, 0, workload_in(random_mask(0, 9, 12, 11), *MESH), key="video")
    cache.load(path)
    assert len(cache) == 2
    assert not cache.knows(9, "video")
    assert [cache.knows(layer, "video") for layer in range(5)] == [False, False, False, True, True]
    assert (cache.hits, cache.plans, cache.regret) == (0, 0, 0.0)


def test_homes_need_mesh_of_cache() -> None:
    cache = PlanCache(MeshPlanner(MESH))
    with pytest.raises(ValueError, match=r"homes need the mesh: make the PlanCache with mesh=\(ulysses_degree"):
        cache.plan_for(0, 0, workload_in(random_mask(0, 9, 12, 11), *MESH), homes=homes_of(MESH))


def test_save_that_fails_leaves_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Atomic: a run that dies while it saves finds the plans of the save before."""
    path = tmp_path / "plans.json"
    saved_run(path)
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    cache, _ = cache_for(MESH)
    cache.plan_for(0, 0, workload_in(random_mask(7, 9, 12, 11), *MESH), key="other")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plans.json"]


@pytest.mark.parametrize("key", KEYS)
def test_layers_come_back_as_written(tmp_path: Path, key: Any) -> None:
    path = tmp_path / "plans.json"
    plan = saved_run(path, 1)[0]
    write_layers(
        path,
        [
            SavedLayer(7, key, plan, np.array([3, 0, 2])),
            SavedLayer(8, key, None, np.array([1])),
            SavedLayer(9, key, plan, None),
        ],
    )
    first, second, third = read_layers(path)
    assert [(saved.layer, saved.key) for saved in (first, second, third)] == [(7, key), (8, key), (9, key)]
    assert type(first.key) is type(key)
    assert first.plan is not None
    assert first.plan.to_json() == plan.to_json()
    assert first.head_blocks is not None
    assert first.head_blocks.tolist() == [3, 0, 2]
    assert first.head_blocks.dtype == np.int64
    assert second.plan is None
    assert third.head_blocks is None


@pytest.mark.parametrize("key", [frozenset({1}), b"x", (1, [2]), np.int64(3), object])
def test_write_layers_refuses_keys_json_cannot_hold(tmp_path: Path, key: Any) -> None:
    with pytest.raises(ValueError, match="a key must be built from None, booleans, numbers, strings and tuples"):
        write_layers(tmp_path / "plans.json", [SavedLayer(0, key, None, None)])
    assert not list(tmp_path.iterdir())


ENTRY: dict[str, Any] = {"layer": 0, "key": None, "plan": None, "head_blocks": [1, 2]}


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        "plans",
        {},
        {"entries": []},
        {"format": 1, "entries": []},
        {"format": 3, "entries": []},
        {"format": 2},
        {"format": 2, "entries": None},
        {"format": 2, "entries": [3]},
        {"format": 2, "entries": [{**ENTRY, "head_blocks": [-1]}]},
        {"format": 2, "entries": [{**ENTRY, "head_blocks": [0.5]}]},
        {"format": 2, "entries": [{**ENTRY, "head_blocks": []}]},
        {"format": 2, "entries": [{**ENTRY, "key": {"a": 1}}]},
        {"format": 2, "entries": [{**ENTRY, "layer": "first"}]},
        {"format": 2, "entries": [{**ENTRY, "layer": float("inf")}]},
        {"format": 2, "entries": [{**ENTRY, "layer": 1.5}]},
        {"format": 2, "entries": [{**ENTRY, "plan": {}}]},
        {"format": 2, "entries": [{**ENTRY, "plan": 5}]},
        {"format": 2, "entries": [{name: ENTRY[name] for name in ("layer", "key", "plan")}]},
    ],
)
def test_read_layers_refuses_other_files(tmp_path: Path, stored: Any) -> None:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match=r"plans\.json holds no plans: .*; pass a file that save\(\) wrote"):
        read_layers(path)


def test_read_layers_refuses_damaged_files(tmp_path: Path) -> None:
    """Cut short, not text, and a plan whose owners were edited."""
    path = tmp_path / "plans.json"
    saved_run(path)
    whole = path.read_bytes()
    edited = json.loads(whole)
    owner = edited["entries"][0]["plan"]["q_block_owner"]
    owner[0] = 1 - owner[0]
    for content in (whole[: len(whole) // 2], b"\xff\xfe\x00", json.dumps(edited).encode()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"plans\.json holds no plans"):
            read_layers(path)
