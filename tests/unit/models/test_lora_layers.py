"""Adapters: the gradient of W + alpha / r * B A, frozen weights, merging, and splits over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import TopPMask
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.lora import LoraConfig, is_adapter, trainable_parameters
from dbsp_megatron.models.dit.lora_layers import add_lora, lora_layers, merge_lora, unmerge_lora
from dbsp_megatron.models.dit.model import VideoDiT
from tests.harness import run_ranks
from tests.reference import max_error
from tests.unit.models.cores import (
    GRID,
    MODES,
    DenseCore,
    loss_weight,
    make_inputs,
    randomize,
    sequence_length,
    tiny_config,
)

pytestmark = pytest.mark.timeout(300)

LORA = LoraConfig(rank=3, alpha=5.0)
EVERYWHERE = LoraConfig(rank=3, alpha=5.0, targets=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear"])
"""With the modulation, whose output is gathered over tensor-parallel ranks."""


def adapted(config: DiTConfig, lora: LoraConfig, tp: tuple[int, int] = (0, 1)) -> VideoDiT:
    """A model in fp64 with random weights and adapters; each tensor-parallel rank takes its slices."""
    groups = None if tp[1] == 1 else ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None)
    model = VideoDiT(config, core_attention=DenseCore, pg_collection=groups).double()
    add_lora(model, lora)
    randomize(model, *tp)
    return model


def run(model: VideoDiT, inputs: dict[str, Any], weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of what is trained."""
    out = model(**inputs)
    (out * weight).sum().backward()
    assert not [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    grads = {name: p.grad for name, p in trainable_parameters(model).items()}
    return out.detach(), {name: grad.clone() for name, grad in grads.items() if grad is not None or pytest.fail(name)}


def test_add_lora_changes_nothing_at_first() -> None:
    for text in MODES:
        config = tiny_config(text)
        plain = VideoDiT(config, core_attention=DenseCore)
        randomize(plain)
        model = VideoDiT(config, core_attention=DenseCore)
        randomize(model)
        names = {name for name, _ in model.named_parameters()}
        add_lora(model, LORA)
        inputs = make_inputs(config, torch.float32)
        torch.testing.assert_close(model(**inputs), plain(**inputs))
        for name, layer in lora_layers(model).items():
            x = torch.randn(3, 2, layer.weight.shape[1])
            assert torch.equal(layer(x)[0], plain.get_submodule(name)(x)[0])
        assert {name for name, _ in model.named_parameters() if not is_adapter(name)} == names
        assert set(trainable_parameters(model)) == {name for name, _ in model.named_parameters() if is_adapter(name)}
        per_layer = {"none": 4, "cross": 7, "joint": 4}.get(text)
        # Dual-stream layers have two of each, single-stream layers one.
        assert len(lora_layers(model)) == (2 * per_layer if per_layer else 8 + 4)


def test_add_lora_without_rank_leaves_all_trainable() -> None:
    model = VideoDiT(tiny_config("none"), core_attention=DenseCore)
    add_lora(model, LoraConfig())
    assert not lora_layers(model)
    assert set(trainable_parameters(model)) == {name for name, _ in model.named_parameters()}


def test_add_lora_initial_weights_follow_the_rule_of_matrices() -> None:
    model = VideoDiT(tiny_config("none", hidden_size=96, num_heads=4, head_dim=24), core_attention=DenseCore)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_lora(model, LoraConfig(rank=16), seed=5)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            assert not parameter.any()
        elif name.endswith("lora_a"):
            assert abs(parameter.std().item() * parameter.shape[1] ** 0.5 - 1) < 0.1
        else:
            assert torch.equal(parameter, before[name])
    other = VideoDiT(tiny_config("none", hidden_size=96, num_heads=4, head_dim=24), core_attention=DenseCore)
    add_lora(other, LoraConfig(rank=16), seed=6)
    pairs = zip(lora_layers(model).values(), lora_layers(other).values(), strict=True)
    assert not any(torch.equal(a.lora_a, b.lora_a) for a, b in pairs)


@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_those_of_a_dense_change(text: str, recompute: str) -> None:
    """Autograd of the plain model at W + alpha / r * B A, carried on to A and B by the chain rule."""
    config = tiny_config(text, recompute=recompute)
    model = adapted(config, LORA)
    out, grads = run(model, make_inputs(config), loss_weight(config))
    reference = VideoDiT(config, core_attention=DenseCore).double()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(own[name])
        for name, layer in lora_layers(model).items():
            weight = reference.get_parameter(f"{name}.weight")
            weight.add_(layer.lora_b @ layer.lora_a, alpha=5.0 / 3)
    expected = reference(**make_inputs(config))
    (expected * loss_weight(config)).sum().backward()
    assert max_error(out, expected) < 1e-9
    assert len(grads) == 2 * len(lora_layers(model))
    for name, layer in lora_layers(model).items():
        dense = reference.get_parameter(f"{name}.weight").grad
        assert dense is not None
        for key, want in (("lora_a", layer.lora_b.T @ dense), ("lora_b", dense @ layer.lora_a.T)):
            want = want * (5.0 / 3)
            assert max_error(grads[f"{name}.{key}"], want) < 1e-9 * max(1.0, want.abs().max().item()), f"{name}.{key}"


def test_merge_lora_and_back() -> None:
    config = tiny_config("cross")
    model = adapted(config, LORA).eval()
    weights = {name: layer.weight.clone() for name, layer in lora_layers(model).items()}
    before = model(**make_inputs(config))
    merge_lora(model)
    assert max_error(model(**make_inputs(config)), before) < 1e-12 * before.abs().max()
    assert all(max_error(layer.weight, weights[name]) > 1e-3 for name, layer in lora_layers(model).items())
    with pytest.raises(ValueError, match=r"must be not merged, got 14 that are not so"):
        merge_lora(model)
    with pytest.raises(ValueError, match="call unmerge_lora first"):
        model.train()(**make_inputs(config))
    unmerge_lora(model)
    assert all(max_error(layer.weight, weights[name]) < 1e-12 for name, layer in lora_layers(model).items())
    assert max_error(model(**make_inputs(config)), before) < 1e-12 * before.abs().max()


def test_adapters_beside_bf16_weights_are_kept_in_fp32() -> None:
    config = tiny_config("none")
    model = VideoDiT(config, core_attention=DenseCore).bfloat16()
    add_lora(model, LORA)
    layer = lora_layers(model)["block.layers.0.mlp.linear_fc1"]
    with torch.no_grad():
        layer.lora_b.normal_()
    assert layer.lora_a.dtype == torch.float32
    x = torch.randn(3, 2, 32, dtype=torch.bfloat16)
    out = layer(x)[0]
    want = x.double() @ (layer.weight.double() + 5 / 3 * (layer.lora_b @ layer.lora_a).double()).T
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, atol=0.2, rtol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x.float())[0].double(), want, atol=0.2, rtol=0.02)


