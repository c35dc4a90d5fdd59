"""What is measured side by side: strategies of this package on a mesh, one rank alone, and the package yunchang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.comm.collectives import gather_rows
from dbsp_megatron.parallel_state import factorisations
from tools.device_timing import Ranks
from tools.sp_cases import Mesh
from tools.sp_prediction import predicted_ms

STRATEGIES = ("ulysses", "ring", "usp", "dbsp", "paper", "yunchang")
"""`paper` is dbsp with the published rules for heads and blocks; `yunchang` is another package's USP, dense only."""
UNBALANCED = ("ulysses", "ring", "usp")
ALONE = "one rank"
_SETTLING_STEPS = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One attention: whole tensors, equal on all ranks."""

    q: Tensor
    """[1, S, H, D]; so are k, v and dout."""
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: BlockMask
    """On the device of q."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout."""
        return self.q, self.k, self.v, self.dout


class Differentiable(Protocol):
    """Something computed on this rank, with gradients; collective."""

    leaves: list[Tensor]
    """Tensors here with gradients wanted: q, k, v, or an input and parameters."""
    dout: Tensor
    """Gradient of the output here."""

    def attend(self) -> Tensor:
        """Output of the tokens here, with a graph where gradients are enabled."""


class Entry(Differentiable, Protocol):
    """An implementation of one attention on this rank."""

    name: str
    mesh: Mesh

    def whole(self, x: Tensor) -> Tensor:
        """What all ranks hold of a tensor like the output, in the order of the sequence."""

    def facts(self) -> dict[str, Any]:
        """What the runtime says of one call."""

    def close(self) -> None:
        """Release what it holds."""


def forward(entry: Differentiable) -> Tensor:
    """Output alone."""
    with torch.no_grad():
        return entry.attend()


