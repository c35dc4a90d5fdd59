"""Classifier-free guidance over two halves of the ranks: each computes a branch, with its own sequence parallelism.

A transformer is called in one of two ways. With both branches in the batch, each half takes half of it. With a call for
each branch, the second call is foreseen from the steps before: its latents and timestep are those of the first call,
the rest is as it was. So the first call computes both, and the second one, if it is what was foreseen, finds its result
there. What was not foreseen is computed by both halves alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.models.diffusers.inputs import check_same_inputs, named_tensors
from dbsp_megatron.models.diffusers.table import TransformerTable, map_tensors
from dbsp_megatron.parallel_state import SequenceParallelGroups

NUM_BRANCHES = 2
Kind = Literal["batch", "both", "alone", "ready"]
_ALIKE = ("hidden_states", "timestep")
"""Arguments that two calls for the branches of one step have in common."""


def split_guidance(group: dist.ProcessGroup | None = None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Halve a group of ranks, one half for each branch of guidance; collective over the group.

    Args:
        group: an even number of ranks; default the world.

    Returns:
        The group of this rank's half, for `SequenceParallel`, and that of the two ranks at one place of the halves, for
        `parallelize(..., guidance_group=)`.

    Raises:
        ValueError: the number is odd.
    """
    whole = dist.group.WORLD if group is None else group
    if whole is None or whole.size() % NUM_BRANCHES:
        size = 1 if whole is None else whole.size()
        raise ValueError(f"guidance takes an even number of ranks, one half for each branch, got {size}")
    size = whole.size() // NUM_BRANCHES
    groups = SequenceParallelGroups(whole)
    # A mesh of (ranks of a half) x (halves) has just these groups.
    mesh = groups.mesh(size, NUM_BRANCHES)
    half = mesh.ulysses_group if size > 1 else groups.alone()
    if half is None or mesh.ring_group is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the group")
    return half, mesh.ring_group


@dataclass(frozen=True)
class BranchCall:
    """What a call of the transformer is to both halves."""

    kind: Kind
    """`batch`: each half takes its part; `both`: the other half computes the call that is foreseen; `alone`: both
    compute this one; `ready`: the result is there."""
    arguments: dict[str, Any]
    """Of this rank's half."""


