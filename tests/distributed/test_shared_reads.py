"""Ranks that want the same bytes read each once, and verify what the others send."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.layouts import mesh_of
from tests.faults import forked_ranks
from tests.faults.rank_exports import join
from tests.faults.scenarios import SOAK
from tests.faults.test_half_loaded import refused
from tests.forked import resident
from tests.world import Run, convert, flip_bit, gathered, heard, llama, misplaced, same, write_hf
from tests.world import manager as manager_of
from titan_ckpt.config import ExportConfig, InitialLoadConfig, ResumeConfig
from titan_ckpt.disk.files import FileReader
from titan_ckpt.distributed.coordinator import HAS_LEFT, Coordinator
from titan_ckpt.distributed.peer_groups import ExchangeBroken, PeerGroups
from titan_ckpt.errors import CorruptCheckpointError, PeerError
from titan_ckpt.formats.dcp.filling import ChunkSource
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.huggingface.peft import PeftReader
from titan_ckpt.formats.native.writer import WritePlan
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.reading import shared
from titan_ckpt.formats.reading.engine import SliceReader
from titan_ckpt.geometry.chunks import Block, Chunk
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import StateDictTransforms

FORMATS = ("native", "hf", "dcp")
Read = tuple[str, tuple[int, int]]


@contextmanager
def together(**constants: Any) -> Iterator[list[Read]]:
    """Read together whatever several ranks want, in small windows; yield what this rank reads from files."""
    reads: list[Read] = []
    fetch, read_window = SliceReader.fetch, SliceReader.read_window
    fetch_chunks = ChunkSource.fetch

    def fetched(self: SliceReader, window: tuple[int, int], into: memoryview) -> None:
        reads.append((self.path, window))
        fetch(self, window, into)

    def fetched_chunks(self: ChunkSource, window: tuple[int, int], into: memoryview) -> None:
        reads.append((self.key, window))
        fetch_chunks(self, window, into)

    def read(self: SliceReader, window: tuple[int, int], *, fill: bool) -> None:
        reads.append((self.path, window))
        read_window(self, window, fill=fill)

    small: dict[str, Any] = {
        "LEAST_BYTES": 0,
        "LEAST_RUN_BYTES": 0,
        "_PIECE_BYTES": (1 << 18, 2 << 18),
        "_WINDOW_BYTES": 9 << 18,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(shared, is_dear=lambda **_: True, **small | constants))
        stack.enter_context(patch.object(SliceReader, "fetch", fetched))
        stack.enter_context(patch.object(ChunkSource, "fetch", fetched_chunks))
        stack.enter_context(patch.object(SliceReader, "read_window", read))
        yield reads


def truth() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    big = {f"layers.{i}.weight": torch.randn(512, 256) for i in range(6)}
    return big | {"scale": torch.tensor(0.5), "few": torch.randn(3, 8), "ids": torch.arange(7)}


def write(folder: Path, form: str, state: StateDict, line: Coordinator) -> None:
    if form == "native":
        if line.rank == 0:
            folder.mkdir()
        line.barrier("made")
        WritePlan.of(state, line).write(folder, state)
    elif form == "hf":
        write_hf(folder, state, line=line)
    else:
        dcp.save(dict(state), checkpoint_id=folder)
    line.barrier("written")


def load(state: StateDict, folder: Any, line: Coordinator, *, cast: bool = False, is_on: bool = True) -> None:
    """Fill tensors as a manager does, of the same names as in the folder."""
    form: Any = folder.name if folder.name in FORMATS else None  # a native folder without a manifest says nothing
    with open_reader(folder, form) as reader:
        plan = StateDictTransforms(KeyMap(identity=True)).from_file(state, reader.tensors, None, cast=cast)
        (fill,) = shared.share_reads("read", [reader.plan(plan.requests)], line, is_on=is_on)
        line.together("filled", fill)
        line.peers.discard()


def empty(layout: str, values: StateDict, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return tensors of no value, laid out over the ranks."""
    size = dist.get_world_size()
    mesh = mesh_of("cpu", (2, size // 2) if layout in ("hsdp", "tp") else (size,))
    placements: dict[str, list[Any]] = {
        "hsdp": [Replicate(), Shard(0)],
        "tp": [Replicate(), Shard(1)],
        "rows": [Shard(0)],
        "columns": [Shard(1)],
    }

    def made(value: torch.Tensor) -> Any:
        fresh = torch.zeros_like(value, dtype=dtype if value.is_floating_point() else None)
        if layout == "replicated" or value.dim() < 2:
            return fresh
        return distribute_tensor(fresh, mesh, placements[layout])

    return {name: made(value) for name, value in values.items()}


def overlapping(reads: list[Read]) -> list[Read]:
    """Return what begins before the read before it has ended."""
    reads = sorted(reads)
    return [b for a, b in itertools.pairwise(reads) if a[0] == b[0] and a[1][1] > b[1][0]]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_byte_is_read_once_whatever_the_layout(num_ranks: int, tmp_path: Path) -> None:
    """Each format is read whole on every rank, under HSDP, in columns, and in rows of which a rank has none."""
    distributed(num_ranks)(inspect.unwrap(read_in_each_layout))(tmp_path)


@distributed(nproc=4)
def read_in_each_layout(tmp_path: Path) -> None:
    line, values = Coordinator.current(60.0), truth()
    for form in FORMATS:
        write(folder := tmp_path / form, form, values, line)
        for layout, dtype in [("replicated", None), ("hsdp", None), ("columns", None), ("rows", None),
                              ("replicated", torch.float64), ("hsdp", torch.bfloat16), ("tp", None)]:  # fmt: skip
            if layout in ("hsdp", "tp") and line.world_size == 3:
                continue
            state = empty(layout, values, dtype)
            with together() as reads:
                load(state, folder, line, cast=dtype is not None)
            expected = {name: v.to(state[name].dtype) for name, v in values.items()}
            assert not misplaced(state, expected), (form, layout, dtype)
            of_ranks = gathered(reads)
            if layout in ("replicated", "hsdp", "tp"):
                assert not overlapping([*itertools.chain(*of_ranks)]), (form, layout, dtype)
                assert all(of_ranks), "every rank reads a part"


@distributed(nproc=4)
def test_what_a_rank_sends_wrong_is_found_and_read_from_the_file(tmp_path: Path) -> None:
    """A flip in any piece of a rank, or in its digest: all values are right, and the others name the rank."""
    line, values = Coordinator.current(60.0), truth()
    broadcast = PeerGroups.broadcast
    for form in FORMATS:
        write(folder := tmp_path / form, form, values, line)
        for at in (0, 777, -17, -1):

            def flipped(self: PeerGroups, ranks: Any, sender: int, memory: torch.Tensor, seconds: float) -> Any:
                if line.rank == sender == 1:
                    memory[at] ^= 4  # noqa: B023
                return broadcast(self, ranks, sender, memory, seconds)

            state = empty("replicated", values)
            with together(), heard() as lines, patch.object(PeerGroups, "broadcast", flipped):
                load(state, folder, line)
            assert not misplaced(state, values), (form, at)
            if at != -1 or form != "native":  # native blocks have their digests in the file
                assert any("arrived wrong from rank 1" in text for text in lines), (form, at, lines)
            assert not any("from rank 2" in text for text in lines)


@distributed(nproc=4)
def test_what_a_rank_cannot_read_is_read_by_the_others(tmp_path: Path) -> None:
    """A rank whose reads for others fail leaves them to these; damage in a file is an error on every rank."""
    line, values = Coordinator.current(60.0), truth()
    for form in FORMATS:
        write(folder := tmp_path / form, form, values, line)

        source: Any = ChunkSource if form == "dcp" else SliceReader
        fetch = source.fetch

        def fails(self: Any, window: tuple[int, int], into: memoryview) -> None:
            if line.rank == 2 and "ahead" in threading.current_thread().name:
                raise OSError("no luck")
            fetch(self, window, into)  # noqa: B023

        state = empty("replicated", values)
        with together(), patch.object(source, "fetch", fails):
            load(state, folder, line)
        assert not misplaced(state, values)
    path = tmp_path / "native" / "rank-00000.safetensors"
    if line.rank == 0:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    line.barrier("flipped")
    with together(), pytest.raises(CorruptCheckpointError, match="digest they were written with"):
        load(empty("replicated", values), tmp_path / "native", line)


def whole_run() -> Run:
    """Return a run whose ranks all hold all of 3 MB."""
    torch.manual_seed(0)
    return Run(torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256)), is_laid_out=True)


