"""Times one rank of a model that attends along one dim at a time: on one GPU, the part that it has among any number.

Usage:
    python tools/bench_axial.py --model stdit3_xl_2 --grid 30 45 80 --recompute full --json axial.json
    python tools/bench_axial.py --model stdit3_xl_2 --grid 15 45 80 --ranks 1 8 64 --only infer

Of several ranks the fullest one is computed, whose exchanges copy nothing: times are those of the work alone, and bytes
those that it would send. So they show what is lost to uneven parts, small kernels and packing, and what links must
carry. Weights and inputs are random. With one rank this is the whole model, as it trains and samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.dsp import DspGroup, DspMesh
from dbsp_megatron.models.axial import AxialConfig, AxialDiT
from dbsp_megatron.models.dit import load_model_config
from dbsp_megatron.models.dit.narrow import narrow_matrices
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from tools.attention_rounds import Clock
from tools.sp_command import in_a_line
from tools.tables import aligned

INFER, TRAIN = "infer", "train"
ATTENTIONS = ("sdpa", "blocks")
"""PyTorch's own attention, or the block-sparse engine with every block dense."""
_ATTENTION_OPS = re.compile(
    r"aten::_(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)\w*|dbsp::block_sparse_attention\w*"
)
_PRODUCT_OPS = re.compile(r"aten::(mm|addmm|bmm|baddbmm)$")


class EmulatedGroup(DspGroup):
    """One rank's view of ranks that are not there, and so agree."""

    def agree(self, where: str, problem: str | None, beliefs: Any, *, always: bool = False) -> None:
        """Raise this rank's own problem.

        Raises:
            ValueError: there is one.
        """
        if problem:
            raise ValueError(problem)


class BlocksCore(torch.nn.Module):
    """Dense attention along dim 0 of [s, b, h, d] by the block-sparse engine; Megatron's contract."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **_: Any) -> Tensor:
        """Maps to [s, b, h * d]."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        mask = BlockMask.dense(q.shape[2], q.shape[1], device=q.device)
        out = block_sparse_attention(q, k, v, mask, return_lse=False)
        if not isinstance(out, Tensor):
            raise TypeError("block_sparse_attention returned lse, which was not asked for")
        return out.transpose(0, 1).flatten(2)


@dataclass(frozen=True, kw_only=True)
class AxialBench:
    """What is timed.

    Raises:
        ValueError: it cannot be.
    """

    model: str
    grid: tuple[int, int, int]
    batch: int
    layers: int | None
    """Layers of the model; None for all."""
    recompute: str
    attention: str
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    rounds: int
    device: str

    def __post_init__(self) -> None:
        if not isinstance(load_model_config(self.model), AxialConfig):
            raise ValueError(f"--model must be one with attention_dims, got {self.model}: use stdit3_xl_2 or the like")
        if min(*self.grid, self.batch, self.rounds, *self.ranks, 1 if self.layers is None else self.layers) < 1:
            raise ValueError("--grid, --batch, --layers, --ranks and --rounds must be at least 1: raise them")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")

    @property
    def config(self) -> AxialConfig:
        """The model, with as many layers as wanted."""
        found = load_model_config(self.model)
        if not isinstance(found, AxialConfig):
            raise ValueError(f"--model {self.model} has no attention_dims")
        layers = found.num_layers if self.layers is None else self.layers
        return dataclasses.replace(found, num_layers=layers, recompute=self.recompute)  # type: ignore[arg-type]


def emulated_mesh(num_ranks: int) -> DspMesh | None:
    """The first, and so the fullest, of some ranks; None for one."""
    if num_ranks == 1:
        return None
    # Registers the backend whose collectives do nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    return DspMesh(EmulatedGroup(dist.group.WORLD, "dsp"))


class Measured:
    """The model on one rank.

    Args:
        bench: what is timed.
        num_ranks: among how many.
    """

    def __init__(self, bench: AxialBench, num_ranks: int) -> None:
        self.bench, self.device, config = bench, torch.device(bench.device), bench.config
        self.mesh = emulated_mesh(num_ranks)
        core: Any = BlocksCore if bench.attention == "blocks" else None
        # Megatron's initial weights are drawn one by one on the host.
        with torch.device("meta"):
            model = AxialDiT(config, mesh=self.mesh, core_attention=core)
        self.model = model.to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
        num_tokens = self.model.local_positions(bench.grid).numel()
        self.given: dict[str, Any] = {
            "video_tokens": draw(bench.batch, num_tokens, config.patch_dim),
            "timestep": torch.full((bench.batch,), 0.5, device=self.device),
            "grid": bench.grid,
        }
        if config.text == "cross":
            self.given["context"] = draw(bench.batch, config.text_len, config.text_dim or 0)
        self.optimizer: torch.optim.Optimizer | None = None

    def infer(self) -> None:
        """One prediction, with matrices as dbsp-infer keeps them; no `train` can follow."""
        if self.device.type == "cuda":
            narrow_matrices(self.model, torch.bfloat16)
        with torch.no_grad(), self._bf16():
            self.model(**self.given)

    def train(self) -> None:
        """One step: forward, backward, AdamW."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=self.device.type == "cuda")
        with self._bf16():
            out = self.model(**self.given)
        out.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def facts(self) -> dict[str, Any]:
        """What the plan says."""
        plan = None if self.model.session is None else self.model.session.last_plan
        if plan is None:
            return {"switches": 0, "stages_in_units": 0}
        return {"switches": plan.num_switches, "stages_in_units": sum(step.in_units for step in plan.steps)}

    def _bf16(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")


def shares(call: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Milliseconds of a call by kind of operation, as the profiler finds them on the device."""
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as found:
        call()
    which = "self_device_time_total" if cuda else "self_cpu_time_total"
    by_kind = {"attention": 0.0, "products": 0.0, "all": 0.0}
    for event in found.key_averages():
        spent = getattr(event, which) / 1e3
        # Kernels have events of their own, which are counted once; operations say what they are for.
        if not cuda or (event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation):
            by_kind["all"] += spent
        if _PRODUCT_OPS.search(event.key):
            by_kind["products"] += spent
        elif _ATTENTION_OPS.search(event.key):
            by_kind["attention"] += spent
    return by_kind


