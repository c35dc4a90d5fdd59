"""Triton's CPU interpreter made fit for the kernels' tests; call `prepare` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def prepare() -> None:
    """Repair three faults of the interpreter: loop bounds that are arrays of one element, bf16's products and rounding.

    Triton 3.6 passes one-element arrays to `int`, which NumPy refuses from 2.4 on. All versions up to 3.9 multiply the
    bit patterns of bf16 operands as integers, without a word, and cut fp32 off where they should round it to bf16.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "start the process with TRITON_INTERPRET=1"
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_dbsp_prepared", False):
        return
    interpreter._dbsp_prepared = True
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any = None) -> Any:
        result = patch_tensor(tensor) if scope is None else patch_tensor(tensor, scope)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if scope is None:
            tensor.__index__ = index
        else:
            scope.set_attr(tensor, "__index__", index)
        return result

    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_float(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float(a), as_float(b), *rest)

    fp_trunc = interpreter.InterpreterBuilder.create_fp_trunc

    def rounded(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return fp_trunc(self, x, to)
        bits = np.ascontiguousarray(x.data).view(np.uint32)
        even = bits + 0x7FFF + (bits >> 16 & 1)
        return interpreter.TensorHandle(
            (np.where(np.isnan(x.data), bits | 0x400000, even) >> 16).astype(np.uint16), tl.bfloat16
        )

    interpreter.InterpreterBuilder.create_fp_trunc = rounded
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = dot
