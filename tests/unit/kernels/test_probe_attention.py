"""Probe attention against whole rows in fp64, and its Triton kernels in the interpreter and compiled for a card."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.probe_attention import naive, naive_probe_attention, probe_attention
from dbsp_megatron.masks import Needs
from dbsp_megatron.masks.probe import merge_probes
from tests.harness import run_ranks

# batch, probe rows, keys, heads, kv heads, D, Dv, candidates: one of everything, tails of keys and rows, dims that are
# no power of two, groups, more rows than a tile has, several parts of the keys.
SHAPES = [
    (1, 32, 1100, 2, 2, 128, 128, 2),
    (2, 7, 65, 4, 2, 72, 48, 2),
    (1, 64, 130, 3, 1, 16, 32, 1),
    (1, 1, 1, 1, 1, 8, 5, 1),
    (2, 5, 129, 2, 1, 256, 160, 3),
    (1, 3, 64, 2, 2, 32, 256, 0),
    (1, 9, 2500, 1, 1, 16, 16, 2),
]
Shape = tuple[int, int, int, int, int, int, int, int]


def _case(shape: Shape, dtype: torch.dtype, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and candidates, one of which attends nothing in a row."""
    batch, rows, keys, heads, kv_heads, dim, value_dim, candidates = shape
    generator = torch.Generator().manual_seed(sum(shape))
    made = [
        torch.randn(sizes, generator=generator, dtype=torch.float64)
        for sizes in ((batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim))
    ]
    made[0] *= sharp
    allowed = torch.rand((candidates, rows, keys), generator=generator) < 0.6
    allowed[:1, :1] = False
    q, k, v = (x.to(dtype) for x in made)
    return q, k, v, allowed


def _views(x: Tensor) -> dict[str, Tensor]:
    """The same tokens in the memory layouts that callers have."""
    return {
        "contiguous": x,
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "of a fused q, k, v": torch.stack([x * 3, x, x - 7], dim=3)[:, :, :, 1],
        "dims apart": x.transpose(1, 3).contiguous().transpose(1, 3),
    }