def test_modules_to_save_are_trained_beside_the_adapters() -> None:
    config = tiny_config("none", coarse_branch=True)
    model = VideoDiT(config, core_attention=DenseCore)
    add_lora(model, LORA)
    others = {name for name in trainable_parameters(model) if not is_adapter(name)}
    assert others
    assert all(".coarse_branch." in name for name in others)
    model = VideoDiT(config, core_attention=DenseCore)
    add_lora(model, LoraConfig(rank=1, modules_to_save=["output"]))
    others = {name for name in trainable_parameters(model) if not is_adapter(name)}
    assert others == {name for name, _ in model.named_parameters() if name.startswith("output.")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, r"lora.rank must be an integer >= 0, got -1"),
        ({"rank": 2, "alpha": 0.0}, r"lora.alpha must be a positive number, got 0.0"),
        ({"rank": 2, "targets": "linear_qkv"}, r"lora.targets must be a list of names"),
        (
            {"rank": 2, "targets": ["linear_q"]},
            r"lora.targets must name layers of the model \(.*linear_qkv.*'linear_q'",
        ),
        ({"rank": 2, "targets": ["patch_embed"]}, r"lora.targets must name layers of the model"),
        ({"rank": 2, "modules_to_save": ["head"]}, r"lora.modules_to_save must name modules of the model, got 'head'"),
    ],
)
def test_lora_refuses(settings: dict[str, Any], message: str) -> None:
    model = VideoDiT(tiny_config("none"), core_attention=DenseCore)
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraConfig(**settings))
    assert not lora_layers(model)


def test_add_lora_refuses_a_second_time() -> None:
    model = VideoDiT(tiny_config("none"), core_attention=DenseCore)
    add_lora(model, LORA)
    with pytest.raises(ValueError, match="no adapters yet"):
        add_lora(model, LORA)
    with pytest.raises(ValueError, match="call add_lora first"):
        merge_lora(VideoDiT(tiny_config("none"), core_attention=DenseCore))


