"""Models that attend along dims on tensor-parallel x sequence ranks: outputs and every gradient equal one process."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.dsp import DspGroup, DspMesh
from dbsp_megatron.masks import MaskMethod, Needs
from dbsp_megatron.masks.duo import DuoMask
from dbsp_megatron.masks.head_part import HeadPart, part_of_heads
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.sparge import SpargeMask
from dbsp_megatron.masks.sparse_videogen import SparseVideoGenMask
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.models.axial import AxialConfig, AxialDiT
from dbsp_megatron.models.axial.sparse import SparseAttention
from tests.distributed.axial_models import NAMES, build, inputs, part, reference, sent_numbers, tiny
from tests.distributed.dsp_models import check, refused
from tests.harness import run_ranks
from tests.megatron_on_cpu import megatron_on_cpu
from tests.unit.models.cores import gradients

pytestmark = pytest.mark.timeout(300)

# Odd lengths, an image, fewer frames than ranks, places fewer than ranks, one token for three ranks.
CASES = [((5, 1, 7), 2), ((1, 3, 3), 2), ((2, 1, 9), 1), ((7, 1, 2), 2), ((1, 1, 1), 1)]
SPARSE_CASES = [((3, 1, 11), 2), ((1, 1, 11), 1), ((9, 1, 2), 2)]


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """Groups of this rank: tensor-parallel ranks are neighbours."""

    tp: dist.ProcessGroup
    sp: dist.ProcessGroup
    shared_rows: bool = False
    """Whether tensor-parallel ranks share out the tokens between their matrices, too."""

    @property
    def mesh(self) -> DspMesh | None:
        return None if self.sp.size() == 1 else DspMesh(DspGroup(self.sp, "dsp"))

    def build(self, config: AxialConfig, dtype: torch.dtype = torch.float64) -> AxialDiT:
        return build(config, self.mesh, dtype, self.tp, self.shared_rows)


def make_ranks(rank: int, world_size: int, tp: int, shared_rows: bool = False) -> Ranks:
    every = range(world_size)
    lists = [list(every[at : at + tp]) for at in every[::tp]], [list(every[at::tp]) for at in range(tp)]
    made = [[(ranks, dist.new_group(ranks)) for ranks in groups] for groups in lists]
    return Ranks(*(next(group for ranks, group in groups if rank in ranks) for groups in made), shared_rows)


def grouped(name: str, **changes: Any) -> AxialConfig:
    """Four query heads, two for K and V."""
    return tiny(name, **({"num_heads": 4, "num_kv_heads": 2, "head_dim": 4} | changes))


def whole_gradients(model: AxialDiT, ranks: Ranks) -> dict[str, Tensor]:
    """Summed over the ranks of a video, and put together over those that split a matrix."""
    whole = {}
    parameters = dict(model.named_parameters())
    for name, grad in gradients(model).items():
        dist.all_reduce(grad, group=ranks.sp)
        parameter = parameters[name]
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=ranks.tp)
        if getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            parts = [torch.empty_like(grad) for _ in range(ranks.tp.size())]
            dist.all_gather(parts, grad.contiguous(), group=ranks.tp)
            grad = torch.cat(parts, dim)
        whole[name] = grad
    return whole


def compare(config: AxialConfig, ranks: Ranks, grid: Any, batch: int, sparse: SparseAttention | None = None) -> int:
    """Output and gradients of a rank against the whole in one process; the number of layers in units."""
    given, weights = inputs(config, grid, batch)
    given["sparse"] = sparse
    want, wanted = reference(config, given, weights)
    model = ranks.build(config)
    positions = model.local_positions(grid)
    got = model(**part(model, given))
    label = f"{config.attention_dims} {grid} {batch} {sparse and sparse.describe()}"
    torch.testing.assert_close(got.detach(), want[:, positions], rtol=0, atol=1e-11, msg=lambda m: f"{label}: {m}")
    (got * weights[:, positions]).sum().backward()
    check(whole_gradients(model, ranks), wanted, label)
    if model.session is None:
        return 0
    plan = model.session.last_plan
    assert plan is not None
    if sparse is None:
        # The whole stream, but q, k, v and outputs of this rank's heads only.
        heads, kv_heads = (count // ranks.tp.size() for count in (config.num_heads, config.kv_heads))
        mine = dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads)
        numbers = sent_numbers(plan, mine, batch, ranks.sp.rank())
        assert model.session.mesh.traffic.total_bytes == 8 * numbers, label
    return sum(step.in_units for step in plan.steps)


def _dense(rank: int, world_size: int, tp: int, names: list[str], cases: list[Any]) -> int:
    ranks = make_ranks(rank, world_size, tp)
    return sum(compare(grouped(name), ranks, grid, batch) for name in names for grid, batch in cases)


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_models_equal_one_process(sp: int) -> None:
    """All published kinds of layers, two tensor-parallel ranks beside one, two and three of a video."""
    units = run_ranks(_dense, 2 * sp, 2, list(NAMES), CASES, timeout_s=240)
    assert len(set(units)) == 1
    assert (units[0] > 0) == (sp > 1)


def _shared_rows(rank: int, world_size: int, tp: int, names: list[str]) -> None:
    with megatron_on_cpu():
        # For a buffer of Megatron's alone.
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        ranks = make_ranks(rank, world_size, tp, shared_rows=True)
        for name in names:
            for grid, batch in CASES:
                compare(grouped(name), ranks, grid, batch)
        sparse = SparseAttention(method=TopPMask(top_p=0.4), block_size=2, engine="torch")
        for kind in ("full", "selective"):
            compare(grouped("stdit3_xl_2", recompute=kind), ranks, (3, 1, 11), 2, sparse)
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_rows_shared_by_tensor_parallel_ranks_equal_one_process(sp: int) -> None:
    """Megatron's sequence_parallel: tokens that do not divide, that are switched, and none at all."""
    run_ranks(_shared_rows, 2 * sp, 2, list(NAMES), timeout_s=240)


