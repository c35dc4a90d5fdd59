"""Trains a model dense, fine-tunes it dense and sparse from that checkpoint, and compares what the variants learn.

All fine-tuning runs of a seed start from the same weights and see the same clips, noise and timesteps. What a variant
recovers is (loss of the checkpoint - its loss) / (loss of the checkpoint - loss of dense fine-tuning), on held-out
clips, where every run is measured with the attention that it was fine-tuned with.

Usage:
    python tools/compare_sparsity.py --output out/
    python tools/compare_sparsity.py --output out/ --seeds 0 --variants vsa topp --finetune-steps 50
    python tools/compare_sparsity.py --output out/ --set "topk_1=--mask.method=topk --mask.density=0.1"

Results are kept in OUTPUT/results.json run by run: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.data import VideoDataset
from dbsp_megatron.observability import setup_logging
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from dbsp_megatron.train.distributed import distributed_world
from dbsp_megatron.train.trainer import Trainer

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.sparsity_report import DENSE, PRETRAIN, plot_study, study_markdown, summarise_study

RECIPE = Path(__file__).resolve().parents[1] / "launch" / "sparsity.yaml"
VARIANTS = {
    "vsa": "--mask.method=vsa --mask.density=0.25 --mask.ramp=cosine --mask.ramp_steps={ramp}",
    "topk": "--mask.method=topk --mask.density=0.25 --mask.ramp=cosine --mask.ramp_steps={ramp}",
    "topp": "--mask.method=topp --mask.top_p=0.4 --mask.ramp=cosine --mask.ramp_steps={ramp}",
    "sliding_tile": "--mask.method=sliding_tile --mask.cube=[4,2,1] --mask.tile=[4,2,1] --mask.window=[1,3,3]",
    "own_block": "--mask.method=sliding_tile --mask.tile=[2,2,2] --mask.window=[1,1,1]",
}
"""Flags of dbsp-train for each variant; {ramp} is the length of the density ramp in steps.

`own_block` is the control: a study in which it recovers as much as the others says nothing about which blocks
matter."""
_DEFAULT = ("vsa", "topp", "sliding_tile", "own_block")
_FINETUNE_SEED = 1000
"""Added to the seed: fine-tuning must not repeat the noise of the steps before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; returns the exit code."""
    given = _parser().parse_args(argv)
    try:
        study = Study(given)
        study.run()
        write_report(study.record, given.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((given.output / "report.md").read_text())
    return 0


class Study:
    """All runs of a command line; what is done is read from, and kept in, OUTPUT/results.json.

    Args:
        given: parsed arguments.

    Raises:
        ValueError: an unknown variant, settings that a run does not take, or the folder holds results of other ones.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        _check(given)
        self.variants = _variants(given)
        # All of them at once: a mistake in the last must not be found after the first has trained.
        self._runs = self._plan()
        self._path = given.output / "results.json"
        settings = {
            "recipe": Path(given.config).read_text(),
            "pretrain_steps": given.pretrain_steps,
            "finetune_steps": given.finetune_steps,
            "finetune_lr": given.finetune_lr,
            "eval_every": given.eval_every,
            "eval_draws": given.eval_draws,
            "variants": self.variants,
        }
        self.record: dict[str, Any] = {"settings": settings, "environment": collect_environment(), "runs": {}}
        if self._path.exists():
            found = json.loads(self._path.read_text())
            if found["settings"] != settings:
                raise ValueError(f"--output {given.output} holds results of other settings: choose another folder")
            self.record["runs"] = found["runs"]

    def run(self) -> None:
        """Whatever is not done yet."""
        for seed, name, config in self._runs:
            self._do(seed, name, config)

    def _plan(self) -> list[tuple[int, str, TrainConfig]]:
        """Seed, name and configuration of each run, in order."""
        runs = []
        for seed in self.given.seeds:
            first = self._config(f"seed{seed}_{PRETRAIN}", seed, self.given.pretrain_steps, [])
            runs.append((seed, PRETRAIN, first))
            start = str(Path(first.run.root) / first.run.name)
            for name, words in {DENSE: "", **self.variants}.items():
                flags = [f"--run.init_from={start}", f"--optim.lr={self.given.finetune_lr}", *shlex.split(words)]
                steps, seeded = self.given.finetune_steps, _FINETUNE_SEED + seed
                runs.append((seed, name, self._config(f"seed{seed}_{name}", seeded, steps, flags)))
        return runs

    def _config(self, name: str, seed: int, steps: int, flags: Sequence[str]) -> TrainConfig:
        words = ["--config", str(self.given.config), f"--run.root={self.given.output / 'runs'}", f"--run.name={name}"]
        try:
            config = parse_train([*words, f"--train.seed={seed}", f"--train.steps={steps}", *flags]).config
            config.validate(1)
        except ValueError as error:
            raise ValueError(f"run {name}: {error}") from error
        return config

    def _do(self, seed: int, name: str, config: TrainConfig) -> None:
        key = f"{seed} {name}"
        if key in self.record["runs"]:
            return
        self.record["runs"][key] = train(config, self.given.eval_every, self.given.eval_draws)
        write_text(self._path, json.dumps(self.record, indent=1) + "\n")
        row = self.record["runs"][key]
        print(
            f"seed {seed} {name}: held-out loss {row['eval_loss'][0]:.4f} -> {row['eval_loss'][-1]:.4f}, "
            f"density {row['density'][-1]:.3f}, {row['cpu_s']:.0f} s of CPU",
            file=sys.stderr,
            flush=True,
        )


