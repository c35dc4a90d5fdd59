"""The training run: data in, optimizer steps, metrics, checkpoints, and a clean end whatever ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.comm.transfer import HostCopy, to_device
from dbsp_megatron.config.resolve import with_degrees
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.data import ClipSource, iter_validation, plan_batches
from dbsp_megatron.models.build import build_model
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.models.dit.coarse import in_coarse_branch
from dbsp_megatron.models.dit.lora import is_adapter
from dbsp_megatron.models.dit.lora_layers import add_lora
from dbsp_megatron.models.dit.pointwise import compile_pointwise
from dbsp_megatron.observability import MetricLogger, ProgressBar, RunFolder, get_logger
from dbsp_megatron.train import flow_matching
from dbsp_megatron.train.batches import DrawnBatch, StepBatches, clip_loader, count_training_clips
from dbsp_megatron.train.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from dbsp_megatron.train.checkpoint_folder import list_checkpoints
from dbsp_megatron.train.continuation import check_continuation, resolve_seed, run_lock
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines import StepWork, build_engine
from dbsp_megatron.train.memory import peak_memory_gib
from dbsp_megatron.train.mesh import build_mesh, megatron_mesh, sequence_parallel
from dbsp_megatron.train.prefetch import Prefetcher
from dbsp_megatron.train.profiling import StepProfiler, named_range
from dbsp_megatron.train.rank_metrics import own_numbers, rank_metrics
from dbsp_megatron.train.report import RunReport
from dbsp_megatron.train.sharding import shard_model
from dbsp_megatron.train.signals import StopRequest
from dbsp_megatron.train.state import StateTensor
from dbsp_megatron.train.step_clock import StepClock

logger = get_logger(__name__)


class Trainer:
    """One run of `config` on `world`; every rank makes one and calls `run`.

    Args:
        config: the run.
        world: all ranks.
        dataset: the clips of `config.data`.

    Raises:
        ValueError: configuration, data and checkpoint do not fit together.
    """

    def __init__(self, config: TrainConfig, world: World, dataset: ClipSource) -> None:
        self.world = world
        resolved = config.validate(world.size)
        self.mesh = (
            megatron_mesh(world, resolved.mesh, config.parallel)
            if config.train.engine == "megatron"
            else build_mesh(world, resolved.mesh.sp_size, config.parallel)
        )
        checkpoint = self._find_checkpoint(config)
        if checkpoint is not None and config.run.resume == "auto":
            check_continuation(checkpoint.state, config, _model_config(config), is_main=world.is_main)
        seed = resolve_seed(config.train.seed, checkpoint, world)
        # Degrees stay as given: a saved `auto` fits whatever number of processes continues the run.
        self.config = config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        loop = config.train
        self.model_config = _model_config(config)
        self.sp = sequence_parallel(with_degrees(config.sp, resolved.mesh), self.mesh)
        module = build_model(
            self.model_config,
            sp=self.sp,
            pg_collection=self.mesh.model_groups,
            sequence_parallel=config.parallel.sequence_parallel,
            vp_size=config.parallel.virtual_pipeline_parallel_size,
        ).to(world.device)
        add_lora(module, config.lora)
        if loop.compile:
            compile_pointwise(module)
        self.engine = build_engine(module, config, world, self.mesh)
        self.sharded = shard_model(
            self.engine.forward,
            module,
            self.model_config,
            self.sp,
            config.mask,
            device=world.device,
            precision=loop.precision,
            reorders=config.parallel.model_size == 1,
        )
        self.num_train = count_training_clips(dataset, config, world, self.mesh)
        self._origin = dataset.origin
        self.loader = clip_loader(dataset, self.model_config, loop.context, loop.image_context)
        self.plan = plan_batches(dataset.sizes[: self.num_train], loop.global_batch_size, seed)
        self._batches = StepBatches(self.loader, self.plan, loop, dp_rank=self.mesh.dp_rank, dp_size=self.mesh.dp_size)
        self._clock = StepClock()
        self._writer = self.engine.checkpoint_writer(loop, world, self.mesh)
        self.steps_done = 0
        self._last_saved = -1
        if checkpoint is not None:
            self._load_from(checkpoint, self.engine.prepare_load(checkpoint.step))
            self.steps_done = self._last_saved = checkpoint.step
            logger.info("resumed from %s at step %d", checkpoint.path, checkpoint.step)
        elif config.run.init_from:
            self._start_from(open_checkpoint(Path(config.run.init_from), world))

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return checkpoint_folder(self.config)

    def run(self, stop: StopRequest | None = None) -> int:
        """Train to the last step, or until any rank is asked to stop; returns the exit code."""
        stop = StopRequest() if stop is None else stop
        with run_lock(Path(self.config.run.root) / self.config.run.name, self.world):
            return self._run(stop)

    def close(self) -> None:
        """Finish writing and release the engine's process groups; the trainer is not used afterwards."""
        self._writer.wait()
        self.engine.close()

    def _run(self, stop: StopRequest) -> int:
        config, world = self.config, self.world
        folder = RunFolder(config.run.root, config.run.name, is_main=world.is_main)
        folder.write_config(dataclasses.asdict(config))
        folder.write_environment(world_size=world.size)
        resume_step = self.steps_done or None
        if self.steps_done < config.train.steps:
            folder.clear_done()
        with (
            MetricLogger(
                folder,
                config.wandb,
                world.is_main,
                dataclasses.asdict(config),
                resume_step=resume_step,
                tensorboard=config.run.tensorboard,
            ) as metrics,
            RunReport(folder, world, self.sp, resume_step=resume_step) as report,
            ProgressBar(config.train.steps, world.is_main, initial=self.steps_done) as bar,
            StepProfiler(
                folder.path, config.run.profile, config.run.profile_steps, world.rank, world.device
            ) as profiler,
            self._writer,
            Prefetcher(
                self._batches.load,
                first=self.steps_done,
                end=config.train.steps,
                num_ahead=config.data.prefetch_batches,
            ) as batches,
        ):
            shown: dict[str, Any] = {}
            while self.steps_done < config.train.steps:
                with profiler.step(self.steps_done + 1):
                    row, stopping = self._train_step(stop, batches)
                self._writer.poll()
                if logged := self._is_logged(self.steps_done):
                    # Before the evaluation, which attends to other clips.
                    report.add_layers(self.steps_done)
                if config.wandb.mode != "disabled" and self._is_due(config.wandb.image_every):
                    images = report.pictures(self.steps_done, config)
                else:
                    images = {}
                if self._is_due(config.train.eval_every):
                    row["eval/loss"] = self.evaluate()
                if logged:
                    metrics.log(self.steps_done, row)
                metrics.log_images(self.steps_done, images)
                shown = row or shown
                before, after = shown.get("sp/imbalance_before"), shown.get("sp/imbalance_after")
                bar.update(self.steps_done, shown.get("train/loss"), before, after)
                if stopping or self._is_due(config.train.checkpoint_every):
                    self.save()
                if stopping:
                    kept = config.train.keep_last > 0
                    logger.info(
                        "stopped by %s after step %d, %s",
                        stop.reason or "another rank's request",
                        self.steps_done,
                        "checkpoint saved; run the same command to go on" if kept else "no checkpoint is kept",
                    )
                    return 0
            self.save()
        folder.mark_done(self.steps_done)
        return report.finish(self.config)

    def train_step(self, step: int) -> dict[str, Any]:
        """One optimizer step on the batch of 0-based `step`; returns its metrics, equal on all ranks but for `sp/`."""
        return self._optimize(step, self._batches.load(step), StopRequest())[0]

    def _train_step(self, stop: StopRequest, batches: Prefetcher[list[DrawnBatch]]) -> tuple[dict[str, Any], bool]:
        """One step of the run: its metrics, empty if nobody needs them, and whether to stop."""
        step, clock = self.steps_done, self._clock
        clock.start()
        taken = batches.take(step)
        clock.loaded()
        row, stopping = self._optimize(step, taken, stop, read=self._is_read(step + 1), data_ms=clock.data_ms)
        clock.stop(row.pop("num_tokens"))
        self.steps_done += 1
        if self._is_logged(self.steps_done):
            row |= clock.read() | {"mem/peak_gib": peak_memory_gib(self.world.device)}
        return row, stopping

    def _optimize(
        self,
        step: int,
        batches: Sequence[DrawnBatch],
        stop: StopRequest,
        *,
        read: bool = True,
        data_ms: float = 0.0,
    ) -> tuple[dict[str, Any], bool]:
        """Metrics of a step and whether any rank is asked to stop; collective.

        Args:
            step: 0-based.
            batches: micro-batches of this rank.
            stop: this rank's request.
            read: wait for the device and give all metrics; without it the device may still be at the step.
            data_ms: how long this rank waited for data.
        """
        self.sharded.recalibrate()
        self.sp.begin_step(step)
        channels, mesh = self.model_config.patch_out_dim, self.mesh
        local_tokens = sum(len(b.timesteps) * len(self.sharded.video_positions(b.clips.grid)) for b in batches)
        # Counted over every rank and micro-batch before the first backward, so that each token weighs the same.
        num_tokens = int(self.world.sum(mesh.counted(torch.tensor(local_tokens))))
        with named_range("forward_backward", self.world.device):
            total = self.engine.forward_backward(self._work(batches, num_tokens))
        with named_range("optimizer", self.world.device):
            norm, lr = self.engine.step(step)
        done = self._clock.launched(mesh.counted(total))
        if not read:
            return {"num_tokens": num_tokens}, bool(self.world.sum(torch.tensor(float(stop.requested()))) > 0)
        logged = self._is_logged(step + 1)
        own = [float(done.wait()), float(stop.requested())]
        # The device has finished the step by now: `total` was read.
        stats = self.sp.stats(by_rank=logged)
        if logged:
            own += own_numbers(self.world, {**stats, "perf/data_ms": data_ms})
        shared = self.world.sum(torch.tensor(own, dtype=torch.float64))
        row = {
            "train/loss": float(shared[0]) / (num_tokens * channels),
            "train/lr": lr,
            "train/grad_norm": float(norm),
            "num_tokens": num_tokens,
            **stats,
            **(rank_metrics(self.world, shared[2:].tolist()) if logged else {}),
        }
        return row, bool(shared[1] > 0)

    def _work(self, batches: Sequence[DrawnBatch], num_tokens: int) -> StepWork[DrawnBatch]:
        return StepWork(
            batches=batches,
            session=lambda batch: self.sharded.session(batch.clips.grid),
            forward=self._forward,
            num_tokens=num_tokens,
            num_channels=self.model_config.patch_out_dim,
        )

    def _forward(self, batch: DrawnBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The model's output, and what makes of it the squared error summed over this rank's tokens."""
        loop, clips = self.config.train, batch.clips
        data = self.sharded.shard(clips.tokens, clips.grid)
        noise = self.sharded.shard(batch.noise, clips.grid)
        timesteps = to_device(batch.timesteps, self.world.device)
        noisy = flow_matching.interpolate(data, noise, timesteps)
        target = flow_matching.velocity(data, noise)
        output = self.sharded.velocity(
            noisy,
            timesteps,
            clips.grid,
            clips.context,
            condition=None if clips.condition is None else self.sharded.shard(clips.condition, clips.grid),
            image_context=clips.image_context,
        )
        weights = None
        if loop.loss_weighting != "none":
            weights = flow_matching.loss_weights(timesteps, loop.loss_weighting, min_snr_gamma=loop.min_snr_gamma)
        return output, lambda predicted: flow_matching.squared_error_sum(predicted, target, weights)

    @torch.no_grad()
    def evaluate(self, draws: int = 1) -> float:
        """Mean loss over the held-out clips, each counted once however many ranks there are; collective.

        Args:
            draws: timesteps and noises of each clip.
        """
        losses: list[tuple[float, HostCopy]] = []
        elements = 0.0
        self.engine.module.eval()
        sharded, self.sharded.module = self.sharded.module, self.engine.module
        for index in iter_validation(self.config.train.eval_samples, self.mesh.dp_rank, self.mesh.dp_size):
            # Groups with different samples may skip the round when no clip is left, unless the model makes them meet:
            # then they work on some clip that does not count.
            if index is None and not self.engine.meets_in_forward:
                continue
            clips = self.loader.load([self.num_train + (index or 0)])
            counts = float(index is not None)
            for draw in range(draws):
                # Always the draws of the first steps: losses of different steps are to be comparable.
                work = self._work([self._batches.draw(clips, draw)], num_tokens=1)
                losses.append((counts, HostCopy(self.engine.evaluate(work))))
                # While the device works on one, the host makes the next ready.
                losses[-2:][0][1].wait()
            elements += counts * draws * len(self.sharded.video_positions(clips.grid)) * self.model_config.patch_out_dim
        self.sharded.module = sharded
        self.engine.module.train()
        total = sum(counts * float(loss.wait()) for counts, loss in losses)
        sums = self.mesh.counted(torch.tensor([total, elements], dtype=torch.float64))
        total, count = self.world.sum(sums).tolist()
        return total / count

    def save(self) -> None:
        """Write a checkpoint of the present step, unless it exists or none is kept; collective.

        See `train.async_checkpoint`.
        """
        if self._last_saved == self.steps_done or self.config.train.keep_last == 0:
            return
        state = {
            "model": dataclasses.asdict(self.model_config),
            "config": dataclasses.asdict(self.config),
            "seed": self.config.train.seed,
            "world_size": self.world.size,
            "has_ema": self.engine.ema is not None,
            "latents": self._origin,
        }
        self._writer.save(self.checkpoints, self.steps_done, self.engine.state(), state)
        self._last_saved = self.steps_done

    def _load_from(self, checkpoint: Checkpoint, tensors: dict[str, StateTensor]) -> None:
        self.engine.fill(checkpoint, tensors, self.world, self.mesh, may_differ=_may_differ)
        self.engine.loaded()

    def _start_from(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a checkpoint, and nothing else of it."""
        self._load_from(checkpoint, self.engine.weights())
        if self.engine.ema is not None:
            self.engine.ema.restart()
        logger.info("weights of %s (step %d)", checkpoint.path, checkpoint.step)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.steps_done % every == 0

    def _is_logged(self, step: int) -> bool:
        """Whether the metrics of a step are logged; alike on all ranks."""
        loop = self.config.train
        return step % loop.log_every == 0 or (loop.eval_every > 0 and step % loop.eval_every == 0)

    def _is_read(self, step: int) -> bool:
        """Whether a step ends when the device has done it; alike on all ranks.

        The others may still be going on when the next one is launched. What follows a step read here, a checkpoint or a
        picture, waits for the device and is not to count as time of steps.
        """
        loop, image_every = self.config.train, self.config.wandb.image_every
        due = any(every > 0 and step % every == 0 for every in (loop.checkpoint_every, image_every))
        return self._is_logged(step) or due or step == loop.steps

    def _find_checkpoint(self, config: TrainConfig) -> Checkpoint | None:
        folder, resume = checkpoint_folder(config), config.run.resume
        if resume == "auto":
            return find_checkpoint(folder, self.world, set_aside=True)
        if self.world.broadcast(bool(list_checkpoints(folder)) if self.world.is_main else None):
            raise ValueError(
                f"run.resume={resume} would mix a new run with the checkpoints in {folder}; "
                "choose another run.name, remove that folder, or use run.resume=auto"
            )
        return None if resume == "never" else open_checkpoint(Path(resume), self.world)


def _may_differ(name: str) -> bool:
    """Tensors that a checkpoint of the base model need not have."""
    return in_coarse_branch(name) or is_adapter(name)


def checkpoint_folder(config: TrainConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.run.root) / config.run.name / "checkpoints"


def _model_config(config: TrainConfig) -> DiTConfig:
    model = config.load_model()
    kind = config.train.recompute_kind
    recompute = model.recompute if kind == "none" else kind
    return dataclasses.replace(model, init_seed=config.train.seed, recompute=recompute)
