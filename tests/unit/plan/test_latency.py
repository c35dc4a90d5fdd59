"""LatencyModel: every term by hand on a tiny layer of four ranks, and what the terms must never do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron.plan import PartitionPlan, plan_workload
from dbsp_megatron.plan.calibration import reference_calibration
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.traffic import AttentionShape
from tests.unit.plan.plan_cases import random_mask, workload_in
from tests.unit.plan.rate_cases import make_calibration, make_curve, make_rate

SHAPE = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
"""A row of q or out is 2 * 4 * 2 = 16 bytes, K and V of a block and head 32 bytes."""
LOADS = [[[3, 1], [2, 4]], [[1, 1], [1, 2]]]


def four_ranks(**changes: Any) -> PartitionPlan:
    """U = R = 2; block p lives on rank p, head u is computed by Ulysses rank u: 2 rows on every rank."""
    fields: dict[str, Any] = {
        "ulysses_degree": 2,
        "ring_degree": 2,
        "head_policy": "contiguous",
        "block_policy": "home",
        "head_items": items_of_owners(np.array([0, 1]), 4),
        "q_block_owner": [0, 0, 1, 1],
        "kv_block_owner": [0, 0, 1, 1],
        "q_block_home": [0, 1, 2, 3],
        "kv_block_home": [0, 1, 2, 3],
        "loads": LOADS,
    }
    return PartitionPlan(**{**fields, **changes})


def model(**options: Any) -> LatencyModel:
    options = {"calibration": make_calibration(), "shape": SHAPE, "ranks_per_node": 4, **options}
    return LatencyModel(options.pop("calibration"), options.pop("shape"), **options)


def test_predict_forward_by_hand() -> None:
    """Each rank sends 16 + 32 bytes there, 16 back; a chunk of two blocks is 64 bytes, 4 + 8 us."""
    made = model().predict(four_ranks())
    # Kernels: blocks + 0.2 + 5. Ring group 0: max(3, 2) + 5.2 hides not all of the hop, then max(1, 4) + 5.2.
    assert made.compute_us == pytest.approx(8.2 + 9.2)
    assert made.exposed_us == pytest.approx(12.0 - 8.2)
    assert made.all_to_all_us == pytest.approx((3 + 48 / 16) + (3 + 16 / 16))
    assert made.exchange_us == 0
    assert made.total_us == pytest.approx(12.0 + 9.2 + 10.0)
    assert made.total_ns == 31200
    assert made.hop_us == pytest.approx(12.0)
    assert made.mean_compute_us == pytest.approx(15 / 4 + 2 * 5.2)
    assert made.waiting_us == pytest.approx(17.4 - 14.15)
    assert (made.num_launches, made.num_all_to_alls, made.num_hops) == (2, 2, 1)
    assert (made.critical_ulysses_rank, made.critical_ring_rank) == (0, None)
    assert made.notes == ()


def test_predict_decoupled_by_hand() -> None:
    """Ring rank 1 of group 0 computes 7.2 us, waits for its chunk until 12 us, and computes 9.2 us more."""
    made = model(decoupled=True).predict(four_ranks())
    assert made.compute_us == pytest.approx(7.2 + 9.2)
    assert made.exposed_us == pytest.approx(12.0 - 7.2)
    assert (made.critical_ulysses_rank, made.critical_ring_rank) == (0, 1)
    assert made.decoupled


def test_predict_backward_by_hand() -> None:
    """Gradient of out goes, dq, dk, dv come back; gradients of a chunk are fp32, 128 bytes, and hop twice."""
    made = model().predict(four_ranks(), backward=True)
    first, second = 3 * 3 + 0.4 + 7, 3 * 4 + 0.4 + 7
    gradient_hop = 4 + 128 / 8
    assert made.compute_us == pytest.approx(first + second)
    # The K/V hop of 12 us hides behind the first kernel; the gradients of step 0 not all behind the second, 19.4 us.
    assert made.exposed_us == pytest.approx((gradient_hop - second) + gradient_hop)
    assert made.hop_us == pytest.approx(12 + 2 * gradient_hop)
    assert made.all_to_all_us == pytest.approx(10.0)
    assert (made.direction, made.num_hops) == ("backward", 1 + 2)


def test_predict_backward_of_wide_types_sends_gradients_in_the_same_type() -> None:
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2, dtype_bytes=8)
    made = model(shape=shape).predict(four_ranks(), backward=True)
    assert made.hop_us == pytest.approx(3 * (4 + 4 * 64 / 8))


def test_predict_charges_moved_blocks_apart() -> None:
    """Head 0 has block 0 computed by ring rank 1: rank 0 sends its row (16 bytes) there, and it comes back."""
    plan = four_ranks(q_moves=[[0, 0, 1]])
    made = model().predict(plan)
    # Inside the Ulysses groups ranks send 48 and return 16 as before. Over all, rank 0 sends 48 + 16, rank 2 returns
    # 16 + 16.
    assert made.all_to_all_us == pytest.approx(6.0 + 4.0)
    assert made.exchange_us == pytest.approx(16 / 16 + 16 / 16)
    # Rows by rank: (u0, r0) 1, (u0, r1) 3.
    assert made.compute_us == pytest.approx(max(3 + 5.1, 2 + 5.3) + 4 + 5.3)


def test_predict_uses_the_network_between_nodes_only() -> None:
    """Nodes of two ranks: all-to-alls stay inside, hops leave, ten times slower."""
    made = model(ranks_per_node=2).predict(four_ranks())
    assert made.hop_us == pytest.approx(120.0)
    assert made.all_to_all_us == pytest.approx(10.0)
    everything = model(ranks_per_node=1).predict(four_ranks())
    assert everything.all_to_all_us == pytest.approx(100.0)
    assert everything.hop_us == pytest.approx(120.0)


def test_predict_takes_the_slower_of_node_and_network() -> None:
    """Nodes of three ranks: one all-to-all group and two hops are torn apart."""
    made = model(ranks_per_node=3).predict(four_ranks())
    assert made.all_to_all_us == pytest.approx(100.0)
    assert made.hop_us == pytest.approx(120.0)


def test_predict_slows_ranks_by_their_speed() -> None:
    """Speeds are by sp rank p = r*U + u; the fastest runs at the calibrated rates."""
    slow = model(speeds=np.array([1000, 1000, 500, 1000])).predict(four_ranks())
    assert slow.compute_us == pytest.approx(2 * (2 + 5.2) + 2 * (4 + 5.2))
    other = model(speeds=np.array([500, 250, 500, 500])).predict(four_ranks())
    assert other.critical_ulysses_rank == 1
    assert other.compute_us == pytest.approx(2 * 6.2 + 2 * 6.2)


def test_predict_counts_the_batch() -> None:
    shape = AttentionShape(batch_size=3, head_dim=4, block_size_q=2, block_size_k=2)
    shared = model(shape=shape).predict(four_ranks())
    assert shared.compute_us == pytest.approx(3 * 3 + 3 * 0.2 + 5 + 3 * 4 + 3 * 0.2 + 5)
    assert shared.all_to_all_us == pytest.approx(6 + 3 * 64 / 16)
    counted = model(shape=shape, mask_batch_size=3).predict(four_ranks())
    assert counted.compute_us == pytest.approx(3 + 3 * 0.2 + 5 + 4 + 3 * 0.2 + 5)


def test_predict_counts_extra_copies_of_cut_heads() -> None:
    """Ulysses rank 1 helps with head 0: its ranks get the K/V of both heads, and pass both on."""
    items = np.array([[0, 0, 2, 0], [0, 2, 4, 1], [1, 0, 4, 1]])
    loads = [[[3, 1], [0, 0]], [[1, 1], [1, 2]]]
    made = model().predict(four_ranks(head_items=items, loads=loads))
    # Rank 2 (u0, r1) has no row left: it sends a block's q of 2 heads and K/V of 2 heads to rank 3.
    assert made.all_to_all_us == pytest.approx(3 + (2 * 16 + 2 * 32) / 16 + 3 + 2 * 16 / 16)
    assert made.hop_us == pytest.approx(4 + 2 * 64 / 8)


def test_predict_gqa_sends_shared_heads_once() -> None:
    shape = AttentionShape(num_kv_heads=1, head_dim=4, block_size_q=2, block_size_k=2)
    both = items_of_owners(np.array([0, 0]), 4)
    loads = [LOADS[0], np.zeros((2, 2), dtype=int).tolist()]
    made = model(shape=shape).predict(four_ranks(head_items=both, loads=loads))
    assert made.all_to_all_us == pytest.approx(3 + (2 * 16 + 32) / 16 + 3 + 2 * 16 / 16)
    assert made.hop_us == pytest.approx(4 + 64 / 8)


def test_predict_on_one_rank_is_the_kernel() -> None:
    plan = PartitionPlan(
        1, 1, "contiguous", "home", items_of_owners(np.zeros(2, int), 3), [0] * 3, [0], [0] * 3, [0], [[[5]]]
    )
    made = model(calibration=make_calibration(links=())).predict(plan)
    assert made.total_us == made.compute_us == pytest.approx(5 + 0.6 + 5)
    assert (made.num_all_to_alls, made.num_hops, made.waiting_us) == (0, 0, 0)


def test_predict_growth_lengthens_compute_alone() -> None:
    plain, grown = model().predict(four_ranks()), model().predict(four_ranks(), compute_growth=0.5)
    assert grown.compute_us == pytest.approx(1.5 * plain.compute_us)
    assert grown.all_to_all_us == plain.all_to_all_us
    assert grown.mean_compute_us == plain.mean_compute_us


CHUNKS = AttentionShape(num_kv_heads=8, head_dim=4, block_size_q=2, block_size_k=2)


def eight_heads(loads: int) -> PartitionPlan:
    """U = 2, R = 1; four heads of one block each on both."""
    items = items_of_owners(np.repeat([0, 1], 4), 2)
    return PartitionPlan(2, 1, "contiguous", "home", items, [0] * 2, [0] * 2, [0, 1], [0, 1], [[[loads]], [[loads]]])


def test_predict_hides_exchanges_of_chunks_by_hand() -> None:
    """A rank sends 4 heads of 16 + 32 bytes there and of 16 back: 3 + 192 / 0.016 us and 3 + 64 / 0.016 us."""
    links = (make_curve("all_to_all", 3.0, 0.016),)
    plan, calibration = eight_heads(30_000), make_calibration(links=links)
    whole = model(calibration=calibration, shape=CHUNKS).predict(plan)
    assert (whole.num_chunks, whole.hidden_us) == (1, 0.0)
    assert whole.all_to_all_us == pytest.approx(16_006)
    assert whole.compute_us == pytest.approx(30_000 + 0.8 + 5)
    for chunks in (2, 4):
        made = model(calibration=calibration, shape=CHUNKS, num_chunks=chunks).predict(plan)
        assert made.num_chunks == chunks
        assert made.total_us == pytest.approx(16_006 / chunks + whole.compute_us + 60 * (chunks - 1))
        assert made.all_to_all_us == whole.all_to_all_us
    best = model(calibration=calibration, shape=CHUNKS, num_chunks="auto").predict(plan)
    assert best.num_chunks == 4
    assert "heads in 4 chunks" in best.explain()
    # What is bound by its exchanges gains nothing.
    bound = model(calibration=calibration, shape=CHUNKS, num_chunks="auto").predict(eight_heads(10))
    assert (bound.num_chunks, bound.hidden_us) == (1, 0.0)


def test_predict_gives_a_backward_pass_the_chunks_of_its_forward_pass() -> None:
    """On its own the backward pass, whose kernels take three times as long, would take more."""
    calibration = make_calibration(links=(make_curve("all_to_all", 3.0, 1.0),))
    made = model(calibration=calibration, shape=CHUNKS, num_chunks="auto")
    plan = eight_heads(50)
    assert made.predict(plan).num_chunks == 1
    one, two = (made.predict(plan, backward=True, num_chunks=num) for num in (None, 2))
    assert (one.num_chunks, two.num_chunks) == (1, 2)
    assert two.total_us < 0.9 * one.total_us
    fixed = model(calibration=calibration, shape=CHUNKS, num_chunks=3)
    assert fixed.predict(plan, backward=True).num_chunks == 3


def test_predict_has_no_more_chunks_than_kv_heads_and_one_without_an_exchange_of_heads() -> None:
    assert model(num_chunks=4).predict(four_ranks()).num_chunks == 2
    plan = PartitionPlan(
        1, 1, "contiguous", "home", items_of_owners(np.zeros(2, int), 3), [0] * 3, [0], [0] * 3, [0], [[[5]]]
    )
    assert model(num_chunks=4).predict(plan).num_chunks == 1
    assert model(num_chunks=4).predict(plan).total_us == model().predict(plan).total_us


def test_predict_takes_no_less_than_the_fullest_multiprocessor() -> None:
    """Ring group 0: steps of 3 and 1, 2 and 4 blocks. Two at a time: 2 x 4 of the first step's 3 count instead."""
    tails = np.array([[[4, 0], [1, 1]], [[0, 0], [0, 0]]])
    plan = four_ranks()
    made = model(calibration=make_calibration(num_multiprocessors=2)).predict(plan, tails=tails)
    assert made.compute_us == pytest.approx(8 + 5.2 + 4 + 5.2)
    assert model().predict(plan, tails=tails).compute_us == pytest.approx(3 + 5.2 + 4 + 5.2)
    backward = model(calibration=make_calibration(num_multiprocessors=2)).predict(plan, tails=tails, backward=True)
    assert backward.compute_us == model().predict(plan, backward=True).compute_us


