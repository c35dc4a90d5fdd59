"""Ends a run whose rank died, naming that rank, instead of leaving the others in a collective for ever."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

_ALL_PAIRS_LIMIT = 64
_NUM_WATCHED = 8


@dataclass(kw_only=True)
class _Peer:
    """What this rank last saw of another."""

    beat: int = -1
    seen_at: float = 0.0
    host: str = "unknown host"
    pid: int = 0
    state: str = "starting"


class Heartbeat:
    """Daemon thread that publishes a counter and watches those of other ranks.

    It speaks to the rendezvous store through a connection of its own: the main thread may be blocked in a collective,
    or in the store itself. The first rank to find a peer dead writes the verdict, so that all ranks name the same one.

    A peer that ended cleanly has said so and is not missed. A peer that failed with an exception has said that too, and
    the others repeat its message.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        resume_hint: str,
        interval_s: float = 2.0,
        stale_s: float = 15.0,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        # Type stubs of torch lack Store.clone.
        connection: Any = store
        self._store = dist.PrefixStore("dbsp/heartbeat", connection.clone())
        self._store.set_timeout(timedelta(seconds=stale_s))
        self._rank = rank
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._resume_hint = resume_hint
        self._on_death = on_death or _die
        if world_size <= _ALL_PAIRS_LIMIT:
            watched = [peer for peer in range(world_size) if peer != rank]
        else:
            watched = [(rank + distance) % world_size for distance in range(1, _NUM_WATCHED + 1)]
        self._peers = {peer: _Peer() for peer in watched}
        self._beat = 0
        self._state = "running"
        self._ending = threading.Event()
        self._suspicious = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Publish the first beat and start watching."""
        self._publish()
        now = time.monotonic()
        for peer in self._peers.values():
            peer.seen_at = now
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye; after an exception, first wait for the verdict on what caused it."""
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._state = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            if _from_collective(error):
                # A broken connection is how another rank's death looks from here: let the watch name that rank.
                self._state = "connection lost"
                self._suspicious = True
                self._thread.join(self._stale_s + 5 * self._interval_s)
        else:
            self._state = "done"
        self._ending.set()
        self._thread.join(self._interval_s)
        # If the store went with its host, there is nobody left to tell.
        with suppress(RuntimeError):
            self._publish()

    def _publish(self) -> None:
        self._beat += 1
        value = {"beat": self._beat, "host": socket.gethostname(), "pid": os.getpid(), "state": self._state}
        self._store.set(str(self._rank), json.dumps(value))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(self._interval_s):
            now = time.monotonic()
            if now - last > self._stale_s / 2:
                # This process itself was stopped or starved: what it missed says nothing about the others.
                for peer in self._peers.values():
                    peer.seen_at = now
            last = now
            try:
                self._publish()
                verdict = self._verdict()
            except RuntimeError as error:
                if self._ending.is_set():
                    return
                reason = str(error).splitlines()[0][:120]
                verdict = f"the rendezvous store stopped answering, its process has ended ({reason})"
            if verdict is not None and not self._ending.is_set():
                self._on_death(f"{verdict}; {self._resume_hint}")
                return

    def _verdict(self) -> str | None:
        """Update the peers; a message if one of them is dead."""
        now = time.monotonic()
        # After a lost connection there is no doubt that something died, so less silence is proof enough.
        limit = min(self._stale_s, 3 * self._interval_s) if self._suspicious else self._stale_s
        mine = None
        for rank, peer in self._peers.items():
            if self._store.check([str(rank)]):
                value = json.loads(self._store.get(str(rank)))
                if value["beat"] != peer.beat:
                    peer.beat, peer.seen_at = value["beat"], now
                    peer.host, peer.pid, peer.state = value["host"], value["pid"], value["state"]
            where = f"rank {rank} ({peer.host}, pid {peer.pid})"
            if peer.state == "done":
                continue
            if peer.state.startswith("failed"):
                mine = f"{where} {peer.state}"
                break
            if now - peer.seen_at > limit:
                mine = f"{where} stopped responding {now - peer.seen_at:.0f} s ago"
                break
        if mine is not None:
            return self._store.compare_set("verdict", "", mine).decode()
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None


def _from_collective(error: BaseException) -> bool:
    """Whether an exception looks like a collective that lost its peer, or the store."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    words = ("connection", "timed out", "gloo", "nccl", "socket", "broken pipe")
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in words)


def _die(message: str) -> None:
    """End this process at once: its main thread may never come back from the collective it is in."""
    sys.stdout.flush()
    print(f"\n{message}", file=sys.stderr, flush=True)
    os._exit(1)


def default_store() -> dist.Store:
    """The store that the default process group was built on."""
    return dist.distributed_c10d._get_default_store()
