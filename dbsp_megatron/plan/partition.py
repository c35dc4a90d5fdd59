"""PartitionPlan: who computes which heads and token blocks in one attention layer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dbsp_megatron.plan.explain import explain_plan
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count

_JSON_FORMAT = 1
_SCALARS = ("ulysses_degree", "ring_degree", "head_policy", "block_policy")
_ARRAYS = ("head_owner", "q_block_owner", "kv_block_owner", "q_block_home", "kv_block_home", "loads")


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """One layer's division of work over a mesh of Ulysses x Ring ranks; it never changes the result of attention.

    Arrays are copied, made read-only and checked.

    Raises:
        ValueError: if owners, homes or loads do not fit the mesh or one another.
    """

    ulysses_degree: int
    """Ulysses degree U, the inner axis: sp rank `p = r*U + u`."""
    ring_degree: int
    """Ring degree R."""
    head_policy: str
    """Head policy that made the plan, `auto` resolved."""
    block_policy: str
    """Block policy that made the plan, `auto` resolved; `home` when the blocks stay in a layout made elsewhere."""
    head_owner: IntArray
    """int64 [H], Ulysses rank that computes each head."""
    q_block_owner: IntArray
    """int64 [Nq], ring rank that computes each q-block."""
    kv_block_owner: IntArray
    """int64 [Nk], ring rank that serves each k-block."""
    q_block_home: IntArray
    """int64 [Nq], sp rank that holds each q-block in the token layout."""
    kv_block_home: IntArray
    """int64 [Nk], sp rank that holds each k-block in the token layout."""
    loads: IntArray
    """int64 [U, R, R], dense blocks by Ulysses rank, ring rank and ring step, for the mask that was planned."""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            shape = (None, None, None) if name == "loads" else (None,)
            object.__setattr__(self, name, checked_array(name, getattr(self, name), shape))
        self.validate()

    def validate(self) -> None:
        """Checks every number of the plan against the mesh.

        Raises:
            ValueError: naming the first number that does not fit.
        """
        ulysses, ring = (checked_count(name, getattr(self, name)) for name in _SCALARS[:2])
        checked_array("head_owner", self.head_owner, (None,), ulysses)
        checked_array("q_block_owner", self.q_block_owner, (None,), ring)
        checked_array("kv_block_owner", self.kv_block_owner, (None,), ring)
        checked_array("q_block_home", self.q_block_home, self.q_block_owner.shape, ulysses * ring)
        checked_array("kv_block_home", self.kv_block_home, self.kv_block_owner.shape, ulysses * ring)
        checked_array("loads", self.loads, (ulysses, ring, ring))
        num_heads = np.bincount(self.head_owner, minlength=ulysses)
        num_rows = np.bincount(self.q_block_owner, minlength=ring)
        for u, r in np.argwhere(self.loads.sum(axis=2) > 0).tolist():
            if num_heads[u] == 0 or num_rows[r] == 0:
                raise ValueError(
                    f"loads gives {int(self.loads[u, r].sum())} dense blocks to Ulysses rank {u}, ring rank {r}, which "
                    f"owns {int(num_heads[u])} heads and {int(num_rows[r])} q-blocks; compute loads from these owners"
                )

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.head_owner.shape[0])

    @property
    def num_q_blocks(self) -> int:
        """Rows of q-blocks Nq."""
        return int(self.q_block_owner.shape[0])

    @property
    def num_kv_blocks(self) -> int:
        """Columns of k-blocks Nk."""
        return int(self.kv_block_owner.shape[0])

    @property
    def imbalance(self) -> float:
        """Ring ranks of one group wait for one another at every step; 1 is perfect, 1 also for an empty mask."""
        return barrier_imbalance(self.loads)

    @property
    def imbalance_gpu(self) -> float:
        """Ring steps are decoupled: the heaviest rank total over the mean."""
        return _over_mean(int(self.loads.sum(axis=2).max()), self.loads)

    @property
    def imbalance_paper(self) -> float:
        """All ranks wait for one another at every step; never below the other two forms."""
        return _over_mean(int(self.loads.max(axis=(0, 1)).sum()), self.loads)

    @cached_property
    def moved_q_blocks(self) -> IntArray:
        """int64 [moved], q-blocks whose owner is not the ring rank of their home."""
        return np.flatnonzero(self.q_block_owner != self.q_block_home // self.ulysses_degree)

    @cached_property
    def moved_kv_blocks(self) -> IntArray:
        """int64 [moved], k-blocks whose owner is not the ring rank of their home."""
        return np.flatnonzero(self.kv_block_owner != self.kv_block_home // self.ulysses_degree)

    @property
    def moved_q_fraction(self) -> float:
        """Moved q-blocks over all q-blocks."""
        return self.moved_q_blocks.size / self.num_q_blocks

    @property
    def moved_kv_fraction(self) -> float:
        """Moved k-blocks over all k-blocks."""
        return self.moved_kv_blocks.size / self.num_kv_blocks

    @property
    def num_split_heads(self) -> int:
        """Heads that are computed by more than one Ulysses rank; no policy does that."""
        return 0

    @cached_property
    def digest(self) -> str:
        """Hex digest of mesh, owners and homes: equal on two ranks exactly when they would do the same exchange."""
        state = hashlib.blake2b(digest_size=16)
        state.update(f"{self.ulysses_degree},{self.ring_degree}".encode())
        for name in _ARRAYS[:-1]:
            array = getattr(self, name)
            state.update(f";{name}:{array.shape[0]}:".encode())
            state.update(array.astype("<i8").tobytes())
        return state.hexdigest()

    def to_json(self) -> str:
        """Returns the plan as JSON text of one line, with its digest."""
        fields: dict[str, Any] = {"format": _JSON_FORMAT, "digest": self.digest}
        fields.update((name, getattr(self, name)) for name in _SCALARS)
        fields.update((name, getattr(self, name).tolist()) for name in _ARRAYS)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PartitionPlan:
        """Reads a plan that `to_json` wrote.

        Args:
            text: The JSON text.

        Raises:
            ValueError: if the text is no such plan, is incomplete or does not match its digest.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a plan must be JSON text: {error}; pass what to_json() returned") from error
        if not isinstance(fields, dict) or fields.get("format") != _JSON_FORMAT:
            raise ValueError(f"a plan must be a JSON object with format {_JSON_FORMAT}; pass what to_json() returned")
        missing = [name for name in ("digest", *_SCALARS, *_ARRAYS) if name not in fields]
        if missing:
            raise ValueError(f"the plan lacks {', '.join(missing)}; pass what to_json() returned")
        plan = cls(**{name: fields[name] for name in (*_SCALARS, *_ARRAYS)})
        if plan.digest != fields["digest"]:
            raise ValueError(
                f"the plan says digest {fields['digest']} but its owners give {plan.digest}; it was changed, plan again"
            )
        return plan

    def explain(self) -> str:
        """Returns a few lines of plain words: who got what and why, loads per rank, moved fractions."""
        return explain_plan(self)


def barrier_cost(loads: IntArray) -> int:
    """Dense blocks on the critical path when the ring ranks of a group wait for one another at every step.

    Args:
        loads: int64 [U, R, R], by Ulysses rank, ring rank and step.
    """
    return int(loads.max(axis=1).sum(axis=1).max())


def barrier_imbalance(loads: IntArray) -> float:
    """Returns `barrier_cost` over the mean load of a rank; 1.0 for an empty mask.

    Args:
        loads: int64 [U, R, R], by Ulysses rank, ring rank and step.
    """
    return _over_mean(barrier_cost(loads), loads)


def _over_mean(cost: int, loads: IntArray) -> float:
    total = int(loads.sum())
    return cost * loads.shape[0] * loads.shape[1] / total if total else 1.0
