"""A converted model computes what that of diffusers computes, also when it is split over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import DenseMask
from dbsp_megatron.models.convert import load_diffusers, load_weights
from tests.harness import run_ranks
from tests.unit.models.convert.cases import (
    CASES,
    as_tokens,
    conversion_of,
    make_inputs,
    make_theirs,
    our_inputs,
    run_theirs,
    save_theirs,
)
from tests.unit.models.cores import DenseCore

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]


def _expected(name: str, theirs: object) -> tuple[dict[str, Tensor], Tensor]:
    case = CASES[name]
    model = conversion_of(case).model
    inputs = make_inputs(case, model)
    return inputs, as_tokens(case, model, run_theirs(case, theirs, inputs))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_load_diffusers_computes_what_diffusers_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = save_theirs(case, tmp_path)
    inputs, expected = _expected(name, theirs)
    assert expected.std() > 0.1
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    ours = load_diffusers(tmp_path, core_attention=DenseCore)
    found = ours(**our_inputs(case, ours.dit_config, inputs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["wan i2v", "cogvideox i2v"])
@torch.no_grad()
def test_every_tensor_shows_in_the_output(name: str, tmp_path: Path) -> None:
    """The comparison above would pass on a tensor whose rows are in another order if the output did not show it."""
    case = CASES[name]
    theirs = save_theirs(case, tmp_path)
    inputs, expected = _expected(name, theirs)
    ours = load_diffusers(tmp_path, core_attention=DenseCore)
    arguments = our_inputs(case, ours.dit_config, inputs)
    for parameter_name, parameter in ours.named_parameters():
        kept = parameter.clone()
        parameter.copy_(kept.roll(1, 0 if len(kept) > 1 else 1))
        assert (ours(**arguments) - expected).abs().max() > 3e-3, parameter_name
        parameter.copy_(kept)
    torch.testing.assert_close(ours(**arguments), expected, rtol=1e-4, atol=1e-4)


def _split_rank(rank: int, world_size: int, name: str, folder: str, axis: str) -> tuple[Tensor, Tensor]:
    """Positions and output of this rank's video tokens."""
    case = CASES[name]
    if axis == "tensor":
        groups = ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None)
        model = load_diffusers(folder, pg_collection=groups, core_attention=DenseCore)
        inputs = our_inputs(case, model.dit_config, make_inputs(case, model.dit_config))
        with torch.no_grad():
            return torch.arange(0), model(**inputs)
    sp = SequenceParallel(
        SequenceParallelConfig(strategy="dbsp", ulysses_degree=world_size, ring_degree=1, block_size=4)
    )
    model = load_diffusers(folder, sp=sp)
    text = model.dit_config.sequence_text_len
    layout = sp.layout(text + case.grid[0] * case.grid[1] * case.grid[2])
    inputs = our_inputs(case, model.dit_config, make_inputs(case, model.dit_config), layout.positions)
    sp.begin_step(0)
    with torch.no_grad(), sp.use(layout=layout, mask=DenseMask(), grid=case.grid):
        out = model(**inputs)
    sp.destroy()
    return layout.positions[layout.positions >= text] - text, out


@pytest.mark.parametrize("name", ["wan i2v", "cogvideox wide", "cogvideox i2v", "cogvideox 2b"])
def test_converted_models_on_two_ranks_equal_diffusers(name: str, tmp_path: Path) -> None:
    """Tensor parallel ranks keep slices of the same weights, sequence parallel ones (U = 2) their tokens."""
    _, expected = _expected(name, save_theirs(CASES[name], tmp_path))
    for _, out in run_ranks(_split_rank, 2, name, str(tmp_path), "tensor", timeout_s=240):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    results = run_ranks(_split_rank, 2, name, str(tmp_path), "sequence", timeout_s=240)
    assert sorted(torch.cat([video for video, _ in results]).tolist()) == list(range(expected.shape[1]))
    for video, out in results:
        torch.testing.assert_close(out, expected[:, video], rtol=1e-4, atol=1e-4)


def test_load_weights_names_what_does_not_fit(tmp_path: Path) -> None:
    case = CASES["wan t2v"]
    theirs, conversion = make_theirs(case).state_dict(), conversion_of(case)
    save_theirs(case, tmp_path)
    model = load_diffusers(tmp_path, core_attention=DenseCore)
    tensors = dict(conversion.to_ours(lambda name: theirs[name]))
    with pytest.raises(ValueError, match=r"lacks output.table"):
        load_weights(model, ((name, tensor) for name, tensor in tensors.items() if name != "output.table"))
    with pytest.raises(ValueError, match=r"has extra, which this model has no place for"):
        load_weights(model, [*tensors.items(), ("extra", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"output.table must have the shape \[2, 56\].*got \[56, 2\]"):
        load_weights(model, (tensors | {"output.table": torch.zeros(56, 2)}).items())