class Unlike(MaskMethod):
    """A user's method: diagonal and some blocks that depend on layer, head and row."""

    name = "unlike"

    def needs(self, layer: int, step: int) -> Needs:
        return Needs()

    def predict(self, q_summary: Any, k_summary: Any, layer: int, step: int, grid: Any) -> Tensor:
        heads, rows = torch.arange(q_summary.num_heads), q_summary.blocks
        columns = torch.arange(q_summary.num_blocks)
        mixed = (heads[:, None, None] * 5 + rows[:, None] * 3 + columns * (layer + 1)) % 4 == 0
        return (mixed | (rows[:, None] == columns)).expand(q_summary.batch, -1, -1, -1)


# By layer and head, by head alone, by data alone; the last ones are of one rule for all heads.
BY_HEAD: list[MaskMethod] = [
    DuoMask(global_heads=((1,), (0, 3), (2,), (1, 2)), sink_tokens=2, window_tokens=2),
    SpargeMask(top_p=(0.2, 0.9, 0.5, 0.3), similarity=0.4),
    ScheduledMask(SpargeMask(top_p=(0.2, 0.9, 0.5, 0.3), similarity=-1.0), dense_layers=1),
    Unlike(),
]
ONE_RULE: list[MaskMethod] = [TopPMask(top_p=0.4), ScheduledMask(TopKMask(density=0.3), dense_layers=1)]


def _sparse(rank: int, world_size: int, tp: int, methods: list[MaskMethod]) -> int:
    ranks, units = make_ranks(rank, world_size, tp), 0
    for method in methods:
        sparse = SparseAttention(method=method, block_size=2, engine="torch")
        for grid, batch in SPARSE_CASES:
            units += compare(grouped("stdit3_xl_2"), ranks, grid, batch, sparse)
    return units


