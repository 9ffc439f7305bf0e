"""Save and load a training state in a bucket: python -m benchmarks.store [--gb N] [--server juicefs|snailmail].

juicefs is an S3 on this machine's disk, snailmail one in memory whose requests take 20 ms. Every client may have 16
requests in flight per rank; s3torchconnector does not take a number. `make .venv-servers/.bench` installs them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.common import (
    Case,
    Options,
    PeakMemory,
    StateDict,
    alternate,
    barrier,
    local_bytes,
    measures,
    parse,
    rank,
    report,
    run,
    say,
    touch_free_memory,
    training_state,
    world_size,
)
from benchmarks.load import ends, manager_of, proof, spoil
from tests.stores import servers
from titan_ckpt.config import StoreConfig
from titan_ckpt.disk.workers import run_workers
from titan_ckpt.formats.native.sealed_file import BLOCK_BYTES
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import open_location

KEY = "benchmark"
"""User and password of the server."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_REGION": "us-east-1"}
UNSIGNED = {"AWS_UNSIGNED_PAYLOAD": "true"}
"""titan_ckpt and obstore leave bodies unsigned, as over https, although these servers speak http; so does `_s3fs`."""
LATENCY_MS = 20
_HELD_TWICE = 2
"""A server in memory holds what arrives, and then the object that it makes of it."""
CONNECTIONS, PART_MIB = Bucket.concurrency, Bucket.part_mib

OURS, DCP, DCP_FILES = "titan_ckpt", "DCP + s3fs", f"DCP + s3fs, {CONNECTIONS} files at a time"
CONNECTOR, LIMIT = "DCP + s3torchconnector", "limit: obstore alone"
LIMIT_VERIFIED = "limit: obstore alone, hashed and copied into memory"
FOLDERS = {OURS: "ours", DCP: "dcp", DCP_FILES: "files", CONNECTOR: "connector", LIMIT: "alone"}


def main(options: Options, server: servers.Server) -> dict[str, Any]:
    """Compare saves, then loads of what they have written; count requests."""
    sys.path.append(str(servers.PEERS))
    # juicefs ignores conditions, so that titan_ckpt refuses it unless one writer is promised
    store = StoreConfig(endpoint=server.endpoint, single_writer=options.server == "juicefs")
    place = open_location(f"{server.url}/{Path(options.folder).name}", settings=store)
    assert isinstance(place, BucketPath)
    state = training_state(options.gb)
    true_ends = {fqn: ends(tensor) for fqn, tensor in state.items()}
    total = local_bytes(state) * world_size()
    requests = _requests(options, server, store)
    manager = manager_of(state, Path(options.folder), folder=str(place / FOLDERS[OURS]), store=store)
    steps = itertools.count(1)
    newest = 0

    def save() -> None:
        nonlocal newest
        newest = next(steps)
        manager.save(newest)

    with manager:
        saves = _saves(state, place, server) | {OURS: save}

        def before_save(_: str = "") -> None:
            _clear(place)
            touch_free_memory(_HELD_TWICE * local_bytes(state))

        def before_load(_: str = "") -> None:
            spoil(state)
            touch_free_memory(local_bytes(state))

        times = alternate(saves, options.pairs, before_save)
        title = f"{options.server}, {total / 1e9:.2f} GB, {world_size()} rank(s)"
        report(f"save, {title}", times, total)
        found = {"save": _measures(times, saves[OURS], before_save, total)}
        for name, again in saves.items():  # what is loaded below
            if name != OURS:
                again()
        loads = _loads(state, place, server) | {OURS: lambda: manager.load(newest)}
        times = alternate(loads, options.pairs, before_load, after=proof(state, true_ends))
        report(f"load, {title}", times, total)
        found["load"] = _measures(times, loads[OURS], before_load, 0)
    for name, count in requests.items():
        say(f"  requests, {name}: {count}")
    _clear(place)
    return found | {"requests": requests, "parts_in_flight_mib": CONNECTIONS * PART_MIB}


