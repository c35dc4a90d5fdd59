"""Attention that gives way on the card: the same numbers, and an exchange that begins before the kernel has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dbsp_megatron.kernels.block_sparse_attention.giving_way import giving_way
from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists, dense_lists
from tests.gpu import test_hopper_attention_cuda as hopper
from tests.reference import nan_filled_memory
from tests.unit.kernels.attention_cases import delta_of, make_data, reference, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _card_and_poison() -> Iterator[None]:
    """Hopper only; what a kernel leaves unwritten reads as NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    with nan_filled_memory():
        yield


@pytest.mark.parametrize("config", hopper.CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["several tiles a program, groups", "mask of samples, table of kv heads", "nothing"])
def test_hopper_attention_that_gives_way_gives_the_same(config: tuple[int, int, int], name: str) -> None:
    """Programs that end early compute every tile once; only sums of dQ may come in another order."""
    case = hopper._case(config, name)
    data = make_data(case, "cuda")
    want = reference(case, data)
    lists = build_lists(data.blocks, transpose=True)
    lse, delta = want[1].float(), delta_of(data, want[0], want[1])
    stays = hopper._forward(case, data, lists), hopper._backward(case, data, lists, lse, delta)
    with giving_way():
        gives_way = hopper._forward(case, data, lists), hopper._backward(case, data, lists, lse, delta)
        half = torch.zeros_like(data.q, dtype=torch.float32), torch.full_like(lse, float("-inf"))
        resumed = hopper._forward(case, data, lists, out=half[0], lse=half[1])
    assert all(torch.equal(x, y) for x, y in zip(gives_way[0], stays[0], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(gives_way[1][1:], stays[1][1:], strict=True))
    assert relative_error(gives_way[1][0], stays[1][0]) < 1e-4
    hopper._check_forward(resumed, want, name)


@pytest.mark.parametrize("gives_way", [True, False])
def test_a_kernel_of_high_priority_begins_before_attention_ends_only_if_that_gives_way(gives_way: bool) -> None:
    """What `PipelinedAttention` needs of the card: without it an exchange begins when attention has ended."""
    from dbsp_megatron.kernels.block_sparse_attention.hopper_forward import hopper_forward

    q, k, v = (torch.randn((1, 32768, 8, 128), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lists = dense_lists(1, 8, 256, 256, torch.device("cuda"))
    urgent = torch.cuda.Stream(priority=-1)
    begin, end, early = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    sent = torch.zeros(2**20, device="cuda")

    def attend() -> None:
        hopper_forward(q, k, v, lists, 128, 128, 128**-0.5)

    def exchange() -> None:
        sent.add_(1.0)

    for measured in (False, True):
        # The first time kernels are loaded, which may wait for the device.
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)  # both are launched before either begins
        begin.record()
        ready = torch.cuda.Event()
        ready.record()
        if gives_way:
            with giving_way():
                attend()
        else:
            attend()
        end.record()
        with torch.cuda.stream(urgent):
            urgent.wait_event(ready)
            torch.cuda._sleep(500_000)  # attention has all multiprocessors but one by now
            exchange()
            early.record()
        torch.cuda.synchronize()
        if measured:
            share = begin.elapsed_time(early) / begin.elapsed_time(end)
            assert (share < 0.8) == gives_way, share
