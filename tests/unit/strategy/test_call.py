"""LayerCall: what of a call is compared and planned for."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.engines import engine_named
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.layout import TokenLayout


def _call(*, requires_grad: bool) -> LayerCall:
    layout = TokenLayout(45, 16, "contiguous", 1, 1, 0, None, None, None)
    q = torch.zeros(1, 45, 2, 8, requires_grad=requires_grad)
    mask = BlockMask.dense(2, 45, block_size_q=16, block_size_k=16)
    return LayerCall(q, q, q, mask, 0, 0, layout, 0.5, None, engine_named("torch"))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_needs_grad_is_that_of_the_caller_also_inside_an_autograd_function(requires_grad: bool) -> None:
    """Forward passes of autograd functions run without gradients, and ask again."""
    call = _call(requires_grad=requires_grad)
    assert call.needs_grad == call.shape.backward == requires_grad
    with torch.no_grad():
        assert call.needs_grad == call.shape.backward == requires_grad
        assert not _call(requires_grad=requires_grad).needs_grad
