"""Which samples a rank sees at a step: pure functions of (seed, step), so that a resumed run needs no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # NumPy promises the raw bit stream for ever, but not what `permutation` makes of it; a run that is resumed after an
    # upgrade must see the same order.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """The sample ids of every optimizer step.

    Each epoch is a shuffle of all samples by (seed, epoch). The epochs form one endless stream that is cut into global
    batches, so no sample is dropped and a batch may span two epochs. Only the data-parallel rank enters: the ranks of
    one sequence-parallel group, which share their data-parallel rank, get the same ids.
    """

    num_samples: int
    """Samples in the dataset."""
    global_batch_size: int
    """Samples of one optimizer step over all data-parallel ranks."""
    seed: int = 0
    """Seed of the shuffle; >= 0."""

    def __post_init__(self) -> None:
        for key, minimum in (("num_samples", 1), ("global_batch_size", 1), ("seed", 0)):
            check_integer(key, getattr(self, key), minimum)

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of the whole global batch of an optimizer step.

        Args:
            step: optimizer step, >= 0.

        Returns:
            `global_batch_size` ids in [0, num_samples).

        Raises:
            ValueError: the step is negative.
        """
        return batch_of_epochs(
            step,
            self.global_batch_size,
            self.num_samples,
            lambda epoch: _epoch_order(self.num_samples, self.seed, epoch),
        )

    def slice_for(self, step: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
        """Micro-batches of one data-parallel rank: consecutive pieces of `sample_ids(step)`.

        Args:
            step: optimizer step, >= 0.
            dp_rank: data-parallel rank, in [0, dp_size).
            dp_size: number of data-parallel ranks (sequence-parallel ranks are not counted).
            micro_batch_size: samples of one forward pass of a rank.

        Returns:
            global_batch_size / (dp_size * micro_batch_size) lists of `micro_batch_size` ids.

        Raises:
            ValueError: the sizes do not divide, or the rank is out of range.
        """
        check_rank(dp_rank, dp_size)
        check_integer("micro_batch_size", micro_batch_size, 1)
        self.check_division(dp_size, micro_batch_size)
        share = self.global_batch_size // dp_size
        ids = self.sample_ids(step)[dp_rank * share : (dp_rank + 1) * share]
        return [ids[i : i + micro_batch_size] for i in range(0, share, micro_batch_size)]

    def check_division(self, dp_size: int, micro_batch_size: int) -> None:
        """Refuse a global batch that ranks cannot share equally in whole micro-batches.

        Raises:
            ValueError: the sizes do not divide.
        """
        if self.global_batch_size % (dp_size * micro_batch_size):
            raise ValueError(
                f"global_batch_size must be a multiple of dp_size * micro_batch_size, got global_batch_size="
                f"{self.global_batch_size}, dp_size={dp_size}, micro_batch_size={micro_batch_size}; "
                f"set global_batch_size to a multiple of {dp_size * micro_batch_size}"
            )


def batch_of_epochs(
    step: int, global_batch_size: int, num_samples: int, order: Callable[[int], NDArray[np.int64]]
) -> list[int]:
    """Sample ids of one global batch, cut out of the endless stream of epochs.

    Args:
        step: optimizer step, >= 0.
        global_batch_size: samples of a step.
        num_samples: samples of an epoch.
        order: all ids of an epoch, in order.

    Raises:
        ValueError: the step is negative.
    """
    check_integer("step", step, 0)
    first = step * global_batch_size
    stop = first + global_batch_size
    ids: list[int] = []
    for epoch in range(first // num_samples, (stop - 1) // num_samples + 1):
        begin = epoch * num_samples
        ids += order(epoch)[max(first - begin, 0) : stop - begin].tolist()
    return ids


def iter_validation(num_samples: int, dp_rank: int, dp_size: int) -> Iterator[int | None]:
    """Sample ids of one data-parallel rank in a pass over the validation set.

    Every rank gets ceil(num_samples / dp_size) rounds, so that collectives line up; a rank with no sample left in the
    last round gets None and takes part without counting. No sample is given twice.

    Args:
        num_samples: samples in the validation set, >= 0.
        dp_rank: data-parallel rank, in [0, dp_size).
        dp_size: number of data-parallel ranks.

    Raises:
        ValueError: a number is out of range.
    """
    check_integer("num_samples", num_samples, 0)
    check_rank(dp_rank, dp_size)
    return (i if i < num_samples else None for i in range(dp_rank, -(-num_samples // dp_size) * dp_size, dp_size))


def check_rank(dp_rank: int, dp_size: int) -> None:
    """Refuse a data-parallel rank out of range with a ValueError."""
    check_integer("dp_size", dp_size, 1)
    if not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"dp_rank must be in [0, dp_size), got dp_rank={dp_rank}, dp_size={dp_size}; "
            "pass the rank in the data-parallel group, not the world rank"
        )


def check_integer(key: str, value: object, minimum: int) -> None:
    """Refuse what is no integer of at least `minimum` with a ValueError that names `key`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{key} must be an integer >= {minimum}, got {value!r}")
