"""VideoDiT over several ranks: sequence parallel and tensor parallel results equal one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear
from dbsp_megatron.models.dit.model import VideoDiT
from tests.harness import run_ranks
from tests.megatron_on_cpu import megatron_on_cpu
from tests.unit.models.cores import (
    MODES,
    DenseCore,
    GatherCore,
    gradients,
    loss_weight,
    make_inputs,
    make_model,
    randomize,
    sequence_length,
    tiny_config,
)

pytestmark = pytest.mark.timeout(300)


def import_rank(rank: int, world_size: int) -> None:
    """Finding this function is what imports megatron-core on a rank."""


@pytest.fixture(scope="module", autouse=True)
def _ranks_have_imported_megatron() -> None:
    """On a busy machine the import takes longer than ranks wait for one another while they form a group."""
    run_ranks(import_rank, 3, timeout_s=240, backend=None)


def run_whole(config: DiTConfig, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients in one process."""
    model = make_model(config)
    out = model(**inputs)
    (out * loss_weight(config)).sum().backward()
    return out.detach(), gradients(model)


@contextmanager
def noted_collectives() -> Iterator[list[str]]:
    """Notes every collective of this process while it is open."""
    seen: list[str] = []

    def noting(name: str, original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast"):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        yield seen


def sequence_parallel_rank(
    rank: int, world_size: int, config: DiTConfig, parts: list[list[int]], context_len: int | None
) -> dict[str, Any]:
    """One rank's outputs, gradients and number of collectives; the core attention is the only one to communicate."""
    whole = make_inputs(config, context_len=context_len)
    positions = torch.tensor(parts[rank], dtype=torch.int64)
    video = positions[positions >= config.sequence_text_len] - config.sequence_text_len
    model = make_model(config, GatherCore)
    with noted_collectives() as seen:
        out = model(**(whole | {"positions": positions, "video_tokens": whole["video_tokens"][:, video]}))
        in_forward = len(seen)
        (out * loss_weight(config)[:, video]).sum().backward()
    grads = gradients(model)
    return {"video": video, "out": out.detach(), "grads": grads, "in_forward": in_forward, "all": len(seen)}


def strided(length: int, world_size: int) -> list[list[int]]:
    return [list(range(rank, length, world_size)) for rank in range(world_size)]


def uneven(length: int) -> list[list[int]]:
    """Rank 0 holds some text only, rank 1 nothing, rank 2 the rest."""
    return [[0, 1], [], list(range(2, length))]


@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("split", ["strided", "uneven"])
def test_sequence_parallel_equals_one_process(text: str, split: str) -> None:
    """Traps B23, B25, B31, B33: positions, joint text and replicated context, also on ranks without tokens."""
    config = tiny_config(text)
    length = sequence_length(config)
    parts = strided(length, 2) if split == "strided" else uneven(length)
    context_len = 7 if text == "cross" else None
    expected, expected_grads = run_whole(config, make_inputs(config, context_len=context_len))
    ranks = run_ranks(sequence_parallel_rank, len(parts), config, parts, context_len)
    for result in ranks:
        torch.testing.assert_close(result["out"], expected[:, result["video"]])
        # The core gathers lengths and keys once per layer and reduces once in the backward; nothing else communicates.
        assert result["in_forward"] == 2 * config.num_attention_layers
        assert result["all"] == 3 * config.num_attention_layers
    for name, grad in expected_grads.items():
        torch.testing.assert_close(
            sum(result["grads"][name] for result in ranks), grad, msg=lambda m, n=name: f"{n}: {m}"
        )


def tensor_parallel_rank(rank: int, world_size: int, config: DiTConfig, use_parallel_state: bool) -> dict[str, Any]:
    """One tensor-parallel rank: output, gradients, how they are split, initial weights, checkpoint shapes."""
    if use_parallel_state:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        model = VideoDiT(config, core_attention=DenseCore)
    else:
        groups = ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None)
        model = VideoDiT(config, core_attention=DenseCore, pg_collection=groups)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = model.double()
    randomize(model, rank, world_size)
    out = model(**make_inputs(config))
    (out * loss_weight(config)).sum().backward()
    dims = {
        name: p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        for name, p in model.named_parameters()
    }
    shapes: dict[str, tuple[int, ...]] = {}
    if use_parallel_state:
        sharded = model.sharded_state_dict()
        shapes = {key: tuple(value.global_shape) for key, value in sharded.items() if hasattr(value, "global_shape")}
        parallel_state.destroy_model_parallel()
    return {"out": out.detach(), "grads": gradients(model), "dims": dims, "initial": initial, "shapes": shapes}