def _slow(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Row by row in fp64."""
    batch, rows, heads, _ = q.shape
    group = heads // k.shape[2]
    result = []
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                scores = k[b, :, h // group].double() @ q[b, i, h].double() * scale
                row = [scores.max()[None]]
                weights = (scores - row[0]).exp()
                for mask in [torch.ones(len(scores), dtype=torch.bool), *allowed[:, i]]:
                    row += [weights[mask].sum()[None], weights[mask] @ v[b, mask, h // group].double()]
                result.append(torch.cat(row))
    return torch.stack(result).view(batch, heads, rows, -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probe_attention_equals_rows_in_fp64(shape: Shape, dtype: torch.dtype) -> None:
    q, k, v, allowed = _case(shape, dtype)
    got = probe_attention(q, k, v, allowed, 0.2)
    want = _slow(q, k, v, allowed, 0.2)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * max(1, shape[2] ** 0.5))


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_heads_at_once_change_nothing(at_once: int) -> None:
    q, k, v, allowed = _case(SHAPES[1], torch.float64)
    with patch.object(naive, "_WORKING_ELEMENTS", at_once):
        torch.testing.assert_close(probe_attention(q, k, v, allowed), _slow(q, k, v, allowed, 72**-0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_keys_and_keys_that_weigh_nothing(dtype: torch.dtype) -> None:
    """Scores of -inf are no keys: a row does not depend on which of them a rank has."""
    q, k, v, allowed = _case(SHAPES[1], dtype)
    none = probe_attention(q, k[:, :0], v[:, :0], allowed[:, :, :0])
    assert bool((none[..., 0] == -math.inf).all())
    assert not bool(none[..., 1:].any())
    q[..., 0] = 1
    k[:, 3:, :, 0] = -math.inf
    far = probe_attention(q, k[:, 3:], v[:, 3:], allowed[:, :, 3:])
    assert torch.equal(far, none)
    near = probe_attention(q, k[:, :3], v[:, :3], allowed[:, :, :3])
    torch.testing.assert_close(probe_attention(q, k, v, allowed), near)


def test_result_has_no_gradient() -> None:
    q, k, v, allowed = _case(SHAPES[1], torch.float32)
    assert not probe_attention(q.requires_grad_(), k.requires_grad_(), v, allowed).requires_grad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 7, 4)}, "q must be floating point [B, tokens, heads, dim]"),
        ({"k": torch.zeros(2, 65, 3, 72)}, "a divisor of 4, 72] for q [2, 7, 4, 72], got [2, 65, 3, 72]"),
        ({"k": torch.zeros(2, 65, 2, 64)}, "got [2, 65, 2, 64]"),
        ({"v": torch.zeros(2, 64, 2, 48)}, "B, s, Hkv = [2, 65, 2] as k has them, got [2, 64, 2, 48]"),
        ({"allowed": torch.zeros(2, 7, 64, dtype=torch.bool)}, "allowed must be bool [C, m, s] = [C, 7, 65]"),
        ({"allowed": torch.zeros(2, 7, 65)}, "got torch.float32 [2, 7, 65]"),
        ({"v": torch.zeros(2, 65, 2, 48, device="meta")}, "v must be on cpu as q is, got meta"),
        ({"allowed": torch.zeros(2, 7, 65, dtype=torch.bool, device="meta")}, "allowed must be on cpu"),
    ],
)
def test_probe_attention_refuses_what_does_not_fit(change: dict[str, Tensor], words: str) -> None:
    arguments = dict(zip(("q", "k", "v", "allowed"), _case(SHAPES[1], torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match="must be") as error:
        probe_attention(**arguments)
    assert words in str(error.value)


def _run_interpreter(rank: int, world_size: int, shapes: list[Shape]) -> list[str]:
    from dbsp_megatron.kernels.probe_attention.triton_kernel import triton_probe_attention
    from tests.unit.kernels.interpreter import prepare

    prepare()
    faults = []
    dtypes = (torch.bfloat16, torch.float16)
    for number, shape in enumerate(shapes):
        q, k, v, allowed = _case(shape, dtypes[number % 2])
        k_view, v_view = (list(_views(x).values())[(number + place) % 4] for place, x in enumerate((k, v)))
        strided = torch.nn.functional.pad(allowed, (3, 2))[..., 3:-2]
        scale = -0.3 if number % 3 == 2 else 0.2
        got = triton_probe_attention(q.float() if number % 2 else q, k_view, v_view, strided, scale)
        again = triton_probe_attention(q, k, v, allowed, scale)
        for name, want in (
            ("twin", naive_probe_attention(q, k, v, allowed, scale)),
            ("fp64", _slow(q, k, v, allowed, scale)),
        ):
            error = (got.double() - want.double()).abs()
            if got.shape != want.shape or bool((error > 1e-5 * want.abs() + 2e-6 * want.abs().max()).any()):
                faults.append(f"{shape} {q.dtype} {name}: {float(error.max())}")
        if not torch.equal(got, again):
            faults.append(f"{shape} {q.dtype}: strides change the result")
    return faults


def test_triton_probe_attention_equals_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, SHAPES, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=240)[0]
    assert not faults, faults


def _run_errors(rank: int, world_size: int, dtype: torch.dtype, sharp: float) -> float:
    """Largest relative difference of the errors of two candidates from those in fp64, over three parts of the keys."""
    from dbsp_megatron.kernels.probe_attention.triton_kernel import triton_probe_attention
    from tests.unit.kernels.interpreter import prepare

    prepare()
    q, k, v, allowed = _case((1, 6, 3000, 2, 2, 16, 16, 2), dtype, sharp)
    # Of the keys that one candidate lacks, a tenth, the other lacks all but a few.
    allowed[0] = torch.rand(allowed[0].shape, generator=torch.Generator().manual_seed(3)) < 0.9
    allowed[1] = allowed[0]
    allowed[1, :, ::29] = True
    needs = Needs(probe_rows=6, probe_candidates=2)
    parts = [slice(0, 1000), slice(1000, 1001), slice(1001, 3000)]
    got = torch.stack([triton_probe_attention(q, k[:, i], v[:, i], allowed[..., i], 0.25) for i in parts])
    want = _slow(q, k, v, allowed, 0.25)[None]
    have, wanted = (merge_probes(x, (1, 2), needs, 16) for x in (got, want))
    apart = (wanted[..., 1] / wanted[..., 0] - 1).abs()
    assert bool((apart > 0).all()), "candidates must differ, or nothing is compared"
    return float((have / wanted - 1).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharp", [0.05, 1.0, 6.0])
def test_candidates_that_differ_little_keep_their_errors(dtype: torch.dtype, sharp: float) -> None:
    """Broad and sharp rows; the choice between candidates asks for differences of 1e-3."""
    pytest.importorskip("triton", reason="needs triton")
    error = run_ranks(_run_errors, 1, dtype, sharp, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert error < 2e-5, error


def _run_special(rank: int, world_size: int) -> list[str]:
    from dbsp_megatron.kernels.probe_attention.triton_kernel import triton_probe_attention
    from tests.unit.kernels.interpreter import prepare

    prepare()
    shape = (1, 3, 1200, 2, 2, 16, 16, 2)
    faults = []

    def compare(name: str, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        got = triton_probe_attention(q, k, v, allowed, 0.25)
        want = naive_probe_attention(q, k, v, allowed, 0.25)
        finite = torch.isfinite(want)
        if not torch.equal(torch.isfinite(got), finite) or not torch.allclose(got[finite], want[finite], 1e-5, 1e-4):
            faults.append(name)
        return got

    for place, (tensor, value) in enumerate(
        ((0, math.nan), (1, math.nan), (2, math.nan), (1, math.inf), (2, math.inf))
    ):
        case = _case(shape, torch.bfloat16)
        case[0][..., 0] = 1
        case[tensor][0, 1, 0, 0] = value
        got = compare(f"{value} in input {tensor}, case {place}", *case)
        # What is not finite stays in its head.
        if not bool(torch.isfinite(got[:, 1]).all()) or bool(torch.isfinite(got[:, 0]).all()):
            faults.append(f"{value} in input {tensor} does not stay in its head")
    q, k, v, allowed = _case(shape, torch.bfloat16)
    q[..., 0] = 1
    k[:, :600, :, 0] = -math.inf
    compare("the first part weighs nothing", q, k, v, allowed)
    k[..., 0] = -math.inf
    got = compare("nothing weighs anything", q, k, v, allowed)
    if bool(got[..., 1:].any()):
        faults.append("sums of nothing")
    return faults


def test_triton_probe_attention_treats_what_is_not_finite_as_its_twin() -> None:
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_special, 1, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert not faults, faults


def test_parts_cover_the_keys_once() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from dbsp_megatron.kernels.probe_attention.triton_kernel import _parts

    for num_keys in (1, 63, 64, 65, 511, 512, 1025, 9450, 75600, 10_000_019):
        for others in (1, 3, 40, 128, 1000, 100_000):
            for tile in (32, 64):
                num, keys = _parts(num_keys, others, tile, 132)
                assert keys % tile == 0
                assert (num - 1) * keys < num_keys <= num * keys
                assert num == 1 or keys >= 512
                assert num == 1 or num * others <= 4 * 132
    assert _parts(75600, 40, 64, 132) == (13, 5824)


def _compiled(rows: int, dim: int, value_dim: int, dtype: str, tma: bool) -> tuple[Any, str, str]:
    """The main kernel as a launch on an H200 would compile it, what the assembler says of it, and its machine code."""
    import triton

    from dbsp_megatron.kernels.block_sparse_attention.portable_config import padded_dim
    from dbsp_megatron.kernels.probe_attention.triton_kernel import _part_kernel, _tile_config

    config = _tile_config(rows, dim, value_dim)
    constants: dict[str, Any] = {
        "DIM": dim,
        "DIM_PAD": padded_dim(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded_dim(value_dim),
        "RAISE": naive.FP16_RAISE if dtype == "fp16" else 1.0,
        "M": config.block_m,
        "N": config.block_n,
        "TMA": tma,
    }
    types = {"q_ptr": f"*{dtype}", "bits_ptr": "*i32", "sums_ptr": "*fp32", "stats_ptr": "*fp32", "scale_log2": "fp32"}
    for name, padded in (("k", padded_dim(dim)), ("v", padded_dim(value_dim))):
        types[name] = f"tensordesc<{dtype}[1, 1, {config.block_n}, {padded}]>" if tma else f"*{dtype}"
    names = _part_kernel.arg_names
    aligned = [name for name in names if types.get(name, "").startswith("*") or name[:8] in ("k_stride", "v_stride")]
    source = triton.compiler.ASTSource(
        fn=_part_kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options=config.launch_options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, code = (
            subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return compiled, usage, code


@pytest.mark.parametrize(
    ("rows", "dim", "value_dim", "dtype", "tma"),
    [
        (96, 128, 128, "bf16", True),
        (192, 128, 128, "fp16", True),
        (32, 128, 128, "bf16", True),
        (96, 64, 64, "bf16", True),
        (96, 72, 72, "bf16", True),
        (96, 128, 128, "bf16", False),
    ],
)
def test_triton_probe_attention_compiles_without_spills(
    rows: int, dim: int, value_dim: int, dtype: str, tma: bool
) -> None:
    """Compiled for sm_90 without a card: registers, shared memory, and warpgroup products that stay in flight."""
    pytest.importorskip("triton", reason="needs triton")
    compiled, usage, code = _compiled(rows, dim, value_dim, dtype, tma)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    assert int(found[2]) == 0, usage
    assert compiled.metadata.shared <= 227 * 1024
    assert code.count("HGMMA") > 0
    assert not re.search(r"\bHMMA", code)
    assert code.count("WARPGROUP.DEPBAR") * 4 <= code.count("HGMMA")