def test_predict_published_by_hand() -> None:
    """Balanced step (15 / 8 blocks) times the imbalance over all ranks, (3 + 4) * 4 / 15, one curve for 64 bytes."""
    step = 15 / 8 + 5.2
    rho = 7 * 4 / 15
    assert model().predict_published(four_ranks()) == pytest.approx(3 + 64 / 16 + (12.0 + step) * rho)
    backward = 3 * 15 / 8 + 0.4 + 7
    assert model().predict_published(four_ranks(), backward=True) == pytest.approx(7 + (4 + 3 * 8 + backward) * rho)


def test_row_overhead_is_in_dense_blocks() -> None:
    assert model().row_overhead(1) == pytest.approx(0.1)
    assert model().row_overhead(4) == pytest.approx(0.4)
    shape = AttentionShape(batch_size=3, head_dim=4, block_size_q=2, block_size_k=2)
    assert model(shape=shape).row_overhead(1) == pytest.approx(0.1)
    assert model(shape=shape, mask_batch_size=3).row_overhead(1) == pytest.approx(0.3)


def test_notes_tell_what_was_not_measured() -> None:
    made = model(calibration=make_calibration(note="from a book"), dtype="float16").predict(four_ranks())
    assert made.notes[1] == "from a book"
    assert "scaled from bfloat16" in made.notes[0]
    assert "Assumed: from a book." in made.explain()


