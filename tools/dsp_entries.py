"""Ways to run the model of `dsp_model` on several ranks, and one rank alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.dsp import DspGroup, DspMesh, DspSession, Stage, attend_units, switch, unit_plan_of
from dbsp_megatron.dsp.layout import balanced_lengths
from dbsp_megatron.strategy.layout import TokenLayout
from tools.device_timing import Ranks
from tools.dsp_megatron import MegatronEntry
from tools.dsp_model import (
    DIMS,
    Attend,
    attend_whole,
    attention_over,
    run_block,
    run_whole,
)
from tools.dsp_parts import CutAlong, ModelEntry, Problem, scattered_bytes

STRATEGIES = ("dsp", "dsp units", "ulysses", "ulysses everywhere", "ring", "megatron")
"""`ulysses` and `ring` work in spatial attention alone, whose dim is cut; `ulysses everywhere` in all attention."""


class DspEntry(CutAlong):
    """The stream is switched before a stage that needs the dim that is cut."""

    name = "dsp"

    def __init__(self, problem: Problem, ranks: Ranks) -> None:
        shape = problem.shape
        size = shape.batch * shape.channels * problem.x.element_size()
        stages = [Stage(name=block, needs=frozenset(dim), stream_bytes=size) for block, dim in shape.blocks()]
        self._session = DspSession(DspMesh(DspGroup(ranks.group, "dsp")), ("T", "S"), stages=stages)
        plan = self._session.plan({"T": shape.frames, "S": shape.places})
        if plan is None:
            raise RuntimeError("stages are declared and yet there is no plan")
        self.plan = plan
        (axis,) = self._session.mesh.axes
        self.enters, leaves = ((layout.dim_of(axis) or 0) + 1 for layout in (plan.start, plan.end))
        self.cut = self.enters
        super().__init__(problem, ranks)
        self.cut = leaves
        self.dout = self.part(problem.dout)

    def attend(self) -> Tensor:
        """See `ModelEntry`."""
        x = self.x
        with self._session.run({"T": self.shape.frames, "S": self.shape.places}) as run:
            for block, dim in self.shape.blocks():
                x = run.stage(block, x, "B T S C")
                x = run_block(self.parameters, block, x, self._attention(block, dim), self.shape.head_dim)
        return x

    def whole_input(self, x: Tensor) -> Tensor:
        """As `whole`, of a tensor that is cut as the input is."""
        leaves, self.cut = self.cut, self.enters
        found = self.whole(x)
        self.cut = leaves
        return found

    def _attention(self, block: str, dim: str) -> Attend:
        return attention_over(dim, self.shape.attention)

    def expected_bytes(self, backward: bool) -> list[int]:
        """A switch before each block but the first, and back: M/N (N - 1)/N where lengths divide."""
        shape, found = self.shape, [0] * self.ranks.size
        frames, places = (balanced_lengths(n, self.ranks.size) for n in (shape.frames, shape.places))
        for number in range(2 * shape.pairs - 1):
            from_places = (self.enters == DIMS["S"]) == (number % 2 == 0)
            for rank, (t, s) in enumerate(zip(frames, places, strict=True)):
                sent = s * (shape.frames - t) if from_places != backward else t * (shape.places - s)
                found[rank] += sent * shape.batch * shape.channels * self.size
        return found


class UnitsEntry(CutAlong):
    """Places stay cut; q, k and v of spatial attention go to (frame, head) units."""

    name = "dsp units"

    def _attention(self, block: str, dim: str) -> Attend:
        if dim == "T":
            return attention_over("T", self.shape.attention)
        places, engine = self.shape.places, "auto"
        if self.shape.attention == "blocks":
            # Without a mask "auto" is PyTorch's own attention.
            engine = "triton" if self.x.is_cuda and self.x.dtype != torch.float64 else "torch"
        return lambda q, k, v: attend_units(q, k, v, self.group, DIMS["S"], length=places, engine=engine)

    def expected_bytes(self, backward: bool) -> list[int]:
        """As Ulysses, with units in place of heads, however many a rank has."""
        shape, size = self.shape, self.ranks.size
        plan = unit_plan_of(shape.lengths, DIMS["S"], size, shape.heads)
        units = [0] * size
        for unit, begin, end, rank in plan.items.tolist():
            if end - begin < -(-shape.places // 64):
                raise ValueError(f"unit {unit} is cut, for which there is no short formula: let it be measured alone")
            units[rank] += 1
        return scattered_bytes(units, self.lengths(), self.size * shape.head_dim * shape.pairs, backward)


class UlyssesEverywhereEntry(CutAlong):
    """Places stay cut; in every attention heads are scattered and places gathered."""

    name = "ulysses everywhere"

    def _attention(self, block: str, dim: str) -> Attend:
        return lambda q, k, v: self._scattered(q, k, v, DIMS[dim])

    def _scattered(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        places, heads = self.shape.places, self.shape.heads
        packed = switch(torch.stack((q, k, v)), self.group, 3, 4, length=places)
        out = attend_whole(packed.unbind(0), dim, self.shape.attention)
        return switch(out, self.group, 3, 2, length=heads)

    def expected_bytes(self, backward: bool) -> list[int]:
        """Four tensors in each attention: 8 M/N (N - 1)/N for a pair."""
        shape = self.shape
        rest = shape.batch * shape.frames * shape.head_dim * self.size * 2 * shape.pairs
        heads = balanced_lengths(shape.heads, self.ranks.size)
        return scattered_bytes(heads, self.lengths(), rest, backward)


class UlyssesEntry(UlyssesEverywhereEntry):
    """Heads are scattered in spatial attention alone, as the strategy of `SequenceParallel` does, by any attention."""

    name = "ulysses"

    def _attention(self, block: str, dim: str) -> Attend:
        return attention_over("T", self.shape.attention) if dim == "T" else super()._attention(block, dim)

    def expected_bytes(self, backward: bool) -> list[int]:
        """Four tensors in each pair: 4 M/N (N - 1)/N."""
        return [sent // 2 for sent in super().expected_bytes(backward)]


class RuntimeEntry(ModelEntry):
    """Spatial attention by a strategy of `SequenceParallel`, frames as its batch."""

    def __init__(self, problem: Problem, ranks: Ranks, strategy: str) -> None:
        self.name, shape = strategy, problem.shape
        mesh = (ranks.size, 1) if strategy == "ulysses" else (1, ranks.size)
        # A ring moves whole blocks; heads travel with any places, which then are cut evenly.
        block_size = 1 if strategy == "ulysses" else max(1, min(64, shape.places // ranks.size))
        self._sp = SequenceParallel(
            SequenceParallelConfig(
                strategy=strategy, ulysses_degree=mesh[0], ring_degree=mesh[1], block_size=block_size
            ),
            group=ranks.group,
        )
        self._layout: TokenLayout = self._sp.layout(shape.places)
        self._mask = BlockMask.dense(
            shape.heads, shape.places, device=ranks.device
        ) if strategy == "ulysses" else None  # fmt: skip
        self._step = 0
        super().__init__(problem, ranks)

    def part(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        return self._layout.shard(x, dim=2).detach().clone()

    def whole(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        return self._layout.gather(x.detach(), dim=2)

    def attend(self) -> Tensor:
        """See `ModelEntry`."""
        # What the runtime remembers of calls would grow without end.
        self._sp.begin_step(self._step)
        self._step += 1
        return super().attend()

    def _attention(self, block: str, dim: str) -> Attend:
        if dim == "T":
            return attention_over("T", self.shape.attention)
        layer = int(block.split(".")[0])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            return self._sp.attention(*flat, mask=self._mask, layer=layer, layout=self._layout).unflatten(
                0, q.shape[:2]
            )

        return attend

    def expected_bytes(self, backward: bool) -> list[int]:
        """Ulysses: 4 M/N (N - 1)/N for a pair. Ring: 2 M (N - 1)/N, again in the backward pass, and gradients back.

        The gradients of half precision travel in fp32.
        """
        shape, counts = self.shape, self._layout.counts
        rest = shape.batch * shape.frames * shape.head_dim * shape.pairs
        if self.name == "ulysses":
            heads = balanced_lengths(shape.heads, self.ranks.size)
            return scattered_bytes(heads, counts, rest * self.size, backward)
        others, of_grad = self.ranks.size - 1, max(4, self.size) if backward else 0
        return [
            rest * 2 * shape.heads * (self.size * count * others + of_grad * (shape.places - count)) for count in counts
        ]

    def close(self) -> None:
        """See `ModelEntry`."""
        self._sp.destroy()


class AloneEntry:
    """The whole model on the first rank; the others wait."""

    name = "one rank"

    def __init__(self, problem: Problem, rank: int) -> None:
        self._shape, self._works, self.dout = problem.shape, rank == 0, problem.dout
        self._x = problem.x.detach().clone().requires_grad_()
        self._parameters = {name: x.detach().clone().requires_grad_() for name, x in problem.parameters.items()}
        self.leaves = [self._x, *self._parameters.values()]

    def attend(self) -> Tensor:
        """The output."""
        return run_whole(self._parameters, self._shape, self._x)

    def guarded(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call on the first rank, nothing on others."""
        return call if self._works else lambda: None


def make_entry(strategy: str, problem: Problem, ranks: Ranks) -> ModelEntry:
    """An entry of STRATEGIES.

    Raises:
        ValueError: it cannot run this problem on these ranks.
    """
    if strategy in ("ulysses", "ring") and problem.shape.attention == "blocks":
        return RuntimeEntry(problem, ranks, strategy)
    if strategy == "ring":
        raise ValueError("ring adds up parts of K and V, which PyTorch's attention does not: use --attention blocks")
    kinds = {kind.name: kind for kind in (DspEntry, UnitsEntry, UlyssesEntry, UlyssesEverywhereEntry, MegatronEntry)}
    return kinds[strategy](problem, ranks)
