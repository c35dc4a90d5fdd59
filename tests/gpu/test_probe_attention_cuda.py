"""The Triton kernels of the probe attention on one CUDA device: parity, layouts, no waiting, speed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.probe_attention import naive_probe_attention, probe_attention
from dbsp_megatron.masks import Needs
from dbsp_megatron.masks.probe import merge_probes
from tests.reference import nan_filled_memory

pytestmark = pytest.mark.gpu

# batch, probe rows, keys, heads, kv heads, D, Dv, candidates
Shape = tuple[int, int, int, int, int, int, int, int]
SHAPES: list[Shape] = [
    (1, 32, 75600, 4, 4, 128, 128, 2),
    (2, 32, 9450, 6, 3, 64, 64, 2),
    (1, 64, 18900, 3, 3, 128, 128, 2),
    (2, 7, 1037, 4, 2, 72, 72, 3),
    (1, 1, 5000, 5, 5, 40, 96, 1),
    (1, 33, 4097, 8, 1, 96, 128, 2),
    (1, 32, 4097, 2, 2, 256, 256, 2),
    (1, 16, 63, 2, 2, 128, 64, 0),
    (3, 5, 1, 2, 1, 16, 8, 2),
]


def _case(shape: Shape, dtype: torch.dtype, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in fp32 with values of the dtype, as they come over ranks; a candidate attends nothing in a row."""
    batch, rows, keys, heads, kv_heads, dim, value_dim, candidates = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    q, k, v = (
        torch.randn(sizes, device="cuda", generator=generator)
        for sizes in ((batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim))
    )
    allowed = torch.rand((candidates, rows, keys), device="cuda", generator=generator) < 0.7
    allowed[:1, :1] = False
    return (q * sharp).to(dtype).float(), k.to(dtype), v.to(dtype), allowed


def _check(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> None:
    with nan_filled_memory():
        got = probe_attention(q, k, v, allowed)
    want = naive_probe_attention(q.double(), k.double(), v.double(), allowed, q.shape[3] ** -0.5)
    assert got.dtype == torch.float32
    # Weighted sums cancel: they err by parts of the sum of weights.
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))
    num = allowed.shape[0]
    if num:
        needs, shape = Needs(probe_rows=q.shape[1], probe_candidates=num), (q.shape[0], q.shape[2])
        errors = (merge_probes(x[None], shape, needs, v.shape[3]) for x in (got, want))
        torch.testing.assert_close(*errors, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharp", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probe_attention_equals_twin_in_fp64(shape: Shape, sharp: float, dtype: torch.dtype) -> None:
    _check(*_case(shape, dtype, sharp))


def test_candidates_that_differ_little_keep_their_errors() -> None:
    """Of the tenth of the keys that one candidate lacks the other lacks all but a few."""
    q, k, v, allowed = _case(SHAPES[0], torch.bfloat16)
    allowed[0] = torch.rand(allowed[0].shape, device="cuda") < 0.9
    allowed[1] = allowed[0]
    allowed[1, :, ::29] = True
    _check(q, k, v, allowed)


def test_probe_attention_takes_strided_views() -> None:
    q, k, v, allowed = _case(SHAPES[1], torch.bfloat16)
    want = probe_attention(q, k, v, allowed)
    wide = torch.nn.functional.pad(k, (3, 2))
    views = {
        "heads first": k.transpose(1, 2).contiguous().transpose(1, 2),
        "of a fused q, k, v": torch.stack([k * 3, k, k - 7], dim=3)[:, :, :, 1],
        "not aligned": wide[..., 3:-2],
        "dims apart": k.transpose(1, 3).contiguous().transpose(1, 3),
        "every other token": k.repeat_interleave(2, 1)[:, ::2],
    }
    for name, view in views.items():
        assert torch.equal(probe_attention(q, view, v, allowed), want), name
        flipped = probe_attention(q, k, view, allowed)
        assert torch.equal(flipped, probe_attention(q, k, k, allowed)), name
    strided = torch.nn.functional.pad(allowed, (5, 6))[..., 5:-6]
    assert torch.equal(probe_attention(q.to(k.dtype), k, v, strided), want)
    assert torch.equal(probe_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, allowed), want)


