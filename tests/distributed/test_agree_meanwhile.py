"""What a rank makes ready while ranks agree on a call: dropped on all of them when one has other ideas."""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel
from dbsp_megatron.attention import ring
from dbsp_megatron.comm.agree import Agreement, Belief, digest_int
from dbsp_megatron.strategy import selection
from dbsp_megatron.strategy.consensus import slowest_us
from dbsp_megatron.strategy.execution import MeshExecutor
from dbsp_megatron.strategy.layer import LayerRunner
from dbsp_megatron.strategy.timed_engine import TimedEngine
from tests.distributed.sharded import check, make_sp, random_problem, recorded_collectives, refusal, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL

SEQLEN, BLOCK, HEADS = 45, 8, 5
WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 4, "ring": 1},
    "ring": {"ulysses": 1, "ring": 4},
    "ring, one chunk ahead": {"ulysses": 1, "ring": 4, "kv_prefetch": 1},
    "mixed": {"ulysses": 2, "ring": 2},
    "chunks": {"ulysses": 4, "ring": 1, "exchange_chunks": 2},
    "mixed, chunks": {"ulysses": 2, "ring": 2, "exchange_chunks": 2},
}
"""In a ring alone all sides are identities, and K and V are the first to be sent."""
ODD = 2


class _FaultError(Exception):
    """Of this rank alone, or of the test."""


def _kept(sp: SequenceParallel) -> object:
    """What a call that is refused leaves as it is."""
    records = [
        (record.layer, record.blocks_timed, len(record.watches), len(record.forward_kernels), record.bytes_sent)
        for record in sp.records.layers.values()
    ]
    told = [(key, id(value)) for key, value in sp.latest.items()]
    return records, told, sp._runner.traffic.bytes_sent, list(sp._rows)


def _mistaken(
    sp: SequenceParallel, local: list[Tensor], mask: BlockMask, rank: int, mistake: str
) -> tuple[str, list[str]]:
    """What comes of a call in which ranks differ, and the collectives that were begun."""
    odd = rank == ODD
    call: dict[str, Any] = {"mask": mask, "layer": 0}
    needs_grad = local[0].requires_grad
    given = [x.detach().requires_grad_(needs_grad != (odd and mistake == "gradients")) for x in local]
    other = BlockMask(mask.blocks.roll(1, 3), BLOCK, BLOCK, SEQLEN, SEQLEN)
    with ExitStack() as stack:
        if odd and mistake == "problem":
            given[1] = given[1][:, :, :3]
        elif odd and mistake == "layer":
            call["layer"] = 1
        elif odd and mistake in ("mask", "nothing sent"):
            call["mask"] = other
        elif odd and mistake == "fault":
            # Another rank has something to tell, which goes before what this one alone knows.
            stack.enter_context(patch.object(MeshExecutor, "_chunk", side_effect=_FaultError))
        elif rank == 0 and mistake == "fault":
            call["mask"] = other
        if mistake == "nothing sent":
            stack.enter_context(patch.object(MeshExecutor, "execute", return_value=given[0]))
        log = stack.enter_context(recorded_collectives())
        heard = refusal(lambda: sp.attention(*given, **call, layout=sp.layout(SEQLEN)))
    return heard, [name for name, *_ in log]


MISTAKES = {
    "problem": rf"k and v.*rank {ODD}\]",
    "layer": f"ranks disagree about layer and step .*rank {ODD}: layer 1",
    "mask": f"ranks disagree about mask .*rank {ODD}: BlockMask",
    "gradients": r"whether gradients are needed \(.*(: needed; .*: not needed|: not needed; .*: needed)\)",
    "fault": "ranks disagree about mask .*rank 0: BlockMask",
    "nothing sent": f"ranks disagree about mask .*rank {ODD}: BlockMask",
}