def saved(run: Run, folder: Path, steps: int) -> list[dict[str, Any]]:
    history = []
    with run.manager(folder, async_mode="disabled") as manager:
        for step in range(1, steps + 1):
            run.step(torch.ones(1, 256))
            history.append(run.state())
            manager.save(step)
    return history


@distributed(nproc=4)
def test_a_run_resumes_and_says_what_it_read_and_received(tmp_path: Path) -> None:
    """The telemetry of all ranks counts each byte once as read and thrice as received; off, all is read four times.

    The log says which it is and why.
    A damaged step is left for the one before, and what broke off there is connected anew.
    """
    run = whole_run()
    history = saved(run, tmp_path, 2)
    events: list[Any] = []
    for is_on, why in [(True, "MB are read together with other ranks: "), (False, "share_reads is false")]:
        resume = ResumeConfig(share_reads=is_on)
        with together(), heard(level=logging.INFO) as lines, run.manager(tmp_path, resume=resume) as manager:
            manager.telemetry.add_sink(events.append)
            run.step(torch.ones(1, 256))
            assert manager.load().step == 2
            assert same(run.state(), history[1])
        assert len([line for line in lines if why in line]) == 1
    with heard(level=logging.INFO) as lines, run.manager(tmp_path) as manager:
        manager.load()
    assert [line for line in lines if "nothing to share is in a bucket" in line]
    if dist.get_rank() == 0:
        on, off = ((e["bytes_read"], e["bytes_received"]) for e in events if e["event"] == "load")
        assert on[1] == 3 * on[0] > 3 * 3e6
        assert off == (4 * on[0], 0)
        flip_bit(tmp_path / "checkpoints" / "step-2" / "rank-00002.safetensors", -3000)
    dist.barrier()
    with together(), run.manager(tmp_path) as manager:
        assert manager.load().step == 1
        assert same(run.state(), history[0])


