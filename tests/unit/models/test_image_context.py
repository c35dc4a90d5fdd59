"""Cross-attention to an image beside the text, alone and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from tests.harness import run_ranks
from tests.unit.models.cores import BATCH, DenseCore, loss_weight, make_inputs, make_model, sequence_length, tiny_config
from tests.unit.models.test_model_ranks import run_whole, sequence_parallel_rank, strided, tensor_parallel_rank, uneven

pytestmark = pytest.mark.timeout(300)

CONFIG = tiny_config("cross", image_dim=9)


def import_rank(rank: int, world_size: int) -> None:
    """Finding this function is what imports megatron-core on a rank."""


@pytest.fixture(scope="module", autouse=True)
def _ranks_have_imported_megatron() -> None:
    """On a busy machine the import takes longer than ranks wait for one another while they form a group."""
    run_ranks(import_rank, 3, timeout_s=240, backend=None)


def test_cross_attention_adds_that_to_the_image() -> None:
    """Written again: two attentions of the same queries, one output projection."""
    model = make_model(CONFIG)
    attention = model.block.layers[0].cross_attention
    state = dict(attention.named_parameters())
    heads, d = CONFIG.num_heads, CONFIG.heads_dim

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.qk_norm_eps).sqrt() * state[f"{name}.weight"]

    def attend(q: Tensor, context: Tensor, kv: str, k_norm: str) -> Tensor:
        k, v = linear(context, kv).unflatten(-1, (heads, 2, d)).unbind(-2)
        k = norm(k.flatten(-2), k_norm).unflatten(-1, (heads, d))
        probs = (torch.einsum("qbhd,kbhd->bhqk", q, k) * d**-0.5).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", probs, v).flatten(2)

    x, text, image = (torch.randn(n, BATCH, CONFIG.hidden_size, dtype=torch.float64) for n in (7, 5, 3))
    q = norm(linear(x, "linear_q"), "q_norm").unflatten(-1, (heads, d))
    out = attend(q, text, "linear_kv", "k_norm") + attend(q, image, "image_linear_kv", "image_k_norm")
    torch.testing.assert_close(attention(x, text, image), linear(out, "linear_proj"))


def test_image_projection_equals_its_formula() -> None:
    model = make_model(CONFIG)
    assert model.image_proj is not None
    state = dict(model.image_proj.named_parameters())
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    hidden = F.layer_norm(x, (9,), state["norm_in.weight"], state["norm_in.bias"], 1e-5)
    hidden = F.gelu(F.linear(hidden, state["linear_1.weight"], state["linear_1.bias"]))
    hidden = F.linear(hidden, state["linear_2.weight"], state["linear_2.bias"])
    want = F.layer_norm(hidden, (32,), state["norm_out.weight"], state["norm_out.bias"], 1e-5)
    torch.testing.assert_close(model.image_proj(x), want)


@pytest.mark.parametrize("split", ["strided", "uneven"])
def test_sequence_parallel_exchanges_nothing_for_the_image(split: str) -> None:
    """Trap B33: the image is whole on every rank, also where a rank has no tokens."""
    length = sequence_length(CONFIG)
    parts = strided(length, 2) if split == "strided" else uneven(length)
    expected, expected_grads = run_whole(CONFIG, make_inputs(CONFIG, context_len=7))
    ranks = run_ranks(sequence_parallel_rank, len(parts), CONFIG, parts, 7)
    for result in ranks:
        torch.testing.assert_close(result["out"], expected[:, result["video"]])
        assert result["in_forward"] == 2 * CONFIG.num_layers  # of the self-attention core alone
        assert result["all"] == 3 * CONFIG.num_layers
    for name, grad in expected_grads.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(
            sum(result["grads"][name] for result in ranks), grad, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_tensor_parallel_splits_keys_and_values_of_the_image() -> None:
    expected, expected_grads = run_whole(CONFIG, make_inputs(CONFIG))
    ranks = run_ranks(tensor_parallel_rank, 2, CONFIG, True)
    dims, cross = ranks[0]["dims"], "block.layers.0.cross_attention"
    assert [dims[f"{cross}.{name}"] for name in ("image_linear_kv.weight", "image_k_norm.weight")] == [0, 0]
    assert dims["image_proj.linear_2.weight"] is None
    shapes = {name: tuple(p.shape) for name, p in make_model(CONFIG).named_parameters()}
    for result in ranks:
        torch.testing.assert_close(result["out"], expected)
        assert {key: s for key, s in result["shapes"].items() if not key.endswith("_extra_state")} == shapes
    for name, grad in expected_grads.items():
        pieces = [result["grads"][name] for result in ranks]
        joined = pieces[0] if dims[name] is None else torch.cat(pieces, dims[name])
        torch.testing.assert_close(joined, grad, msg=lambda m, n=name: f"{n}: {m}")


def test_recompute_gives_the_same_gradients() -> None:
    expected, expected_grads = run_whole(CONFIG, make_inputs(CONFIG))
    again, grads = run_whole(tiny_config("cross", image_dim=9, recompute="full"), make_inputs(CONFIG))
    torch.testing.assert_close(again, expected)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad)


def _refused(model: VideoDiT, config: DiTConfig, changes: dict[str, Any], message: str) -> None:
    inputs = make_inputs(config, torch.float32)
    with pytest.raises(ValueError, match=message):
        model(**(inputs | changes))


def test_image_context_is_checked() -> None:
    model = VideoDiT(CONFIG, core_attention=DenseCore)
    _refused(model, CONFIG, {"image_context": None}, r"image_context must be given with image_dim: 9; got None")
    for shape in ((BATCH, 3, 8), (1, 3, 9), (3, 9), (BATCH, 0, 9)):
        _refused(model, CONFIG, {"image_context": torch.zeros(shape)}, r"image_context must be \[B, L, image_dim\] = ")
    plain = tiny_config("cross")
    _refused(
        VideoDiT(plain, core_attention=DenseCore),
        plain,
        {"image_context": torch.zeros(BATCH, 3, 9)},
        r"image_context must not be given with image_dim: None; got \[2, 3, 9\]",
    )
    for text in ("none", "joint", "dual_stream"):
        with pytest.raises(ValueError, match=rf"image_dim needs text: cross.*got 9 with text: {text}"):
            tiny_config(text, image_dim=9)


def test_a_new_model_learns_from_the_image() -> None:
    model = VideoDiT(CONFIG, core_attention=DenseCore)
    inputs = make_inputs(CONFIG, torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (model(**inputs) - loss_weight(CONFIG, torch.float32)).square().mean().backward()
        optimizer.step()
    name = "block.layers.0.cross_attention.image_linear_kv.weight"
    gradient = dict(model.named_parameters())[name].grad
    assert gradient is not None
    assert gradient.abs().max() > 0
