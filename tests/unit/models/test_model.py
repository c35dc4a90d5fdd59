"""VideoDiT in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron.models.dit.model import VideoDiT
from tests.unit.models.cores import (
    BATCH,
    GRID,
    MODES,
    TEXT_LEN,
    DenseCore,
    gradients,
    loss_weight,
    make_inputs,
    make_model,
    sequence_length,
    tiny_config,
)

NUM_VIDEO = GRID[0] * GRID[1] * GRID[2]


def plain_forward(model: VideoDiT, inputs: dict[str, Any]) -> Tensor:
    """The model with `text: none`, written again with [B, S, H, D] tensors and complex RoPE."""
    config, state = model.dit_config, dict(model.named_parameters())
    d, heads, kv_heads = config.heads_dim, config.num_heads, config.kv_heads

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.norm_eps).sqrt()

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.qk_norm_eps).sqrt() * state[name]

    half = config.time_freq_dim // 2
    angles = inputs["timestep"][:, None] * 1000 * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    emb = linear(
        F.silu(linear(torch.cat((angles.cos(), angles.sin()), -1), "time_embed.linear_1")), "time_embed.linear_2"
    )
    coordinates = torch.cartesian_prod(*(torch.arange(n) for n in GRID)).double()
    frequencies = [
        config.rope_theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n) for n in config.rope_axes_dims
    ]
    phase = torch.cat([coordinates[:, i, None] * frequencies[i] for i in range(3)], -1)
    spin = torch.polar(torch.ones_like(phase), phase)[None, :, None]

    def rotate(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * spin).flatten(-2)

    x = linear(inputs["video_tokens"], "patch_embed")
    for i in range(config.num_layers):
        prefix = f"block.layers.{i}"
        shift, scale, gate = linear(F.silu(emb), f"{prefix}.attention_norm.linear")[:, None].chunk(3, -1)
        mixed = linear(norm(x) * (1 + scale) + shift, f"{prefix}.self_attention.qkv.linear_qkv")
        mixed = mixed.view(BATCH, NUM_VIDEO, kv_heads, heads // kv_heads + 2, d)
        q = rotate(rms(mixed[:, :, :, :-2].flatten(2, 3), f"{prefix}.self_attention.qkv.q_norm.weight"))
        k = rotate(rms(mixed[:, :, :, -2], f"{prefix}.self_attention.qkv.k_norm.weight"))
        k, v = (y.repeat_interleave(heads // kv_heads, dim=2) for y in (k, mixed[:, :, :, -1]))
        probs = (torch.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", probs, v).flatten(2)
        x = x + gate * linear(out, f"{prefix}.self_attention.linear_proj")
        shift, scale, gate = linear(F.silu(emb), f"{prefix}.mlp_norm.linear")[:, None].chunk(3, -1)
        hidden = F.gelu(linear(norm(x) * (1 + scale) + shift, f"{prefix}.mlp.linear_fc1"), approximate="tanh")
        x = x + gate * linear(hidden, f"{prefix}.mlp.linear_fc2")
    shift, scale = linear(F.silu(emb), "output.linear")[:, None].chunk(2, -1)
    return linear(norm(x) * (1 + scale) + shift, "output.proj")


def test_video_dit_equals_a_plain_rewrite() -> None:
    config = tiny_config("none")
    model, inputs = make_model(config), make_inputs(config)
    # The model keeps its rotary tables in fp32.
    torch.testing.assert_close(model(**inputs), plain_forward(model, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", MODES)
def test_video_dit_runs_forward_and_backward_without_any_process_group(text: str) -> None:
    """Trap B121: one process needs no torch.distributed."""
    config = tiny_config(text)
    model, inputs = make_model(config, dtype=torch.float32), make_inputs(config, torch.float32)
    inputs["video_tokens"].requires_grad_()
    out = model(**inputs)
    assert out.shape == (BATCH, NUM_VIDEO, 2 * 4)
    (out * loss_weight(config, torch.float32)).sum().backward()
    grads = {**gradients(model), "video_tokens": inputs["video_tokens"].grad}
    unused = [name for name, grad in grads.items() if not (grad.isfinite().all() and grad.abs().max() > 0)]
    assert not unused
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("text", MODES)
def test_new_video_dit_predicts_zero_and_its_block_is_the_identity(text: str) -> None:
    config = tiny_config(text)
    model, inputs = VideoDiT(config, core_attention=DenseCore), make_inputs(config, torch.float32)
    seen: list[tuple[Tensor, Tensor]] = []
    model.block.register_forward_hook(lambda _module, args, out: seen.append((args[0], out)))
    out = model(**inputs)
    assert torch.equal(out, torch.zeros_like(out))
    if text != "cross":  # cross-attention has no gate
        assert torch.equal(*seen[0])
    assert seen[0][0].abs().max() > 0.1


@pytest.mark.parametrize("text", MODES)
def test_video_dit_learns_from_a_new_model(text: str) -> None:
    """Zero gates and a zero output layer must not be a fixed point."""
    config = tiny_config(text)
    model, inputs = VideoDiT(config, core_attention=DenseCore), make_inputs(config, torch.float32)
    target = loss_weight(config, torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = (model(**inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses


@pytest.mark.parametrize("text", MODES)
def test_video_dit_follows_positions_in_any_order(text: str) -> None:
    """Traps B23, B25: shuffled tokens with their positions give the shuffled result."""
    config = tiny_config(text)
    model, inputs = make_model(config), make_inputs(config)
    expected = model(**inputs)
    order = torch.randperm(sequence_length(config))
    video = order[order >= config.sequence_text_len] - config.sequence_text_len
    shuffled = inputs | {"positions": order, "video_tokens": inputs["video_tokens"][:, video]}
    torch.testing.assert_close(model(**shuffled), expected[:, video])
    local = inputs | {"positions": torch.arange(sequence_length(config)).roll(1)}
    assert not torch.allclose(model(**local), expected, atol=1e-3)


@pytest.mark.parametrize("text", MODES)
def test_recompute_changes_no_output_and_no_gradient(text: str) -> None:
    config = tiny_config(text)
    results: dict[str, dict[str, torch.Tensor]] = {}
    calls = {}
    for recompute in ("none", "selective", "full"):
        model = make_model(dataclasses.replace(config, recompute=recompute))
        attention = model.block.layers[0].self_attention
        found: list[str] = []
        for name, part in (("core", attention.core_attention), ("projection", attention.qkv)):
            part.register_forward_hook(lambda *_, name=name, found=found: found.append(name))
        out = model(**make_inputs(config))
        (out * loss_weight(config)).sum().backward()
        results[recompute] = {**gradients(model), "out": out.detach()}
        calls[recompute] = [found.count(name) for name in ("core", "projection")]
    assert calls == {"none": [1, 1], "selective": [1, 2], "full": [2, 2]}
    for name, value in results["none"].items():
        assert torch.equal(value, results["full"][name]), name
        # In parts, gradients of a residual are summed in another order.
        torch.testing.assert_close(results["selective"][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("text", MODES)
def test_recompute_keeps_less(text: str) -> None:
    """Bytes of different tensors that autograd keeps; with `selective` q, k, v and out beside the input of a layer."""
    kept = {}
    for recompute in ("none", "selective", "full"):
        config = tiny_config(text, recompute=recompute)
        model, inputs = make_model(config), make_inputs(config)
        weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
        found: dict[int, int] = {}

        def keep(x: torch.Tensor, found: dict[int, int] = found, weights: set[int] = weights) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(**inputs)
        kept[recompute] = sum(found.values())
        del out
    assert kept["full"] < kept["selective"] < 0.8 * kept["none"], kept


@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("autocast", [True, False])
def test_video_dit_in_bf16_stays_near_fp32(text: str, autocast: bool) -> None:
    config = tiny_config(text)
    model, inputs = make_model(config, dtype=torch.float32), make_inputs(config, torch.float32)
    expected = model(**inputs).detach()
    if not autocast:
        model = model.bfloat16()
        for name in inputs.keys() & {"video_tokens", "context"}:
            inputs[name] = inputs[name].bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**inputs)
    (out.float() * loss_weight(config, torch.float32)).sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert (out.float() - expected).norm() < 0.06 * expected.norm()


def test_video_dit_runs_in_inference_mode_between_training_steps() -> None:
    config = tiny_config("joint")
    model, inputs = make_model(config), make_inputs(config)
    with torch.inference_mode():
        sampled = model(**inputs)
    out = model(**inputs)
    out.sum().backward()
    assert torch.equal(sampled, out)


@pytest.mark.parametrize("context_len", [1, 7])
def test_cross_attention_takes_a_context_of_any_length(context_len: int) -> None:
    """Trap B33: the context is not split, so its length is free."""
    config = tiny_config("cross")
    model, inputs = make_model(config), make_inputs(config, context_len=context_len)
    out = model(**inputs)
    inputs["context"] = inputs["context"].flip(1)  # keys have no order
    torch.testing.assert_close(model(**inputs), out)
    inputs["context"] = inputs["context"] + 1
    assert not torch.allclose(model(**inputs), out)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    config = tiny_config("dual_stream")
    torch.manual_seed(1)
    first = VideoDiT(config, core_attention=DenseCore).state_dict()
    torch.manual_seed(2)
    second = VideoDiT(config, core_attention=DenseCore).state_dict()
    other = VideoDiT(dataclasses.replace(config, init_seed=1), core_attention=DenseCore).state_dict()
    tensors = {name for name, value in first.items() if isinstance(value, Tensor)}
    assert all(torch.equal(first[name], second[name]) for name in tensors)
    weight = "block.layers.0.self_attention.qkv.linear_qkv.weight"
    assert not torch.equal(first[weight], other[weight])
    assert not torch.equal(
        first[weight],
        first[weight.replace("qkv.linear", "text_qkv.linear").replace("self_attention.qkv", "self_attention.text_qkv")],
    )
    assert abs(float(first[weight].std()) * config.hidden_size**0.5 - 1) < 0.1


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("none", {"context": torch.zeros(BATCH, 4, 7)}, "context must not be given with text: none"),
        ("cross", {"context": None}, "context must be given with text: cross"),
        ("joint", {"context": torch.zeros(BATCH, TEXT_LEN + 1, 7)}, rf"context must be .* \[{BATCH}, {TEXT_LEN}, 7\]"),
        ("cross", {"context": torch.zeros(BATCH, 4, 6)}, "context must be"),
        ("joint", {"positions": torch.arange(9)}, r"video_tokens must be .* \[2, 4, 12\]"),
        ("none", {"positions": torch.arange(1, NUM_VIDEO + 1)}, "positions must lie in"),
        ("none", {"timestep": torch.tensor([500, 10])}, "timestep must be floating point"),
        ("none", {"timestep": torch.tensor([0.5])}, "timestep must be floating point of shape"),
    ],
)
def test_video_dit_names_what_does_not_fit(text: str, change: dict[str, Any], message: str) -> None:
    config = tiny_config(text)
    model = VideoDiT(config, core_attention=DenseCore)
    with pytest.raises(ValueError, match=message):
        model(**(make_inputs(config, torch.float32) | change))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("text", MODES)
def test_video_dit_on_cuda_equals_cpu(text: str, recompute: str) -> None:
    config = tiny_config(text, recompute=recompute)
    results = []
    for device in ("cpu", "cuda"):
        model = make_model(config).to(device)
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in make_inputs(config).items()}
        out = model(**inputs)
        (out * loss_weight(config).to(device)).sum().backward()
        results.append({name: grad.cpu() for name, grad in gradients(model).items()} | {"out": out.detach().cpu()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("text", MODES)
def test_video_dit_on_cuda_trains_under_bf16_autocast_and_without_tokens(text: str) -> None:
    config = tiny_config(text, recompute="full")
    model = make_model(config, dtype=torch.float32).cuda()
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in make_inputs(config, torch.float32).items()}
    empty = inputs | {"positions": inputs["positions"][:0], "video_tokens": inputs["video_tokens"][:, :0]}
    for given in (inputs, empty):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(**given)
        out.float().square().sum().backward()
        assert out.shape == (BATCH, given["video_tokens"].shape[1], 8)
        assert all(grad.isfinite().all() for grad in gradients(model).values())