@pytest.mark.parametrize("sp", [1, 3])
def test_masks_are_those_of_the_heads_of_the_whole_model(sp: int) -> None:
    """Frames of 11 tokens and 9 frames in blocks of 2; in units where ranks outnumber frames."""
    assert all((units > 0) == (sp > 1) for units in run_ranks(_sparse, 2 * sp, 2, BY_HEAD + ONE_RULE, timeout_s=240))


def test_parts_of_heads_know_the_whole() -> None:
    """Every field of a summary; methods of one rule are taken as they are, their subclasses are not."""
    q, (k, v) = torch.randn(2, 12, 4, 4), torch.randn(2, 2, 12, 2, 4)
    probed = SparseVideoGenMask(density=0.4, sample_rows=5)
    for method in (*BY_HEAD, *ONE_RULE, probed):
        blocks = partial(method.mask, q, k, 1, 0, (3, 2, 2), 2, v=v)().blocks
        assert not torch.equal(blocks[:, :2], blocks[:, 2:])
        for at in range(2):
            heads, kv_heads = slice(2 * at, 2 * at + 2), slice(at, at + 1)
            mine = (q[:, :, heads], k[:, :, kv_heads], 1, 0, (3, 2, 2), 2)
            part = part_of_heads(method, at, 2)
            assert (part is method) == (method in ONE_RULE)
            assert torch.equal(part.mask(*mine, v=v[:, :, kv_heads]).blocks, blocks[:, heads]), part.describe()
    assert all(part_of_heads(method, 0, 1) is method for method in BY_HEAD)
    assert isinstance(part_of_heads(type("Mine", (TopKMask,), {})(), 1, 2), HeadPart)


def _recomputed(rank: int, world_size: int, tp: int, kind: str) -> None:
    """Two passes under way at once, of other sizes, with masks and without."""
    ranks = make_ranks(rank, world_size, tp)
    for name in ("stdit3_xl_2", "axial_k3"):
        config = grouped(name, recompute=kind)
        model = ranks.build(config)
        made = [inputs(config, grid, batch) for grid, batch in (((5, 1, 9), 2), ((2, 1, 11), 1))]
        made[1][0]["sparse"] = SparseAttention(method=BY_HEAD[1], block_size=2, engine="torch")
        outs = [model(**part(model, given)) for given, _ in made]
        for (given, weights), got in zip(reversed(made), reversed(outs), strict=True):
            _, wanted = reference(config, given, weights)
            (got * weights[:, model.local_positions(given["grid"])]).sum().backward()
            check(whole_gradients(model, ranks), wanted, f"{name} {given['grid']}")
            model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_passes_equal_one_process(kind: str) -> None:
    run_ranks(_recomputed, 4, 2, kind)


def _precision(rank: int, world_size: int, tp: int) -> None:
    ranks = make_ranks(rank, world_size, tp)
    for name in NAMES:
        config = grouped(name)
        given, weights = inputs(config, (5, 1, 7), 2, torch.float32)
        want, wanted = reference(config, given, weights, torch.float32)
        model = ranks.build(config, torch.float32)
        positions = model.local_positions((5, 1, 7))
        got = model(**part(model, given))
        assert float((got - want[:, positions]).detach().abs().max()) <= 1e-5 * float(want.abs().max())
        (got * weights[:, positions]).sum().backward()
        for key, grad in whole_gradients(model, ranks).items():
            assert float((grad - wanted[key]).abs().max()) <= 1e-5 * max(1.0, float(wanted[key].abs().max())), key


@pytest.mark.parametrize(("tp", "sp"), [(2, 2), (4, 1)])
def test_single_precision_is_within_1e_5(tp: int, sp: int) -> None:
    """Four ranks of one head each have no K and V to share, so those models have as many of these."""
    run_ranks(_precision if tp == 2 else _four_heads, tp * sp, tp)


