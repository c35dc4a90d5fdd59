"""Differences between versions of torch, megatron-core and NVIDIA apex, looked at in this module only."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import warnings
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from av.container import InputContainer
    from megatron.core.process_groups_config import ProcessGroupCollection


def in_backward() -> bool:
    """Whether a backward pass runs in this thread, as when activations are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def version_tuple(distribution: str) -> tuple[int, ...] | None:
    """Numeric release of an installed distribution.

    Args:
        distribution: Name on the package index, such as `"megatron-core"`.

    Returns:
        The leading integers of its version, `(0, 16, 1)`, or None if it is not installed.
    """
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    release: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        release.append(int(digits))
        if digits != part:  # a pre-release such as `0rc2` ends the release part
            break
    return tuple(release)


def nvidia_apex() -> tuple[ModuleType | None, str]:
    """NVIDIA's apex with its fused optimizer kernels, if that is what is installed.

    A package index also serves an unrelated project under the same name, so the name alone proves nothing: the
    compiled kernels (`amp_C`), `apex.optimizers.FusedAdam` and `apex.multi_tensor_apply` must all be there.

    Returns:
        The module and `""`, or None and the reason in words.
    """
    if importlib.util.find_spec("apex") is None:
        return None, "apex is not installed"
    try:
        apex = importlib.import_module("apex")
        optimizers = importlib.import_module("apex.optimizers")
        multi_tensor = importlib.import_module("apex.multi_tensor_apply")
    except Exception as error:  # another project named apex may fail on import in any way
        return None, f"the installed package named apex is not NVIDIA's apex ({type(error).__name__}: {error})"
    missing = [
        name
        for name, found in (
            ("apex.optimizers.FusedAdam", hasattr(optimizers, "FusedAdam")),
            ("apex.multi_tensor_apply.multi_tensor_applier", hasattr(multi_tensor, "multi_tensor_applier")),
        )
        if not found
    ]
    if missing:
        return None, f"the installed package named apex is not NVIDIA's apex: it has no {' or '.join(missing)}"
    if importlib.util.find_spec("amp_C") is None:
        return None, "apex was built without its CUDA extension amp_C (build it with --cpp_ext --cuda_ext)"
    return apex, ""


def import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, set up for a device.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "train.engine=deepspeed needs the package deepspeed, which is not installed; "
            "pip install deepspeed, or use train.engine=native"
        )
    # Launchers set it; DeepSpeed refuses to start without.
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    if device.type == "cpu":
        # It would compile shared-memory collectives when groups are made, for minutes, and print while it does.
        compatible = getattr(importlib.import_module("deepspeed.ops"), "__compatible_ops__", {})
        for name in [name for name in compatible if "shm" in name]:
            compatible[name] = False
    return deepspeed


def diffusers_dtype_argument() -> str:
    """Argument of `from_pretrained` that says the dtype: renamed in diffusers 0.42, before it ignored the new name."""
    return "dtype" if (version_tuple("diffusers") or (0,)) >= (0, 42) else "torch_dtype"


def process_groups(pg_collection: ProcessGroupCollection | None = None) -> ProcessGroupCollection:
    """The process groups that megatron modules are to be built with.

    Without Megatron's `parallel_state`, and without `torch.distributed` at all, the groups are None, which megatron's
    `get_pg_size` and `get_pg_rank` read as one rank. Nothing is initialised here.

    Args:
        pg_collection: Groups of the caller; returned as they are.

    Returns:
        A collection whose `tp`, `cp` and `pp` can be read.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if pg_collection is not None:
        return pg_collection
    if torch.distributed.is_available() and torch.distributed.is_initialized() and parallel_state.is_initialized():
        return ProcessGroupCollection.use_mpu_process_groups()
    return ProcessGroupCollection(tp=None, cp=None, pp=None)


def background_save_options() -> dict[str, Any]:
    """Arguments of `dist_checkpointing.save` that choose Megatron's own way to write, where there is a choice."""
    from megatron.core import dist_checkpointing

    chosen = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if chosen else {}


def group_size(group: torch.distributed.ProcessGroup | None) -> int:
    """Number of ranks of a group; 1 if it is None or `torch.distributed` is not initialised."""
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return group.size()


def group_rank(group: torch.distributed.ProcessGroup | None) -> int:
    """This process' rank in a group; 0 if it is None or `torch.distributed` is not initialised."""
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    return group.rank()


def open_video(path: str) -> InputContainer:
    """PyAV's `open` for reading, with undecodable metadata ignored (from PyAV 19 on always, without an option)."""
    import av

    if (version_tuple("av") or (19,)) < (19,):
        return av.open(path, mode="r", metadata_errors="ignore")
    return av.open(path, mode="r")


def quiet_megatron() -> None:
    """Leave out megatron-core's warnings that optional packages are absent; commands say themselves what runs."""
    for start in ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=start, category=UserWarning)


def data_parallel_options() -> dict[str, Any]:
    """Arguments of DistributedDataParallel that keep it from broadcasting buffers (renamed in torch 2.13)."""
    from torch.nn.parallel import DistributedDataParallel

    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def new_group_of_members(
    ranks: list[int], name: str, backend: str | None = None, options: Any = None
) -> torch.distributed.ProcessGroup:
    """A process group that only its members make, under a name that they agreed on.

    torch's own `new_group(use_local_synchronization=True)` derives the name from how many groups each rank holds, so
    ranks that hold unequally many (replicas, groups of the user, a second construction) wait for one another under
    different names. This is what it does after choosing the name.

    Args:
        ranks: Global ranks, ascending, this one among them.
        name: Not used before, equal on all members.
        backend: Default that of the default group.
        options: Of the backend; their time limit is that of the group.
    """
    from torch.distributed import distributed_c10d as c10d

    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    chosen = c10d.Backend(backend or default_backend)
    mine = ranks.index(torch.distributed.get_rank())
    make: Any = c10d._new_process_group_helper
    group: torch.distributed.ProcessGroup = make(
        *(len(ranks), mine, ranks, chosen, store, name),
        options,
        timeout=c10d._get_default_timeout(chosen) if options is None else options._timeout,
    )[0]
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group
