"""TMA descriptors of tensors; without a card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs triton with Gluon for Hopper")

from triton.experimental.gluon import language as gl

from dbsp_megatron.kernels.block_sparse_attention.hopper_device import bshd_descriptor

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(64, 64), (64, 128), (128, 128)])
def test_descriptor_has_sizes_and_strides_of_its_tensor(dtype: torch.dtype, rows: int, dim: int) -> None:
    """What is kept from one descriptor to the next, how copies lie in shared memory, is as the library has it."""
    whole = torch.zeros(2, 5, 3, 72, dtype=dtype)
    for x in (whole, whole[:1], whole.transpose(1, 2), whole[..., :64]):
        found = bshd_descriptor(x, rows, dim)
        assert found.base is x
        assert found.shape == [x.shape[i] for i in (0, 2, 1, 3)]
        assert found.strides == [x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in (0, 2, 1, 3)]
        assert found.block_shape == [1, 1, rows, dim]
        assert found.layout == gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], DTYPES[dtype])