def _refused(rank: int, world_size: int, way: dict[str, Any], needs_grad: bool) -> list[tuple[str, list[str]]]:
    sp = make_sp("dbsp", block_size=BLOCK, **way)
    layout = sp.layout(SEQLEN)
    inputs, mask, want = random_problem(3, SEQLEN, HEADS, BLOCK)
    local = [layout.shard(x).requires_grad_(needs_grad) for x in inputs[:3]]
    found = []
    for number, mistake in enumerate(MISTAKES):
        sp.begin_step(number)
        before = _kept(sp)
        run = LayerRunner._execute_meanwhile
        with patch.object(LayerRunner, "_execute_meanwhile", autospec=True, side_effect=run) as meanwhile:
            found.append(_mistaken(sp, local, mask, rank, mistake))
        assert meanwhile.call_count == (rank != ODD or mistake != "problem"), mistake
        assert _kept(sp) == before, mistake
        assert len(sp.cache) == 0, "plans that were made before ranks agreed are forgotten"
        # Agreements still meet, and the call in which ranks agree is right.
        check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, f"after {mistake}")
    sp.destroy()
    return found


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_one_rank_spoils_is_refused_before_anything_is_sent(way: str, needs_grad: bool) -> None:
    by_rank = run_ranks(_refused, 4, WAYS[way], needs_grad)
    for (mistake, words), *heard in zip(MISTAKES.items(), *by_rank, strict=True):
        assert heard == [heard[0]] * 4, mistake
        message, begun = heard[0]
        assert message.startswith("ValueError"), (mistake, message)
        assert re.search(words, message), (mistake, message)
        assert begun == ["all_gather"] * 2, "a row of numbers and one of words"


def _faults_of_all(rank: int, world_size: int, way: dict[str, Any]) -> None:
    sp = make_sp("dbsp", block_size=BLOCK, **way)
    layout = sp.layout(SEQLEN)
    inputs, mask, want = random_problem(4, SEQLEN, HEADS, BLOCK)
    local = [layout.shard(x) for x in inputs[:3]]
    check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, "before")
    plans = len(sp.cache)
    broken = patch.object(MeshExecutor, "_chunk", side_effect=_FaultError)
    with recorded_collectives() as log, broken, pytest.raises(_FaultError):
        sp.attention(*local, mask=mask, layout=layout)
    assert [name for name, *_ in log] == ["all_gather"]
    assert len(sp.cache) == plans > 0, "ranks agreed on the call, so that its plan stands"
    # Otherwise this agreement would meet what is left of the one before.
    spoilt = refusal(lambda: sp.attention(*local, mask=None if rank == ODD else mask, layout=layout))
    assert "ranks disagree about mask" in spoilt
    check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, "after")
    sp.destroy()


@pytest.mark.parametrize("way", ["ulysses", "ring", "mixed, chunks"])
def test_a_fault_while_making_ready_leaves_no_agreement_open(way: str) -> None:
    run_ranks(_faults_of_all, 4, WAYS[way])


def _call_of_step(sp: SequenceParallel, local: list[Tensor], mask: BlockMask, rank: int, fails: bool) -> None:
    """Attention that fails on one rank after all was sent, so that the others do not notice."""
    layout = sp.layout(mask.seqlen_q)
    if not fails or rank != ODD:
        sp.attention(*local, mask=mask, layout=layout)
        return
    with patch.object(ring, "plan_tensor", side_effect=_FaultError), pytest.raises(_FaultError):
        sp.attention(*local, mask=mask, layout=layout)


