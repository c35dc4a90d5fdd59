"""MaskConfig: refusals name the key, the rule and the value."""

from __future__ import annotations

from typing import Any

import pytest

from dbsp_megatron import MaskConfig


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"method": "topk9"}, "method", "topk9"),
        ({"top_p": 0.0}, "top_p", "0.0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_p": float("nan")}, "top_p", "nan"),
        ({"min_blocks": 0}, "min_blocks", "0"),
        ({"dense_layers": -1}, "dense_layers", "-1"),
        ({"dense_steps": -2}, "dense_steps", "-2"),
    ],
)
def test_mask_config_refuses_values_out_of_range(options: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValueError, match=key) as error:
        MaskConfig(**options)
    assert value in str(error.value)


def test_mask_config_is_frozen_and_keyword_only() -> None:
    config = MaskConfig()
    with pytest.raises(AttributeError):
        config.top_p = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        MaskConfig("topp")  # type: ignore[misc]