class _Kept:
    """Arguments of a call, to be compared with others later; what was written to since equals nothing."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)
        self._versions: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}
        for _, x in named_tensors(arguments):
            if x.is_inference():
                self._copies[id(x)] = x.clone()
            else:
                self._versions[id(x)] = x._version

    def equals(self, name: str, other: Any) -> bool:
        """Whether the argument is what was kept."""
        return self._equal(self.arguments.get(name), other)

    def _equal(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            if mine.shape != other.shape or mine.dtype != other.dtype or mine.device != other.device:
                return False
            if id(mine) in self._copies:
                return torch.equal(self._copies[id(mine)], other)
            return mine._version == self._versions[id(mine)] and (mine is other or torch.equal(mine, other))
        if type(mine) is not type(other):
            return False
        if isinstance(mine, tuple | list):
            return len(mine) == len(other) and all(map(self._equal, mine, other))
        if isinstance(mine, dict):
            return mine.keys() == other.keys() and all(self._equal(x, other[key]) for key, x in mine.items())
        return mine is other or (isinstance(mine, bool | int | float | str) and bool(mine == other))


class GuidanceBranches:
    """One transformer whose calls are shared with the other half of the ranks.

    Args:
        group: this rank and the one at its place in the other half.
        table: of the transformer.
    """

    def __init__(self, group: dist.ProcessGroup, table: TransformerTable) -> None:
        self.group, self._table = group, table
        self._branch = dist.get_rank(group)
        self._first: _Kept | None = None
        self._other: dict[str, Any] | None = None
        self._ready: tuple[_Kept, Tensor] | None = None
        self._now: BranchCall | None = None
        self._foreseen: _Kept | None = None
        self._as_tuple = False

    def plan(self, given: dict[str, Any]) -> BranchCall:
        """What to do with a call; no communication."""
        batch = given["hidden_states"].shape[0]
        if batch % NUM_BRANCHES == 0 and batch:
            self._first = self._ready = None
            return BranchCall("batch", self._part(given, batch))
        if self._ready is not None:
            if self._same(self._ready[0], given):
                self._first = None
                return BranchCall("ready", given)
            self._ready = None
        first, self._first = self._first, None
        if first is not None and all(first.equals(name, given.get(name)) for name in _ALIKE):
            alike = first.arguments.keys() == given.keys()
            self._other = {name: x for name, x in given.items() if not first.equals(name, x)} if alike else None
            return BranchCall("alone", given)
        self._first = _Kept(given)
        if self._other is None:
            return BranchCall("alone", given)
        foreseen = {**given, **self._other}
        self._foreseen = _Kept(foreseen)
        return BranchCall("both", foreseen if self._branch else given)

    def agree(self, problem: str | None, call: BranchCall | None, given: Mapping[str, Any]) -> str | None:
        """Compare a call with the other half's; collective over the two. What is wrong with it, or None."""
        tensors = named_tensors(given)
        shapes = ", ".join(f"{name} {(*x.shape, str(x.dtype))}" for name, x in tensors)
        kind = "" if call is None else call.kind
        beliefs = {
            "shapes of the inputs": Belief(
                digest_int(shapes), lambda: shapes, "give both halves the same prompt, batch size and video size"
            ),
            "the branch of guidance": Belief(
                digest_int(kind), lambda: kind, "run the same pipeline on both halves, with the same guidance"
            ),
        }
        try:
            agree("", problem, beliefs, self.group)
            check_same_inputs(tensors, self.group)
        except ValueError as error:
            return str(error)
        return None

    def begin(self, call: BranchCall) -> None:
        """All ranks do this one now."""
        self._now = call

    def forget(self) -> None:
        """After a call that was refused, which ranks may remember or not."""
        self._first = self._other = self._ready = self._foreseen = self._now = None

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the transformer, of which a half computes its part; a plain call after `close`."""

        @functools.wraps(forward)
        def shared(*args: Any, **kwargs: Any) -> Any:
            call, self._now = self._now, None
            if call is None or call.kind == "alone":
                return forward(*args, **kwargs)
            if call.kind == "ready":
                return self._taken(kwargs)
            return self._exchanged(call.kind, forward(*args, **kwargs))

        return torch.compiler.disable(shared)

    def _taken(self, kwargs: Mapping[str, Any]) -> Any:
        if self._ready is None:
            raise RuntimeError("a branch of guidance was to be ready, and is not")
        (_, result), self._ready = self._ready, None
        return _packed(result, self._as_tuple)

    def _exchanged(self, kind: Kind, output: Any) -> Any:
        self._as_tuple = isinstance(output, tuple)
        mine = (output[0] if self._as_tuple else output.sample).contiguous()
        parts = [torch.empty_like(mine) for _ in range(NUM_BRANCHES)]
        dist.all_gather(parts, mine, group=self.group)
        if kind == "batch":
            return _packed(torch.cat(parts), self._as_tuple)
        if self._foreseen is None:
            raise RuntimeError("no call was foreseen")
        self._ready, self._foreseen = (self._foreseen, parts[1]), None
        return _packed(parts[0], self._as_tuple)

    def _part(self, given: Mapping[str, Any], batch: int) -> dict[str, Any]:
        size = batch // NUM_BRANCHES

        def half(x: Tensor) -> Tensor:
            whole = x.dim() == 0 or x.shape[0] != batch
            return x if whole else x[self._branch * size : (self._branch + 1) * size]

        return {name: map_tensors(x, half) if name in self._table.batched else x for name, x in given.items()}

    @staticmethod
    def _same(kept: _Kept, given: Mapping[str, Any]) -> bool:
        return all(kept.equals(name, given.get(name)) for name in kept.arguments.keys() | given.keys())


def _packed(sample: Tensor, as_tuple: bool) -> Any:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return (sample,) if as_tuple else Transformer2DModelOutput(sample=sample)


class SharedForward:
    """Puts the shared forward on a transformer, and the one before back.

    Args:
        transformer: the module.
        branches: what shares its calls.
    """

    def __init__(self, transformer: nn.Module, branches: GuidanceBranches) -> None:
        self._transformer = transformer
        self._before = transformer.__dict__.get("forward")
        self._ours = branches.wrapped(transformer.forward)
        transformer.forward = self._ours

    def undo(self) -> None:
        """Take it off; under a wrapper that came since it stays, and only passes calls on."""
        if self._transformer.__dict__.get("forward") is not self._ours:
            return
        if self._before is None:
            del self._transformer.forward
        else:
            self._transformer.forward = self._before
