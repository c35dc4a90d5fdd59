"""Tags travel with a tensor object, die with it, and are refused where the shape says otherwise."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dbsp_megatron.dsp.layout import Axis, Layout
from dbsp_megatron.dsp.tags import _tags, layout_of, tag, tag_of, untag

LAYOUT = Layout.sharded((4, 7), 1, Axis("dsp", 2))


def test_tag_stays_with_its_tensor_alone() -> None:
    x = tag(torch.zeros(4, 3, requires_grad=True), LAYOUT, {"dsp": 1})
    assert layout_of(x) == LAYOUT
    assert layout_of(x * 1) is None
    assert layout_of(x.detach()) is None
    assert layout_of(copy.deepcopy(x)) is None
    assert tag_of(untag(x)) is None


@pytest.mark.parametrize("change", ["transpose_", "data"])
def test_tag_is_lost_when_dims_are_exchanged_in_place(change: str) -> None:
    """Their lengths on this rank are equal, so that the shape tells nothing."""
    layout = Layout.sharded((3, 6), 1, Axis("dsp", 2))
    x = tag(torch.zeros(3, 3), layout, {"dsp": 1})
    x.add_(1.0).copy_(torch.ones(3, 3))
    assert layout_of(x) == layout
    if change == "data":
        x.data = torch.zeros(3, 3).t()
    else:
        x.transpose_(0, 1)
    assert layout_of(x) is None


def test_tag_dies_with_its_tensor() -> None:
    before = len(_tags)
    x = tag(torch.zeros(4, 3), LAYOUT, {"dsp": 1})
    assert len(_tags) == before + 1
    del x
    gc.collect()
    assert len(_tags) == before


def test_tagged_tensors_are_saved_as_plain_ones() -> None:
    file = io.BytesIO()
    torch.save(tag(torch.ones(4, 3), LAYOUT, {"dsp": 1}), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), torch.ones(4, 3))


def test_tag_survives_recompute() -> None:
    """The function of a checkpoint sees the tagged tensor again."""
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(layout_of(x))
        return x.sin()

    x = tag(torch.zeros(4, 3, requires_grad=True), LAYOUT, {"dsp": 1})
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [LAYOUT, LAYOUT]


def test_wrong_tags_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives rank \{'dsp': 0\} the shape \[4, 4\], got \[4, 3\]"):
        tag(torch.zeros(4, 3), LAYOUT, {"dsp": 0})
    with pytest.raises(ValueError, match=r"must name every axis.*add \['dsp'\]"):
        tag(torch.zeros(4, 3), LAYOUT, {})
