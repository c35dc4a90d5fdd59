"""Declarations: globs part by part, marked classes, nested and missing stages."""

from __future__ import annotations

import pytest
from torch import nn

from dbsp_megatron.dsp import Boundary, StageSpec, stage
from dbsp_megatron.dsp.specs import find_modules, find_stages, matches


@stage(needs={"T"}, branch=True)
class _Marked(nn.Module):
    pass


def _model() -> nn.Module:
    block = nn.ModuleDict({"spatial": nn.Linear(1, 1), "temporal": _Marked()})
    return nn.ModuleDict({"blocks": nn.ModuleList([block])})


def test_matches_part_by_part() -> None:
    assert matches("blocks.12.spatial", "blocks.*.spatial")
    assert not matches("blocks.1.deep.spatial", "blocks.*.spatial")
    assert not matches("blocks.1", "blocks.*.spatial")
    assert matches("", "")


def test_find_stages_by_name_and_by_mark() -> None:
    found = find_stages(_model(), (StageSpec(modules="blocks.*.spatial", needs={"S"}),))
    assert {name: sorted(spec.needs) for name, (_, spec) in found.items()} == {
        "blocks.0.spatial": ["S"],
        "blocks.0.temporal": ["T"],
    }
    assert found["blocks.0.temporal"][1].branch


def test_a_spec_replaces_a_mark() -> None:
    found = find_stages(_model(), (StageSpec(modules="blocks.*.temporal", needs={"S"}),))
    assert [sorted(spec.needs) for _, spec in found.values()] == [["S"]]


def test_wrong_declarations_are_refused() -> None:
    model = _model()
    with pytest.raises(ValueError, match="no module is called 'block.0'"):
        list(find_modules(model, "block.0"))
    with pytest.raises(ValueError, match="named by two stage specs"):
        find_stages(model, (StageSpec(modules="blocks.*.spatial"), StageSpec(modules="blocks.0.*")))
    with pytest.raises(ValueError, match="lies inside stage"):
        find_stages(model, (StageSpec(modules="blocks.0"),))
    with pytest.raises(ValueError, match="no stage"):
        find_stages(nn.Linear(1, 1), ())
    with pytest.raises(ValueError, match=r"needs \['H'\], expected names of its tensor"):
        StageSpec(modules="x", needs={"H"})
    with pytest.raises(ValueError, match="at='before' is unknown"):
        Boundary(at="before")