@pytest.mark.parametrize(
    ("links", "kernels", "expected"),
    [
        ((1.0, 1e6, 1.0, 1e6), (1e4, 0.0), "computing: more ranks or a sparser mask would help"),
        ((9e3, 1e6, 1.0, 1e6), (1.0, 0.0), "all-to-all: a smaller Ulysses degree"),
        ((1.0, 1e6, 9e3, 1e6), (1.0, 0.0), "ring communication that nothing hides: a smaller Ring degree"),
    ],
)
def test_explain_says_what_dominates(
    links: tuple[float, float, float, float], kernels: tuple[float, float], expected: str
) -> None:
    calibration = make_calibration(
        kernels=(make_rate(block_us=kernels[0], row_us=kernels[1], launch_us=0.0),),
        links=(make_curve("all_to_all", *links[:2]), make_curve("p2p", *links[2:])),
    )
    text = model(calibration=calibration).predict(four_ranks()).explain()
    assert text.splitlines()[0].startswith("U2R2 forward (one wait per step): ")
    assert f"Most of it is {expected}" in text


def test_explain_says_that_ranks_wait_or_blocks_move() -> None:
    skewed = four_ranks(loads=[[[90, 0], [0, 0]], [[1, 0], [0, 0]]])
    assert "waiting for the most loaded rank: a better balanced plan" in model().predict(skewed).explain()
    slow = make_calibration(links=(make_curve("all_to_all", 0.1, 0.1), make_curve("p2p", 0.1, 1e6)))
    moved = four_ranks(q_block_owner=[1, 1, 0, 0], kv_block_owner=[1, 1, 0, 0], block_policy="paper")
    assert "exchange of moved blocks: a layout that needs fewer" in model(calibration=slow).predict(moved).explain()