@pytest.mark.parametrize("text", MODES)
def test_tensor_parallel_equals_one_process(text: str) -> None:
    config = tiny_config(text)
    expected, expected_grads = run_whole(config, make_inputs(config))
    initial = dict(VideoDiT(config, core_attention=DenseCore).named_parameters())
    ranks = run_ranks(tensor_parallel_rank, 2, config, True)
    dims = ranks[0]["dims"]
    assert any(dim is not None for dim in dims.values())
    for result in ranks:
        torch.testing.assert_close(result["out"], expected)
        # The checkpoint sees whole tensors, whatever the split.
        assert {key: shape for key, shape in result["shapes"].items() if not key.endswith("_extra_state")} == {
            name: tuple(parameter.shape) for name, parameter in initial.items()
        }
    for name, grad in expected_grads.items():
        for key, whole in (("grads", grad), ("initial", initial[name].detach())):
            pieces = [result[key][name] for result in ranks]
            if dims[name] is None:
                assert torch.equal(pieces[0], pieces[1]), name
                joined = pieces[0]
            else:
                joined = torch.cat(pieces, dims[name])
            torch.testing.assert_close(joined, whole, msg=lambda m, n=name: f"{n}: {m}")


def test_tensor_parallel_works_with_given_groups() -> None:
    """Megatron's parallel_state need not be initialised."""
    config = tiny_config("cross")
    expected, _ = run_whole(config, make_inputs(config))
    for result in run_ranks(tensor_parallel_rank, 2, config, False):
        torch.testing.assert_close(result["out"], expected)


def odd_inputs(config: DiTConfig) -> dict[str, Any]:
    """Inputs of an odd number of tokens, the last one left out if need be."""
    inputs = make_inputs(config)
    count = len(inputs["positions"])
    short = {"positions": inputs["positions"][: count - 1], "video_tokens": inputs["video_tokens"][:, :-1]}
    return inputs if count % 2 else inputs | short


def shared_rows_rank(rank: int, world_size: int, config: DiTConfig) -> dict[str, Any]:
    """One of two tensor-parallel ranks that share out the tokens between matrices."""
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world_size, create_gloo_process_groups=False
        )
        model = VideoDiT(config, core_attention=DenseCore, sequence_parallel=True).double()
        randomize(model, rank, world_size)
        inputs = odd_inputs(config)
        out = model(**inputs)
        (out * loss_weight(config)[:, : out.shape[1]]).sum().backward()
        grads, dims = {}, {}
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad)
            grads[name] = p.grad
            dims[name] = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
    return {"out": out.detach(), "grads": grads, "dims": dims}


