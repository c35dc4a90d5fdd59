"""Checks attention against fp64 on a sample of rows, keys and heads, in pieces that fit beside what is measured.

Dims: S tokens, H query heads, Hkv key/value heads, D head dim, G query heads of a kv head, R rows of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.attention_cases import AttentionCase

_MAX_SCORES = 2**25
"""fp64 scores alive at once: 256 MiB for each tensor of that size."""
_TOLERANCES = {
    torch.bfloat16: (1e-2, 1e-2),
    torch.float16: (2e-3, 3e-3),
    torch.float32: (2e-3, 2e-3),
    torch.float64: (1e-10, 1e-10),
}
"""Largest errors of out (relative) and lse, and of gradients; those of fp32 leave room for TF32."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionSample:
    """What is looked at of a result, and what it should be."""

    rows: Tensor
    """int64, tokens of q."""
    keys: Tensor
    """int64, tokens of k."""
    heads: tuple[int, ...]
    """Query heads of out, lse and dq."""
    kv_heads: tuple[int, ...]
    """Key/value heads of dk and dv."""
    expected: dict[str, Tensor]
    """fp64 `out` and `lse` of rows, and for a backward pass `dq` of rows, `dk` and `dv` of keys; heads come first."""
    dtype: torch.dtype
    """Of the inputs."""

    def errors_forward(self, out: Tensor, lse: Tensor | None) -> dict[str, float]:
        """Errors of a forward pass: out relative in norm, lse absolute; inf where lse is infinite and should not be."""
        found = torch.stack([out[0, self.rows, head] for head in self.heads]).double()
        errors = {"out": _relative(found, self.expected["out"])}
        if lse is not None:
            got = torch.stack([lse[0, head, self.rows] for head in self.heads]).double()
            want = self.expected["lse"]
            # Equal infinities have no difference.
            errors["lse"] = float(torch.where(got == want, 0.0, (got - want).abs()).max())
        return errors

    def errors_backward(self, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, float]:
        """Errors of gradients, relative in norm."""
        found = {"dq": torch.stack([dq[0, self.rows, head] for head in self.heads])}
        found |= {
            name: torch.stack([x[0, self.keys, head] for head in self.kv_heads]) for name, x in (("dk", dk), ("dv", dv))
        }
        return {name: _relative(x.double(), self.expected[name]) for name, x in found.items()}

    def wrong(self, errors: dict[str, float]) -> str | None:
        """The errors that are too large, in words, or None; what is not a number is too large."""
        forward, gradient = _TOLERANCES[self.dtype]
        bad = [
            f"{name} {error:.2g}"
            for name, error in errors.items()
            if not error <= (forward if name in ("out", "lse") else gradient)
        ]
        return f"wrong: error of {', '.join(bad)}" if bad else None


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def sample_attention(case: AttentionCase, num_rows: int, num_keys: int, generator: torch.Generator) -> AttentionSample:
    """Draws a sample of the first and last head and computes it in fp64, in pieces of rows.

    Args:
        case: the attention; gradients are computed if it has a backward pass.
        num_rows: query rows looked at, at most.
        num_keys: keys looked at, at most.
        generator: on the device of the case.
    """
    num_heads, num_kv_heads = case.q.shape[2], case.k.shape[2]
    group = num_heads // num_kv_heads
    rows, keys = (
        torch.randperm(length, generator=generator, device=case.q.device)[:count].sort().values
        for length, count in ((case.q.shape[1], num_rows), (case.k.shape[1], num_keys))
    )
    heads, kv_heads = tuple({0: 0, num_heads - 1: 0}), tuple({0: 0, num_kv_heads - 1: 0})
    backward = "backward" in case.directions
    found: dict[str, list[Tensor]] = {}
    for kv_head in kv_heads:
        of_keys: list[Tensor] = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            if not backward and head not in heads:
                continue
            of_rows, part = _one_head(case, head, kv_head, rows, keys, backward)
            of_keys = [a + b for a, b in zip(of_keys, part, strict=True)] if of_keys else part
            if head in heads:
                for name, x in of_rows.items():
                    found.setdefault(name, []).append(x)
        for name, x in zip(("dk", "dv"), of_keys, strict=False):
            found.setdefault(name, []).append(x)
    return AttentionSample(
        rows=rows,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        expected={name: torch.stack(parts) for name, parts in found.items()},
        dtype=case.q.dtype,
    )


def _one_head(
    case: AttentionCase, head: int, kv_head: int, rows: Tensor, keys: Tensor, backward: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Fp64 out, lse (and dq) of the rows, and the share of dk and dv of the keys that comes from this query head."""
    k, v = (x[0, :, kv_head].double() for x in (case.k, case.v))
    found: dict[str, list[Tensor]] = {}
    dk, dv = (torch.zeros_like(x[keys]) for x in (k, v))
    # Gradients of a key need the weights of every row.
    for piece in _pieces(torch.arange(case.q.shape[1], device=k.device) if backward else rows, len(k)):
        q = case.q[0, piece, head].double()
        weights, lse = _weights(case, q, k, piece, head)
        out = weights @ v
        wanted = torch.isin(piece, rows)
        parts = {"out": out[wanted], "lse": lse[wanted]}
        if backward:
            dout = case.dout[0, piece, head].double()
            delta = (dout * out).sum(-1, keepdim=True)
            dscores = weights * (dout @ v.T - delta) * case.scale
            parts["dq"] = dscores[wanted] @ k
            dk += dscores[:, keys].T @ q
            dv += weights[:, keys].T @ dout
        for name, x in parts.items():
            found.setdefault(name, []).append(x)
    return {name: torch.cat(x) for name, x in found.items()}, [dk, dv] if backward else []


def _pieces(rows: Tensor, num_keys: int) -> Iterator[Tensor]:
    yield from rows.split(max(1, _MAX_SCORES // max(1, num_keys)))


def _weights(case: AttentionCase, q: Tensor, k: Tensor, rows: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Fp64 weights [R, S] and lse [R] of some rows of a head; a row without keys has weights 0."""
    size_q, size_k = case.block_size
    allowed = case.mask.blocks[0, head][rows // size_q].repeat_interleave(size_k, dim=1)[:, : len(k)]
    scores = (q @ k.T * case.scale).masked_fill_(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[:, None]), lse