def test_explain_of_nothing_to_do() -> None:
    idle = PartitionPlan(1, 1, "contiguous", "home", items_of_owners(np.zeros(1, int), 1), [0], [0], [0], [0], [[[0]]])
    calibration = make_calibration(kernels=(make_rate(row_us=0.0, launch_us=0.0),), links=())
    assert model(calibration=calibration).predict(idle).explain() == "U1R1 forward (one wait per step): 0.0 us"


def test_model_refuses() -> None:
    with pytest.raises(ValueError, match="speeds must be at least 1"):
        model(speeds=np.array([1, 0]))
    with pytest.raises(ValueError, match="speeds has 2 entries for 2 x 2 ranks"):
        model(speeds=np.array([1, 1])).predict(four_ranks())
    with pytest.raises(ValueError, match="mask_batch_size must be 1 or the batch size 1, got 2"):
        model(mask_batch_size=2)
    with pytest.raises(ValueError, match="no forward rate"):
        model(calibration=make_calibration(kernels=()))
    with pytest.raises(ValueError, match="no p2p curve of scope 'node'"):
        model(calibration=make_calibration(links=(make_curve("all_to_all", 1.0, 1.0),))).predict(four_ranks())
    with pytest.raises(ValueError, match="ranks_per_node must be an integer of at least 1"):
        model(ranks_per_node=0)
    with pytest.raises(ValueError, match="num_chunks must be an integer of at least 1"):
        model(num_chunks=0)


