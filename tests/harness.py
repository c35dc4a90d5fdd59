"""Runs one function on several ranks: pooled worker processes, gloo or NCCL, a file store, readable failures."""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import multiprocessing.connection as mp_connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.process_state import restored_process_state

GROUP_TIMEOUT_S = 20
"""A collective that waits longer than this raises on the rank that waits."""
_MEET_TIMEOUT_S = 240
_MAX_POOLS = 2
_GRACE_S = 0.5
_MAX_THREADS = 60
"""A worker with more is replaced: gloo's threads of groups that something still refers to wake up all the time."""


class RankError(AssertionError):
    """A rank failed: the message names the rank and carries its traceback."""


class RankTimeoutError(AssertionError):
    """Some ranks did not finish in time: the message names them and shows where they stand."""


def device_for(rank: int) -> torch.device:
    """Device that `rank` computes on: its CUDA device under NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank of a fresh default process group.

    Worker processes are kept for later calls (importing torch takes seconds); the process group and its store are new
    each time. After a failure the workers of that call are killed and replaced.

    Args:
        fn: function at module level; it is found again in the workers by file and name, so its file needs no package.
        world_size: number of ranks.
        *args: pickled to every rank.
        timeout_s: wall-clock limit of the call, start of new workers not counted.
        env: variables set before the worker imports anything; each distinct `env` has workers of its own.
        backend: "gloo", "nccl", or None for no process group at all.

    Returns:
        The pickled return values, by rank.

    Raises:
        RankError: a rank raised or died.
        RankTimeoutError: a rank did not finish within `timeout_s`.
    """
    if "<" in fn.__qualname__:
        raise ValueError(f"run_ranks needs a function at module level, got {fn.__qualname__}")
    return _pool_for(env or {}).run(fn, world_size, args, timeout_s, backend)


# What nearly every rank imports; a worker that has to do it by itself is ready seconds later.
_PRELOADED = ["torch.distributed.checkpoint", "dbsp_megatron.train.trainer", "tests.harness"]


def _context(env: Mapping[str, str]) -> Any:
    """How workers start: forked from a server that has imported everything, or, with variables of their own, anew.

    Where there is a GPU, anew as well: imports of the server may touch CUDA, which no fork of it can use then.
    """
    if env or torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        context = _context(env)
        self.connection, child = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="rank_stacks_")
        os.close(handle)
        self.stacks = Path(name)
        with _environment({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **env}):
            self.process = context.Process(target=_serve, args=(child, name), daemon=True)
            self.process.start()
        child.close()

    def wait_ready(self) -> None:
        """Block until the worker has imported torch."""
        if not self.connection.poll(120):
            raise RankTimeoutError("a worker process did not start within 120 s")
        self.connection.recv_bytes()

    def num_threads(self) -> int:
        """Threads of the process."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:  # it is gone; sending it a job will say so
            return 0

    def stack_dump(self) -> str:
        """Where the worker's threads stand now."""
        if self.process.pid is None or not self.process.is_alive():
            return "(process is gone)"
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text()

    def close(self, kill: bool) -> None:
        """End the process; a worker that is not killed gets a moment to leave by itself."""
        if not kill:
            try:
                self.connection.send_bytes(b"")
                self.process.join(3)
            except OSError:
                pass
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


