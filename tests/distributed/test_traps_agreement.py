"""Traps of disagreement: whatever differs between ranks raises the same error on all of them, and nothing hangs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, MaskConfig, SequenceParallel, SequenceParallelConfig, build_mask_method
from dbsp_megatron.masks import TopPMask
from tests.distributed.sharded import check, make_sp, random_problem, recorded_collectives, refusal, sharded_gradients
from tests.harness import RankError, run_ranks
from tests.reference import FP32_ATOL, random_qkv

MESHES_2 = [("ulysses", 2, 1), ("ring", 1, 2), ("usp", 2, 1), ("dbsp", 2, 1), ("dbsp", 1, 2)]


def _differing_call(rank: int, kind: str) -> dict[str, Any]:
    """Arguments of one attention call of which rank 1's differ in `kind`."""
    odd = rank == 1
    inputs, mask, _ = random_problem(0, 24, 4, 8)
    q, k, v, _ = inputs
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "mask": mask, "layer": 0, "scale": None}
    if kind == "mask pattern":
        blocks = mask.blocks.clone()
        blocks[0, 2, 1, 1] ^= odd
        call["mask"] = BlockMask(blocks, 8, 8, 24, 24)
    elif kind == "mask pattern, equal counts":
        call["mask"] = BlockMask(mask.blocks.roll(int(odd), 3), 8, 8, 24, 24)
    elif kind == "mask or none":
        call["mask"] = None if odd else mask
    elif kind == "mask or method":
        call["mask"] = TopPMask(0.7) if odd else mask
    elif kind == "mask method settings":
        call["mask"] = TopPMask(0.6 if odd else 0.7)
    elif kind == "mask block size":
        call["mask"] = BlockMask.dense(4, 24, block_size_q=4 if odd else 8, block_size_k=8)
    elif kind == "layer":
        call["layer"] = int(odd)
    elif kind == "scale":
        call["scale"] = 0.5 if odd else 0.25
    elif kind == "batch":
        call.update({name: call[name].expand(2 if odd else 1, -1, -1, -1) for name in "qkv"})
        call["mask"] = None
    elif kind == "kv heads":
        call.update({name: call[name][:, :, : 2 if odd else 4] for name in "kv"})
    elif kind == "head dim":
        call.update({name: call[name][..., : 4 if odd else 8] for name in "qkv"})
    elif kind == "dtype":
        call.update({name: call[name].to(torch.bfloat16 if odd else torch.float32) for name in "qkv"})
    elif kind == "local length":
        call["cut"] = odd
    elif kind == "one bad mask":
        call["mask"] = mask.to_dense() if odd else mask
    elif kind == "one bad k":
        call["k"] = k[:, :, :3] if odd else k
    else:
        raise KeyError(kind)
    return call


KINDS = (
    "mask pattern",
    "mask pattern, equal counts",
    "mask or none",
    "mask or method",
    "mask method settings",
    "mask block size",
    "layer",
    "scale",
    "batch",
    "kv heads",
    "head dim",
    "dtype",
    "local length",
    "one bad mask",
    "one bad k",
)


def _disagree(rank: int, world_size: int, kind: str) -> list[tuple[str, str, float]]:
    results = []
    for strategy, u, r in MESHES_2:
        sp = make_sp(strategy, u, r, block_size=8)
        layout = sp.layout(24)
        call = _differing_call(rank, kind)
        cut = call.pop("cut", False)
        local = [layout.shard(call.pop(name))[:, : layout.num_local - cut] for name in "qkv"]
        start = time.monotonic()
        message = refusal(lambda: sp.attention(*local, layout=layout, **call))  # noqa: B023
        results.append((f"{strategy} U{u}R{r}", message, time.monotonic() - start))
        # The groups still work: the next call, in which all ranks agree, is right.
        inputs, mask, want = random_problem(1, 24, 4, 8)
        check(sharded_gradients(sp, inputs, mask, 8, layer=5), want, FP32_ATOL, f"{strategy} after {kind}")
        sp.destroy()
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_differ_raise_on_every_rank(kind: str) -> None:
    """The same ValueError everywhere, at once, before any exchange; then the object still works (Traps B65, B67)."""
    for mesh in zip(*run_ranks(_disagree, 2, kind), strict=True):
        label = mesh[0][0]
        messages = [message for _, message, _ in mesh]
        assert all(message.startswith("ValueError") for message in messages), (label, messages)
        assert len(set(messages)) == 1, (label, messages)
        assert max(seconds for _, _, seconds in mesh) < 10, label
        assert "attention layer 0, step 0" in messages[0], messages
        if kind in ("local length", "one bad mask", "one bad k"):
            assert messages[0].endswith(", rank 1]"), messages
        else:
            _check_tells_values_and_remedy(messages[0])