def tensor_parallel_rank(rank: int, world_size: int, config: DiTConfig, lora: LoraConfig) -> dict[str, Any]:
    """Output, gradients, initial adapters, merged output and checkpoint shapes of one tensor-parallel rank."""
    groups = ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None)
    fresh = VideoDiT(config, core_attention=DenseCore, pg_collection=groups)
    add_lora(fresh, lora)
    initial = {name: p.detach().clone() for name, p in trainable_parameters(fresh).items()}
    model = adapted(config, lora, tp=(rank, world_size))
    out, grads = run(model, make_inputs(config), loss_weight(config))
    dims = {
        name: p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        for name, p in model.named_parameters()
    }
    merge_lora(model)
    merged = model.eval()(**make_inputs(config)).detach()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in lora_layers(model).items():
        sharded = layer.sharded_state_dict(f"{name}.", metadata={"dp_cp_group": _self_group(rank, world_size)})
        shapes |= {key: tuple(value.global_shape) for key, value in sharded.items() if is_adapter(key)}
    return {"out": out, "grads": grads, "initial": initial, "dims": dims, "merged": merged, "shapes": shapes}


def _self_group(rank: int, world_size: int) -> dist.ProcessGroup:
    if not hasattr(_self_group, "made"):
        _self_group.made = [dist.new_group([r]) for r in range(world_size)][rank]  # type: ignore[attr-defined]
    group: dist.ProcessGroup = _self_group.made  # type: ignore[attr-defined]
    return group


@pytest.mark.parametrize(("text", "lora"), [("none", EVERYWHERE), ("cross", LORA), ("dual_stream", LORA)])
def test_tensor_parallel_equals_one_process(text: str, lora: LoraConfig) -> None:
    config = tiny_config(text)
    whole = adapted(config, lora)
    expected, expected_grads = run(whole, make_inputs(config), loss_weight(config))
    fresh = VideoDiT(config, core_attention=DenseCore)
    add_lora(fresh, lora)
    ranks = run_ranks(tensor_parallel_rank, 2, config, lora, timeout_s=200)
    for result in ranks:
        assert max_error(result["out"], expected) < 1e-9
        assert max_error(result["merged"], expected) < 1e-9
        assert result["shapes"] == {name: tuple(p.shape) for name, p in trainable_parameters(whole).items()}
    for name, grad in expected_grads.items():
        dim = ranks[0]["dims"][name]
        for key, want in (("grads", grad), ("initial", fresh.get_parameter(name).detach())):
            pieces = [result[key][name] for result in ranks]
            if dim is None:
                assert torch.equal(pieces[0], pieces[1]), name
            joined = pieces[0] if dim is None else torch.cat(pieces, dim)
            assert max_error(joined, want) < 1e-9 * max(1.0, want.abs().max().item()), f"{key} of {name}"


def sequence_parallel_rank(rank: int, world_size: int, cases: list[tuple[str, str, LoraConfig]]) -> list[str]:
    """What differs between a Ulysses group of two and one process."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    problems = []
    for text, recompute, lora in cases:
        config = tiny_config(text, recompute=recompute)
        found = []
        for degree, group in ((1, alone), (world_size, dist.group.WORLD)):
            settings = SequenceParallelConfig(strategy="dbsp", ulysses_degree=degree, ring_degree=1, block_size=5)
            sp = SequenceParallel(settings, group=group)
            model = VideoDiT(config, sp=sp).double()
            add_lora(model, lora)
            randomize(model)
            layout, inputs = sp.layout(sequence_length(config)), make_inputs(config)
            video = layout.positions[layout.positions >= config.sequence_text_len] - config.sequence_text_len
            inputs |= {"positions": layout.positions, "video_tokens": inputs["video_tokens"][:, video]}
            sp.begin_step(0)
            with sp.use(layout=layout, mask=TopPMask(0.7), grid=GRID):
                out, grads = run(model, inputs, loss_weight(config)[:, video])
            found.append((out, grads, video))
            sp.destroy()
        (want_out, want, everything), (out, grads, video) = found
        if max_error(out, want_out[:, everything.argsort()][:, video]) > 1e-9:
            problems.append(f"{text}: output")
        for name, grad in grads.items():
            dist.all_reduce(grad)
            if max_error(grad, want[name]) > 1e-9 * max(1.0, want[name].abs().max().item()):
                problems.append(f"{text}: {name}")
    return problems


def test_sequence_parallel_gradients_sum_to_those_of_one_process() -> None:
    """With adapters behind the first attention only, whose inputs then have no gradient at all."""
    feed_forward = LoraConfig(rank=2, targets=["linear_fc2"])
    cases = [("none", "none", LORA), ("joint", "full", LORA), ("cross", "full", feed_forward)]
    for problems in run_ranks(sequence_parallel_rank, 2, cases, timeout_s=200):
        assert not problems
