"""Strategies: degrees, refusals, and when dbsp does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.plan import Workload, block_homes
from dbsp_megatron.strategy import SequenceParallelStrategy, get_strategy, register_strategy, strategy_names


@pytest.mark.parametrize(
    ("strategy", "size", "given", "expected"),
    [
        ("ulysses", 6, {}, (6, 1)),
        ("ring", 6, {}, (1, 6)),
        ("usp", 6, {"ring_degree": 3}, (2, 3)),
        ("dbsp", 6, {"ulysses_degree": 3}, (3, 2)),
        ("dbsp", 16, {}, (8, 2)),
        ("dbsp", 1, {}, (1, 1)),
        ("none", 1, {}, (1, 1)),
    ],
)
def test_degrees_are_filled_in(
    strategy: str, size: int, given: dict[str, Any], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` follows the other degree; two of them put Ulysses inside a node of 8."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    made = get_strategy(strategy)(SequenceParallelConfig(strategy=strategy, **given), size)
    assert (made.ulysses_degree, made.ring_degree) == expected


def test_auto_degrees_keep_ulysses_inside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ranks on nodes of 4: Ulysses 4, ring 3."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    made = get_strategy("dbsp")(SequenceParallelConfig(), 12)
    assert (made.ulysses_degree, made.ring_degree) == (4, 3)


@pytest.mark.parametrize(
    ("strategy", "size", "given", "words"),
    [
        ("none", 2, {}, ["none", "2"]),
        ("ulysses", 4, {"ring_degree": 2}, ["ring_degree=2", "4", "usp"]),
        ("ring", 4, {"ulysses_degree": 4}, ["ulysses_degree=4", "4"]),
        ("usp", 6, {"ulysses_degree": 4}, ["ulysses_degree=4", "6"]),
        ("dbsp", 8, {"ulysses_degree": 2, "ring_degree": 3}, ["2", "3", "8"]),
    ],
)
def test_impossible_degrees_are_refused(strategy: str, size: int, given: dict[str, Any], words: list[str]) -> None:
    """The message names the key, both numbers and a remedy (Trap B01)."""
    with pytest.raises(ValueError, match="sp\\.") as error:
        get_strategy(strategy)(SequenceParallelConfig(strategy=strategy, **given), size)
    assert all(word in str(error.value) for word in words)


def test_dsp_has_neither_layouts_nor_attention() -> None:
    """Models switch by themselves; a sequence that were split in silence would be a wrong answer."""
    sp = SequenceParallel(SequenceParallelConfig(strategy="dsp"))
    with pytest.raises(ValueError, match="attend along one dim"):
        sp.layout(8)
    x = torch.ones(1, 8, 2, 4)
    with pytest.raises(ValueError, match="attend along one dim"):
        sp.attention(x, x, x)


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "usq"},
        {"ulysses_degree": 0},
        {"ring_degree": True},
        {"head_policy": "best"},
        {"block_policy": "best"},
        {"block_size": 0},
        {"reward": -1.0},
        {"replan_gain": float("nan")},
        {"plan_counts": "next"},
        {"engine": "cuda"},
        {"engine": "triton"},
    ],
)
def test_wrong_settings_name_key_and_value(given: dict[str, Any]) -> None:
    """Also when the value is only looked at later (strategy, engine)."""
    with pytest.raises(ValueError, match=next(iter(given))):
        _attend(given)


def _attend(given: dict[str, Any]) -> None:
    sp = SequenceParallel(SequenceParallelConfig(**given))
    q = torch.randn(1, 8, 2, 4)
    sp.layout(8, 4)
    sp.attention(q, q, q)


def test_a_new_strategy_is_one_registered_class() -> None:
    """A second class of the same name is refused."""

    class Twice(SequenceParallelStrategy):
        name = "usp"

        def degrees(self) -> tuple[int, int]:
            return 1, 1

    assert strategy_names() == ["dbsp", "auto", "dsp", "none", "ring", "ulysses", "usp"]
    with pytest.raises(ValueError, match="usp"):
        register_strategy(Twice)


def _workload(heavy: int) -> Workload:
    """Four heads of 100 blocks in 10 x 10 on two ranks; `heavy` more in head 0 than in head 1."""
    blocks = np.ones((1, 4, 10, 10), dtype=bool)
    blocks[0, 2:, :, 9] = False
    blocks[0, 3, : max(0, heavy - 1), 0] = False
    homes = block_homes(10, 2, 1, "stripe")
    return Workload.from_mask(BlockMask(torch.from_numpy(blocks), 1, 1), homes, homes, 2)


def test_dbsp_leaves_heads_alone_for_a_small_gain() -> None:
    """The same counts re-place heads only if `replan_gain` is below what that gains."""
    gain = {}
    for replan_gain in (0.001, 0.2):
        config = SequenceParallelConfig(ulysses_degree=2, ring_degree=1, replan_gain=replan_gain)
        gain[replan_gain] = get_strategy("dbsp")(config, 2).plan(_workload(3))
    assert gain[0.2].head_owner.tolist() == [0, 0, 1, 1]
    assert gain[0.001].imbalance < gain[0.2].imbalance


def test_stats_have_the_fixed_keys() -> None:
    """Before any call, too."""
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=4))
    keys = {"imbalance_before", "imbalance_after", "plan_reuse", "predicted_ms", "measured_ms", "strategy"}
    assert {f"sp/{key}" for key in keys} <= set(sp.stats())
    q = torch.randn(1, 10, 2, 4)
    sp.layout(10)
    for step in range(2):
        sp.begin_step(step)
        sp.attention(q, q, q)
    assert sp.stats()["sp/imbalance_before"] == 1.0
    assert float(sp.stats()["sp/predicted_ms"]) > 0