def _check_tells_values_and_remedy(message: str) -> None:
    found = re.fullmatch(r".*ranks disagree about [\w, ]+ \(rank 0: (.+); rank 1: (.+)\): (.+)", message)
    assert found, message
    assert found[1] != found[2], message
    assert len(found[3]) > 20, message


def _configurations(rank: int, world_size: int, options: list[dict[str, Any]]) -> tuple[str, float]:
    start = time.monotonic()
    message = refusal(lambda: make_sp(**options[rank % len(options)]))
    return message, time.monotonic() - start


@pytest.mark.parametrize(
    "options",
    [
        [{"strategy": "ulysses"}, {"strategy": "ring"}],
        [{"strategy": "dbsp", "ulysses": 2, "ring": 1}, {"strategy": "dbsp", "ulysses": 1, "ring": 2}],
        [{"strategy": "dbsp", "head_policy": "paper"}, {"strategy": "dbsp", "head_policy": "lpt_swap"}],
        [{"strategy": "dbsp", "block_policy": "stripe"}, {"strategy": "dbsp", "block_policy": "contiguous"}],
        [{"strategy": "dbsp", "plan_counts": "current"}, {"strategy": "dbsp", "plan_counts": "previous"}],
        [{"strategy": "dbsp"}, {"strategy": "none"}],
        [{"strategy": "dbsp"}, {"strategy": "unheard_of"}],
        [{"strategy": "dbsp"}, {"strategy": "dbsp", "calibration": "nowhere.json"}],
        [{"strategy": "dbsp"}, {"strategy": "dbsp", "engine": "unheard_of"}],
    ],
    ids=["strategy", "mesh", "heads", "blocks", "counts", "none", "unknown", "no-file", "engine"],
)
def test_configurations_that_differ_raise_on_every_rank(options: list[dict[str, Any]]) -> None:
    """Ranks that were configured apart find out when the object is built (Trap B65)."""
    found = run_ranks(_configurations, 2, options)
    assert all(message.startswith("ValueError") for message, _ in found), found
    assert len({message for message, _ in found}) == 1, found
    assert max(seconds for _, seconds in found) < 10


def _no_configuration(rank: int, world_size: int, kind: str) -> str:
    good = SequenceParallelConfig()
    bad: dict[str, Any] = {"dict": {"strategy": "dbsp"}, "class": SequenceParallelConfig, "none": None}
    return refusal(lambda: SequenceParallel(bad[kind] if rank == 1 else good))


@pytest.mark.parametrize("kind", ["dict", "class", "none"])
def test_what_is_no_configuration_on_one_rank_raises_on_every_rank(kind: str) -> None:
    """Ranks that have one would wait for the one that has not (Trap B65)."""
    found = run_ranks(_no_configuration, 3, kind)
    assert found[0] == found[1] == found[2]
    assert found[0].startswith("ValueError: config must be a SequenceParallelConfig, got ")
    assert found[0].endswith("[making SequenceParallel, rank 1]")


