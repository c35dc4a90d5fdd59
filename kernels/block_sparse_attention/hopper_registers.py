"""Accumulator registers of a warpgroup straight to global memory, by TMA or 16 bytes a thread, added or stored."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function
from triton.experimental.gluon.language._core import builtin


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Copy by TMA from shared to global memory that adds. The compiler has it; Gluon has no public name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@constexpr_function
def _red_asm(n):
    results = n // 4  # int8, packed four to a register
    first = results + n  # first value; the n pointers before it are one and the same register
    adds = " ".join(
        f"red.relaxed.gpu.global.add.v4.f32 [ra+{g * 2048}], "
        f"{{${first + 4 * g}, ${first + 4 * g + 1}, ${first + 4 * g + 2}, ${first + 4 * g + 3}}};"
        for g in range(n // 4)
    )
    return (
        "{ .reg .b32 rt; .reg .b64 ra; mov.u32 rt, %tid.x; and.b32 rt, rt, 127; mul.wide.u32 ra, rt, 16; "
        f"add.s64 ra, ra, ${results}; {adds} mov.b32 $0, 0; }}"
    )


@constexpr_function
def _red_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["l"] * n + ["f"] * n)


@gluon.jit
def add_registers(ptr, value, NREG: gl.constexpr):
    """Add the NREG registers a thread holds of `value`: its group g of four to ptr + (g * 128 + thread) * 16 bytes."""
    address = gl.full([value.shape[0], value.shape[1]], ptr, gl.int64, value.type.layout)
    asm: gl.constexpr = _red_asm(NREG)
    constraints: gl.constexpr = _red_constraints(NREG)
    gl.inline_asm_elementwise(asm, constraints, [address, value], dtype=gl.int8, is_pure=False, pack=NREG)


@constexpr_function
def _store_asm(n, columns, kind):
    stride = n // 4 + n
    rows = stride + n
    first = rows + n
    size = 4 if kind == "fp32" else 2
    stores = []
    for g in range(min(n // 4, columns // 8)):
        for half in range(2):
            low, high = first + 4 * g + 2 * half, first + 4 * g + 2 * half + 1
            target = f"[r{half}+{g * 8 * size}]"
            if kind == "fp32":
                stores.append(f"@p{half} st.global.v2.f32 {target}, {{${low}, ${high}}};")
            else:
                pack = "cvt.rn.bf16x2.f32" if kind == "bf16" else "cvt.rn.f16x2.f32"
                stores.append(f"{pack} rp, ${high}, ${low}; @p{half} st.global.b32 {target}, rp;")
    return (
        "{ .reg .b32 rt, rr, rw, rp; .reg .b64 rl, r0, r1; .reg .pred p0, p1; mov.u32 rt, %tid.x; "
        "shr.u32 rr, rt, 2; and.b32 rr, rr, 7; shr.u32 rw, rt, 1; and.b32 rw, rw, 48; add.u32 rr, rr, rw; "
        f"and.b32 rt, rt, 3; mul.wide.u32 rl, rt, {2 * size}; add.s64 r1, rl, ${n // 4}; "
        f"mul.wide.u32 rl, rr, ${stride}; add.s64 r0, r1, rl; mul.wide.u32 rl, ${stride}, 8; add.s64 r1, r0, rl; "
        f"setp.lt.s32 p0, rr, ${rows}; add.u32 rr, rr, 8; setp.lt.s32 p1, rr, ${rows}; {' '.join(stores)} "
        "mov.b32 $0, 0; }"
    )


@constexpr_function
def _store_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["l"] * n + ["r"] * (2 * n) + ["f"] * n)


@gluon.jit
def store_registers(ptr, stride, num_rows, value, NREG: gl.constexpr, COLUMNS: gl.constexpr):
    """Store rows of an accumulator, `stride` elements apart, the first `num_rows` of 64 and COLUMNS of its columns.

    A thread has rows r and r + 8 and two columns of each eight. As plain stores the compiler would work out addresses
    before the main loop, which costs that loop 250 bytes of spills.
    """
    shape: gl.constexpr = value.type.shape
    layout: gl.constexpr = value.type.layout
    address = gl.full(shape, ptr.to(gl.int64, bitcast=True), gl.int64, layout)
    kind: gl.constexpr = ptr.dtype.element_ty.name
    strides = gl.full(shape, stride * (ptr.dtype.element_ty.primitive_bitwidth // 8), gl.int32, layout)
    rows = gl.full(shape, num_rows, gl.int32, layout)
    asm: gl.constexpr = _store_asm(NREG, COLUMNS, kind)
    constraints: gl.constexpr = _store_constraints(NREG)
    gl.inline_asm_elementwise(
        asm, constraints, [address, strides, rows, value], dtype=gl.int8, is_pure=False, pack=NREG
    )


@constexpr_function
def _scale_asm(n):
    # Elements 0 and 1 of four lie in one of the two rows that a thread holds, 2 and 3 in the other.
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; "
        f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra KEPT; {products} KEPT: }}"
    )


@constexpr_function
def _scale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def scale_rows(value, factor, NREG: gl.constexpr):
    """Rows of an accumulator of NREG registers a thread times a factor each; a warp with factors of 1 skips it all."""
    layout: gl.constexpr = value.type.layout
    zero = gl.full(value.type.shape, 0.0, gl.float32, layout)
    factors, _ = gl.broadcast(gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None], zero)
    asm: gl.constexpr = _scale_asm(NREG)
    constraints: gl.constexpr = _scale_constraints(NREG)
    return gl.inline_asm_elementwise(asm, constraints, [value, factors], dtype=gl.float32, is_pure=True, pack=NREG)


@gluon.jit
def partial_sums(x, COLUMNS: gl.constexpr):
    """Sums of the columns that each thread holds of an accumulator [64, COLUMNS], as [64, 4]; nothing is exchanged."""
    return gl.sum(gl.sum(gl.reshape(x, [64, COLUMNS // 8, 4, 2]), 3), 1)