def gradients(entry: Differentiable, out: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the leaves of an output with a graph."""
    return torch.autograd.grad(out, entry.leaves, entry.dout)


def forward_backward(entry: Differentiable) -> tuple[Tensor, ...]:
    """Output and gradients of the leaves."""
    with torch.enable_grad():
        out = entry.attend()
        return (out.detach(), *gradients(entry, out))


class StrategyEntry:
    """A strategy of this package, through the object that a model uses.

    Args:
        strategy: of STRATEGIES, but yunchang.
        mesh: (U, R).
        problem: the attention.
        block_size: tokens of a block of the layout.
        settings: fields of SequenceParallelConfig.
    """

    def __init__(
        self, strategy: str, mesh: Mesh, problem: Problem, block_size: int, settings: Mapping[str, Any]
    ) -> None:
        self.name, self.mesh, self._mask = strategy, mesh, problem.mask
        policies = {"head_policy": "paper", "block_policy": "paper"} if strategy == "paper" else {}
        self._sp = SequenceParallel(
            SequenceParallelConfig(
                strategy="dbsp" if strategy == "paper" else strategy,
                ulysses_degree=mesh[0],
                ring_degree=mesh[1],
                block_size=block_size,
                **(policies | dict(settings)),
            )
        )
        self._step = 0
        self._shard(problem)
        for _ in range(_SETTLING_STEPS):
            self.begin()
            forward(self)
            if not self._sp.recalibrate():
                break
            self._shard(problem)
        self.begin()

    def _shard(self, problem: Problem) -> None:
        self._layout = self._sp.layout(problem.q.shape[1])
        q, k, v, self.dout = (self._layout.shard(x).detach() for x in problem.tensors)
        self.leaves = [x.requires_grad_() for x in (q, k, v)]

    def begin(self) -> None:
        """A new step: what the runtime remembers of calls would grow without end."""
        self._sp.begin_step(self._step)
        self._step += 1

    def attend(self) -> Tensor:
        """See `Entry`."""
        return self._sp.attention(*self.leaves, mask=self._mask, layer=0, layout=self._layout)

    def whole(self, x: Tensor) -> Tensor:
        """See `Entry`."""
        return self._layout.gather(x.detach())

    def facts(self) -> dict[str, Any]:
        """Imbalance and bytes of a forward pass."""
        self.begin()
        forward(self)
        found = self._sp.stats()
        return {
            "rho_before": float(found["sp/imbalance_before"]),
            "rho_after": float(found["sp/imbalance_after"]),
            "rho_gpu": float(found["sp/imbalance_gpu"]),
            "bytes_sent": int(found["sp/bytes_sent"]),
        }

    def predicted_ms(self, *, backward: bool) -> float | None:
        """What the calibration predicts for a call, measured by nothing here; None where it cannot."""
        return predicted_ms(self._sp, 0, self.dout.device, backward=backward)

    def close(self) -> None:
        """See `Entry`."""
        self._sp.destroy()


class AloneEntry:
    """The first rank computes the whole attention; the others wait."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self.name, self.mesh, self._mask, self._works = ALONE, (1, 1), problem.mask, rank == 0
        self.dout = problem.dout
        self.leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)] if rank == 0 else []

    def attend(self) -> Tensor:
        """The output, on the first rank."""
        q, k, v = self.leaves
        out = block_sparse_attention(q, k, v, self._mask, return_lse=False)
        if not isinstance(out, Tensor):
            raise RuntimeError("block_sparse_attention returned an lse that was not asked for")
        return out

    def calls(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward, and forward with backward, of the first rank; nothing on others."""
        if not self._works:
            return (lambda: None), (lambda: None)
        return (lambda: self._forward()), (lambda: self._both())

    def _forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend()

    def _both(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(self.attend(), self.leaves, self.dout)


class YunchangEntry:
    """USP of the package yunchang, on the kernel that it finds here; contiguous tokens, no mask.

    Args:
        mesh: (U, R).
        problem: the attention; its mask must be dense.
        ranks: all ranks.

    Raises:
        ImportError: the package is not installed or does not import.
        ValueError: it cannot divide the attention, or none of its kernels runs here.
    """

    name = "yunchang"

    def __init__(self, mesh: Mesh, problem: Problem, ranks: Ranks) -> None:
        yunchang, kernels = _import_yunchang()
        seqlen, heads = problem.q.shape[1:3]
        if ranks.group is None:
            raise ValueError("it needs several ranks")
        if seqlen % ranks.size or heads % mesh[0]:
            raise ValueError(
                f"it wants tokens and heads that ranks divide, got {seqlen} tokens, {heads} heads, {mesh[0]}x{mesh[1]}"
            )
        self.mesh, self._ranks, self._count = mesh, ranks, seqlen // ranks.size
        q, k, v, self.dout = (x.chunk(ranks.size, dim=1)[ranks.rank].contiguous() for x in problem.tensors)
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        yunchang.set_seq_parallel_pg(*mesh, ranks.rank, ranks.size)
        refused = []
        for ring, kernel in _yunchang_kernels(ranks.device):
            try:
                self._layer = yunchang.LongContextAttention(
                    ring_impl_type=ring, attn_type=kernels.AttnType.from_string(kernel)
                )
                forward(self)
            except Exception as error:  # A kernel that is missing fails in any way, and alike on all ranks.
                refused.append(f"{kernel}: {type(error).__name__}")
                continue
            self.kernel = kernel
            return
        raise ValueError(f"none of its kernels runs here ({', '.join(refused)})")

    def attend(self) -> Tensor:
        """See `Entry`."""
        out: Tensor = self._layer(*self.leaves, dropout_p=0.0, causal=False)
        return out

    def whole(self, x: Tensor) -> Tensor:
        """See `Entry`."""
        group = self._ranks.group
        if group is None:
            return x
        return gather_rows(x.detach(), [self._count] * self._ranks.size, 1, group)

    def facts(self) -> dict[str, Any]:
        """The kernel that it uses."""
        return {"kernel": self.kernel}

    def close(self) -> None:
        """See `Entry`."""
        self._layer = None


def _import_yunchang() -> tuple[Any, Any]:
    import importlib

    return importlib.import_module("yunchang"), importlib.import_module("yunchang.kernels")


def _yunchang_kernels(device: torch.device) -> tuple[tuple[str, str], ...]:
    """(Ring, kernel) names of the package, the fastest first."""
    if device.type != "cuda":
        return (("basic", "torch_math"),)
    return (("basic", "fa3"), ("basic", "fa"), ("basic", "torch_cudnn"), ("basic_pytorch", "torch_flash"))


def strategy_meshes(strategies: Sequence[str], size: int, meshes: Sequence[Mesh]) -> list[tuple[str, Mesh]]:
    """Every strategy on every mesh that is its own: usp where it is neither of the pure ones.

    Args:
        strategies: of STRATEGIES.
        size: ranks P.
        meshes: (U, R) pairs; none: all of `size` ranks.

    Raises:
        ValueError: a strategy does not exist, or a mesh has another number of ranks.
    """
    for name in strategies:
        if name not in STRATEGIES:
            raise ValueError(f"--strategy must be of {', '.join(STRATEGIES)}, got {name!r}: use these names")
    for mesh in meshes:
        if mesh[0] * mesh[1] != size:
            raise ValueError(f"--mesh {mesh[0]}x{mesh[1]} is not of {size} rank(s): choose from {factorisations(size)}")
    found = []
    for name in strategies:
        for mesh in meshes or factorisations(size):
            own = {"ulysses": mesh[1] == 1, "ring": mesh[0] == 1 and size > 1, "usp": min(mesh) > 1}
            if own.get(name, True):
                found.append((name, mesh))
    return found


def same_everywhere(group: dist.ProcessGroup | None, *values: object) -> bool:
    """Whether all ranks hold equal values."""
    if group is None:
        return True
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, repr(values), group=group)
    return len(set(rows)) == 1


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over that of what is wanted; infinite for what is not a number."""
    error = float((got.to(want.dtype) - want).norm() / want.norm())
    return error if error == error else float("inf")
