"""The moving average follows the weights in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dbsp_megatron.train.ema import Ema


def test_ema_ramps_up_to_its_decay() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    ema = Ema(layer.named_parameters(), decay=0.5)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    expected = 0.0
    for update in range(1, 12):
        ema.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay)
        torch.testing.assert_close(ema.tensors["weight"], torch.full((1, 2), expected))
    assert layer.weight.eq(1.0).all()


def test_ema_is_fp32_and_copies_back() -> None:
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    ema = Ema(layer.named_parameters(), decay=0.9)
    assert {tensor.dtype for tensor in ema.tensors.values()} == {torch.float32}
    kept = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    ema.copy_to(layer)
    assert torch.equal(layer.weight, kept)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_ema_rejects_decay(decay: float) -> None:
    with pytest.raises(ValueError, match=r"train\.ema_decay"):
        Ema([], decay)


def test_ema_restarts_at_the_present_weights() -> None:
    """As a new average would, ramp included."""
    layer = nn.Linear(3, 2)
    ema = Ema(layer.named_parameters(), decay=0.9)
    ema.update()
    with torch.no_grad():
        layer.weight.add_(1.0)
    ema.restart()
    assert ema.num_updates == 0
    assert torch.equal(ema.tensors["weight"], layer.weight)