def measure(bench: AxialBench, num_ranks: int) -> list[dict[str, Any]]:
    """Records of one number of ranks, by kind of pass; `ms` is None where it could not run, `fail` says why."""
    records: list[dict[str, Any]] = [
        {"ranks": num_ranks, "kind": kind, "ms": None, "fail": None} for kind in bench.kinds
    ]
    try:
        for record in records:
            measured = Measured(bench, num_ranks)
            clock = Clock(measured.device)
            call = measured.infer if record["kind"] == INFER else measured.train
            call()
            if measured.mesh is not None:
                measured.mesh.traffic.reset()
            peak, _ = clock.peak_mib(call)
            sent = 0 if measured.mesh is None else measured.mesh.traffic.total_bytes
            times = [clock.start(call, 1)() for _ in range(bench.rounds)]
            record |= {"ms": median(times), "round_ms": times, "peak_mib": peak, "sent_bytes": sent}
            record |= {f"{kind}_ms": ms for kind, ms in shares(call, measured.device).items()} | measured.facts()
            del measured, call
    except (ValueError, RuntimeError) as error:  # Out of memory among them: the other sizes may still run.
        for record in records:
            record["fail"] = record["fail"] or (in_a_line(error) if record["ms"] is None else None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records for a terminal; efficiency is the time of one rank over ranks times time."""
    alone = {record["kind"]: record["ms"] for record in records if record["ranks"] == 1 and record["ms"]}
    rows = [("kind", "ranks", "ms", "work shared", "attention ms", "products ms", "all ms", "peak MiB", "sent MB",
             "switches", "in units")]  # fmt: skip
    for record in records:
        if record["ms"] is None:
            rows.append((record["kind"], str(record["ranks"]), record["fail"] or "-", *["-"] * 8))
            continue
        whole = alone.get(record["kind"])
        rows.append(
            (
                record["kind"],
                str(record["ranks"]),
                f"{record['ms']:.1f}",
                f"{whole / record['ms'] / record['ranks']:.1%}" if whole else "-",
                *(f"{record[f'{kind}_ms']:.1f}" for kind in ("attention", "products", "all")),
                f"{record['peak_mib']:.0f}",
                f"{record['sent_bytes'] / 1e6:.1f}",
                str(record["switches"]),
                str(record["stages_in_units"]),
            )
        )
    return aligned(rows)


def parse_flags(argv: Sequence[str] | None) -> tuple[AxialBench, Path | None]:
    """Command line -> what to time, and the file to write.

    Raises:
        ValueError: it cannot be.
    """
    parser = argparse.ArgumentParser(description="Time one rank of a model that attends along one dim at a time.")
    parser.add_argument("--model", default="stdit3_xl_2", help="a name or file of a description (%(default)s)")
    parser.add_argument("--grid", nargs=3, type=int, default=[30, 45, 80], help="patches along T, H, W (30 45 80)")
    parser.add_argument("--batch", type=int, default=1, help="samples (%(default)s)")
    parser.add_argument("--layers", type=int, help="layers (those of the model)")
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--attention", choices=ATTENTIONS, default="sdpa")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="ranks whose fullest is computed (1)")
    parser.add_argument("--only", choices=(INFER, TRAIN), help="one kind of pass (both)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="file of everything that was found")
    given = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    names = ("model", "batch", "layers", "recompute", "attention", "rounds")
    bench = AxialBench(
        **{name: getattr(given, name) for name in names},
        grid=tuple(given.grid),
        ranks=tuple(dict.fromkeys(given.ranks)),
        kinds=(INFER, TRAIN) if given.only is None else (given.only,),
        device=device,
    )
    return bench, given.json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing could be timed."""
    try:
        bench, file = parse_flags(argv)
    except ValueError as error:
        print(f"bench_axial: {error}", file=sys.stderr)
        return 2
    records = [record for ranks in bench.ranks for record in measure(bench, ranks)]
    print(table(records), flush=True)
    if file is not None:
        found = collect_environment(world_size=1)
        about = {key: found[key] for key in ("devices", "git", "command", "packages")}
        write_text(file, json.dumps({"config": asdict(bench), **about, "records": records}, indent=1) + "\n")
    return 0 if any(record["ms"] is not None for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
