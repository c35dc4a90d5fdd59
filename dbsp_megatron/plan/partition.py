"""PartitionPlan: who computes which heads and token blocks in one attention layer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.explain import explain_plan
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.items import (
    BEGIN,
    END,
    HEAD,
    RANK,
    checked_items,
    cut_items,
    heads_per_row,
    kv_heads_by_rank,
    rows_by_rank,
)

_JSON_FORMAT = 2
_SCALARS = ("ulysses_degree", "ring_degree", "head_policy", "block_policy")
_ARRAYS = ("head_items", "q_block_owner", "kv_block_owner", "q_moves", "q_block_home", "kv_block_home", "loads")


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
    head_items: IntArray
    """int64 [n, 4], sorted (head, q_begin, q_end, Ulysses rank): rows of a head and who computes them; a cut head has
    several items."""
    q_block_owner: IntArray
    """int64 [Nq], ring rank that computes each q-block, but for `q_moves`."""
    kv_block_owner: IntArray
    """int64 [Nk], ring rank that serves each k-block."""
    q_block_home: IntArray
    """int64 [Nq], sp rank that holds each q-block in the token layout."""
    kv_block_home: IntArray
    """int64 [Nk], sp rank that holds each k-block in the token layout."""
    loads: IntArray
    """int64 [U, R, R], dense blocks by Ulysses rank, ring rank and ring step, for the mask that was planned."""
    q_moves: IntArray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """int64 [m, 3], (Ulysses rank, q-block, ring rank), sorted: q-blocks that the heads of one Ulysses rank have
    computed by another ring rank than `q_block_owner` says."""

    def __post_init__(self) -> None:
        ulysses, ring = (checked_count(name, getattr(self, name)) for name in _SCALARS[:2])
        for name in _SCALARS[2:]:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be the name of a policy, got {getattr(self, name)!r}; pass a string")
        q_owner = checked_array("q_block_owner", self.q_block_owner, (None,), ring)
        kv_owner = checked_array("kv_block_owner", self.kv_block_owner, (None,), ring)
        checked = {
            "head_items": checked_items(self.head_items, q_owner.shape[0], ulysses),
            "q_block_owner": q_owner,
            "kv_block_owner": kv_owner,
            "q_block_home": checked_array("q_block_home", self.q_block_home, q_owner.shape, ulysses * ring),
            "kv_block_home": checked_array("kv_block_home", self.kv_block_home, kv_owner.shape, ulysses * ring),
            "loads": checked_array("loads", self.loads, (ulysses, ring, ring)),
            "q_moves": _checked_moves(self.q_moves, q_owner, ulysses, ring),
        }
        for name, array in checked.items():
            object.__setattr__(self, name, array)
        self._check_loads()

    def _check_loads(self) -> None:
        """A rank without rows cannot have work."""
        idle = (self.rows == 0) & (self.loads.sum(axis=2) > 0)
        if idle.any():
            u, r = (int(i) for i in np.argwhere(idle)[0])
            raise ValueError(
                f"loads gives {int(self.loads[u, r].sum())} dense blocks to Ulysses rank {u}, ring rank {r}, to which "
                "head_items, q_block_owner and q_moves give no row; count the loads of these owners"
            )

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.head_items[-1, HEAD]) + 1

    @property
    def num_q_blocks(self) -> int:
        """Rows of q-blocks Nq."""
        return int(self.q_block_owner.shape[0])

    @property
    def num_kv_blocks(self) -> int:
        """Columns of k-blocks Nk."""
        return int(self.kv_block_owner.shape[0])

    @property
    def head_owner(self) -> IntArray:
        """int64 [H], Ulysses rank of each head.

        Raises:
            ValueError: if a head is cut and so has several.
        """
        if self.num_split_heads:
            raise ValueError(
                f"{self.num_split_heads} heads of this plan are cut and have no single owner; read head_items instead"
            )
        return self.head_items[:, RANK]

    @cached_property
    def main_head_owner(self) -> IntArray:
        """int64 [H], Ulysses rank that computes most rows of each head, the lowest of several."""
        rows = np.zeros((self.num_heads, self.ulysses_degree), dtype=np.int64)
        np.add.at(
            rows,
            (self.head_items[:, HEAD], self.head_items[:, RANK]),
            self.head_items[:, END] - self.head_items[:, BEGIN],
        )
        owner: IntArray = rows.argmax(axis=1)
        owner.setflags(write=False)
        return owner

    @property
    def num_split_heads(self) -> int:
        """Heads that are cut between Ulysses ranks."""
        return int(np.unique(self.head_items[cut_items(self.head_items, self.num_q_blocks), HEAD]).size)

    @cached_property
    def heads_per_row(self) -> IntArray:
        """int64 [U, Nq], heads that each Ulysses rank computes in each row of q-blocks."""
        return heads_per_row(self.head_items, self.num_q_blocks, self.ulysses_degree)

    def q_owner_of(self, ulysses_rank: int) -> IntArray:
        """Ring rank of each q-block for the heads of one Ulysses rank, moves included: int64 [Nq].

        Raises:
            ValueError: if there is no such Ulysses rank.
        """
        if not 0 <= ulysses_rank < self.ulysses_degree:
            raise ValueError(f"ulysses_rank must lie in 0..{self.ulysses_degree - 1}, got {ulysses_rank!r}")
        mine = self.q_moves[self.q_moves[:, 0] == ulysses_rank]
        if not mine.size:
            return self.q_block_owner
        owner = self.q_block_owner.copy()
        owner[mine[:, 1]] = mine[:, 2]
        return owner

    @cached_property
    def rows(self) -> IntArray:
        """int64 [U, R], (head, q-block) rows that each rank computes."""
        return rows_by_rank(self.head_items, self.q_block_owner, self.q_moves, self.ulysses_degree, self.ring_degree)

    def kv_heads(self, num_kv_heads: int | None = None) -> tuple[IntArray, ...]:
        """K/V heads that each Ulysses rank needs, ascending; `num_kv_heads` Hkv divides H, default H. Made once."""
        kept: dict[int, tuple[IntArray, ...]] = vars(self).setdefault("_kv_heads", {})
        group = self._group_size(num_kv_heads)
        if group not in kept:
            kept[group] = tuple(kv_heads_by_rank(self.head_items, self.ulysses_degree, group))
        return kept[group]

    def extra_kv_copies(self, num_kv_heads: int | None = None) -> int:
        """K/V heads that ranks hold beyond one copy of each; what cut heads (and torn groups) cost."""
        group = self._group_size(num_kv_heads)
        held = self.head_items[:, RANK] * self.num_heads + self.head_items[:, HEAD] // group
        return int(np.unique(held).size) - self.num_heads // group

    def _group_size(self, num_kv_heads: int | None) -> int:
        if num_kv_heads is None:
            return 1
        if self.num_heads % checked_count("num_kv_heads", num_kv_heads):
            raise ValueError(
                f"num_kv_heads={num_kv_heads} must divide the {self.num_heads} heads of the plan; pass the K/V heads "
                "of this layer"
            )
        return self.num_heads // num_kv_heads

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
    def moved_q_rows(self) -> IntArray:
        """int64 [U], (head, q-block) rows of each Ulysses rank that are not computed by the ring rank of their home."""
        home = self.q_block_home // self.ulysses_degree
        rows = (self.heads_per_row * (self.q_block_owner != home)).sum(axis=1)
        for u, block, target in self.q_moves.tolist():
            was_moved = int(self.q_block_owner[block] != home[block])
            rows[u] += self.heads_per_row[u, block] * (int(target != home[block]) - was_moved)
        return rows

    @cached_property
    def moved_q_blocks(self) -> IntArray:
        """int64 [moved], q-blocks that some ring group computes on another ring rank than that of their home."""
        home = self.q_block_home // self.ulysses_degree
        moved = np.zeros(self.num_q_blocks, dtype=bool)
        for u in range(self.ulysses_degree):
            moved |= (self.q_owner_of(u) != home) & (self.heads_per_row[u] > 0)
        return np.flatnonzero(moved)

    @cached_property
    def moved_kv_blocks(self) -> IntArray:
        """int64 [moved], k-blocks whose owner is not the ring rank of their home."""
        return np.flatnonzero(self.kv_block_owner != self.kv_block_home // self.ulysses_degree)

    @cached_property
    def moved_q_fraction(self) -> float:
        """Moved (head, q-block) rows over all rows."""
        return int(self.moved_q_rows.sum()) / (self.num_heads * self.num_q_blocks)

    @property
    def moved_kv_fraction(self) -> float:
        """Moved k-blocks over all k-blocks."""
        return self.moved_kv_blocks.size / self.num_kv_blocks

    @cached_property
    def digest(self) -> str:
        """Hex digest of mesh, owners and homes: equal on two ranks exactly when they would do the same exchange."""
        state = hashlib.blake2b(digest_size=16)
        state.update(f"{self.ulysses_degree},{self.ring_degree}".encode())
        for name in _ARRAYS:
            if name == "loads":
                continue
            array = getattr(self, name)
            state.update(f";{name}:{array.shape[0]}:".encode())
            state.update(array.astype("<i8").tobytes())
        return state.hexdigest()

    @property
    def _load_digest(self) -> str:
        """Of what `digest` leaves out, since it does not decide the exchange."""
        state = hashlib.blake2b(f"{self.head_policy},{self.block_policy}".encode(), digest_size=16)
        state.update(self.loads.astype("<i8").tobytes())
        return state.hexdigest()

    def to_json(self) -> str:
        """Returns the plan as JSON text of one line, with its digest."""
        fields: dict[str, Any] = {"format": _JSON_FORMAT, "digest": self.digest, "load_digest": self._load_digest}
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
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a plan must be JSON text: {error}; pass what to_json() returned") from error
        if not isinstance(fields, dict) or fields.get("format") != _JSON_FORMAT:
            raise ValueError(f"a plan must be a JSON object with format {_JSON_FORMAT}; pass what to_json() returned")
        missing = [name for name in ("digest", "load_digest", *_SCALARS, *_ARRAYS) if name not in fields]
        if missing:
            raise ValueError(f"the plan lacks {', '.join(missing)}; pass what to_json() returned")
        if fields["q_moves"] == []:
            fields["q_moves"] = np.zeros((0, 3), dtype=np.int64)
        plan = cls(**{name: fields[name] for name in (*_SCALARS, *_ARRAYS)})
        for name, found in (("digest", plan.digest), ("load_digest", plan._load_digest)):
            if found != fields[name]:
                what = "owners" if name == "digest" else "loads and policies"
                raise ValueError(
                    f"the plan says {name} {fields[name]} but its {what} give {found}; it was changed, plan again"
                )
        return plan

    def explain(self) -> str:
        """Returns a few lines of plain words: who got what and why, loads per rank, moved fractions."""
        return explain_plan(self)


def _checked_moves(value: IntArray, q_owner: IntArray, ulysses_degree: int, ring_degree: int) -> IntArray:
    """Moves as a read-only copy, each q-block of a Ulysses rank at most once and away from its owner."""
    if np.asarray(value).shape == (0, 3):
        return np.zeros((0, 3), dtype=np.int64)
    moves = checked_array("q_moves", value, (None, 3))
    limits = np.array([ulysses_degree, q_owner.shape[0], ring_degree])
    key = moves[:, 0] * limits[1] + moves[:, 1]
    fits: NDArray[np.bool_] = np.all(moves < limits, axis=1)
    fits[1:] &= key[1:] > key[:-1]
    fits[fits] &= q_owner[moves[fits, 1]] != moves[fits, 2]
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"q_moves must be sorted (Ulysses rank, q-block, ring rank) below {limits.tolist()}, each q-block once and "
            f"to another ring rank than its owner; entry {row} is {moves[row].tolist()}; drop or sort it"
        )
    return moves


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
