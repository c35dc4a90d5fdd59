"""Block pooling against sums over pairs of tokens in fp64, and its Triton kernel in the interpreter against a twin."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_pool import block_means, block_self_similarity, naive_pool_blocks, pool_blocks
from tests.harness import run_ranks

# batch, tokens, heads, dim, block size: short last blocks, blocks of one token, a block longer than the sequence.
SHAPES = [(2, 37, 3, 24, 16), (1, 130, 2, 128, 64), (3, 5, 1, 96, 1), (2, 7, 5, 3, 50), (1, 32, 2, 256, 16)]
TOLERANCE = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-12}


def _tokens(batch: int, tokens: int, heads: int, dim: int) -> Tensor:
    """Tokens around a mean that differs by head, from alike to opposed, some of them zero."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn((batch, tokens, heads, dim), generator=generator)
    x += torch.randn((batch, 1, heads, dim), generator=generator) * torch.linspace(0, 4, heads)[:, None]
    x[:, 1::5] = 0
    return x


def _views(x: Tensor) -> dict[str, Tensor]:
    """The same tokens in the memory layouts that callers have."""
    fused = torch.stack([x * 3, x, x - 7], dim=3)
    return {
        "contiguous": x,
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "of a fused q, k, v": fused[:, :, :, 1],
        "dims apart": x.transpose(1, 3).contiguous().transpose(1, 3),
        "some tokens and heads": torch.nn.functional.pad(x, (0, 0, 1, 2, 3, 1))[:, 3:-1, 1:-2],
    }


def _by_pairs(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Means, and the mean over all pairs of tokens of a block of the cosine of their angle, in fp64."""
    means, alike = [], []
    for start in range(0, x.shape[1], block_size):
        block = x[:, start : start + block_size].double()
        unit = torch.nn.functional.normalize(block, dim=3)
        means.append(block.mean(1))
        alike.append(torch.einsum("bihd,bjhd->bhij", unit, unit).mean((2, 3)))
    return torch.stack(means, 1), torch.stack(alike, 1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pool_blocks_equals_sums_over_pairs(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """The short last block is averaged over the tokens that it has (Trap B07)."""
    for name, x in _views(_tokens(*shape[:4]).to(dtype)).items():
        before = x.clone()
        means, alike = pool_blocks(x, shape[4], similarity=True)
        assert alike is not None
        for got, want in zip((means, alike), _by_pairs(x, shape[4]), strict=True):
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
            torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype], msg=name)
        assert torch.equal(x, before)


def test_pool_blocks_gives_similarity_only_when_asked() -> None:
    x = _tokens(2, 37, 3, 24).requires_grad_()
    means, alike = pool_blocks(x, 16, similarity=True)
    assert alike is not None
    assert pool_blocks(x, 16)[1] is None
    assert torch.equal(block_means(x, 16), means)
    assert torch.equal(block_self_similarity(x, 16), alike)
    assert not means.requires_grad
    assert not alike.requires_grad


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_block_self_similarity_is_known_for_known_blocks(scale: float) -> None:
    alike = torch.ones(8, 4)
    opposed = torch.cat([torch.ones(4, 4), -torch.ones(4, 4)])
    orthogonal = torch.eye(4).repeat(2, 1)
    half_zero = torch.cat([torch.ones(4, 4), torch.zeros(4, 4)])
    x = torch.cat([alike, opposed, orthogonal, half_zero])[None, :, None] * scale
    got = block_self_similarity(x, 8).flatten()
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0, 0.25, 0.25]), rtol=0, atol=1e-6)


def test_pool_blocks_of_no_tokens_is_empty() -> None:
    means, alike = pool_blocks(torch.ones(2, 0, 3, 8), 16, similarity=True)
    assert means.shape == (2, 0, 3, 8)
    assert alike is not None
    assert alike.shape == (2, 0, 3)


def _run_interpreter(rank: int, world_size: int, shapes: list[tuple[int, int, int, int, int]]) -> list[str]:
    from dbsp_megatron.kernels.block_pool.triton_kernel import triton_pool_blocks
    from tests.unit.kernels.interpreter import prepare

    prepare()
    faults = []
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for number, shape in enumerate(shapes):
        for place, (name, x) in enumerate(_views(_tokens(*shape[:4])).items()):
            cast = x.to(dtypes[(number + place) % 3])
            want = naive_pool_blocks(cast, shape[4], similarity=True)
            got = triton_pool_blocks(cast, shape[4], similarity=True)
            alone = triton_pool_blocks(cast, shape[4])
            for x_got, x_want in zip(got, want, strict=True):
                assert x_got is not None
                assert x_want is not None
                close = x_got.shape == x_want.shape and x_got.dtype == x_want.dtype
                if not close or not torch.allclose(x_got, x_want, rtol=0, atol=2e-6):
                    faults.append(f"{shape} {name} {cast.dtype}")
            if alone[1] is not None or not torch.equal(alone[0], got[0]):
                faults.append(f"{shape} {name} without similarity")
    empty = triton_pool_blocks(torch.ones(2, 0, 3, 8), 16, similarity=True)
    if empty[0].shape != (2, 0, 3, 8):
        faults.append("no tokens")
    return faults


def test_triton_pool_blocks_equals_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, SHAPES, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert not faults, faults


@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 128), ("fp16", 96), ("bf16", 64), ("fp32", 256)])
def test_triton_pool_blocks_compiles_to_wide_loads(dtype: str, dim: int) -> None:
    """Compiled for sm_90 without a card, as a launch with aligned tensors would: 16 bytes a load."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from dbsp_megatron.kernels.block_pool.triton_kernel import _TILE_ELEMENTS, _pool_kernel

    names = _pool_kernel.arg_names
    padded = triton.next_power_of_2(dim)
    constants = {"DIM": dim, "DIM_PAD": padded, "TOKENS": _TILE_ELEMENTS // padded, "SIMILARITY": True, "stride_d": 1}
    pointers = {"x_ptr": "*" + dtype, "means_ptr": "*fp32", "similarity_ptr": "*fp32"}
    source = triton.compiler.ASTSource(
        fn=_pool_kernel,
        signature={name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in pointers or (name.startswith("stride") and name not in constants)
        },
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    loads = re.findall(r"ld\.global[\w.:]*", compiled.asm["ptx"])
    assert loads
    assert all(load.endswith("v4.b32") for load in loads), loads


@pytest.mark.parametrize(
    ("x", "block_size", "message"),
    [
        (torch.ones(2, 3, 4), 2, "x must be floating point .B, S, H, D., got torch.float32 .2, 3, 4."),
        (torch.ones(2, 3, 4, 5, dtype=torch.int64), 2, "x must be floating point"),
        (torch.ones(2, 3, 4, 5), 0, "block_size must be at least 1, got 0"),
    ],
)
def test_pool_blocks_refuses_what_does_not_fit(x: Tensor, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool_blocks(x, block_size)