class _Pool:
    """Workers that share one environment; world size `n` uses the first `n`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.workers: list[_Worker] = []

    def run(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float, backend: str | None
    ) -> list[Any]:
        tired = [worker for worker in self.workers[:world_size] if worker.num_threads() > _MAX_THREADS]
        for worker in tired:
            worker.close(kill=True)
        missing = max(0, world_size - len(self.workers))
        started = [_Worker(self.env) for _ in range(missing + len(tired))]
        fresh = iter(started)
        self.workers = [next(fresh) if worker in tired else worker for worker in self.workers] + list(fresh)
        for worker in started:
            worker.wait_ready()
        workers = self.workers[:world_size]
        code = fn.__code__
        target = (code.co_filename, fn.__module__, fn.__qualname__)
        payload = pickle.dumps(args)
        try:
            with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
                for rank, worker in enumerate(workers):
                    job = (target, payload, rank, world_size, os.path.join(folder, "store"), backend)
                    worker.connection.send_bytes(pickle.dumps(job))
                return self._collect(workers, fn.__name__, timeout_s)
        except BaseException:
            for worker in workers:
                worker.close(kill=True)
            self.workers = self.workers[world_size:]
            raise

    def _collect(self, workers: list[_Worker], name: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        ranks = {id(worker.connection): rank for rank, worker in enumerate(workers)}
        while len(results) + len(failures) < len(workers):
            done = set(results) | {rank for rank, _ in failures}
            waiting = [worker.connection for rank, worker in enumerate(workers) if rank not in done]
            ready = mp_connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                if not isinstance(connection, Connection):
                    continue
                rank = ranks[id(connection)]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    workers[rank].process.join(5)
                    ok, value = False, f"the process died with exit code {workers[rank].process.exitcode}"
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, value))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            rank, text = failures[0]
            others = sorted(other for other, _ in failures[1:])
            also = f" (ranks {others} failed too)" if others else ""
            raise RankError(f"{name}: rank {rank} of {len(workers)} failed first{also}:\n{text}")
        missing = [rank for rank in range(len(workers)) if rank not in results]
        if missing:
            stacks = "\n".join(f"--- rank {rank}\n{workers[rank].stack_dump()}" for rank in missing)
            raise RankTimeoutError(
                f"{name}: ranks {missing} of {len(workers)} still run after {timeout_s:g} s\n{stacks}"
            )
        return [results[rank] for rank in range(len(workers))]

    def close(self) -> None:
        for worker in self.workers:
            worker.close(kill=False)
        self.workers = []


_pools: dict[tuple[tuple[str, str], ...], _Pool] = {}


def _pool_for(env: Mapping[str, str]) -> _Pool:
    key = tuple(sorted(env.items()))
    pool = _pools.pop(key, None) or _Pool(env)
    while len(_pools) >= _MAX_POOLS:
        _pools.pop(next(iter(_pools))).close()
    _pools[key] = pool
    return pool


def close_pools() -> None:
    """End all pooled workers, so that coverage data and temporary files are written out."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(connection: Connection, stacks: str) -> None:
    """Body of a worker: take jobs until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                return
            if not message:
                return
            try:
                with restored_process_state():
                    reply = pickle.dumps((True, _run_job(*pickle.loads(message))))
            except BaseException:
                reply = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(reply)


def _run_job(
    target: tuple[str, str, str], payload: bytes, rank: int, world_size: int, store_path: str, backend: str | None
) -> Any:
    torch.manual_seed(0)
    fn = _load(*target)
    args = pickle.loads(payload)
    if backend is None:
        return fn(rank, world_size, *args)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(store_path, world_size)
    # Importing the test takes seconds on new workers; warm ones must not run into the group's limit meanwhile.
    _meet(store, "imported", rank, world_size)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    # After a failure the group stays up until the parent kills the worker: closing it would make the other ranks fail
    # too, and their broken connections would hide the cause.
    result = fn(rank, world_size, *args)
    # Ranks may have unequal work, so the end is awaited without the group's limit; the parent's limit holds.
    _meet(store, "done", rank, world_size)
    dist.destroy_process_group()
    return result


def _meet(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    """Wait until all ranks have come here."""
    place = dist.PrefixStore(name, store)
    place.set(str(rank), "here")
    place.wait([str(other) for other in range(world_size)], timedelta(seconds=_MEET_TIMEOUT_S))


def _load(path: str, module_name: str, qualname: str) -> Any:
    """Find a function by file: with pytest's importlib mode the test modules need not be importable by name."""
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    return found