def _unnoticed(rank: int, world_size: int, mistakes: tuple[int, ...]) -> list[tuple[Any, ...]]:
    sp = make_sp("auto", 1, 4, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs, mask, want = random_problem(7, SEQLEN, HEADS, BLOCK)
    local = [layout.shard(x) for x in inputs[:3]]
    compared = []
    with patch.object(selection, "slowest_us", side_effect=slowest_us) as counted:
        for step in range(22):
            sp.begin_step(step)
            _call_of_step(sp, local, mask, rank, step in mistakes)
            check(sharded_gradients(sp, inputs, mask, BLOCK, layer=1), want, FP32_ATOL, f"step {step}")
            compared.append((step, counted.call_count, sp.stats()["sp/plan_reuse"]))
    sp.destroy()
    return compared


# Times of the layer are compared in steps 3 and 19, as of the steps before.
@pytest.mark.parametrize("mistakes", [(2,), (4,), (2, 18)])
def test_a_fault_of_one_rank_leaves_ranks_in_step(mistakes: tuple[int, ...]) -> None:
    found = run_ranks(_unnoticed, 4, mistakes)
    assert found == [found[0]] * 4
    assert found[0][-1][1] > 0


def _uneven_stripes(rank: int, world_size: int) -> tuple[bool, list[int]]:
    sp = make_sp("dbsp", 1, 4, block_size=BLOCK, block_policy="hot_stripe")
    blocks = torch.eye(12, dtype=torch.bool).repeat(1, HEADS, 1, 1)
    blocks[:, :, ::4] = True
    mask = BlockMask(blocks, BLOCK, BLOCK)
    layout = sp.layout(mask.seqlen_q)
    local = [layout.shard(x) for x in random_problem(8, mask.seqlen_q, HEADS, BLOCK)[0][:3]]
    sp.begin_step(0)
    _call_of_step(sp, local, mask, rank, fails=True)
    changed = sp.recalibrate()
    homes = sp.layout(mask.seqlen_q).homes.tolist()
    sp.destroy()
    return changed, homes


def test_a_fault_of_one_rank_leaves_layouts_alike() -> None:
    """Layouts follow counts without communication, so that ranks must have seen the same calls."""
    found = run_ranks(_uneven_stripes, 4)
    assert found == [found[0]] * 4
    assert found[0][0]


def _fail_at(number: int, which: str, direction: str) -> AbstractContextManager[Any]:
    """Makes a call of the engine fail, counted from 0."""
    calls = iter(range(1000))
    original = getattr(TimedEngine, direction)

    def run(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise _FaultError(which)
        return original(*args, **options)

    return patch.object(TimedEngine, direction, run)


def _all_fail(rank: int, world_size: int, way: dict[str, Any]) -> None:
    sp = make_sp("dbsp", block_size=BLOCK, kv_gather_mib=0, **way)
    inputs, mask, want = random_problem(10, SEQLEN, HEADS, BLOCK)
    check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, "before")
    for direction in ("forward", "backward"):
        for _ in range(5):
            with _fail_at(0, "all", direction), pytest.raises(_FaultError):
                sharded_gradients(sp, inputs, mask, BLOCK)
            check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, f"after a fault in {direction}")
    sp.destroy()


@pytest.mark.parametrize("way", WAYS)
def test_calls_after_one_that_failed_alike_on_all_ranks_are_right(way: str) -> None:
    """Such as for want of memory, while K and V of other ranks are on their way."""
    run_ranks(_all_fail, 4, WAYS[way])


def _fail_apart(rank: int, world_size: int, needs_grad: bool) -> list[str]:
    sp = make_sp("dbsp", 1, 4, block_size=BLOCK, kv_gather_mib=0, kv_prefetch=1)
    layout = sp.layout(SEQLEN)
    inputs, mask, _ = random_problem(11, SEQLEN, HEADS, BLOCK, dense=True)
    local = [layout.shard(x).requires_grad_(needs_grad) for x in inputs[:3]]

    def attend() -> Tensor:
        return sp.attention(*local, mask=mask, layout=layout)

    out = attend()
    direction = "backward" if needs_grad else "forward"
    with _fail_at(rank != ODD, "some", direction), pytest.raises(_FaultError):
        out.sum().backward() if needs_grad else attend()
    heard = [refusal(attend) for _ in range(2)]
    sp.destroy()
    return heard


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_was_sent_in_a_call_that_failed_is_not_taken_for_that_of_another(needs_grad: bool) -> None:
    heard, *others = run_ranks(_fail_apart, 4, needs_grad)
    assert others == [heard] * 3
    assert all("ranks disagree about exchanges so far" in message for message in heard)


