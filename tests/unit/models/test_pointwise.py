"""Compiled pointwise parts give what PyTorch gives operation by operation, and keep less for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.models.dit import pointwise
from dbsp_megatron.models.dit.modulation import AdaLayerNormZero
from dbsp_megatron.models.dit.pointwise import compile_pointwise
from tests.unit.models.cores import MODES, gradients, loss_weight, make_inputs, make_model, tiny_config


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile without a code generator, which would take minutes; names of the functions that went through it."""
    names: list[str] = []

    @cache
    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        names.append(function.__name__)
        # The partitioner is that of the default back end: it chooses what is kept.
        return torch.compile(function, dynamic=True, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(pointwise, "_compiled", compiled)
    yield names
    torch.compiler.reset()


def _kept(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """A result, and the bytes of different tensors that autograd keeps for it."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return result, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("text", MODES)
def test_a_compiled_model_equals_the_plain_one(text: str, recompute: str, traced: list[str]) -> None:
    """In fp64, with gradients of all parameters."""
    config = tiny_config(text, recompute=recompute)
    plain, compiled = make_model(config).train(), make_model(config).train()
    compiled.load_state_dict(plain.state_dict())
    compile_pointwise(compiled)
    inputs, weight = make_inputs(config), loss_weight(config)
    wanted, found = (model(**inputs) for model in (plain, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for out in (wanted, found):
        (out * weight).sum().backward()
    expected = gradients(plain)
    for name, gradient in gradients(compiled).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert {"_modulated_norm", "_gated_sum", "apply_rotary"} <= set(traced)


def test_lengths_share_what_was_compiled(traced: list[str]) -> None:
    """Ranks hold different numbers of tokens, and clips differ in size."""
    config = tiny_config("none")
    model = make_model(config)
    compile_pointwise(model)
    positions = torch.arange(18)
    inputs = make_inputs(config)
    counts = []
    for length in (18, 7, 12, 5):
        torch._dynamo.utils.counters.clear()
        part = inputs | {"positions": positions[:length], "video_tokens": inputs["video_tokens"][:, :length]}
        model(**part).sum().backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] > 0
    assert counts[1:] == [0, 0, 0]


def test_a_compiled_layer_keeps_less(traced: list[str]) -> None:
    """In bf16 under autocast: fp32 values inside norms and rotary embedding are made again."""
    config = tiny_config("cross", hidden_size=64, num_heads=4, head_dim=16, ffn_hidden_size=64, qk_norm="rms_hidden")
    model = make_model(config, dtype=torch.float32).train()
    inputs = make_inputs(config, torch.float32)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = model(**inputs)
        return out

    wanted, before = _kept(run)
    compile_pointwise(model)
    found, after = _kept(run)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert after < 0.8 * before


def test_functions_stay_as_they_are_unless_asked() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    assert pointwise.pointwise(double, False) is double
    model = make_model(tiny_config("none"))
    assert not any(module.compiles for module in model.modules() if isinstance(module, AdaLayerNormZero))