def _without_context(rank: int, world_size: int) -> list[str]:
    sp = make_sp("dbsp", 2, 1, block_size=8)
    layout = sp.layout(24)
    q = torch.ones(1, layout.num_local, 4, 8)
    heard = []
    with sp.use(layout=layout if rank == 0 else None):
        heard.append(refusal(lambda: sp.attention_in_context(q, q, q, layer=3)))
        heard.append(refusal(lambda: sp.attention_in_context(q, q, q, layer=3, problem="mine" if rank else None)))
    sp.attention(q, q, q, layout=layout)
    # The mask of layer 0 is known on both ranks, that of layer 7 on none.
    heard.append(refusal(lambda: sp.layer_mask(7)))
    heard.append(refusal(lambda: sp.layer_mask(7 * rank)))
    heard.append(refusal(lambda: layout.gather(q, dim=1 + 4 * rank)))
    # Calls that are not the same one.
    heard.append(refusal(lambda: sp.layer_mask(0) if rank else layout.gather(q)))
    sp.destroy()
    return heard


def test_one_sided_mistakes_around_attention_raise_on_every_rank() -> None:
    """What a module refuses, or lacks, before it calls attention is told to the ranks that call it (Trap B65)."""
    heard, other = run_ranks(_without_context, 2)
    assert heard == other
    for text, words in zip(
        heard,
        (
            r"no token layout is active.*attention layer 3, step 0, rank 1\]",
            r"mine \[attention layer 3, step 1, rank 1\]",
            r"layer 7 has no kept mask.*\[mask of layer 7\]",
            r"layer 7 has no kept mask.*\[mask of layer 7, rank 1\]",
            r"dim=5 must be one of the 4 dims.*rank 1\]",
            r"ranks are in different calls \(rank 0: gather of the layout of 24 tokens; rank 1: mask of layer 0\)",
        ),
        strict=True,
    ):
        assert re.search(words, text), text


def _refused(rank: int, world_size: int, what: str) -> list[str]:
    messages = []
    inputs, mask, _ = random_problem(0, 24, 4, 8)
    for strategy, u, r in MESHES_2:
        sp = make_sp(strategy, u, r, block_size=8)
        layout = sp.layout(24)
        local = [layout.shard(x) for x in inputs[:3]]
        bad: dict[str, Callable[[], Any]] = {
            "dense bias": lambda: torch.zeros(1, 4, 24, 24),
            "token mask": mask.to_dense,
            "window": lambda: (8, 8),
            "causal": lambda: "causal",
            "3 heads": lambda: BlockMask.dense(3, 24, block_size_q=8, block_size_k=8),
            "23 tokens": lambda: BlockMask.dense(4, 23, block_size_q=8, block_size_k=8),
            "24 queries of 16 keys": lambda: BlockMask.dense(4, 24, 16, block_size_q=8, block_size_k=8),
            "3 samples": lambda: BlockMask(mask.blocks.expand(3, -1, -1, -1), 8, 8, 24, 24),
        }
        argument = bad[what]()
        with recorded_collectives() as log:
            messages.append(refusal(lambda: sp.attention(*local, mask=argument, layout=layout)))  # noqa: B023
        assert all(name.startswith("all_gather") for name, *_ in log), "tokens were exchanged before the refusal"
        sp.destroy()
    return messages


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dense bias", ["Tensor"]),
        ("token mask", ["Tensor"]),
        ("window", ["tuple"]),
        ("causal", ["str"]),
        ("3 heads", ["3", "4"]),
        ("23 tokens", ["23", "24"]),
        ("24 queries of 16 keys", ["16", "24"]),
        ("3 samples", ["3", "1"]),
    ],
)
def test_masks_that_cannot_be_honoured_are_refused(what: str, words: list[str]) -> None:
    """A foreign mask kind or one of the wrong size is an error that names it, never run without (Trap B35)."""
    for messages in run_ranks(_refused, 2, what):
        for message in messages:
            assert message.startswith("ValueError"), message
            assert all(word in message for word in words), message


