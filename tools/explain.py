"""Says what a training command will run, before it runs: mesh, groups, tokens, memory, predicted times, warnings.

Usage:
    python tools/explain.py --config launch/demo.yaml --world-size 4
    python tools/explain.py --config my.yaml --world-size 16 --hosts 'gpu[01-02]' --time 4:00:00 --train.recompute true
    python tools/explain.py --config my.yaml --world-size 8 --mask-file runs/my_run --json

Takes every argument of dbsp-train. Nothing is started, no GPU is needed. What dbsp-train would refuse is refused with
the same line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.train.distributed import env_world_size

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.explain_advice import Limits, better_settings, warnings_of
from tools.explain_layout import expand_hosts, process_groups, token_facts, understand
from tools.explain_masks import expected_masks
from tools.explain_memory import checkpoint_bytes, memory_of_rank, memory_parts, ranks_of
from tools.explain_text import as_text
from tools.explain_time import predict_times


def explain(words: Sequence[str]) -> dict[str, Any]:
    """Everything that is known of a run, as JSON values.

    Args:
        words: arguments of dbsp-train and of this tool.

    Raises:
        ValueError: the run would be refused, or an argument of this tool cannot be used.
    """
    given, rest = _parser().parse_known_args(list(words))
    hosts = expand_hosts(given.hosts) if given.hosts else []
    limits = Limits(time_s=None if given.time is None else seconds(given.time), memory_gib=given.memory_gib)
    command = parse_train(rest)
    world_size = command.world_size or env_world_size()
    situation = understand(command.config, world_size, given.gpus_per_node, hosts)
    tokens = token_facts(situation)
    masks = expected_masks(situation, given.mask_file, given.mask_kind, given.density)
    times = predict_times(situation, masks)
    groups = process_groups(situation, times.chosen.mesh)
    memory = memory_parts(situation, tokens, times.plan)
    by_rank = [
        asdict(rank) | {"total_bytes": sum(p.num_bytes for p in memory_of_rank(situation, tokens, times.plan, rank))}
        for rank in ranks_of(situation)
    ]
    config, resolved, loop = situation.config, situation.resolved, situation.config.train
    return {
        "run": {
            "name": config.run.name,
            "model": resolved.model,
            "parameters": resolved.num_parameters,
            "layers": resolved.num_layers,
            "heads": resolved.num_heads,
            "kv_heads": situation.model.kv_heads,
            "head_dim": situation.model.heads_dim,
            "precision": loop.precision,
            "steps": loop.steps,
            "global_batch_size": loop.global_batch_size,
            "micro_batch_size": loop.micro_batch_size,
            "micro_batches": situation.num_micro_batches,
            "checkpoint_every": loop.checkpoint_every,
            "checkpoint_bytes": checkpoint_bytes(situation),
            "recompute": situation.recompute,
            "compile": loop.compile,
        },
        "mesh": {
            "world_size": world_size,
            "data": resolved.mesh.dp_size,
            "sequence": situation.sp_size,
            "tensor": config.parallel.tensor_parallel_size,
            "pipeline": config.parallel.pipeline_parallel_size,
            "virtual": config.parallel.virtual_pipeline_parallel_size,
            "ulysses": times.chosen.ulysses_degree,
            "ring": times.chosen.ring_degree,
            "strategy": config.sp.strategy,
            "chosen_by_layer": bool(resolved.mesh.choices),
            "gpus_per_node": situation.gpus_per_node,
            "hosts": list(situation.hosts),
        },
        "groups": [asdict(kind) for kind in groups],
        "tokens": asdict(tokens),
        "masks": {
            "method": situation.method.describe(),
            "density": masks.density,
            "measured": masks.measured,
            "source": masks.source,
            "layers": len(masks.layers),
        },
        "pipeline": by_rank,
        "memory": {
            "parts": [asdict(part) for part in memory],
            "total_bytes": sum(part.num_bytes for part in memory),
            "device_gib": limits.memory_gib,
        },
        "time": asdict(times.step) | {"run_s": loop.steps * times.step.step_ms / 1e3, "job_s": limits.time_s},
        "meshes": [asdict(option) for option in times.options],
        "warnings": [asdict(a) for a in warnings_of(situation, tokens, groups, memory, times, limits)],
        "better": [asdict(advice) for advice in better_settings(situation, masks, times)],
    }


def _parser() -> argparse.ArgumentParser:
    # Exact names only: everything else belongs to dbsp-train.
    parser = _Quiet(prog="explain.py", usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--hosts")
    parser.add_argument("--time")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--mask-file", type=Path)
    parser.add_argument("--mask-kind")
    parser.add_argument("--density", type=float)
    return parser


class _Quiet(argparse.ArgumentParser):
    """Raises ValueError instead of printing the usage."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def seconds(text: str) -> float:
    """Seconds of Slurm's `--time`: minutes, minutes:seconds, hours:minutes:seconds, or days before a hyphen.

    Raises:
        ValueError: it is none of these.
    """
    numbers = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", text)
    if numbers is None:
        raise ValueError(f"--time must be like 30, 4:00:00 or 1-12:00:00, got {text!r}; write it as for sbatch")
    fields = [int(field) for field in numbers["rest"].split(":")]
    if numbers["days"] is not None:
        hours, minutes, secs = (*fields, 0, 0)[:3]
    elif len(fields) == 3:
        hours, minutes, secs = fields
    else:
        hours, (minutes, secs) = 0, (*fields, 0)[:2]
    found = ((int(numbers["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + secs
    if found < 1:
        raise ValueError(f"--time must be longer than nothing, got {text!r}; write it as for sbatch")
    return float(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what dbsp-train, or this tool, refuses."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(f"{__doc__}\n{_OPTIONS}")
        return 0
    as_json = "--json" in words
    quiet_megatron()
    try:
        facts = explain([word for word in words if word not in ("--json", "--dry-run")])
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=1, allow_nan=False) if as_json else as_text(facts))
    return 0


_OPTIONS = """Options beside those of dbsp-train:
  --world-size N       processes (default: the launcher's)
  --gpus-per-node N    processes on a node (default: 8, or as the hosts share them)
  --hosts LIST         names of the nodes, as Slurm writes them: gpu[01-02]
  --time T             limit of the job, as for sbatch: 30 (minutes), 4:00:00, 1-12:00:00
  --memory-gib G       memory of a device, to compare with
  --mask-file PATH     masks of this model (.npz, .npy, .safetensors, or a run folder), in place of assumed ones
  --mask-kind KIND     structure of assumed masks, see tools/structured_masks.py
  --density D          share of dense blocks of assumed masks
  --json               the same facts for programs"""


if __name__ == "__main__":
    sys.exit(main())
