"""Dry runs on shapes leave nothing in the model, and examples have to tell what is whole; in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbsp_megatron.dsp import Boundary, DspMesh, StageSpec, parallelize, trace

GRID = ("T", "S")


@functools.cache
def _shared_table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


class _Table(nn.Module):
    """Adds a table that is made at first use and kept."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep, self.calls = keep, 0
        self.made: Tensor | None = None
        self.by_length: dict[int, Tensor] = {}
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self._table(x.shape[2])[:, None]

    def _table(self, length: int) -> Tensor:
        if self.keep == "function":
            return _shared_table(length)
        if self.keep == "attribute":
            self.made = torch.arange(length, dtype=torch.float32) if self.made is None else self.made
            return self.made
        if self.keep == "dict":
            return self.by_length.setdefault(length, torch.arange(length, dtype=torch.float32))
        if self.keep == "list":
            if not self.all:
                self.all.append(torch.arange(length, dtype=torch.float32))
            return self.all[0]
        if not hasattr(self, "buffer"):
            self.register_buffer("buffer", torch.arange(length, dtype=torch.float32), persistent=False)
        return self.get_buffer("buffer")


class _Model(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.table = _Table(keep)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.table(x)
        return y


def _prepare(model: nn.Module, way: str, x: Tensor) -> Any:
    stages = [StageSpec(modules="table", needs={"S"})]
    if way == "trace":
        options: Any = {"entries": {"x": "B T S C"}, "example": {"x": x}}
        return trace(model, DspMesh(None), grid=GRID, stages=stages, **options)
    parallelize(model, DspMesh(None), grid=GRID, entries=[Boundary()], example=(x,), stages=stages)
    return model


@pytest.mark.parametrize("way", ["parallelize", "trace"])
@pytest.mark.parametrize("keep", ["attribute", "dict", "list", "buffer"])
def test_tables_that_modules_keep_are_not_those_of_the_dry_run(keep: str, way: str) -> None:
    x = torch.ones(1, 2, 4, 3)
    model = _Model(keep)
    before = list(model.buffers())
    run = _prepare(model, way, x)
    assert model.table.calls == 0
    assert list(model.buffers()) == before
    out = run(x)
    assert type(out) is Tensor
    assert torch.equal(out, _Model(keep)(x))


@pytest.mark.parametrize("way", ["parallelize", "trace"])
def test_tables_that_functions_keep_are_refused(way: str) -> None:
    _shared_table.cache_clear()
    x = torch.ones(1, 2, 4, 3)
    with pytest.raises(ValueError, match=r"keeps a tensor of the dry run.*clear that cache.*fake=False"):
        _prepare(_Model("function"), way, x)
    _shared_table.cache_clear()
    # A real call before the dry run leaves real tables.
    want = _Model("function")(x)
    assert torch.equal(_prepare(_Model("function"), way, x)(x), want)


class _Sum(nn.Module):
    """Adds a side input; its linear layer works along the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        y: Tensor = self.mix(self.linear(x + side))
        return y


def test_examples_and_dims_of_a_trace_are_checked() -> None:
    def traced(x: Tensor, tensor: str = "B T S C", **example: Tensor) -> Any:
        stages = [StageSpec(modules="mix", needs={"S"}, tensor=tensor)]
        entries, shown = {"x": tensor}, {"x": x, **example}
        return trace(_Sum(), DspMesh(None), grid=GRID, entries=entries, example=shown, tensor=tensor, stages=stages)

    x = torch.ones(2, 3, 5, 4)
    with pytest.raises(ValueError, match=r"example lacks \['side'\]"):
        traced(x)
    with pytest.raises(ValueError, match=r"with 1 entry of \['T'\] the example does not tell"):
        traced(x[:, :1], side=torch.ones(1, 1, 1, 4))
    with pytest.raises(ValueError, match=r"'linear' \(linear\) does not work entry by entry"):
        traced(torch.ones(2, 5, 3, 4), "B C T S", side=torch.ones(1, 5, 1, 1))
    assert traced(x, side=torch.ones(1, 1, 1, 4))(x, x[:1, :1, :1]).shape == x.shape