def _block_size_rule(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for u, r in ((4, 1), (2, 2), (1, 4)):
        sp = make_sp("dbsp", u, r)
        for block_q, block_k in ((16, 8), (8, 16), (3, 8), (8, 4), (8, 8)):
            inputs = random_qkv(0, 1, 40, 4, 8)
            mask = BlockMask.dense(4, 40, block_size_q=block_q, block_size_k=block_k)
            found[f"U{u}R{r} {block_q}x{block_k}"] = refusal(lambda: sharded_gradients(sp, inputs, mask, 8))  # noqa: B023
        sp.destroy()
    return found


def test_mask_blocks_must_nest_in_layout_blocks_when_a_ring_cuts_them() -> None:
    """With R > 1 the layout's 8 must be a multiple of the mask's sizes, or ValueError naming both; R = 1 takes any."""
    found = run_ranks(_block_size_rule, 4)
    assert all(messages == found[0] for messages in found)
    for case, message in found[0].items():
        if "R1" in case or case.endswith(("8x4", "8x8")):
            assert message == "accepted", (case, message)
        else:
            assert message.startswith("ValueError"), (case, message)
            bad = {"16x8": "16", "8x16": "16", "3x8": "3"}[case.split()[1]]
            assert bad in message, (case, message)
            assert "8" in message, (case, message)


def _method_on_local_data(rank: int, world_size: int, plan_counts: str) -> list[tuple[Any, ...]]:
    sp = make_sp("dbsp", 2, 2, block_size=8, plan_counts=plan_counts)
    method = build_mask_method(MaskConfig(method="topp", top_p=0.5))
    layout = sp.layout(53)
    with recorded_collectives() as log:
        for step in range(4):
            sp.begin_step(step)
            # Scores differ by rank in sharpness, so that each rank alone would keep another share of blocks.
            q, k, v, _ = random_qkv(step, 1, 53, 5, 8)
            local = [layout.shard(x) for x in (q * 6, k, v)]
            local[0] = (local[0] * (0.01 if rank % 2 else 3.0)).requires_grad_()
            sp.attention(*local, mask=method, layer=0, layout=layout).sum().backward()
    return [(name, size, count) for name, size, _, count in log]


@pytest.mark.parametrize("plan_counts", ["previous", "current"])
def test_statistics_on_both_sides_of_a_threshold_take_one_branch(plan_counts: str) -> None:
    """Local data never decides whether a collective runs: the logs of all ranks agree, call by call (Trap B65)."""
    logs = run_ranks(_method_on_local_data, 4, plan_counts, timeout_s=40)
    assert logs[0]
    names = [[entry[:2] for entry in log] for log in logs]
    assert all(other == names[0] for other in names)


def _perturb(rank: int, world_size: int) -> None:
    meshes = [("ulysses", 4, 1), ("ring", 1, 4), ("usp", 2, 2), ("dbsp", 4, 1), ("dbsp", 2, 2), ("dbsp", 1, 4)]
    inputs, mask, _ = random_problem(3, 32, 5, 4, dense=True)
    for strategy, u, r in meshes:
        sp = make_sp(strategy, u, r)
        layout = sp.layout(32, block_size=4)
        last = torch.zeros(1, dtype=torch.int64)
        if rank == world_size - 1:
            last += layout.positions[-1]
        dist.broadcast(last, world_size - 1)
        outs = []
        for shift in (0.0, 1.0):
            v = inputs[2].clone()
            v[:, last] += shift
            local = [layout.shard(x) for x in (*inputs[:2], v)]
            outs.append(sp.attention(*local, mask=mask, layer=0, layout=layout))
        change = (outs[1] - outs[0]).abs().amax((0, 1, 3))
        assert bool((change > 1e-4).all()), f"{strategy} U{u}R{r}: rank {rank} does not see the last rank's token"
        sp.destroy()


def test_a_token_of_the_last_rank_moves_every_rank() -> None:
    """No rank silently attends to its own chunk only (Trap B37)."""
    run_ranks(_perturb, 4)


@pytest.mark.parametrize("strategy", ["usp", "dbsp", "ulysses"])
def test_degrees_without_process_group_are_refused(strategy: str) -> None:
    """A mesh of four without torch.distributed is an error at build, not a fall back to one rank (Trap B37)."""
    message = refusal(lambda: make_sp(strategy, 4, 1))
    assert message.startswith("ValueError"), message
    assert "4" in message
    assert "1" in message


def _no_part(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("rank one gives up")
    make_sp("ulysses")


def test_harness_names_the_rank_that_failed_first() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first(?s:.*)rank one gives up"):
        run_ranks(_no_part, 2)
