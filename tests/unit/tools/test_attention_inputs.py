"""Dumps of q, k and v, and the sizes that they must have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.tools.tiny_run import BLOCK_SIZE, GRID, SEQLEN, write_dumps
from tools.attention_inputs import DumpedInputs, Geometry, LayerInputs

GEOMETRY = Geometry(grid=GRID, seqlen=SEQLEN, block_size=BLOCK_SIZE)
CPU = torch.device("cpu")


def test_geometry_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="grid .* has 36 tokens, the sequence 35"):
        Geometry(grid=GRID, seqlen=35, block_size=5)
    with pytest.raises(ValueError, match="--block-size must be at least 1, got 0"):
        Geometry(grid=GRID, seqlen=SEQLEN, block_size=0)


def test_visit_shows_every_layer_of_every_sample(tmp_path: Path) -> None:
    paths = write_dumps(tmp_path)
    dumps = DumpedInputs(paths, GEOMETRY, CPU)
    assert (dumps.num_layers, dumps.num_heads) == (2, 4)
    seen: list[LayerInputs] = []
    dumps.visit(seen.append)
    assert [(x.step, x.layer) for x in seen] == [(s, layer) for s in (0, 1) for layer in (0, 0, 1, 1)]
    saved = load_file(paths[1])
    assert torch.equal(seen[-1].q, saved["q.1"][1:])
    assert torch.equal(seen[-2].k, saved["k.1"][:1])
    assert seen[0].v is not None


def test_dumps_refuse_wrong_shapes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass their own --grid"):
        DumpedInputs(write_dumps(tmp_path, seqlen=40), GEOMETRY, CPU)
    tensors = load_file(write_dumps(tmp_path)[0])
    for change, line in (
        ({"k.1": tensors["k.1"][..., :4].contiguous()}, "q.1, k.1, v.1 must be"),
        ({"q.1": tensors["q.1"][:, :, :2].contiguous()}, "H alike in all layers"),
        ({"v.0": tensors["v.0"][:1].contiguous()}, "q.0, k.0, v.0 must be"),
    ):
        save_file(tensors | change, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError, match=line):
            DumpedInputs([tmp_path / "bad.safetensors"], GEOMETRY, CPU)
    save_file({name: x for name, x in tensors.items() if name != "k.1"}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="q.1, k.1, v.1 must be"):
        DumpedInputs([tmp_path / "bad.safetensors"], GEOMETRY, CPU)
    (tmp_path / "bad.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="must be a safetensors file"):
        DumpedInputs([tmp_path / "bad.safetensors"], GEOMETRY, CPU)