def test_what_is_not_finite_stays_in_its_head() -> None:
    q, k, v, allowed = _case(SHAPES[1], torch.bfloat16)
    q[..., 0] = 1
    want = probe_attention(q, k, v, allowed)
    for tensor, place in ((q, 3), (k, 77), (v, 9449)):
        for value in (math.nan, math.inf):
            before = float(tensor[1, place, 0, 0])
            tensor[1, place, 0, 0] = value
            got = probe_attention(q, k, v, allowed)
            tensor[1, place, 0, 0] = before
            # A kv head has two query heads.
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1, 2:], want[1, 2:])
            assert not bool(torch.isfinite(got[1, 0]).all())
    k[:, :9000, :, 0] = -math.inf
    near = probe_attention(q, k[:, 9000:], v[:, 9000:], allowed[..., 9000:])
    torch.testing.assert_close(probe_attention(q, k, v, allowed), near, rtol=1e-5, atol=1e-4)
    k[..., 0] = -math.inf
    assert not bool(probe_attention(q, k, v, allowed)[..., 1:].any())


def test_probe_attention_repeats_bit_by_bit() -> None:
    case = _case(SHAPES[0], torch.bfloat16)
    first = probe_attention(*case)
    for _ in range(10):
        assert torch.equal(probe_attention(*case), first)


def test_probe_attention_reaches_tensors_of_more_than_2_to_the_31_elements() -> None:
    """Trap B47: offsets in 32 bits would wrap; the last keys are far beyond."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free device memory")
    q, _, _, _ = _case((1, 4, 1, 32, 32, 128, 128, 1), torch.bfloat16)
    k = torch.zeros((1, 2**19 + 70, 32, 128), dtype=torch.bfloat16, device="cuda")
    assert k.numel() > 2**31
    # Only the last keys weigh anything.
    q[..., 0] = 1
    k[..., 0] = -math.inf
    tail = torch.randn((1, 100, 32, 128), device="cuda").bfloat16()
    k[:, -100:] = tail
    allowed = torch.rand((1, 4, k.shape[1]), device="cuda") < 0.5
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    got = probe_attention(q, k, k[..., 1:], allowed)
    want = naive_probe_attention(q.double(), tail.double(), tail[..., 1:].double(), allowed[..., -100:], 128**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_probe_attention_never_waits_for_the_device_nor_compiles_for_a_new_length() -> None:
    from dbsp_megatron.kernels.probe_attention.triton_kernel import _merge_kernel, _pack_kernel, _part_kernel

    q, k, v, allowed = _case(SHAPES[0], torch.bfloat16)
    q = q[:, :31]
    allowed = allowed[:, :31]
    probe_attention(q, k, v, allowed)
    caches = [x.device_caches[torch.cuda.current_device()][0] for x in (_merge_kernel, _pack_kernel, _part_kernel)]
    before = [len(cache) for cache in caches]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for keys in (75599, 65536, 18900, 9450, 1000, 129, 64, 1):
            probe_attention(q, k[:, :keys], v[:, :keys], allowed[..., :keys])
            probe_attention(q[:, :30], k[:, :keys], v[:, :keys], allowed[:, :30, :keys].contiguous())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(cache) for cache in caches] == before


def test_probe_attention_costs_little_more_than_reading_k_and_v(capsys: pytest.CaptureFixture[str]) -> None:
    """40 heads of 75,600 keys: less than the plain copy of k and v would take at 0.5 TB/s; figures are printed."""
    q, k, v, allowed = _case((1, 32, 75600, 40, 40, 128, 128, 2), torch.bfloat16)
    times = []
    for repeat in range(13):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        probe_attention(q, k, v, allowed)
        stop.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop))
    ms = sorted(times)[len(times) // 2]
    line = f"75600 x 40 x 128 bf16, 32 rows, 2 candidates: {ms:.3f} ms, {2 * k.numel() * 2 / ms / 1e6:.0f} GB/s"
    with capsys.disabled():
        print(f"\nprobe_attention: {line}")
    assert ms < 3.0, line
