"""Checkpoints of engine megatron in megatron-core's own format, `torch_dist`, which loads on other layouts.

megatron-core joins the slices of tensor-parallel ranks, by the model's `sharded_state_dict`. What data ranks split is
put together here, tensor by tensor, as `fully_reshardable` of its distributed optimizer has it, and the ranks that
share a slice take turns in writing and reading: Megatron's own way gives each of them all tensors in host memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from dbsp_megatron.compat import background_save_options
from dbsp_megatron.train import torch_dist
from dbsp_megatron.train.checkpoint import Checkpoint
from dbsp_megatron.train.checkpoint_folder import begin, describe, publish
from dbsp_megatron.train.checkpoint_writer import CheckpointWriter
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines.base import ParameterNames
from dbsp_megatron.train.engines.write_results import use_pipe
from dbsp_megatron.train.state import StateTensor, TensorParallelPart, hand_out, owned, turns

SHARDING_TYPE = "fully_reshardable"
"""Megatron's name of the optimizer's form in a checkpoint: tensors with the names and shapes of the parameters."""
_CHECKPOINT_VERSION = 3.0
"""What Megatron-LM calls the present arrangement of weights."""


@dataclass(frozen=True)
class ShardedState:
    """Which slices of which tensors this rank holds.

    Attributes:
        module: the bare model.
        names: of its parameters.
        group: ranks that hold the same slices.
        device: where ranks exchange tensors.
    """

    module: nn.Module
    names: ParameterNames
    group: dist.ProcessGroup
    device: torch.device

    def _described(self) -> dict[str, Any]:
        """The model's own description of what it holds."""
        sharded: dict[str, Any] = self.module.sharded_state_dict(  # type: ignore[operator]
            metadata={"dp_cp_group": self.group}
        )
        return sharded

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self.names.to_global[name]: parameter for name, parameter in self.module.named_parameters()}

    def to_write(self, tensors: Mapping[str, StateTensor]) -> dict[str, ShardedBase]:
        """What this rank writes, in host memory; collective.

        Args:
            tensors: of `Engine.state`.
        """
        described, parameters = self._described(), self._parameters()
        weights = _weights(described)
        parts: dict[str, StateTensor] = {}
        owners: dict[str, str] = {}
        for full_name, tensor in tensors.items():
            kind, name = _kind_and_name(full_name)
            if kind == "model" and parameters[name].requires_grad:
                key = torch_dist.master_key(name)
                parts[name], owners[name] = parameters[name].detach(), name
            else:
                key = name if kind == "model" else torch_dist.state_key(kind, name)
            parts[key], owners[key] = _slice(tensor), name
        # Megatron's layers have an `_extra_state` each, empty here, which their own loading asks for.
        mine: dict[str, ShardedBase] = {k: v for k, v in described.items() if isinstance(v, ShardedObject)}
        for key, data in owned(parts, self.group, list(parts)).items():
            entry = _entry(weights[owners[key]], key, data)
            if is_main_replica(entry.replica_id):
                mine[key] = entry
        return mine

    def fill(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, StateTensor],
        world: World,
        may_differ: Callable[[str], bool],
    ) -> None:
        """Overwrite tensors of `Engine.state` with those of a checkpoint; collective.

        Raises:
            ValueError: a name or shape is not in the checkpoint.
        """
        weights, present = _weights(self._described()), checkpoint.present(tensors, world, may_differ)
        asked: dict[str, ShardedTensor] = {}
        for full_name in turns(list(present), self.group):
            weight = weights[_kind_and_name(full_name)[1]]
            asked[full_name] = _entry(weight, present[full_name], torch.empty(weight.local_shape))
        _check_fit(checkpoint, asked, world)
        loaded: dict[str, Tensor] = dist_checkpointing.load(asked, str(checkpoint.path))
        parts = {full_name: _slice(tensors[full_name]) for full_name in present}
        hand_out(parts, loaded, self.group, list(parts), self.device)