def _four_heads(rank: int, world_size: int, tp: int) -> None:
    compare(grouped("stdit3_xl_2", num_kv_heads=4), make_ranks(rank, world_size, tp), (5, 1, 7), 2)


def _refusals(rank: int, world_size: int, tp: int) -> list[str]:
    """What one rank alone is given, without a mesh and with one; afterwards the model runs."""
    texts = []
    ranks = make_ranks(rank, world_size, tp)
    config = grouped("stdit3_xl_2")
    model = ranks.build(config)
    given, _ = inputs(config, (4, 1, 6), 2)
    longer, _ = inputs(config, (5, 1, 6), 2)
    mine = part(model, given)
    odd: list[dict[str, Any]] = [
        {"video_tokens": mine["video_tokens"][:, 1:]},
        {"fps": torch.ones(3, dtype=torch.float64)},
        part(model, longer),
        {"sparse": SparseAttention(method=TopKMask(), block_size=2)},
        {"sparse": SparseAttention(method=DuoMask(global_heads=(4,)), block_size=1)},
    ]
    texts += [refused(partial(model, **(mine | (each if rank == world_size - 1 else {})))) for each in odd]
    with torch.set_grad_enabled(rank == 1):
        texts.append(refused(partial(model, **mine)))
    texts.append(refused(partial(model, **mine)))
    for heads, kv_heads in ((4, 1), (3, 3)):
        groups = ProcessGroupCollection(tp=ranks.tp, cp=None, pp=None)
        odd_heads = grouped("stdit3_xl_2", num_heads=heads, num_kv_heads=kv_heads)
        text = refused(partial(AxialDiT, odd_heads, pg_collection=groups))
        assert f"num_kv_heads must be divisible by the tensor-parallel size 2; got {kv_heads}" in text
    groups = ProcessGroupCollection(tp=None, cp=None, pp=ranks.tp)
    assert "must not be split over pp ranks; got 2" in refused(partial(AxialDiT, config, pg_collection=groups))
    return texts


@pytest.mark.parametrize("sp", [1, 2])
def test_wrong_use_is_refused_on_every_rank(sp: int) -> None:
    words = ["video_tokens must be", "fps must be of shape [2]", "lengths", "disagree about the call", "heads [4]"]
    for texts in run_ranks(_refusals, 2 * sp, 2):
        for text, word in zip(texts, [*words, "gradients", "accepted"], strict=True):
            assert word in text, (word, text)


def _wrong_groups(rank: int, world_size: int) -> list[str]:
    """Ranks of a video that have other heads, or, of six, tensor-parallel ones that have other tokens."""
    config = grouped("stdit3_xl_2")
    if world_size == 6:
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 5], [3, 4])]
        videos = [dist.new_group(video) for video in ([0, 2, 3], [1, 4, 5])]
        tp_group = pairs[(0, 0, 1, 2, 2, 1)[rank]]
        return [refused(partial(build, config, DspMesh(DspGroup(videos[rank in (1, 4, 5)], "dsp")), tp_group=tp_group))]
    ranks = make_ranks(rank, world_size, 2)
    crossed = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
    texts = []
    for tp_group, mesh in (
        (ranks.sp, DspMesh(DspGroup(ranks.sp, "dsp"))),
        (crossed[rank in (1, 2)], DspMesh(DspGroup(ranks.sp, "dsp"))),
        (ranks.tp, DspMesh(DspGroup(crossed[rank in (1, 2)], "dsp"))),
    ):
        texts.append(refused(partial(build, config, mesh, tp_group=tp_group)))
    return texts


def test_groups_that_do_not_fit_together_are_refused() -> None:
    for texts in run_ranks(_wrong_groups, 4):
        assert all("disagree about their number among copies" in text for text in texts), texts
    for (text,) in run_ranks(_wrong_groups, 6):
        assert "disagree about their place on the mesh" in text
