"""What one rank alone does wrong with DSP is refused on all of them, before anything is exchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp import (
    Boundary,
    DspGroup,
    DspSession,
    Layout,
    StageSpec,
    attend_units,
    gather,
    parallelize,
    redistribute,
    split,
    switch,
    trace,
)
from dbsp_megatron.models.evoformer import Evoformer, EvoformerConfig
from tests.distributed.dsp_models import DimAttention, mesh_of_world, refused
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks


def _primitives(rank: int, world_size: int) -> list[str]:
    group = DspGroup(dist.group.WORLD, "dsp")
    x, q = torch.randn(2, 3, 4), torch.randn(1, 3, 2, 4)
    wrong: list[object] = ["a", None, 1.5]
    texts = []
    for odd in wrong:
        length = odd if rank == 1 else 6
        texts.append(refused(lambda n=length: switch(x, group, 1, 2, length=n)))
        texts.append(refused(lambda n=length: gather(x, group, 1, length=n)))
        texts.append(refused(lambda n=odd if rank == 1 else 1: split(x, group, n)))
        texts.append(refused(lambda n=length: attend_units(q, q, q, group, 1, length=n)))
    # Layouts that only one rank believes in.
    axis = group.axis
    places = [{"dsp": each} for each in range(world_size)]
    shape = (2, 6, 4)
    target = Layout.sharded(shape, 2 if rank else 0, axis)
    texts.append(refused(lambda: redistribute(x, Layout.sharded(shape, 1, axis), target, group, places)))
    texts.append(refused(lambda: redistribute(x, Layout.sharded(shape, 1, axis), target, group, places[: 1 + rank])))
    low = x.half() if rank else x
    same = Layout.sharded(shape, 2, axis)
    texts.append(refused(lambda: redistribute(low, Layout.sharded(shape, 1, axis), same, group, places)))
    texts.append(refused(lambda: redistribute(x, Layout.sharded(shape, 1, axis), same, group, places)))
    return texts


def test_one_sided_calls_of_primitives_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(_primitives, 2)
    assert first == second
    assert "accepted" not in first[:-1]
    assert first[-1] == "accepted"
    assert "TypeError" in first[0]
    for text, words in zip(
        first[-4:-1], ("ranks disagree about the layouts", "coords must be of all", "dtype"), strict=True
    ):
        assert words in text, text


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = DimAttention(1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attend(x)
        return found


def _first_stage(x: Tensor, name: str, needs: str = "S") -> None:
    """A pass that records one stage."""
    with DspSession(mesh_of_world(), ("T", "S")).run({"T": 4, "S": 4}) as run:
        run.stage(name, run.enter(x, "B T S C"), "B T S C", needs={needs})


def _passes(rank: int, world_size: int) -> list[str]:
    x = torch.randn(1, 4, 4, 4)
    stages = [StageSpec(modules="attend", needs={"T"})]
    model = _Model()
    texts = []
    with (
        parallelize(model, mesh_of_world(), grid=("T", "S"), entries=[Boundary()], stages=stages, example=(x,)),
        recorded_collectives() as log,
    ):
        for odd in (x[0], None, x.double(), x[:, :3], x.repeat(2, 1, 1, 1)):
            texts.append(refused(lambda each=odd if rank else x: model(each)))
        assert "all_to_all_single" not in [name for name, *_ in log]
        texts.append(refused(lambda: model(x)))
    traced = trace(
        _Model(), mesh_of_world(), grid=("T", "S"), entries={"x": "B T S C"}, example={"x": x}, stages=stages
    )
    texts.append(refused(lambda: traced(x if rank else x[0])))
    session = DspSession(mesh_of_world(), ("T", "S"))
    for lengths in ({"T": 4.0, "S": 4}, {"T": -4, "S": 4}, {"T": 4}):
        texts.append(refused(lambda each=lengths if rank else {"T": 4, "S": 4}: session.run(each)))
    texts.append(refused(lambda: session.run({"T": 4, "S": 4}, facts={"kind": rank})))
    # Stages that are not known yet: another name, need, dtype or batch on one rank.
    for other in ("a", "b"):
        texts.append(refused(lambda name=other if rank else "a": _first_stage(x, name)))
    texts.append(refused(lambda: _first_stage(x, "a", "T" if rank else "S")))
    texts.append(refused(lambda: _first_stage(x.double() if rank else x, "a")))
    texts.append(refused(lambda: _first_stage(x.repeat(1 + rank, 1, 1, 1), "a")))
    evoformer = Evoformer(
        EvoformerConfig(
            num_blocks=1, msa_channels=6, pair_channels=5, msa_heads=2, pair_heads=3, head_dim=4, outer_channels=2,
            triangle_channels=3, transition_factor=2,
        ),
        mesh=mesh_of_world(),
    )  # fmt: skip
    msa, pair = torch.randn(1, 4, 5, 6), torch.randn(1, 5, 5, 5)
    parts = [evoformer.cut(msa, "msa", "start", (4, 5)), evoformer.cut(pair, "pair", "start", (4, 5))]
    for size in (4, (4,), (4.0, 5)):
        texts.append(refused(lambda each=size if rank else (4, 5): evoformer(*parts, each)))
    texts.append(refused(lambda: evoformer(parts[0], None if rank else parts[1], (4, 5))))
    texts.append(refused(lambda: evoformer(parts[0].double() if rank else parts[0], parts[1], (4, 5))))
    return texts


def test_one_sided_passes_are_refused_on_all_ranks() -> None:
    words = [
        *(
            "names 4 dims",
            "is not a tensor",
            "ranks disagree about the call",
            "ranks disagree about lengths",
            "shape: [2, 4, 4, 4]",
            "accepted",
        ),
        *(
            "names 4 dims",
            "must be integers >= 0",
            "must be integers >= 0",
            "must name the grid",
            "disagree about the call",
        ),
        *("accepted", *["disagree about stage, layout and dtype"] * 4),
        *["size must be two integers"] * 3,
        *("pair must be a tensor", "disagree about the call"),
    ]
    for texts in run_ranks(_passes, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text, (word, text)