def _weights(described: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """Slices of parameters by global name; of one that several chunks of a rank share, what the first says."""
    found: dict[str, ShardedTensor] = {}
    for entry in described.values():
        if isinstance(entry, ShardedTensor):
            found.setdefault(entry.key, entry)
    return found


def _kind_and_name(full_name: str) -> tuple[str, str]:
    """`optim.exp_avg` and the parameter's name, of `optim.exp_avg.<name>`; kinds of one word alike."""
    words = 2 if full_name.startswith("optim.") else 1
    split = full_name.split(".", words)
    return ".".join(split[:words]), split[words]


def _slice(tensor: StateTensor) -> StateTensor:
    """A tensor as its tensor-parallel ranks have it: joining those is megatron-core's work."""
    return tensor.part if isinstance(tensor, TensorParallelPart) else tensor


def _entry(weight: ShardedTensor, key: str, data: Tensor) -> ShardedTensor:
    """A tensor cut as a weight is, of which this is the one copy among the data ranks."""
    return replace(weight, key=key, data=data, dtype=data.dtype, replica_id=(*weight.replica_id[:2], 0))


def _check_fit(checkpoint: Checkpoint, asked: Mapping[str, ShardedTensor], world: World) -> None:
    """On every rank alike: megatron-core finds out on the rank that reads, while the others wait."""
    stored = {entry.key: entry.shape for entry in checkpoint.stored().values()}
    problem = ""
    for entry in asked.values():
        shape = stored.get(entry.key)
        if shape is None:
            problem = problem or f"it has no tensor {entry.key}"
        elif shape != tuple(entry.global_shape):
            problem = problem or f"{entry.key} is {list(shape)}, the model has {list(entry.global_shape)}"
    problem = next((text for text in world.gather(problem) if text), "")
    if problem:
        raise checkpoint.misfit(ValueError(problem))


class TorchDistWriter(CheckpointWriter):
    """Writes with `dist_checkpointing`, in the background by Megatron's `AsyncCallsQueue`.

    In the background, state is copied to host memory, a forked process on each rank writes its files and hashes them,
    and `poll` publishes when all ranks are done. All collectives are those of the training thread.

    Args:
        state: slices of this rank.
        optimizer_groups: gives the optimizer's parameter groups.
        world: all ranks.
        keep_last: checkpoints to keep.
        background: whether training goes on meanwhile.

    Raises:
        ValueError: a package is missing.
    """

    def __init__(
        self,
        state: ShardedState,
        optimizer_groups: Callable[[], list[dict[str, Any]]],
        world: World,
        *,
        keep_last: int,
        background: bool,
    ) -> None:
        if find_spec("psutil") is None:
            raise ValueError(
                "train.checkpoint_format=torch_dist needs the package psutil, which megatron-core writes with; "
                "pip install psutil, or use train.checkpoint_format=native"
            )
        self._state, self._optimizer_groups = state, optimizer_groups
        self._world, self._keep_last = world, keep_last
        self._queue = AsyncCallsQueue(persistent=False) if background else None
        self._where = ""

    def save(self, folder: Path, step: int, tensors: Mapping[str, StateTensor], state: Mapping[str, Any]) -> None:
        """See `CheckpointWriter.save`."""
        self.wait()
        self._where = f"of step {step} in {folder}"
        sharded = self._state.to_write(tensors)
        common = {
            "iteration": step,
            "checkpoint_version": _CHECKPOINT_VERSION,
            "optimizer": {
                "optimizer": {"param_groups": _plain_groups(self._optimizer_groups(), step)},
                "param_state_sharding_type": SHARDING_TYPE,
            },
        }
        partial = begin(folder, step, self._world)
        use_pipe()
        with _told(self._where):
            request = dist_checkpointing.save(
                {"tensors": sharded, **common}, str(partial), async_sharded_save=True, **background_save_options()
            )
        if request is None:
            raise OSError(f"cannot write the checkpoint {self._where}: megatron-core returned no request to write it")
        digests = partial / f".digests_{self._world.rank}.json"
        if request.async_fn is not None:
            prefix = f"__{dist.get_rank()}_"
            request = request._replace(async_fn=functools.partial(_write_and_hash, request.async_fn, digests, prefix))

        def finish() -> None:
            fault = None
            if self._world.is_main:
                torch_dist.write_common(partial, common)
                fault = torch_dist.find_code(partial)
            if fault := self._world.broadcast(fault):
                # Better now than when the checkpoint is needed: it would be refused.
                raise OSError(
                    f"cannot write the checkpoint {self._where} with this version of megatron-core: {fault}; "
                    "use train.checkpoint_format=native"
                )
            known = json.loads(digests.read_text()) if digests.exists() else {}
            digests.unlink(missing_ok=True)
            publish(folder, step, state, self._world, keep_last=self._keep_last, known=known)

        request.add_finalize_fn(finish)
        with _told(self._where):
            if self._queue is None:
                request.execute_sync()
            else:
                self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """See `CheckpointWriter.poll`."""
        self._finalize(blocking=False)

    def wait(self) -> None:
        """See `CheckpointWriter.wait`."""
        self._finalize(blocking=True)

    def abandon(self) -> None:
        """See `CheckpointWriter.abandon`: what is half written stays under its temporary name."""
        if self._queue is not None:
            for call in self._queue.async_calls:
                call.async_caller.close(abort=True)

    def _finalize(self, *, blocking: bool) -> None:
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            with _told(self._where):
                self._queue.maybe_finalize_async_calls(blocking=blocking)


def _write_and_hash(
    write: Callable[..., None], digests: Path, prefix: str, rank: int, buckets: Any, results: Any, **options: Any
) -> None:
    """Write this rank's files, and their entries of the manifest; runs in a process of its own in the background."""
    try:
        write(rank, buckets, results, **options)
    except Exception as error:
        # Other ranks wait for news of this one; raised here, the failure would reach nobody.
        results.put(RuntimeError(f"{type(error).__name__}: {error}"))
    with suppress(OSError):  # what has no entry yet gets one when the checkpoint is published
        found = {path.name: describe(path) for path in digests.parent.glob(f"{prefix}*")}
        digests.write_text(json.dumps(found))


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Failures to write, as OSError."""
    try:
        yield
    except CheckpointException as error:
        reason = next((str(cause[0]) for cause in error.failures.values()), "another rank could not write its files")
        raise OSError(f"cannot write the checkpoint {where}: {reason}") from error
    except CheckpointingException as error:
        raise OSError(f"cannot write the checkpoint {where}: {error}") from error


def _plain_groups(groups: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Settings of parameter groups, without the parameters, as `DistributedOptimizer.load_state_dict` takes them."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)} | {"step": step}
        for group in groups
    ]