def _interrupted(rank: int, world_size: int) -> None:
    sp = make_sp("dbsp", 1, 4, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs, mask, _ = random_problem(9, SEQLEN, HEADS, BLOCK)
    local = [layout.shard(x) for x in inputs[:3]]
    given = mask if rank else BlockMask(mask.blocks.roll(1, 3), BLOCK, BLOCK, SEQLEN, SEQLEN)
    if rank == ODD:
        with patch.object(MeshExecutor, "_chunk", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            sp.attention(*local, mask=given, layout=layout)
    else:
        with pytest.raises(ValueError, match="ranks disagree about mask"):
            sp.attention(*local, mask=given, layout=layout)
    assert len(sp.cache) == 0
    sp.destroy()


def test_an_interrupt_is_not_taken_for_a_refusal() -> None:
    run_ranks(_interrupted, 4)


def _chosen_meshes(rank: int, world_size: int) -> tuple[list[str], int]:
    sp = make_sp("auto", block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs, mask, want = random_problem(6, SEQLEN, HEADS, BLOCK)
    other = BlockMask(mask.blocks.roll(1, 3), BLOCK, BLOCK, SEQLEN, SEQLEN)
    local = [layout.shard(x) for x in inputs[:3]]
    heard = []
    with patch.object(selection, "slowest_us", side_effect=slowest_us) as compared:
        for step in range(24):
            sp.begin_step(step)
            given = other if rank == ODD else mask
            heard.append(refusal(lambda: sp.attention(*local, mask=given, layout=layout)))  # noqa: B023
            run = LayerRunner._execute_meanwhile
            with patch.object(LayerRunner, "_execute_meanwhile", autospec=True, side_effect=run) as meanwhile:
                check(sharded_gradients(sp, inputs, mask, BLOCK), want, FP32_ATOL, f"step {step}")
            assert meanwhile.call_count == (step > 0), "a mesh is chosen in the first step, after ranks agreed"
    sp.destroy()
    return heard, compared.call_count


def test_meshes_that_are_chosen_are_measured_alike_after_refused_calls() -> None:
    """Times are compared in collectives of their own, which follow the call where its plan is known."""
    found = run_ranks(_chosen_meshes, 4)
    assert found == [found[0]] * 4
    heard, num_compared = found[0]
    assert all("ranks disagree about mask" in message for message in heard)
    assert num_compared > 0


def _late(rank: int, world_size: int) -> list[float]:
    """Milliseconds that attention took, where the last rank comes late by a second."""
    sp = make_sp("dbsp", 1, 2, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs, mask, _ = random_problem(5, SEQLEN, HEADS, BLOCK)
    local = [layout.shard(x) for x in inputs[:3]]
    for step in range(2):
        sp.begin_step(step)
        if rank == 1 and step == 1:
            time.sleep(1)
        sp.attention(*local, mask=mask, layout=layout)
    took = [sp.records.layer(0).attention_ms]
    sp.destroy()
    return took


def test_time_of_attention_is_not_that_of_late_ranks() -> None:
    first, _ = run_ranks(_late, 2)
    assert first[0] < 900


def _open(rank: int, world_size: int) -> list[str]:
    def begin(problem: str | None, value: int) -> Agreement:
        belief = Belief(digest_int(value), lambda: str(value), "count alike")
        return Agreement(f"place {rank}", problem, {"number": belief}, dist.group.WORLD)

    heard = []
    for problem, value in ((None, 3), ("no number" if rank else None, 3), (None, rank)):
        agreement = begin(problem, value)
        assert agreement.is_open
        assert not agreement.is_refused
        # Meanwhile: nothing that others see.
        torch.ones(3).sum()
        heard += [refusal(agreement.finish), refusal(agreement.finish)]
        assert not agreement.is_open
        assert not agreement.must_wait
        assert agreement.is_refused == (heard[-1] != "accepted")
    return heard


def test_agreement_says_the_same_each_time_and_asks_once() -> None:
    heard, other = run_ranks(_open, 2)
    assert heard == other
    assert heard[::2] == heard[1::2]
    assert heard[0] == "accepted"
    assert heard[2] == "ValueError: no number [place 1, rank 1]"
    assert heard[4].startswith("ValueError: place 0: ranks disagree about number (rank 0: 0; rank 1: 1)")


def _without_words(rank: int, world_size: int) -> str:
    def shown() -> str:
        if rank:
            raise _FaultError("mislaid")
        return "0"

    return refusal(Agreement("here", None, {"number": Belief(rank, shown, "count")}, dist.group.WORLD).finish)


def test_ranks_hear_of_a_disagreement_that_one_of_them_has_no_words_for() -> None:
    heard, other = run_ranks(_without_words, 2)
    assert heard == other
    assert "(rank 0: 0; rank 1: what raised _FaultError when asked: mislaid)" in heard


def test_agreement_of_one_rank_is_what_it_says() -> None:
    assert refusal(Agreement("here", None, {}, None).finish) == "accepted"
    assert refusal(Agreement("here", "no number", {}, None).finish) == "ValueError: no number"
