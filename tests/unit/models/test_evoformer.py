"""The Evoformer in one process: its parameters, and each sublayer beside loops written from the paper's algorithms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from dbsp_megatron.models.evoformer import Evoformer, EvoformerConfig, load_evoformer_config
from dbsp_megatron.models.evoformer.attention import GatedAttention
from dbsp_megatron.models.evoformer.sublayers import TriangleAttention, TriangleMultiplication
from dbsp_megatron.models.evoformer.track import PAIR_DIMS, Track
from tests.unit.models.cores import randomize

SMALL = EvoformerConfig(
    num_blocks=1, msa_channels=6, pair_channels=5, msa_heads=2, pair_heads=3, head_dim=4, outer_channels=2,
    triangle_channels=3, transition_factor=2,
)  # fmt: skip
SEQUENCES, RESIDUES = 3, 4


def test_af2_has_the_parameters_of_its_description() -> None:
    config = load_evoformer_config("af2_evoformer")
    with torch.device("meta"):
        model = Evoformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 87_837_696
    assert config.num_blocks == 48


def _model() -> Evoformer:
    model = Evoformer(SMALL).double()
    randomize(model)
    return model


def _inputs(masked: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given: dict[str, Any] = {
        "msa": draw(2, SEQUENCES, RESIDUES, SMALL.msa_channels),
        "pair": draw(2, RESIDUES, RESIDUES, SMALL.pair_channels),
        "size": (SEQUENCES, RESIDUES),
    }
    if masked:
        given["msa_mask"] = (draw(2, SEQUENCES, RESIDUES) > -0.8).double()
        given["pair_mask"] = (draw(2, RESIDUES, RESIDUES) > -0.8).double()
        given["msa_mask"][:, 0], given["pair_mask"][:, :, 0] = 1.0, 1.0
    return given


def _norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], module.weight, module.bias)


def _attention(module: GatedAttention, row: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """One row [L, C]: keys [L] of 0 and 1, bias [L, L, heads]."""
    heads = []
    size = module.linear_q.out_features // module.num_heads
    for head in range(module.num_heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = (row @ each.weight[part].T for each in (module.linear_q, module.linear_k, module.linear_v))
        scores = q @ k.T / size**0.5
        if bias is not None:
            scores = scores + bias[..., head]
        weights = scores.masked_fill(keys[None] == 0, float("-inf")).softmax(-1)
        gate = torch.sigmoid(row @ module.linear_gate.weight[part].T + module.linear_gate.bias[part])
        heads.append(gate * (weights @ v))
    return module.linear_out(torch.cat(heads, -1))  # type: ignore[no-any-return]


def _by_loops(model: Evoformer, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
    """One block on one sample, entry by entry."""
    block: Any = model.blocks[0]
    n = range(RESIDUES)
    bias = _norm(block.row.pair_norm, z) @ block.row.linear_bias.weight.T
    x = _norm(block.row.norm, m)
    m = m + torch.stack([_attention(block.row.attention, x[s], m_mask[s], bias) for s in range(SEQUENCES)])
    x = _norm(block.column.norm, m)
    m = m + torch.stack([_attention(block.column.attention, x[:, r], m_mask[:, r], None) for r in n], dim=1)
    inner = torch.relu(block.msa_transition.linear_1(_norm(block.msa_transition.norm, m)))
    m = m + block.msa_transition.linear_2(inner)
    x = _norm(block.outer.norm, m)
    left = block.outer.linear_left(x) * m_mask[..., None]
    right = block.outer.linear_right(x) * m_mask[..., None]
    update = torch.zeros_like(z)
    for i in n:
        for j in n:
            outer = sum(torch.outer(left[s, i], right[s, j]) for s in range(SEQUENCES))
            assert isinstance(outer, Tensor)
            update[i, j] = block.outer.linear_out(outer.flatten()) / (1e-3 + (m_mask[:, i] * m_mask[:, j]).sum())
    z = z + update
    for module in (block.outgoing, block.incoming):
        x = _norm(module.norm, z)
        a = torch.sigmoid(module.gate_left(x)) * module.linear_left(x) * z_mask[..., None]
        b = torch.sigmoid(module.gate_right(x)) * module.linear_right(x) * z_mask[..., None]
        product = torch.zeros(RESIDUES, RESIDUES, SMALL.triangle_channels, dtype=z.dtype)
        for i in n:
            for j in n:
                for k in n:
                    product[i, j] += a[i, k] * b[j, k] if module.outgoing else a[k, i] * b[k, j]
        z = z + torch.sigmoid(module.gate_out(x)) * module.linear_out(_norm(module.center_norm, product))
    for module in (block.starting, block.ending):
        x = _norm(module.norm, z)
        bias, keys = x @ module.linear_bias.weight.T, z_mask
        if not module.starting:
            x, bias, keys = x.transpose(0, 1), bias.transpose(0, 1), keys.T
        update = torch.stack([_attention(module.attention, x[i], keys[i], bias) for i in n])
        z = z + (update if module.starting else update.transpose(0, 1))
    inner = torch.relu(block.pair_transition.linear_1(_norm(block.pair_transition.norm, z)))
    return m, z + block.pair_transition.linear_2(inner)


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_a_block_computes_the_algorithms_of_the_paper(masked: bool) -> None:
    model, given = _model(), _inputs(masked)
    msa, pair = model(**given)
    for sample in range(2):
        masks = [
            given[f"{name}_mask"][sample] if masked else torch.ones_like(given[name][sample, ..., 0])
            for name in ("msa", "pair")
        ]
        wanted = _by_loops(model, given["msa"][sample], given["pair"][sample], *masks)
        for got, expected in zip((msa[sample], pair[sample]), wanted, strict=True):
            # Residues that are masked everywhere attend to all alike, or to nothing.
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9, equal_nan=False)


@pytest.mark.diffusers
@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_triangles_compute_what_esmfold_does(first: bool) -> None:
    """Another implementation, of transformers: multiplication out and in, attention at start and end."""
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangleAttention, EsmFoldTriangleMultiplicativeUpdate

    channels = SMALL.triangle_channels
    config = dataclasses.replace(SMALL, pair_channels=channels)
    x = torch.randn(2, RESIDUES, RESIDUES, channels, dtype=torch.float64)
    mask = (torch.rand(2, RESIDUES, RESIDUES, dtype=torch.float64) > 0.2).double()
    mask[:, 0], mask[:, :, 0] = 1.0, 1.0
    track = Track(None, PAIR_DIMS, {"i": RESIDUES, "j": RESIDUES})
    ours: nn.Module = TriangleAttention(config, starting=first).double()
    theirs: nn.Module = EsmFoldTriangleAttention(channels, config.head_dim, config.pair_heads, starting=first).double()
    _take(ours, theirs, {
        "norm": "layer_norm", "linear_bias": "linear", "attention.linear_q": "mha.linear_q",
        "attention.linear_k": "mha.linear_k", "attention.linear_v": "mha.linear_v",
        "attention.linear_gate": "mha.linear_g", "attention.linear_out": "mha.linear_o",
    })  # fmt: skip
    torch.testing.assert_close(ours(x, mask, track, ""), theirs(x, mask), rtol=0, atol=1e-6)
    ours = TriangleMultiplication(config, outgoing=first).double()
    theirs = EsmFoldTriangleMultiplicativeUpdate(SimpleNamespace(pairwise_state_dim=channels), _outgoing=first).double()
    _take(ours, theirs, {
        "norm": "layer_norm_in", "center_norm": "layer_norm_out", "linear_left": "linear_a_p",
        "gate_left": "linear_a_g", "linear_right": "linear_b_p", "gate_right": "linear_b_g",
        "linear_out": "linear_z", "gate_out": "linear_g",
    })  # fmt: skip
    torch.testing.assert_close(ours(x, mask, track, ""), theirs(x, mask), rtol=0, atol=1e-6)


def _take(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """Random weights for theirs, and the same for ours; every parameter of ours is given one."""
    randomize(theirs)
    values = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        module, _, kind = name.rpartition(".")
        parameter.copy_(values.pop(f"{names[module]}.{kind}"))
    assert not values


def test_a_new_model_leaves_its_input_as_it_is() -> None:
    """Last layers start at zero, so that deep stacks begin as the identity."""
    given = _inputs(False)
    msa, pair = Evoformer(SMALL).double()(**given)
    assert torch.equal(msa, given["msa"])
    assert torch.equal(pair, given["pair"])


def test_wrong_descriptions_and_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="msa_heads must be an integer >= 1"):
        dataclasses.replace(SMALL, msa_heads=0)
    with pytest.raises(ValueError, match="recompute must be none or full"):
        dataclasses.replace(SMALL, recompute="some")  # type: ignore[arg-type]
    (tmp_path / "odd.yaml").write_text("num_blocks: 1\nmsa_channels: 2\npair_channels: 2\nodd: 3\n")
    with pytest.raises(ValueError, match="unknown keys odd"):
        load_evoformer_config(tmp_path / "odd.yaml")
    (tmp_path / "odd.yaml").write_text("num_blocks: 1\n")
    with pytest.raises(ValueError, match="lacks msa_channels, pair_channels"):
        load_evoformer_config(tmp_path / "odd.yaml")
    model, given = _model(), _inputs(True)
    for change, message in (
        ({"size": (SEQUENCES, RESIDUES + 1)}, "msa must be"),
        ({"pair": given["pair"][:, :2]}, "pair must be"),
        ({"msa_mask": given["msa_mask"][:, :1]}, "msa_mask must be whole"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given | change)