def train(config: TrainConfig, eval_every: int, eval_draws: int) -> dict[str, Any]:
    """One run in this process, saved at its end.

    Args:
        config: the run, on one rank; `train.device` says where.
        eval_every: steps between evaluations; there is one before the first step and one after the last.
        eval_draws: timesteps and noises of each held-out clip.

    Returns:
        Curves: `loss` and `density` of each step, `eval_loss` at `eval_steps`; and `cpu_s`.
    """
    started = time.process_time()
    with distributed_world(config.train.device) as world:
        trainer = Trainer(config, world, VideoDataset(config.data))
    steps = config.train.steps
    losses, densities, eval_steps, eval_losses = [], [], [], []
    for step in range(steps + 1):
        if step % eval_every == 0 or step == steps:
            # The mask of the step that comes next, or of the last one.
            trainer.sp.begin_step(min(step, steps - 1))
            eval_steps.append(step)
            eval_losses.append(trainer.evaluate(eval_draws))
        if step < steps:
            row = trainer.train_step(step)
            losses.append(row["train/loss"])
            densities.append(row["sp/density"])
    trainer.steps_done = steps
    trainer.save()
    return {
        "eval_steps": eval_steps,
        "eval_loss": eval_losses,
        "loss": losses,
        "density": densities,
        "cpu_s": time.process_time() - started,
    }


def write_report(record: dict[str, Any], output: Path) -> None:
    """Table, picture and summary of a study, as far as it has got."""
    summary = summarise_study(record)
    write_text(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(output / "report.md", study_markdown(summary) + "\n")
    plot_study(record, summary, output / "report.png")


def _check(given: argparse.Namespace) -> None:
    for key in ("pretrain_steps", "finetune_steps", "eval_every", "eval_draws"):
        if getattr(given, key) < 1:
            raise ValueError(f"--{key.replace('_', '-')} must be at least 1, got {getattr(given, key)}")
    if len(set(given.seeds)) < len(given.seeds):
        raise ValueError(f"--seeds must differ, got {given.seeds}: name each once")
    if not given.config.is_file():
        raise ValueError(f"--config must be a YAML file of dbsp-train, got {given.config}")


def _variants(given: argparse.Namespace) -> dict[str, str]:
    known = dict(VARIANTS)
    for text in given.set:
        name, equals, words = text.partition("=")
        if not equals or name in (DENSE, PRETRAIN) or not name.isidentifier():
            raise ValueError(f"--set must be NAME=FLAGS with a name other than dense and pretrain, got {text!r}")
        known[name] = words
    wanted = [*given.variants, *(text.partition("=")[0] for text in given.set)]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"--variants must be of {', '.join(known)}, got {', '.join(unknown)}; define others by --set")
    ramp = max(1, given.finetune_steps // 4)
    return {name: known[name].replace("{ramp}", str(ramp)) for name in wanted}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of runs, results, table and picture")
    parser.add_argument("--config", type=Path, default=RECIPE, help="dbsp-train YAML of the dense run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--variants", nargs="*", default=list(_DEFAULT), help=f"of {', '.join(VARIANTS)}; default: {' '.join(_DEFAULT)}"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=FLAGS", help="one more variant")
    parser.add_argument("--pretrain-steps", type=int, default=50)
    parser.add_argument("--finetune-steps", type=int, default=80)
    parser.add_argument("--finetune-lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--eval-draws", type=int, default=4, help="timesteps and noises of each held-out clip")
    return parser


if __name__ == "__main__":
    setup_logging(0)
    quiet_megatron()
    raise SystemExit(main())
