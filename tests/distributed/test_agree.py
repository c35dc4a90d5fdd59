"""Messages about ranks that differ: one for all ranks, with the place, who has which value, and what to do."""

from __future__ import annotations

import torch.distributed as dist

from dbsp_megatron.comm.agree import Belief, agree, digest_int
from tests.distributed.sharded import refusal
from tests.harness import run_ranks


def _belief(value: object, shown: object | None = None) -> Belief:
    return Belief(digest_int(value), lambda: str(value if shown is None else shown), "paint all of them alike")


def _heard(rank: int, world_size: int) -> list[str]:
    def ask(problem: str | None, **beliefs: Belief) -> str:
        return refusal(lambda: agree(f"layer {rank}", problem, beliefs, dist.group.WORLD))

    return [
        ask(None, size=_belief(3), colour=_belief("red")),
        ask(None, size=_belief(3), colour=_belief("blue" if rank == 2 else "red")),
        ask(None, colour=_belief(rank, "a colour")),
        ask(None, colour=_belief(rank)),
        ask("no paint" if rank in (1, 3) else None, colour=_belief(rank)),
        ask(f"no paint for {rank}"),
        ask("no paint"),
        ask(None, **{"colour" if rank else "size": _belief(3)}),
        ask(None, colour=_belief("ü" * 2000 if rank else "red")),
    ]


def test_messages_name_place_values_ranks_and_remedy() -> None:
    found = run_ranks(_heard, 6)
    assert all(heard == found[0] for heard in found)
    alike, one, hidden, many, two, each, all_of_them, calls, long = found[0]
    assert alike == "accepted"
    assert one == (
        "ValueError: layer 0: ranks disagree about colour (ranks 0, 1, 3, 4, 5: red; rank 2: blue): "
        "paint all of them alike"
    )
    assert "rank 0: a colour (digest " in hidden
    assert hidden.count("(digest ") == 4
    assert "(rank 0: 0; rank 1: 1; rank 2: 2; rank 3: 3; and 2 more)" in many
    assert two == "ValueError: no paint [layer 1, ranks 1, 3]"
    assert each == "ValueError: no paint for 0 [layer 0, rank 0]"
    assert all_of_them == "ValueError: no paint [layer 0]"
    assert calls == (
        "ValueError: ranks are in different calls (rank 0: layer 0; ranks 1, 2, 3, 4, 5: layer 1): make every rank run "
        "the same calls in the same order"
    )
    assert "paint all" in long
    assert len(long) < 1000
