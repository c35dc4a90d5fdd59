"""qk_gain_init: heads that start from broad to narrow attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dbsp_megatron.models.dit.config import load_model_config
from dbsp_megatron.models.dit.model import VideoDiT


def test_gain_init_is_geometric_over_heads() -> None:
    """Both norms of every layer, from the first value to the last."""
    config = dataclasses.replace(load_model_config("dit_debug"), qk_gain_init=(0.5, 4.0))
    model = VideoDiT(config)
    gains = torch.tensor([0.5 * 8 ** (head / 5) for head in range(6)]).repeat_interleave(16)
    weights = {name: p for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert len(weights) == 2 * config.num_layers
    for name, weight in weights.items():
        torch.testing.assert_close(weight, gains, msg=name)


@pytest.mark.parametrize(
    ("changes", "word"), [({"qk_norm": "rms_head"}, "rms_hidden"), ({"qk_gain_init": (0.0, 1.0)}, "0.0")]
)
def test_gain_init_refuses_what_cannot_have_it(changes: dict[str, object], word: str) -> None:
    """Shared gains cannot differ by head; a gain of 0 would switch a head off."""
    with pytest.raises(ValueError, match=f"qk_gain_init.*{word}"):
        dataclasses.replace(load_model_config("dit_debug"), **changes)
