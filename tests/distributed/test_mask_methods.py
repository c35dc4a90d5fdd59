"""Every mask method on 1, 2 and 4 ranks: the same integers as in one process, and attention right with gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, MaskConfig, build_mask_method
from dbsp_megatron.masks import MaskMethod, Needs, SparseVideoGenMask, TokenGrid, TopPMask, write_masks
from tests.distributed.sharded import check, make_sp, recorded_collectives
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, Gradients, attention_gradients, expand_blocks, random_blocks, random_qkv

GRID, NUM_TEXT, BLOCK, HEADS, KV_HEADS = (5, 4, 6), 7, 8, 6, 3
SEQLEN = NUM_TEXT + 120
NUM = -(-SEQLEN // BLOCK)
ORDERS = (5, 5, 0, 0, 2, 2)

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topp": {"top_p": 0.6},
    "topk": {"density": 0.3},
    "sparge": {"top_p": 0.6, "similarity": 0.15},
    "vsa": {"density": 0.2},
    "sparse_videogen": {"density": 0.2, "sample_rows": 16},
    "sliding_tile": {"tile": (2, 2, 2), "window": (1, 3, 1)},
    "radial": {"width": 0.4},
    "duo": {"global_heads": (1, 4), "sink_tokens": 5, "window_tokens": 11},
    "file": {},
    "paro": {},
}


def _method(name: str, folder: str) -> MaskMethod:
    options = dict(METHODS[name])
    if name in ("file", "paro"):
        options["path"] = str(Path(folder) / f"{name}.safetensors")
    return build_mask_method(MaskConfig(method=name, **options))


def _write_files(folder: Path, grid: TokenGrid) -> None:
    masks = {2: random_blocks(3, 1, HEADS, NUM, NUM)[0]}
    for name, orders in (("file", None), ("paro", {2: ORDERS})):
        path = folder / f"{name}.safetensors"
        write_masks(path, masks, seqlen=SEQLEN, block_size=BLOCK, grid=grid, orders=orders)


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks that are alike inside by different amounts, heads that are more and less peaked."""
    q, k, v, dout = random_qkv(3, 2, SEQLEN, HEADS, 8, num_kv_heads=KV_HEADS)
    generator = torch.Generator().manual_seed(1)
    for x, heads in ((q, HEADS), (k, KV_HEADS)):
        centre = torch.randn(2, NUM, heads, 8, generator=generator) * torch.rand(2, NUM, heads, 1, generator=generator)
        x += 2 * centre.repeat_interleave(BLOCK, 1)[:, :SEQLEN]
    return q * torch.linspace(0.1, 1, HEADS)[:, None], k, v, dout


def _expected(method: MaskMethod, grid: TokenGrid, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Gradients]:
    """Mask and result of one process, whatever the method does about the order of tokens."""
    q, k, v, dout = inputs
    blocks = method.mask(q, k, 2, 1, grid, BLOCK, v=v).blocks
    allowed = expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
    orders = method.head_orders(2, 0, HEADS, KV_HEADS, SEQLEN, grid)
    if orders is None:
        return blocks, attention_gradients(q, k, v, allowed, dout)
    found = attention_gradients(*(orders.reorder(x) for x in (q, k, v)), allowed, orders.reorder(dout))
    return blocks, Gradients(*(orders.restore(getattr(found, name)) for name in ("out", "dq", "dk", "dv")))


def _run(rank: int, world_size: int, mesh: tuple[int, int], grid: TokenGrid, names: list[str], folder: str) -> None:
    inputs = _inputs()
    counts = "previous" if grid.cube else "current"
    # The first call is verified too: against a reference gathered from what heads see in their own order.
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, plan_counts=counts, verify_steps=0 if grid.cube else 2)
    layout = sp.layout(SEQLEN)
    for name in names:
        method = _method(name, folder)
        blocks, want = _expected(method, grid, inputs)
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        sp.begin_step(1)
        local = [layout.shard(x) for x in leaves]
        out = layout.gather(sp.attention(*local, mask=method, layer=2, layout=layout, grid=grid))
        got = Gradients(out.detach(), *torch.autograd.grad((out * inputs[3]).sum(), leaves))
        assert torch.equal(torch.from_numpy(sp.layer_mask(2)[0]), blocks[0]), name
        # Inputs are larger than of unit variance, and errors with them.
        check(got, want, 3 * FP32_ATOL, name)
        if counts == "current":
            assert sp.stats()["sp/density"] == pytest.approx(float(blocks.double().mean())), name
    sp.destroy()


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
def test_methods_give_the_single_process_mask_and_result(
    tmp_path: Path, mesh: tuple[int, int], cube: tuple[int, int, int] | None
) -> None:
    """Output and all gradients, odd lengths, GQA, two samples, text in front (Traps B31, B65)."""
    grid = TokenGrid(*GRID, cube=cube)
    _write_files(tmp_path, grid)
    run_ranks(_run, mesh[0] * mesh[1], mesh, grid, list(METHODS), str(tmp_path))