def _measures(times: dict[str, list[float]], ours: Case, before: Callable[[], None], written: int) -> dict[str, Any]:
    before()
    barrier()
    with PeakMemory() as peak:
        ours()
    say(f"  {'extra memory of titan_ckpt':44s} {peak.mib:8.0f} MiB")
    best = min((DCP, DCP_FILES), key=lambda name: sorted(times[name])[len(times[name]) // 2])
    peers = [DCP, DCP_FILES, CONNECTOR]
    return measures(times, OURS, best, peers, LIMIT, bytes_written=written, extra_peak_mib=peak.mib)


def _clear(place: BucketPath) -> None:
    """Delete what was written, but for the lease of our run, and wait for the disk: every turn finds the same machine.

    What a turn has left to be written to the disk would be written during the next one.
    """
    barrier()
    if rank() == 0:
        folders = [place / name for name in FOLDERS.values()]
        found = [facts.key for folder in folders for facts in place.bucket.list_objects(folder.key)]
        place.bucket.delete([key for key in found if not key.endswith("lease.json")])
        os.sync()
    barrier()


def _saves(state: StateDict, place: BucketPath, server: servers.Server) -> dict[str, Case]:
    from s3torchconnector.dcp import S3StorageWriter

    data = torch.ones(local_bytes(state), dtype=torch.uint8)
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    part = PART_MIB << 20
    key = (place / FOLDERS[LIMIT] / str(rank())).key

    def by_s3fs(name: str, **settings: Any) -> None:
        path = str(place / FOLDERS[name])
        dcp.save(dict(state), storage_writer=FsspecWriter(path, sync_files=False, **settings, **_s3fs(server)))

    def by_connector() -> None:
        path = f"{place / FOLDERS[CONNECTOR]}/"
        dcp.save(dict(state), storage_writer=_reaching(server, S3StorageWriter("us-east-1", path, _path_style())))

    return {
        DCP: partial(by_s3fs, DCP),
        DCP_FILES: partial(by_s3fs, DCP_FILES, thread_count=CONNECTIONS),
        CONNECTOR: by_connector,
        LIMIT: lambda: place.bucket.upload(key, (view[i : i + part] for i in range(0, len(view), part)), part),
    }


def _loads(state: StateDict, place: BucketPath, server: servers.Server) -> dict[str, Case]:
    from s3torchconnector.dcp import S3StorageReader

    num_bytes, part = local_bytes(state), PART_MIB << 20
    key = (place / FOLDERS[LIMIT] / str(rank())).key

    def by_s3fs(name: str) -> None:
        dcp.load(dict(state), storage_reader=FsspecReader(str(place / FOLDERS[name]), **_s3fs(server)))

    def by_connector() -> None:
        path = f"{place / FOLDERS[CONNECTOR]}/"
        dcp.load(dict(state), storage_reader=_reaching(server, S3StorageReader("us-east-1", path, _path_style())))

    memory = torch.ones(num_bytes, dtype=torch.uint8).numpy()

    def answer(start: int) -> memoryview:
        return place.bucket.read_range(key, start, min(start + part, num_bytes))

    def get(start: int) -> None:
        answer(start)

    def get_verified(start: int) -> None:
        """Do what any load has to do that puts right bytes into tensors, and nothing else."""
        values = np.frombuffer(answer(start), np.uint8)
        for at in range(0, len(values), BLOCK_BYTES):
            piece = values[at : at + BLOCK_BYTES]
            xxhash.xxh3_128_digest(piece.data)
            np.copyto(memory[start + at :][: len(piece)], piece)

    def all_parts(get: Callable[[int], None]) -> None:
        run_workers(list(range(0, num_bytes, part)), get, CONNECTIONS)

    return {
        DCP: partial(by_s3fs, DCP),
        DCP_FILES: partial(by_s3fs, DCP_FILES),
        CONNECTOR: by_connector,
        LIMIT: partial(all_parts, get),
        LIMIT_VERIFIED: partial(all_parts, get_verified),
    }


def _s3fs(server: servers.Server) -> dict[str, Any]:
    """Return what s3fs is to know; DCP deletes one object per save, and juicefs wants an MD5 of a list of them."""
    from s3fs import S3FileSystem

    async def delete_each(fs: Any, paths: list[str], **_: object) -> list[str]:
        for path in paths:
            await fs._rm_file(path)  # noqa: SLF001
        return paths

    S3FileSystem._bulk_delete = delete_each  # noqa: SLF001
    return {
        "endpoint_url": server.endpoint,
        "max_concurrency": CONNECTIONS,
        "default_block_size": PART_MIB << 20,
        "config_kwargs": {
            "max_pool_connections": CONNECTIONS,
            "s3": {"addressing_style": "path", "payload_signing_enabled": False},
        },
        "use_listings_cache": False,
    }


def _path_style() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True, part_size=PART_MIB << 20)


def _reaching(server: servers.Server, storage: Any) -> Any:
    """Let a reader or writer ask this server; its constructor knows AWS alone."""
    from s3torchconnector._s3client import S3Client

    storage.fs._client = S3Client("us-east-1", endpoint=server.endpoint, s3client_config=_path_style())  # noqa: SLF001
    return storage


def _requests(options: Options, server: servers.Server, store: StoreConfig) -> dict[str, int]:
    """Count the requests of all ranks in one save and one load, of few tensors and of many of the same size."""
    counts: dict[str, int] = {}
    for num_tensors in (50, 300):
        state = {
            f"{kind}.{i:04d}.weight": torch.ones(600_000 // num_tensors)
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for i in range(num_tensors)
        }
        with servers.Proxy(server.endpoint, lambda *_: None) as proxy:
            settings = StoreConfig(endpoint=proxy.endpoint, single_writer=store.single_writer)
            url = f"{server.url}/{Path(options.folder).name}/counted/{num_tensors}"
            with manager_of(state, Path(options.folder), folder=url, store=settings) as manager:
                manager.save(1)  # with what is asked once in a run
                for name, act in (("save", partial(manager.save, 2)), ("load", partial(manager.load, 2))):
                    counts[f"{name} of {3 * num_tensors} tensors"] = _count(proxy, act)
    return counts


def _count(proxy: servers.Proxy, act: Callable[[], object]) -> int:
    barrier()
    before = len(proxy.requests)
    act()
    barrier()
    count = torch.tensor(len(proxy.requests) - before)
    if dist.is_initialized():
        dist.all_reduce(count)
    return int(count)


@contextlib.contextmanager
def serving(options: Options) -> Iterator[servers.Server]:
    """Start the server that is asked for."""
    folder = Path(options.folder) / "server"
    folder.mkdir(parents=True)
    if options.server == "juicefs":
        with servers.juicefs(folder, KEY) as server:
            yield server
    elif options.server == "snailmail":
        with servers.snailmail(folder, LATENCY_MS) as server:
            yield server
    else:
        with servers.moto(folder) as server:
            yield server


if __name__ == "__main__":
    _options = parse("save and load in a bucket", gb=1.0, nproc=2, pairs=5)
    os.environ.update(CREDENTIALS | UNSIGNED)
    with serving(_options) as _server:
        run(_options, partial(main, server=_server))
