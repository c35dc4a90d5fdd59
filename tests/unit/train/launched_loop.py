"""A stand-in for a training run that imports little: collectives in a loop, under the real launch and watch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.launch import launch
from dbsp_megatron.train.signals import StopRequest


def _prepare() -> Path:
    if os.environ.get("BAD_RANK") == os.environ.get("RANK", "0"):
        raise ValueError("data.paths is bad here")
    return Path(sys.argv[1])


def _work(folder: Path, world: World, stop: StopRequest) -> int:
    (folder / f"pid_{world.rank}").write_text(str(os.getpid()))
    fails = os.environ.get("FAIL_RANK") == str(world.rank)
    for step in range(int(sys.argv[2])):
        if any(world.gather(stop.requested())):
            (folder / f"stopped_{world.rank}").write_text(stop.reason or "by another rank")
            return 0
        if fails and step == 5:
            raise KeyError("a fault of one rank")
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    launch(
        _prepare,
        _work,
        settings=lambda folder: ("cpu", 120.0),
        resume_hint=lambda folder: "resume with: the same command",
        handle_signals=True,
    )
