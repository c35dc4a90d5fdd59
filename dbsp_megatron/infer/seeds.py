"""One seed for all ranks."""

from __future__ import annotations

import random

from dbsp_megatron.train.distributed import World


def shared_seed(seed: int, world: World) -> int:
    """The seed, or, for -1, one that rank 0 draws.

    Ranks that drew their own would denoise different videos and exchange tokens of them.
    """
    return seed if seed >= 0 else int(world.broadcast(random.SystemRandom().randrange(2**31)))