def _few_tokens(rank: int, world_size: int) -> None:
    """Four ranks, three blocks: one of them holds nothing."""
    sp = make_sp("dbsp", 1, 4, block_size=8)
    layout = sp.layout(20)
    q, k, v, _ = random_qkv(3, 2, 20, 4, 8, num_kv_heads=2)
    for name in ("topp", "sparge", "sparse_videogen", "radial", "duo"):
        method = build_mask_method(MaskConfig(method=name))
        out = sp.attention(*(layout.shard(x) for x in (q, k, v)), mask=method, layout=layout, grid=(2, 2, 5))
        want = method.mask(q, k, 0, sp._calls - 1, (2, 2, 5), 8, v=v).blocks
        assert out.shape[1] == layout.num_local
        assert torch.equal(torch.from_numpy(sp.layer_mask(0)[0]), want[0]), name
    sp.destroy()


def test_methods_work_on_ranks_without_tokens() -> None:
    """Trap B117."""
    run_ranks(_few_tokens, 4)


class _OneSidedProbe(SparseVideoGenMask):
    """Fails on rank 1, before or after the exchange of the probe."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__(0.3, 8)
        object.__setattr__(self, "where", where if rank == 1 else "")

    def candidates(self, q: Any, k: Any, layer: int, step: int) -> Tensor:
        if self.where == "candidates":  # type: ignore[attr-defined]
            raise KeyError("a user's bug")
        return super().candidates(q, k, layer, step)[: 1 if self.where == "shape" else 2]  # type: ignore[attr-defined]

    def head_orders(self, *args: Any) -> None:
        if self.where == "orders":  # type: ignore[attr-defined]
            raise KeyError("a user's bug")


def _broken(rank: int, world_size: int) -> list[str]:
    sp = make_sp("dbsp", 2, 1, block_size=8)
    layout = sp.layout(60)
    q = torch.randn(1, layout.num_local, 4, 8)
    messages = []
    for where in ("candidates", "shape", "orders"):
        with pytest.raises(ValueError, match="mask method sparse_videogen") as error:
            sp.attention(q, q, q, mask=_OneSidedProbe(where, rank), grid=(3, 4, 5))
        messages.append(str(error.value))
    with pytest.raises(ValueError, match="needs the token grid") as error:
        sp.attention(q, q, q, mask=SparseVideoGenMask(0.3, 8))
    messages.append(str(error.value))
    sp.attention(q, q, q, mask=SparseVideoGenMask(0.3, 8), grid=(3, 4, 5))
    return messages


def test_a_method_that_fails_on_one_rank_fails_on_all() -> None:
    """In the probe as well, whose exchanges all ranks go through (Trap B65)."""
    messages = run_ranks(_broken, 2)
    assert messages[0] == messages[1]
    assert "a user's bug" in messages[0][0]
    assert "candidates must be bool [C, m, s] = (2, 8, " in messages[0][1]


def _exchanged(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Gathers of one call, by method; those that agree and count are the same for all."""
    sp = make_sp("dbsp", 2, 1, block_size=8)
    layout = sp.layout(60)
    q, k = torch.randn(1, layout.num_local, 4, 8), torch.randn(1, layout.num_local, 2, 8)
    found = {}
    for name in ("dense", "radial", "topp", "sparge", "sparse_videogen"):
        method = build_mask_method(MaskConfig(method=name))
        # The third call also fetches the counts of the one before, as all later ones do.
        for _ in range(3):
            with recorded_collectives() as log:
                sp.attention(q, k, k, mask=method, grid=(3, 4, 5))
        found[name] = [entry for entry in log if entry[0] == "all_gather"]
    return found


def test_only_what_a_method_needs_is_exchanged() -> None:
    found = run_ranks(_exchanged, 2)[0]
    base = len(found["dense"])
    assert len(found["radial"]) == base
    assert len(found["topp"]) == base + 1
    assert len(found["sparge"]) == base + 1
    assert len(found["sparse_videogen"]) == base + 2


class _NeedsByRank(TopPMask):
    """Asks for other fields on rank 1, so that ranks would exchange different things."""

    def __init__(self, rank: int) -> None:
        super().__init__(0.5)
        object.__setattr__(self, "rank", rank)

    def needs(self, layer: int, step: int) -> Needs:
        fields = ("means", "similarity") if self.rank == 1 else ("means",)  # type: ignore[attr-defined]
        return Needs(q=("means",), k=fields)


def _different_needs(rank: int, world_size: int) -> None:
    sp = make_sp("dbsp", 2, 1, block_size=8)
    layout = sp.layout(60)
    q = torch.randn(1, layout.num_local, 4, 8)
    with pytest.raises(ValueError, match="ranks disagree about mask"):
        sp.attention(q, q, q, mask=_NeedsByRank(rank))


def test_ranks_with_different_needs_are_refused_before_any_exchange() -> None:
    """Trap B65."""
    run_ranks(_different_needs, 2)


def _grids_differ(rank: int, world_size: int) -> None:
    sp = make_sp("dbsp", 2, 1, block_size=8)
    layout = sp.layout(60)
    q = torch.randn(1, layout.num_local, 4, 8)
    mask = BlockMask.dense(4, 60, block_size_q=8, block_size_k=8)
    with pytest.raises(ValueError, match="ranks disagree"):
        sp.attention(q, q, q, mask=mask, grid=TokenGrid(3, 4, 5, (2, 2, 2) if rank else None))


def test_ranks_with_different_orders_of_tokens_are_refused() -> None:
    """Sizes alone are equal: what differs is which token is where."""
    run_ranks(_grids_differ, 2)