@pytest.mark.parametrize("text", ["none", "cross", "joint"])
def test_rows_shared_by_tensor_parallel_ranks_equal_one_process(text: str) -> None:
    """Megatron's sequence_parallel, with tokens that do not divide, text and video of their own modulation."""
    config = tiny_config(text)
    model, inputs = make_model(config), odd_inputs(config)
    expected = model(**inputs)
    (expected * loss_weight(config)[:, : expected.shape[1]]).sum().backward()
    expected_grads = gradients(model)
    ranks = run_ranks(shared_rows_rank, 2, config)
    for result in ranks:
        torch.testing.assert_close(result["out"], expected.detach())
    for name, grad in expected_grads.items():
        dim = ranks[0]["dims"][name]
        parts = [result["grads"][name] for result in ranks]
        if dim is None:
            torch.testing.assert_close(parts[0], parts[1], msg=lambda m, n=name: f"{n}: {m}")
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        torch.testing.assert_close(whole, grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("text", "changes"), [("dual_stream", {}), ("none", {"coarse_branch": True})])
def test_shared_rows_are_refused_where_they_would_be_unequal(text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sequence_parallel must be off"):
        VideoDiT(tiny_config(text, **changes), core_attention=DenseCore, sequence_parallel=True)


def refused_rank(rank: int, world_size: int, config: DiTConfig, group: str) -> str:
    groups = ProcessGroupCollection(**({"tp": None, "cp": None, "pp": None} | {group: dist.group.WORLD}))
    try:
        VideoDiT(config, core_attention=DenseCore, pg_collection=groups)
    except ValueError as error:
        return str(error)
    return ""


def test_video_dit_refuses_heads_that_tensor_parallelism_cannot_split() -> None:
    messages = run_ranks(refused_rank, 2, tiny_config("none", num_kv_heads=1), "tp")
    assert all("num_kv_heads must be divisible by the tensor-parallel size 2; got 1" in text for text in messages)


def test_video_dit_refuses_layers_that_stages_cannot_share() -> None:
    messages = run_ranks(refused_rank, 2, tiny_config("none", num_layers=3), "pp")
    assert all("divisible by the pipeline-parallel size 2; got 3" in text for text in messages)


def pipeline_rank(rank: int, world_size: int, config: DiTConfig) -> dict[str, Any]:
    """One of two stages: hidden states go forth, their gradient comes back."""
    groups = ProcessGroupCollection(tp=None, cp=None, pp=dist.group.WORLD)
    model = VideoDiT(config, core_attention=DenseCore, pg_collection=groups).double()
    initial = {model.global_name(name): p.detach().clone() for name, p in model.named_parameters()}
    whole = dict(make_model(config).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[model.global_name(name)])
    inputs = make_inputs(config)
    hidden = torch.zeros(
        sequence_length(config), len(inputs["timestep"]), config.hidden_size, dtype=torch.float64, requires_grad=True
    )
    if rank == 0:
        out = model(**inputs)
        dist.send(out.detach(), 1)
        dist.recv(hidden.data, 1)
        out.backward(hidden.data)
    else:
        dist.recv(hidden.data, 0)
        model.set_input_tensor([hidden])
        out = model(**inputs)
        (out * loss_weight(config)).sum().backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, 0)
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if getattr(parameter, "pipeline_parallel", False):
            dist.all_reduce(parameter.grad)
        grads[model.global_name(name)] = parameter.grad
    shared = sorted(name for name, p in model.named_parameters() if getattr(p, "shared", False))
    return {"out": out.detach(), "grads": grads, "initial": initial, "shared": shared}


@pytest.mark.parametrize("text", MODES)
def test_pipeline_stages_equal_one_process(text: str) -> None:
    """Outputs, all gradients (conditioning summed over its copies), initial weights by their names in the whole."""
    config = tiny_config(text)
    expected, expected_grads = run_whole(config, make_inputs(config))
    first, last = run_ranks(pipeline_rank, 2, config)
    torch.testing.assert_close(last["out"], expected)
    together = first["grads"] | last["grads"]
    assert together.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(together[name], grad, msg=lambda m, n=name: f"{n}: {m}")
    fresh = dict(VideoDiT(config, core_attention=DenseCore).double().named_parameters())
    for stage in (first, last):
        for name, values in stage["initial"].items():
            assert torch.equal(values, fresh[name]), name
    assert first["shared"] == []
    assert last["shared"], "the second stage's copies would count twice in the gradient norm"


def layer_dtypes(rank: int, world_size: int, text: str) -> list[list[tuple[torch.dtype, ...]]]:
    """What the linear layers of one process and of two tensor-parallel ranks return under autocast, in order."""
    config = tiny_config(text)
    found = []
    for group in (None, dist.group.WORLD):
        groups = ProcessGroupCollection(tp=group, cp=None, pp=None)
        model = VideoDiT(config, core_attention=DenseCore, pg_collection=groups)
        seen: list[tuple[torch.dtype, ...]] = []
        for module in model.modules():
            if isinstance(module, (ColumnLinear, RowLinear)):
                module.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append((out[0].dtype,)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**make_inputs(config, torch.float32))
        found.append([*seen, (out.dtype,)])
    return found


@pytest.mark.parametrize("text", ["cross", "dual_stream"])
def test_split_layers_return_what_whole_ones_do_under_autocast(text: str) -> None:
    """A bias of fp32, added behind the sum over ranks, would make fp32 of a bf16 product."""
    for alone, split in run_ranks(layer_dtypes, 2, text):
        assert split == alone
        assert set(alone) == {(torch.bfloat16,)}