@distributed(nproc=4)
def test_a_frozen_base_that_every_rank_holds_is_read_once(tmp_path: Path) -> None:
    """A LoRA run asks for no byte of its base's folder twice, though the tensors are cast."""
    base = llama(seed=3)
    if dist.get_rank() == 0:
        groups = StateDictTransforms(base.key_map()).to_file(base.state_dict(), None, torch.bfloat16)
        alone = Coordinator(0, 1, None, "", 60.0)
        export_huggingface(
            tmp_path / "base", groups, config=base.hf_config(), assets=None, max_shard_bytes=10**9, coordinator=alone
        )
    dist.barrier()
    model = llama(seed=4)
    hooks = convert(model, {"kind": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["wq"]})
    source = InitialLoadConfig(str(tmp_path / "base"), cast=True)
    with (
        together(_PIECE_BYTES=(1 << 14, 1 << 14)) as reads,
        manager_of(tmp_path, model, initial_load=[source], model_converters=hooks) as manager,
    ):
        manager.load()
    expected = {name: value.bfloat16().float() for name, value in base.named_parameters()}
    live = {name.replace(".base.", "."): value for name, value in model.named_parameters()}
    assert all(same(live[name].detach(), value.detach()) for name, value in expected.items() if name in live)
    assert len(expected.keys() & live.keys()) > 10
    of_ranks = gathered(reads)
    assert all(of_ranks)
    assert not overlapping([*itertools.chain(*of_ranks)])


@distributed(nproc=4)
def test_an_adapter_of_peft_is_read_once(tmp_path: Path) -> None:
    """Its values are checked on every rank after they have come."""
    line, (key, other) = Coordinator.current(60.0), [f"base_model.model.wq.lora_{x}.weight" for x in "AB"]
    values = {key: torch.randn(8, 1 << 17), other: torch.randn(1 << 17, 8)}
    for value in values.values():
        dist.broadcast(value, 0)
    for is_finite in (True, False):
        if line.rank == 0:
            values[other][-1, -1] = 1.0 if is_finite else torch.nan
            config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["wq"]}
            (tmp_path / "adapter_config.json").write_text(json.dumps(config))
            save_file(values, tmp_path / "adapter_model.safetensors")
        line.barrier("written")
        state = {name: torch.zeros_like(value) for name, value in values.items()}
        with together() as reads, PeftReader(tmp_path) as reader:
            requests = [Block(Chunk.whole(value.shape), value, name) for name, value in state.items()]
            (fill,) = shared.share_reads("read", [reader.plan(requests)], line, is_on=True)
            with nullcontext() if is_finite else pytest.raises(CorruptCheckpointError, match="not finite"):
                fill()
            line.peers.discard()
        dist.broadcast(values[other], 0)
        assert all(state[name].view(torch.int32).equal(value.view(torch.int32)) for name, value in values.items())
        of_ranks = gathered(reads)
        assert all(of_ranks) and not overlapping([*itertools.chain(*of_ranks)])


