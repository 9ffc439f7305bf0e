"""Ranks as forked processes that a test may stop or kill one by one, each with a Coordinator over a real TCP store.

`titan_ckpt.testing.distributed` is for ranks that are to live; here a dying rank is the point.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from tests.forked import fork
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import PeerError


class Ranks:
    """Forked processes, each with a Coordinator; the store is served by one more, as torchrun serves it, or by rank 0.

    This process never talks to the store: its client would start threads, and forking beside threads may deadlock.
    """

    def __init__(self, world: int, body: Callable[[Coordinator], Any], timeout: float, rank_0_serves: bool) -> None:
        self.world = world
        self.pids: list[int] = []
        self.pipes: list[int] = []
        host_read, host_write = os.pipe()
        members = list(range(world)) if rank_0_serves else [*range(world), -1]
        for rank in members:
            read, write = os.pipe()

            def live(rank: int = rank, write: int = write) -> None:
                try:
                    if rank == (0 if rank_0_serves else -1):
                        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False)
                        os.write(host_write, f"{store.port:06d}".encode() * world)
                    else:
                        store = TCPStore("127.0.0.1", int(os.read(host_read, 6)), None, False, timedelta(seconds=30))
                    if rank == -1:
                        time.sleep(600)
                    result = body(Coordinator(rank, world, store, "test", timeout))
                    os.write(write, json.dumps(result).encode())
                except BaseException:
                    os.write(write, json.dumps({"crash": traceback.format_exc()[-2000:]}).encode())

            pid = fork(live)
            os.close(write)
            self.pids.append(pid)
            self.pipes.append(read)
        os.close(host_read)
        os.close(host_write)

    def result(self, rank: int) -> Any:
        data = b""
        while block := os.read(self.pipes[rank], 65536):
            data += block
        return json.loads(data) if data else None

    def results(self) -> list[Any]:
        """Return what every rank returned; None of one that was killed."""
        return [self.result(rank) for rank in range(self.world)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for pid, pipe in zip(self.pids, self.pipes, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)


def run(
    world: int, body: Callable[[Coordinator], Any], timeout: float = 20.0, rank_0_serves: bool = False
) -> list[Any]:
    """Run `body` on every rank and return what each returned."""
    with Ranks(world, body, timeout, rank_0_serves) as ranks:
        return ranks.results()


def outcome(call: Callable[[], Any]) -> list[Any]:
    """Return ["ok", value], or what was raised with the ranks it names."""
    try:
        return ["ok", call()]
    except PeerError as error:
        return ["PeerError", list(error.ranks), str(error)]
    except Exception as error:
        return [type(error).__name__, str(error)]
