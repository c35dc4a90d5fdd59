"""A stand-in for a training run that imports little: collectives in a loop, under the real launch and watch."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.launch import launch
from dbsp_megatron.train.signals import StopRequest


@dataclass(frozen=True)
class Degrees:
    """A section of the settings."""

    ring_degree: int


@dataclass(frozen=True)
class Settings:
    """What a rank was started with."""

    folder: str
    sp: Degrees


def _prepare() -> Settings:
    rank = os.environ.get("RANK", "0")
    if os.environ.get("BAD_RANK") == rank:
        raise ValueError("data.paths is bad here")
    return Settings(sys.argv[1], Degrees(2 if os.environ.get("OTHER_RANK") == rank else 1))


def _work(settings: Settings, world: World, stop: StopRequest) -> int:
    folder = Path(settings.folder)
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
        settings=lambda settings: ("cpu", 120.0),
        resume_hint=lambda settings: "resume with: the same command",
        handle_signals=True,
    )
