"""What both commands do around their work: join the world, agree on errors, watch other ranks, choose the exit code."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

from dbsp_megatron.comm.agree import digest_int
from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.train.distributed import World, distributed_world
from dbsp_megatron.train.heartbeat import Heartbeat, default_store
from dbsp_megatron.train.signals import StopRequest

CONFIG_ERROR_CODE = 2
FAILED_CODE = 1

PreparedT = TypeVar("PreparedT")


def exit_with_line(error: ValueError) -> NoReturn:
    """Print a configuration or data error as one line on stderr and end with code 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(CONFIG_ERROR_CODE)


def launch(
    prepare: Callable[[], PreparedT],
    work: Callable[[PreparedT, World, StopRequest], int],
    *,
    settings: Callable[[PreparedT], tuple[str, float]],
    resume_hint: Callable[[PreparedT], str],
    handle_signals: bool,
) -> NoReturn:
    """Run `work` on all ranks and exit.

    Args:
        prepare: parses and checks, without communication; a ValueError on any rank ends all of them with one line.
        work: the job; returns the exit code.
        settings: device name and collective timeout (s) of what `prepare` returned.
        resume_hint: what to tell the user to do when a rank dies.
        handle_signals: whether `work` ends by itself when its stop request is set. Launchers send SIGTERM to the
            survivors of a dead rank; handling it outside everything else gives them the time to name that rank.
    """
    quiet_megatron()
    stop = StopRequest()
    try:
        prepared = prepare()
    except ValueError as error:
        _fail(error)
    try:
        handlers = stop.installed() if handle_signals else nullcontext()
        with handlers, distributed_world(*settings(prepared)) as world:
            _agree(world, None)
            _agree_on_settings(world, prepared)
            with _watch(world, resume_hint(prepared)):
                code = work(prepared, world, stop)
                # Nobody leaves before all are done: the first to end may take the rendezvous store with it.
                world.barrier()
    except ValueError as error:
        exit_with_line(error)
    except OSError as error:
        # A full disk, a missing right: nothing that a traceback would explain better.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(FAILED_CODE) from error
    raise SystemExit(code)


def _fail(problem: ValueError) -> NoReturn:
    """Tell the other ranks about an error before the work, then end."""
    try:
        with distributed_world("cpu", 60.0) as world:
            _agree(world, problem)
    except ValueError as error:
        exit_with_line(error)
    raise SystemExit(CONFIG_ERROR_CODE)


def _agree(world: World, problem: ValueError | None) -> None:
    """Raise on rank 0 what any rank found; the others leave quietly with the same code."""
    texts = world.gather(None if problem is None else str(problem))
    found = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if not found:
        return
    if not world.is_main:
        raise SystemExit(CONFIG_ERROR_CODE)
    rank, text = found[0]
    everywhere = len(found) == world.size and len({text for _, text in found}) == 1
    raise ValueError(text if everywhere else f"rank {rank}: {text}")


def _agree_on_settings(world: World, prepared: object) -> None:
    """Refuse ranks that were started with other settings: they would wait for one another, or train apart."""
    if not dataclasses.is_dataclass(prepared) or isinstance(prepared, type):
        return
    mine = dict(_flat(dataclasses.asdict(prepared)))
    if len(set(world.gather(digest_int(sorted(mine.items()))))) == 1:
        return
    found: list[dict[str, str]] = world.gather(mine)
    if not world.is_main:
        raise SystemExit(CONFIG_ERROR_CODE)
    rank, key = next(
        (rank, key) for rank, other in enumerate(found) for key in (*mine, *other) if other.get(key) != mine.get(key)
    )
    raise ValueError(
        f"{key} must be equal on all ranks, got {found[rank].get(key)} on rank {rank} and {mine.get(key)} on rank 0: "
        "start all of them with the same arguments and configuration files"
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value)


def _watch(world: World, hint: str) -> AbstractContextManager[object]:
    if world.size == 1:
        return nullcontext()
    return Heartbeat(default_store(), world.rank, world.size, resume_hint=hint)


def same_start(words: str, environ: Mapping[str, str]) -> str:
    """How to start Python on as many processes as now, by what started these.

    Args:
        words: arguments of Python.
        environ: environment of a rank.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if "RUN_LIFE_DIR" in environ:
        return "the launch/run.sh command that started this run (Slurm requeues a job by itself when a node died)"
    if "TORCHELASTIC_RUN_ID" in environ:
        local = int(environ.get("LOCAL_WORLD_SIZE", world))
        nodes = f"--nnodes {world // local} " if world > local else ""
        return f"torchrun {nodes}--nproc_per_node {local} {words}{' on every node' if nodes else ''}"
    if "SLURM_PROCID" in environ:
        return f"srun --ntasks {world} python {words} with the same setting of RANK and WORLD_SIZE"
    return f"python {words} on {world} processes, as before"


def launched_rank() -> int:
    """Rank that the launcher announced, else 0."""
    return int(os.environ.get("RANK", "0"))
