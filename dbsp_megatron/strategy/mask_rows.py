"""Mask rows of a rank's own q-blocks, as a mask method predicts them.

Dims: B batch, H/Hkv heads, D head dim, nb blocks of this rank, N blocks of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.masks import MaskMethod, pool_blocks
from dbsp_megatron.strategy.call import LayerCall


def predict_rows(call: LayerCall, method: MaskMethod, size: int, traffic: Traffic) -> tuple[Tensor | None, str | None]:
    """What a method predicts for the q-blocks of this rank; collective.

    Args:
        call: inputs of the layer.
        method: mask method.
        size: ranks P of the sequence.
        traffic: told of the bytes that this rank sends.

    Returns:
        Rows bool [B, H, nb, N] and None, or None and what is wrong with what the method gave.
    """
    layout = call.layout
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        q_summary = pool_blocks(call.q, layout.block_size)
        k_summary = pool_blocks(call.k, layout.block_size)
        if size > 1:
            traffic.bytes_sent += k_summary.numel() * k_summary.element_size() * (size - 1)
            k_summary = layout.gather_blocks(k_summary, 1)
        try:
            rows = method.predict(q_summary, k_summary, call.layer, call.step, call.grid)
        except Exception as error:  # whatever a user's method raises, the other ranks must hear of it
            return None, f"mask method {method.describe()} raised {type(error).__name__}: {error}"
    wanted = (call.q.shape[0], call.q.shape[2], q_summary.shape[1], layout.num_blocks)
    if not isinstance(rows, Tensor) or rows.dtype != torch.bool or tuple(rows.shape) != wanted:
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        return None, f"mask method {method.describe()} must return bool [B, H, nq, Nk] = {wanted}, got {got}"
    return rows, None
