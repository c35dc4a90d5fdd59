"""Convert transformers of diffusers (Wan 2.1 and 2.2, CogVideoX) into checkpoints of dbsp-train, and back.

Usage:
    python tools/convert_checkpoint.py import Wan2.1-T2V-1.3B-Diffusers/transformer converted/wan
    python tools/convert_checkpoint.py export runs/my_run exported/wan --weights ema --dtype bfloat16

`import` writes OUTPUT/model.yaml and a checkpoint in OUTPUT/checkpoints: `--model OUTPUT/model.yaml --init-from OUTPUT`
of dbsp-train, or `--checkpoint OUTPUT` of dbsp-infer. `export` writes a folder for `from_pretrained`. Files are JSON
and safetensors only, nothing is downloaded, and what cannot be carried over exactly is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.compat import quiet_megatron

if TYPE_CHECKING:
    from tools.convert_folders import Converted

DTYPES = ("keep", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what is refused."""
    options = _parser().parse_args(argv)
    quiet_megatron()
    from tools.convert_folders import export_checkpoint, import_folder  # megatron-core warns while it is imported

    try:
        if options.direction == "import":
            done = import_folder(
                options.folder, options.output, variant=options.variant, dtype=options.dtype, dry_run=options.dry_run
            )
        else:
            done = export_checkpoint(
                options.checkpoint,
                options.output,
                weights=options.weights,
                like=options.like,
                dtype=options.dtype,
                max_shard_gib=options.max_shard_gib,
                dry_run=options.dry_run,
            )
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(_summary(done))
    return 0


def _summary(done: Converted) -> str:
    gib = done.num_bytes / 1024**3
    lines = [
        f"{done.class_name}: {done.num_parameters:,} parameters in {done.num_tensors} tensors, {gib:.2f} GiB",
        *done.notes,
        f"would write {done.output}" if done.dry_run else f"wrote {done.output}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    reads = directions.add_parser("import", help="a transformer of diffusers becomes a checkpoint")
    reads.add_argument("folder", type=Path, help="folder with config.json and weights, or of a pipeline that has one")
    reads.add_argument("output", type=Path, help="new folder for model.yaml and the checkpoint")
    reads.add_argument("--variant", help="read files such as diffusion_pytorch_model.fp16.safetensors: fp16")
    writes = directions.add_parser("export", help="a checkpoint becomes a transformer of diffusers")
    writes.add_argument("checkpoint", type=Path, help="run folder (its newest good checkpoint) or a checkpoint folder")
    writes.add_argument("output", type=Path, help="new folder for config.json and weights")
    writes.add_argument("--weights", choices=("model", "ema"), default="model", help="plain or averaged weights")
    writes.add_argument("--like", type=Path, help="a transformer of the same model, whose config.json is kept")
    writes.add_argument("--max-shard-gib", type=float, default=5.0, help="largest file; also what is held in memory")
    for command in (reads, writes):
        command.add_argument("--dtype", choices=DTYPES, default="keep", help="dtype of what is written")
        command.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
