"""Rotary angles come from global positions, whatever part of the sequence is local."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.models.dit.rope import apply_rotary, rotary_angles

GRID, AXES, THETA = (2, 3, 5), (8, 4, 4), 10000.0


def complex_rotation(x: torch.Tensor, t: int, h: int, w: int) -> torch.Tensor:
    """One token [head_dim], by multiplication with unit complex numbers."""
    factors = []
    for coordinate, channels in zip((t, h, w), AXES, strict=True):
        for i in range(channels // 2):
            factors.append(
                torch.polar(torch.ones(()).double(), torch.tensor(coordinate * THETA ** (-2 * i / channels)).double())
            )
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.stack(factors)).flatten()


def test_rotary_equals_complex_multiplication_per_axis() -> None:
    x = torch.randn(30, 1, 1, 16)
    cos, sin = rotary_angles(torch.arange(30), GRID, AXES, THETA)
    rotated = apply_rotary(x, cos[:, None, None], sin[:, None, None])[:, 0, 0]
    for position in range(30):
        t, h, w = position // 15, position // 5 % 3, position % 5
        torch.testing.assert_close(
            rotated[position].double(), complex_rotation(x[position, 0, 0], t, h, w), rtol=0, atol=1e-5
        )


def test_rotary_angles_of_a_shard_are_rows_of_the_whole() -> None:
    """Trap B25: rank 1's first token has its global position, not 0."""
    whole = rotary_angles(torch.arange(30), GRID, AXES, THETA)
    for shard in (torch.arange(15, 30), torch.tensor([29]), torch.tensor([7, 2, 21]), torch.arange(0)):
        for table, local in zip(whole, rotary_angles(shard, GRID, AXES, THETA), strict=True):
            assert torch.equal(local, table[shard])
    assert not torch.equal(rotary_angles(torch.tensor([15]), GRID, AXES, THETA)[0], whole[0][:1])


@pytest.mark.parametrize("batch", [1, 3])
def test_apply_rotary_shards_the_token_dim_only(batch: int) -> None:
    """Trap B23: with batch 3 and three axes no other dim may be taken for the tokens."""
    x = torch.randn(16, batch, 3, 16)
    grid = (2, 2, 4)
    cos, sin = (table[:, None, None] for table in rotary_angles(torch.arange(16), grid, AXES, THETA))
    whole = apply_rotary(x, cos, sin)
    halves = []
    for shard in (torch.arange(8), torch.arange(8, 16)):
        cos, sin = (table[:, None, None] for table in rotary_angles(shard, grid, AXES, THETA))
        halves.append(apply_rotary(x[shard], cos, sin))
    assert torch.equal(torch.cat(halves), whole)


def test_apply_rotary_refuses_a_table_that_would_broadcast() -> None:
    """Trap B25: a shard of one token must not hide a table of global length."""
    cos, sin = (table[:, None, None] for table in rotary_angles(torch.arange(16), (2, 2, 4), AXES, THETA))
    with pytest.raises(ValueError, match="16 rows for 1 tokens"):
        apply_rotary(torch.randn(1, 1, 2, 16), cos, sin)


def test_apply_rotary_keeps_dtype_and_rounds_once() -> None:
    x = torch.randn(30, 2, 2, 16)
    cos, sin = (table[:, None, None] for table in rotary_angles(torch.arange(30), GRID, AXES, THETA))
    low = apply_rotary(x.bfloat16(), cos, sin)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, apply_rotary(x.bfloat16().float(), cos, sin).bfloat16())


def test_rotary_angles_accept_an_unused_axis() -> None:
    cos, _ = rotary_angles(torch.arange(4), (1, 2, 2), (0, 4, 4), THETA)
    assert cos.shape == (4, 4)