@distributed(nproc=2)
def test_stored_chunks_that_reach_into_others_are_filled(tmp_path: Path) -> None:
    """A rank receives only a part of a chunk whose first bytes are another's too, and reads it by itself."""
    line, values = Coordinator.current(60.0), {"a": torch.randn(600, 512), "b": torch.randn(600, 512)}
    for name in values:
        dist.broadcast(values[name], 0)
    folder = tmp_path / "dcp"
    if line.rank == 0:
        with warnings.catch_warnings(action="ignore"):  # that this is one process
            dcp.save(dict(values), checkpoint_id=folder, no_dist=True)
    line.barrier("saved")
    table = pickle.loads((folder / ".metadata").read_bytes())
    line.barrier("read")
    (first, place), (_, other) = sorted(table.storage_data.items(), key=lambda item: item[1].offset)
    assert place.relative_path == other.relative_path
    if line.rank == 0:
        place.length += 4096
        (folder / ".metadata").write_bytes(pickle.dumps(table))
    line.barrier("changed")
    state = {each: torch.zeros(600, 512) for each in values if line.rank == 0 or each == first.fqn}
    with together():
        load(state, folder, line)
    assert not misplaced(state, {each: values[each] for each in state})


@distributed(nproc=2)
def test_files_of_one_name_that_differ_are_not_mixed(tmp_path: Path) -> None:
    """Hosts may have files of their own under the same path, as large as each other's."""
    line, values = Coordinator.current(60.0), truth()
    for rank in range(2):
        write(folder := tmp_path / str(rank) / "hf", "hf", {name: v + rank for name, v in values.items()}, line)
    (file,) = folder.glob("*.safetensors")
    opened = FileReader.__init__

    def own(self: FileReader, path: Path) -> None:
        opened(self, tmp_path / str(line.rank) / "hf" / path.name)
        self.path = path

    state = empty("replicated", values)
    with together(), patch.object(FileReader, "__init__", own):
        load(state, folder, line)
    assert not misplaced(state, {name: v + line.rank for name, v in values.items()}), file


