"""merge_states: joining two partial attentions of the same queries, empty ones included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.engines.states import merge_states
from tests.reference import FP64_ATOL, attention_reference, max_error, random_qkv


def _empty() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 5, 3, 8), torch.full((2, 3, 5), float("-inf"))


def _some() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, 3, 8, generator=generator), torch.randn(2, 3, 5, generator=generator) * 30


def test_merge_states_of_two_empty_states_is_empty() -> None:
    """No -inf minus -inf: exactly output 0 and lse -inf (Trap B11)."""
    out, lse = merge_states(*_empty(), *_empty())
    assert torch.equal(out, _empty()[0])
    assert torch.equal(lse, _empty()[1])


def test_merge_states_with_an_empty_state_is_the_identity() -> None:
    """Bitwise, in both orders (Trap B11)."""
    for merged in (merge_states(*_empty(), *_some()), merge_states(*_some(), *_empty())):
        assert torch.equal(merged[0], _some()[0])
        assert torch.equal(merged[1], _some()[1])


@pytest.mark.parametrize("kinds", [(_empty, _empty), (_empty, _some), (_some, _empty), (_some, _some)])
def test_merge_states_has_finite_gradients(kinds: tuple[object, object]) -> None:
    """Also where both states are empty (Trap B11)."""
    leaves = [x.requires_grad_() for kind in kinds for x in kind()]  # type: ignore[operator]
    out, lse = merge_states(*leaves)
    loss = out.sin().sum() + lse.masked_fill(lse.isneginf(), 0.0).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grads)


def test_merge_states_of_key_parts_is_attention_over_all_keys() -> None:
    q, k, v, _ = random_qkv(1, 2, 5, 3, 8, seqlen_k=11, dtype=torch.float64)
    want_out, want_lse = attention_reference(q, k, v, None)
    out, lse = attention_reference(q, k[:, :2], v[:, :2], None)
    for part in (slice(2, 3), slice(3, 11)):
        out, lse = merge_states(out, lse, *attention_reference(q, k[:, part], v[:, part], None))
    assert max_error(out, want_out) <= FP64_ATOL
    assert max_error(lse, want_lse) <= FP64_ATOL


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_merge_states_does_not_read_rows_that_have_no_keys(garbage: float) -> None:
    """A ring starts from memory that nothing was written to."""
    out, lse = torch.full((2, 5, 3, 8), garbage), torch.full((2, 3, 5), float("-inf"))
    part, part_lse = _some()
    part_lse[0, 1, 2] = float("-inf")
    part[0, 2, 1] = garbage
    for merged in (merge_states(out, lse, part, part_lse), merge_states(part, part_lse, out, lse)):
        assert torch.equal(merged[1], part_lse)
        assert torch.equal(merged[0], part.masked_fill(torch.isneginf(part_lse).transpose(1, 2)[..., None], 0.0))


def test_merge_states_keeps_rows_that_are_nan() -> None:
    """Whichever part they come from: a row of NaN does not become a finite one."""
    part, part_lse = _some()
    lse = part_lse.clone()
    lse[1, 2, 3] = float("nan")
    for merged, merged_lse in (merge_states(part, lse, *_some()), merge_states(*_some(), part, lse)):
        wrong = torch.zeros_like(lse, dtype=torch.bool)
        wrong[1, 2, 3] = True
        assert torch.equal(merged_lse.isnan(), wrong)
        assert torch.equal(merged.isnan().all(-1), wrong.transpose(1, 2))
        assert torch.equal(merged.isnan().any(-1), wrong.transpose(1, 2))
