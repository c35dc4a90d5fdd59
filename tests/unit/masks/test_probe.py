"""The probe: places, attention of any split of the keys, and errors against dense attention."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from dbsp_megatron.kernels.probe_attention import naive, probe_attention
from dbsp_megatron.masks import Needs
from dbsp_megatron.masks.probe import merge_probes, probe_places, take_rows
from tests.reference import attention_reference, random_qkv

CPU = torch.device("cpu")


@pytest.mark.parametrize("seqlen", [1, 5, 63, 64, 640, 75600, 10_000_019])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_probe_places_are_distinct_and_one_in_each_part(count: int, seqlen: int) -> None:
    places = probe_places(count, seqlen, 3, 5, CPU)
    count = min(count, seqlen)
    assert places.shape == (count,)
    for i, place in enumerate(places.tolist()):
        assert i * seqlen // count <= place <= ((i + 1) * seqlen - 1) // count
    assert bool((places.diff() > 0).all())


def test_probe_places_differ_by_layer_and_step() -> None:
    seen = {tuple(probe_places(16, 75600, layer, step, CPU).tolist()) for layer in range(4) for step in range(4)}
    assert len(seen) == 16


def test_take_rows_gives_zeros_for_tokens_elsewhere() -> None:
    x = torch.randn(2, 10, 3, 4, dtype=torch.bfloat16)
    places = torch.tensor([0, 3, 4, 9])
    held = [
        torch.tensor([0, 1, 4, 5]),
        torch.tensor([2, 3, 9]),
        torch.tensor([6, 7, 8]),
        torch.tensor([], dtype=torch.int64),
    ]
    parts = [take_rows(x[:, positions], positions, places) for positions in held]
    assert all(part.dtype == torch.float32 for part in parts)
    assert torch.equal(sum(parts, torch.zeros(())), x[:, places].float())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 1 << 30])
@pytest.mark.parametrize("num_parts", [1, 3, 5])
def test_errors_equal_dense_attention(kv_heads: int, at_once: int, num_parts: int) -> None:
    """Over any split of the keys, with a part without keys; a candidate that attends nothing has output 0."""
    q, k, v, _ = random_qkv(0, 2, 57, 4, 8, num_kv_heads=kv_heads, dtype=torch.float64)
    rows = torch.tensor([0, 7, 30, 56])
    allowed = torch.rand(3, 4, 57) < 0.4
    allowed[2, 1] = False
    keys = torch.randperm(57).tensor_split(num_parts)
    keys = (*keys, torch.tensor([], dtype=torch.int64))
    with patch.object(naive, "_WORKING_ELEMENTS", at_once):
        parts = torch.stack([probe_attention(q[:, rows], k[:, i], v[:, i], allowed[:, :, i], 0.3) for i in keys])
    got = merge_probes(parts, (2, 4), Needs(probe_rows=4, probe_candidates=3), 8)
    full = attention_reference(q[:, rows], k, v, None, 0.3)[0]
    for index, mask in enumerate(allowed):
        out = attention_reference(q[:, rows], k, v, mask[None, None], 0.3)[0]
        torch.testing.assert_close(got[..., index], (out - full).square().mean((1, 3)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_keep_the_weights_beyond_their_own_precision(dtype: torch.dtype) -> None:
    """Broad attention, whose single weights fp16 could not hold, and differences below what one bf16 weight holds."""
    q, k, v = (x.to(dtype) for x in random_qkv(5, 2, 9000, 2, 16, dtype=torch.float64)[:3])
    rows = torch.tensor([0, 4000, 8999])
    allowed = torch.rand((2, 3, 9000), generator=torch.Generator().manual_seed(2)) < 0.8
    wide = [x.double() for x in (q[:, rows], k, v)]
    part = probe_attention(q[:, rows].float(), k, v, allowed, 0.1)
    want = probe_attention(*wide, allowed, 0.1)
    assert part.dtype == torch.float32
    torch.testing.assert_close(part.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))
    needs = Needs(probe_rows=3, probe_candidates=2)
    torch.testing.assert_close(
        merge_probes(part[None], (2, 2), needs, 16), merge_probes(want[None], (2, 2), needs, 16), rtol=1e-4, atol=0
    )


def test_needs_refuses_what_is_not_known() -> None:
    for options, words in (
        ({"q": ("median",)}, r"needs.q must name fields of \('means', 'similarity'\), got \['median'\]"),
        ({"probe_rows": 4}, "must both be 0 or both be positive, got 4 and 0"),
        ({"probe_rows": -1, "probe_candidates": 1}, "got -1 and 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Needs(**options)