@distributed(nproc=4)
def test_memory_is_two_windows_beside_that_of_a_load(tmp_path: Path) -> None:
    """And a piece that is read ahead, here of 2 MiB; also of a DCP chunk, which is whole in memory either way."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back, and counts again
    line, values = Coordinator.current(60.0), {"big": torch.ones(4096, 2048), "few": torch.ones(3, 8)}
    sizes = {"_PIECE_BYTES": (1 << 20, 2 << 20), "_WINDOW_BYTES": 4 << 20, "_AHEAD_BYTES": 2 << 20}
    for form in FORMATS:
        write(folder := tmp_path / form, form, values, line)
        peaks = []
        for is_on in (False, True, False, True):  # the first two, which import and connect, do not count
            state = {name: torch.full_like(value, 2.0) for name, value in values.items()}
            with together(**sizes):
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
                before = resident()
                load(state, folder, line, is_on=is_on)
                peaks.append(resident("VmHWM") - before)
            assert same(state, values)
        assert peaks[3] - peaks[2] < (2 * 4 + 2 + 8) << 20, (form, [peak >> 20 for peak in peaks])


@distributed(nproc=2)
def test_a_signal_is_heard_while_a_rank_waits_for_another(tmp_path: Path) -> None:
    """As of Ctrl-C: the other rank sends nothing until it is heard."""
    line, values, is_heard = Coordinator.current(40.0), truth(), tmp_path / "heard"
    write(folder := tmp_path / "native", "native", values, line)
    broadcast = PeerGroups.broadcast

    def interrupted(*_: object) -> None:
        is_heard.touch()
        raise KeyboardInterrupt

    def waiting(self: PeerGroups, ranks: Any, sender: int, memory: torch.Tensor, seconds: float) -> Any:
        if sender == 1 and line.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        if sender == line.rank == 1:
            for look in itertools.takewhile(lambda _: not is_heard.exists(), itertools.count()):
                assert look < 100
                time.sleep(0.1)
        return broadcast(self, ranks, sender, memory, seconds)

    signal.signal(signal.SIGALRM, interrupted)
    state = empty("replicated", values)
    told = pytest.raises(KeyboardInterrupt if line.rank == 0 else (PeerError, ExchangeBroken))
    with together(), patch.object(PeerGroups, "broadcast", waiting), told:
        load(state, folder, line)


RANKS, SECONDS = 4, 4.0
FAULTS = ("kill", "stop", "raise", "late", "flip")
SEEDS = range(100) if SOAK else (*range(10), 28)
"""In the last one a rank is late by more than the others wait."""


class Moments:
    """The moments at which this rank may fail while ranks read together: before it calls what waits for the others."""

    def __init__(self, act: Callable[[int, str, Sequence[Any]], None] = lambda *_: None) -> None:
        """`act` gets the number of each, the name of what is called, and its arguments."""
        self.number, self._is_on, self._act = 0, False, act

    def before(self, called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tag = args[1] if called.__name__ == "gather" else ""
            self._is_on |= tag == "load-begin/digests"
            if self._is_on:
                self.number += 1
                self._act(self.number - 1, called.__name__, args)
            self._is_on &= tag != "load-read"
            return called(*args, **options)

        return call

    @contextmanager
    def noted(self) -> Iterator[None]:
        calls = [(Coordinator, "gather"), (Coordinator, "gloo_group"), (PeerGroups, "broadcast"),
                 (shared.Deal, "_receive"), (shared._Sent, "fill")]  # fmt: skip
        with ExitStack() as stack:
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, self.before(getattr(owner, name))))
            stack.enter_context(together(_PIECE_BYTES=(1 << 16, 1 << 16), _WINDOW_BYTES=4 << 16))
            yield


def small_run(layout: str) -> Run:
    """Return a run of 1 MB of weights, which all ranks hold whole, or two pairs of them in halves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256))
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicas", "shards")))
    return Run(model, is_laid_out=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Return a step of each layout, and in how many moments a rank loads it together with the others."""
    made = {}
    for layout in ("whole", "hsdp"):
        folder = tmp_path_factory.mktemp(layout)

        def body(line: Coordinator) -> Any:
            join(line)
            run, moments = small_run(layout), Moments()  # noqa: B023
            with run.manager(folder, async_mode="disabled") as manager:  # noqa: B023
                run.step(torch.ones(1, 256))
                manager.save(1)
                state = run.state()
                if line.rank == 0:
                    torch.save(state, folder / "truth.pt")  # noqa: B023
                with moments.noted():
                    manager.load()
            return moments.number

        numbers = forked_ranks.run(RANKS, body)
        assert all(isinstance(number, int) for number in numbers), numbers
        made[layout] = folder, min(numbers)
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_fails_while_they_read_together_is_named(
    seed: int, tmp_path: Path, stored: dict[str, tuple[Path, int]]
) -> None:
    """At a moment that is drawn: the others raise PeerError in time, and keep nothing of the mixture.

    A rank that is late is named, or does not matter; what a rank sends wrong never does.
    """
    draw = random.Random(seed)
    fault, victim, layout = FAULTS[seed % len(FAULTS)], draw.randrange(RANKS), draw.choice([*stored])
    original, count = stored[layout]
    number, folder = draw.randrange(count), tmp_path / "run"
    shutil.copytree(original, folder)

    def body(line: Coordinator) -> Any:
        join(line)
        run = small_run(layout)

        def act(at: int, name: str, args: Sequence[Any]) -> None:
            if line.rank == victim and fault == "flip" and name == "broadcast" and args[2] == victim:
                args[3][draw.randrange(len(args[3]))] ^= 1 << draw.randrange(8)
            if line.rank != victim or at != number:
                return
            if fault in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "raise":
                raise ValueError("no luck")
            if fault == "late":
                time.sleep(0.7 * SECONDS)

        with run.manager(folder, async_mode="disabled", export=(ExportConfig("dcp"),)) as manager:
            manager._coordinator.timeout_seconds = manager._directory._coordinator.timeout_seconds = SECONDS
            began = time.monotonic()
            with Moments(act).noted():
                told = forked_ranks.outcome(lambda: manager.load(1).step)
            seconds = time.monotonic() - began
            kept = same(run.state(), torch.load(folder / "truth.pt")) if told[0] == "ok" else refused(manager)
        return [told, kept, seconds]

    with forked_ranks.Ranks(RANKS, body, 20.0, rank_0_serves=False) as ranks:
        of_ranks = {r: ranks.result(r) for r in range(RANKS) if r != victim or fault not in ("kill", "stop")}
    print(seed, fault, victim, layout, number, count, of_ranks)
    assert all(kept is True for _, kept, _ in of_ranks.values()), of_ranks
    others = [told for rank, (told, *_) in of_ranks.items() if rank != victim]
    if fault == "flip" or (fault == "late" and others[0][0] == "ok"):
        assert all(told[:2] == ["ok", 1] for told, *_ in of_ranks.values()), of_ranks
    else:
        for ended, named, why in others:
            assert (ended, named[:1]) == ("PeerError", [victim]), why
            assert f"rank {victim}" in why
            assert named == [victim] or HAS_LEFT in why  # who has raised before others looked
    assert [path.name for path in folder.glob("*/step-*")] == ["step-1"]
