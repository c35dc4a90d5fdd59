"""Bytes that `tools/explain.py` names are those of real weights, optimizers and saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.models.dit import VideoDiT, load_model_config
from dbsp_megatron.train.ema import Ema
from dbsp_megatron.train.optimizer import build_optimizer
from tools import explain, explain_memory
from tools.explain_layout import token_facts, understand
from tools.explain_masks import expected_masks
from tools.explain_stages import pipeline_ranks
from tools.explain_time import predict_times

DEMO = ["--config", "launch/demo.yaml", "--train.device", "cpu"]


def _facts(*words: str) -> dict[str, Any]:
    return explain.explain([*DEMO, *words])


def _parts(facts: dict[str, Any]) -> dict[str, int]:
    return {part["name"]: part["num_bytes"] for part in facts["memory"]["parts"]}


def test_memory_of_weights_and_optimizer_is_exact() -> None:
    parts = _parts(_facts("--world-size", "4"))
    model = VideoDiT(load_model_config("dit_debug"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(OptimConfig(), model.named_parameters())
    optimizer.step()

    def size(tensors: Sequence[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    parameters = list(model.parameters())
    moments = [x for state in optimizer.state.values() for name, x in state.items() if name != "step"]
    assert parts["weights"] == size(parameters)
    assert parts["gradients"] == size([p.grad for p in parameters if p.grad is not None])
    assert parts["optimizer"] == size(moments)
    assert parts["moving average"] == size(list(Ema(model.named_parameters(), 0.9).tensors.values()))
    facts = _facts("--world-size", "4", "--optim.name", "sgd", "--train.ema_decay", "0")
    assert not {"optimizer", "moving average"} & set(_parts(facts))
    assert facts["run"]["checkpoint_bytes"] == size(parameters)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["dit_debug", "cross", "dual"])
def test_memory_of_activations_is_that_of_real_tensors(name: str, bf16: bool) -> None:
    small = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_layers": 3, "in_channels": 3, "rope_axes": None}
    model = load_model_config("dit_debug")
    if name == "cross":
        model = replace(model, **small, text="cross", text_dim=8, text_len=5)
    elif name == "dual":
        model = replace(model, **small, text="dual_stream", text_dim=8, text_len=5, num_single_layers=2)
    tokens = token_facts(understand(parse_train(DEMO).config, 4))
    text = model.sequence_text_len
    tokens = replace(tokens, num_tokens=60 + text, text_tokens=text, tokens=(60 + text,))
    saved = explain_memory.saved_by_model(model, tokens, 2, bf16=bf16)
    module = VideoDiT(model, core_attention=explain_memory._NoAttention).train()
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    context = None if model.text == "none" else torch.zeros(2, model.text_len, 8)
    inputs = torch.zeros(2, 60, model.patch_dim), torch.zeros(2)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = module(*inputs, grid=(60, 1, 1), positions=torch.arange(60 + text), context=context)
    real = sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in weights)
    assert out.shape[1] == 60
    assert saved.fixed + saved.layers == pytest.approx(real, rel=0.01)
    assert saved.layers > saved.layer > 0


def test_memory_of_attention_is_that_of_real_tensors() -> None:
    alone = ["--sp.strategy", "none", "--sp.ulysses_degree", "1", "--sp.ring_degree", "1"]
    situation = understand(parse_train([*DEMO, *alone]).config, 1)
    tokens = token_facts(situation)
    times = predict_times(situation, expected_masks(situation))
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=16))
    layout = sp.layout(seqlen=640, block_size=16)
    q, k, v = (torch.randn(2, 640, 6, 16, requires_grad=True) for _ in range(3))
    mask = BlockMask(torch.ones(1, 6, 40, 40, dtype=torch.bool), 16, 16, 640, 640)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = sp.attention(q, k, v, mask=mask, layer=0)
    assert layout.num_local == out.shape[1]
    floats = [x for x in kept.values() if x.is_floating_point()]
    real = sum(x.untyped_storage().nbytes() for x in floats)
    assert explain_memory.attention_bytes(situation, tokens, times.plan) == pytest.approx(real, rel=0.01)


def test_recompute_keeps_less() -> None:
    words = ["--world-size", "4", "--train.precision", "bf16"]
    usual, some, less = (_facts(*words, "--train.recompute", kind) for kind in ("false", "selective", "true"))
    assert less["memory"]["total_bytes"] < some["memory"]["total_bytes"] < usual["memory"]["total_bytes"]
    assert _parts(some)["attention, kept"] > _parts(usual)["attention, kept"]
    # 160 tokens x 2 samples x 96 channels of each of 4 layers, and what the first and last layers keep.
    assert _parts(less)["layer inputs"] > 4 * 160 * 2 * 96 * 4


PIPELINE = ["--world-size", "8", "--train.engine", "megatron", "--train.global_batch_size", "16"]
PIPELINE += ["--sp.ulysses_degree", "2", "--sp.ring_degree", "1", "--parallel.pipeline_parallel_size", "2"]


def test_pipeline_ranks_hold_their_layers_and_micro_batches() -> None:
    """Four ranks of two stages each, of 16 layers; P = 4, V = 2: rank 0 begins with 2 * 3 + 4 passes."""
    ranks = pipeline_ranks(4, 2, 16, 8)
    assert [rank.layers for rank in ranks] == [((2 * p, 2 * p + 1), (2 * p + 8, 2 * p + 9)) for p in range(4)]
    assert [rank.passes for rank in ranks] == [(7, 4), (5, 4), (4, 3), (4, 1)]
    assert [rank.num_kept for rank in ranks] == [22, 18, 14, 10]
    assert [rank.ends_kept(8) for rank in ranks] == [7, 0, 0, 1]
    assert ranks[0].kept([1] * 8 + [10] * 8) == 7 * 2 + 4 * 20
    # Never more passes than the step has; one rank without a pipeline keeps one.
    assert [rank.passes for rank in pipeline_ranks(4, 2, 16, 4)] == [(4, 4), (4, 4), (4, 3), (4, 1)]
    assert [rank.passes for rank in pipeline_ranks(4, 1, 16, 2)] == [(2,), (2,), (2,), (1,)]
    assert [rank.passes for rank in pipeline_ranks(1, 1, 16, 1)] == [(1,)]


def test_memory_is_that_of_the_pipeline_rank_that_keeps_most() -> None:
    plain, virtual = _facts(*PIPELINE), _facts(*PIPELINE, "--parallel.virtual_pipeline_parallel_size", "2")
    for facts, layers, passes in (
        (plain, [((0, 1),), ((2, 3),)], [(2,), (1,)]),
        (virtual, [((0, 0), (2, 2)), ((1, 1), (3, 3))], [(3, 2), (2, 1)]),
    ):
        assert [rank["layers"] for rank in facts["pipeline"]] == layers
        assert [rank["passes"] for rank in facts["pipeline"]] == passes
        totals = [rank["total_bytes"] for rank in facts["pipeline"]]
        assert facts["memory"]["total_bytes"] == max(totals) == totals[0] > totals[1]
    # Attention of two layers of two micro-batches, of five layers interleaved.
    assert _parts(virtual)["attention, kept"] * 4 == _parts(plain)["attention, kept"] * 5


def test_text_tells_of_stages_and_of_compiled_layers(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DEMO, *PIPELINE, "--parallel.virtual_pipeline_parallel_size", "2", "--train.compile", "true"]
    assert explain.main(words) == 0
    text = capsys.readouterr().out
    for said in (
        "8 = 2 data x 2 sequence parallel x 2 pipeline ranks, 1 node(s) of 8",
        "2 stages on each rank in turns (interleaved)",
        "0     0, 2    3 + 2",
        "norms, modulation and rotary embedding; the first step takes longer",
        "5 layers of micro-batches under way on pipeline rank 0",
        "without train.compile, which keeps less",
    ):
        assert said in text, said
    plan = parse_train(words).config.validate(8).describe()
    assert "4 stages of 1 layer, 2 on each rank in turns (interleaved)" in plan
    assert "norms, modulation and rotary embedding (train.compile)" in plan
    plan = parse_train([*DEMO, *PIPELINE]).config.validate(8).describe()
    assert "x 2 pipeline stages" in plan
    assert "compile:" not in plan


def test_models_that_attend_to_an_image_are_explained() -> None:
    model = replace(load_model_config("dit_debug"), text="cross", text_dim=8, text_len=5)
    tokens = replace(token_facts(understand(parse_train(DEMO).config, 4)), num_tokens=60, text_tokens=0, tokens=(60,))
    without = explain_memory.saved_by_model(model, tokens, 1, bf16=False)
    found = explain_memory.saved_by_model(replace(model, image_dim=6), tokens, 1, bf16=False)
    # Keys and values of 257 tokens, at least.
    assert found.layer > without.layer + 2 * 257 * 96 * 4