@pytest.mark.parametrize("growth", [float("nan"), float("inf"), -2, -0.01, "much", True, 10**400])
def test_predict_refuses_impossible_growth(growth: Any) -> None:
    with pytest.raises(ValueError, match="compute_growth must be a finite number of at least 0, got"):
        model().predict(four_ranks(), compute_growth=growth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float64", "", None, 16])
def test_model_refuses_types_that_no_calibration_knows(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got"):
        model(dtype=dtype)


@pytest.mark.parametrize("value", [None, {}, "machine.json"])
def test_model_refuses_other_objects(value: Any) -> None:
    with pytest.raises(ValueError, match="calibration must be of type Calibration, got"):
        LatencyModel(value, SHAPE)
    with pytest.raises(ValueError, match="shape must be of type AttentionShape, got"):
        LatencyModel(make_calibration(), value)


@pytest.mark.parametrize("mesh", [(6, 1), (3, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize("backward", [False, True])
def test_decoupled_never_takes_longer_on_real_plans(mesh: tuple[int, int], backward: bool) -> None:
    workload = workload_in(random_mask(3, 7, 41, 37), *mesh)
    plan = plan_workload(workload, ulysses_degree=mesh[0], ring_degree=mesh[1], head_policy="lpt_swap")
    calibration = reference_calibration()
    barrier, decoupled = (
        LatencyModel(calibration, AttentionShape(), decoupled=form).predict(plan, backward=backward)
        for form in (False, True)
    )
    assert decoupled.total_us <= barrier.total_us * (1 + 1e-12)
    assert barrier.num_launches == mesh[1]
    assert barrier.total_us > 0
