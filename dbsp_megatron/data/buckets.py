"""Which samples a rank sees at a step when clips have several sizes: pure functions of (seed, step), as in `order`.

N samples, G of them a step; a bucket is all samples of one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.data.order import BatchPlan, batch_of_epochs, check_integer, check_rank

Ints = NDArray[np.int64]


class BucketPlan:
    """The sample ids of every optimizer step, and micro-batches of one size each.

    Each epoch has every sample once. The epochs form one endless stream that is cut into global batches; an epoch is
    put in order so that as many batches as possible hold samples of one size, and all ranks then have as much to do.
    What is left of the buckets, fewer than G samples of each, comes in mixed batches among them. The order depends on
    sizes, G, seed and epoch, not on the parallel layout, which only decides how a batch is cut.

    The loss of a step is to be divided by the tokens of all its micro-batches on all ranks, as the trainer does: then
    neither unequal sizes nor shorter micro-batches change what a token weighs.

    Args:
        sizes: T, H, W of every sample, by id.
        global_batch_size: samples of one optimizer step over all data-parallel ranks.
        seed: of the shuffle; >= 0.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, sizes: Sequence[tuple[int, int, int]], global_batch_size: int, seed: int = 0) -> None:
        for key, value, minimum in (
            ("num_samples", len(sizes), 1),
            ("global_batch_size", global_batch_size, 1),
            ("seed", seed, 0),
        ):
            check_integer(key, value, minimum)
        self.num_samples = len(sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        found, buckets = np.unique(np.asarray(sizes, dtype=np.int64), axis=0, return_inverse=True)
        self._buckets: Ints = buckets.reshape(-1).astype(np.int64)
        self.num_buckets = len(found)
        self._orders: dict[int, Ints] = {}

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of the whole global batch of an optimizer step.

        Args:
            step: optimizer step, >= 0.

        Returns:
            `global_batch_size` ids in [0, num_samples).

        Raises:
            ValueError: the step is negative.
        """
        return batch_of_epochs(step, self.global_batch_size, self.num_samples, self._order)

    def slice_for(self, step: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
        """Micro-batches of one data-parallel rank: samples of one size each.

        All ranks get equally many samples and equally many micro-batches, so that collectives of a forward pass (of
        sharded weights) line up.

        Args:
            step: optimizer step, >= 0.
            dp_rank: data-parallel rank, in [0, dp_size).
            dp_size: number of data-parallel ranks (sequence-parallel ranks are not counted).
            micro_batch_size: most samples of one forward pass of a rank.

        Returns:
            Lists of 1 to `micro_batch_size` ids, of `micro_batch_size` if the batch has one size.

        Raises:
            ValueError: the sizes do not divide, or the rank is out of range.
        """
        check_rank(dp_rank, dp_size)
        check_integer("micro_batch_size", micro_batch_size, 1)
        BatchPlan(self.num_samples, self.global_batch_size).check_division(dp_size, micro_batch_size)
        ids = sorted(self.sample_ids(step), key=lambda sample: self._buckets[sample])
        share = self.global_batch_size // dp_size
        ranks = [self._runs(ids[rank * share : (rank + 1) * share], micro_batch_size) for rank in range(dp_size)]
        return _cut_to(max(map(len, ranks)), ranks[dp_rank])

    def _runs(self, ids: list[int], limit: int) -> list[list[int]]:
        """The fewest runs of one bucket, of at most `limit` samples."""
        runs: list[list[int]] = []
        for sample in ids:
            if runs and len(runs[-1]) < limit and self._buckets[runs[-1][0]] == self._buckets[sample]:
                runs[-1].append(sample)
            else:
                runs.append([sample])
        return runs

    def _order(self, epoch: int) -> Ints:
        if epoch not in self._orders:
            if len(self._orders) > 3:
                self._orders.clear()
            self._orders[epoch] = self._make_order(epoch)
        return self._orders[epoch]

    def _make_order(self, epoch: int) -> Ints:
        """All ids once: the end of a batch that the epoch before began, whole batches, the begin of the next one."""
        N, G, K = self.num_samples, self.global_batch_size, self.num_buckets
        # The raw bit stream is all that NumPy promises for ever; see `order`.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(2 * N + K)
        shuffled = np.argsort(keys[:N], kind="stable").astype(np.int64)
        bucket_keys, batch_keys = keys[N : N + K], keys[N + K :]
        by_bucket = [shuffled[self._buckets[shuffled] == bucket] for bucket in range(K)]
        batches: list[Ints] = []
        left: list[Ints] = []
        for bucket in np.argsort(bucket_keys, kind="stable"):
            members = by_bucket[bucket]
            whole = len(members) // G * G
            batches += list(members[:whole].reshape(-1, G))
            left.append(members[whole:])
        head = min(-epoch * N % G, N)
        tail = (N - head) % G
        if head + tail > sum(map(len, left)) and batches:
            left.append(batches.pop())
        loose = np.concatenate(left)
        middle = loose[head : len(loose) - tail]
        batches += list(middle.reshape(-1, G))
        placed = [batches[index] for index in np.argsort(batch_keys[: len(batches)], kind="stable")]
        return np.concatenate([loose[:head], *placed, loose[len(loose) - tail :]])


def _cut_to(count: int, runs: list[list[int]]) -> list[list[int]]:
    """The runs, the longest of them halved until there are `count`."""
    while len(runs) < count:
        longest = max(range(len(runs)), key=lambda index: len(runs[index]))
        run = runs[longest]
        half = -(-len(run) // 2)
        runs = [*runs[:longest], run[:half], run[half:], *runs[longest + 1 :]]
    return runs


def plan_batches(
    sizes: Sequence[tuple[int, int, int]], global_batch_size: int, seed: int = 0
) -> BatchPlan | BucketPlan:
    """A `BucketPlan`, or the plain order if all samples have one size.

    Args:
        sizes: T, H, W of every sample to train on, by id.
        global_batch_size: samples of one optimizer step over all data-parallel ranks.
        seed: of the shuffle; >= 0.

    Raises:
        ValueError: a number is out of range.
    """
    if len(set(sizes)) > 1:
        return BucketPlan(sizes, global_batch_size, seed)
    return BatchPlan(num_samples=len(sizes), global_batch_size=global_batch_size, seed=seed)
