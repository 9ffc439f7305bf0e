"""Reading parts of tensors from safetensors files: exactly the requested bytes, straight into live memory.

Owns the way from a region of a file to a view of memory: the bytes, the kind of read, the cast. Knows no folder and no
index, and decides nothing about names or dtypes. All formats that store plain safetensors files share it.

A run of bytes goes straight into contiguous memory of the same dtype. Into memory that is strided or has a different
dtype it is copied from a mapping, if the file is cached, and else through a bounce buffer around the page cache. A
strided region (a shard of columns) is copied from a mapping. Memory of a device is filled from bounce buffers, which
are page-locked then, and casts are made there.

From a bucket, runs that lie near each other in a file are one request, so that small tensors do not cost one each.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from titan_ckpt import progress
from titan_ckpt.disk.cuda import upload
from titan_ckpt.disk.direct import (
    IO_BYTES,
    bounce_buffer,
    finish_uploads,
    num_copy_workers,
    run_workers,
)
from titan_ckpt.disk.files import Reader
from titan_ckpt.disk.memory import ALIGNMENT, Buffer, bytes_at
from titan_ckpt.errors import CorruptCheckpointError, listed
from titan_ckpt.formats.safetensors.container import Entry, SafetensorsHeader
from titan_ckpt.formats.safetensors.regions import copy_from_host, mapped_boxes, windows
from titan_ckpt.gc_paused import gc_paused
from titan_ckpt.geometry.boxes import element_span, is_run
from titan_ckpt.geometry.chunks import Chunk, is_plain_memory
from titan_ckpt.geometry.requests import Fill, ReadRequest
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place

RUN_BYTES = IO_BYTES - 2 * ALIGNMENT
"""Bytes of one read. Extended to whole blocks, as a direct read must be, it still fits a bounce buffer."""
_MOST_GAP_BYTES = 256 << 10
"""Bytes that nobody wants, between two runs that one request of a bucket gets; asking again takes longer."""
_MIN_DIRECT_BYTES = 64 << 10
"""A smaller read goes through the page cache, whose read-ahead serves the next read."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of bytes of a file, and the memory that its elements fill in row-major order."""

    file: Reader
    offset: int
    num_bytes: int
    dtype: torch.dtype
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Region:
    """A strided box of a file tensor, and memory with as many elements."""

    file: Reader
    entry: Entry
    chunk: Chunk
    into: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.chunk.numel * self.entry.info.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Span:
    """Runs of one object of a bucket that one request gets; they fit a bounce buffer."""

    file: Reader
    offset: int
    num_bytes: int
    runs: tuple[_Run, ...]


_Job = _Run | _Region | _Span


class SafetensorsFiles:
    """Open safetensors files whose headers were checked before. Each key is in one file."""

    def __init__(self, headers: Sequence[SafetensorsHeader]) -> None:
        """Index the files' keys. Raises: CorruptCheckpointError if two files hold one key."""
        self._files: dict[Place, Reader] = {}
        self._lock = threading.Lock()
        self._places: dict[str, tuple[SafetensorsHeader, Entry]] = {}
        faults = []
        for header in headers:
            for key, entry in header.entries.items():
                if key in self._places:
                    faults.append(f"{key} is in {self._places[key][0].path.name} and in {header.path.name}")
                self._places[key] = (header, entry)
        if faults:
            folder = headers[0].path.parent
            raise CorruptCheckpointError(f"{folder}: {len(faults)} tensor(s) twice: {listed(faults)}", str(folder))
        self._headers = headers

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {key: entry for key, (_, entry) in self._places.items()}

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request. Several threads may call it. Raises: as `plan`, and as the function that it returns."""
        self.plan(requests)()

    @gc_paused()
    def plan(self, requests: Sequence[ReadRequest]) -> Fill:
        """Open the files of all requests; return the function that fills them.

        Raises: CorruptCheckpointError if a file has changed since its header was read; OSError. The function raises
        CorruptCheckpointError if a file ends early; OSError.
        """
        jobs: list[_Run | _Region] = []
        for request in requests:
            header, entry = self._places[request.key]
            if request.chunk.numel:
                jobs += _jobs(self._open(header), entry, request)
        order = {file: i for i, file in enumerate(list(self._files.values()))}
        jobs.sort(key=lambda job: (order[job.file], job.offset if isinstance(job, _Run) else job.entry.start))
        return partial(self._fill, _spanned(_joined(jobs)))

    @gc_paused()
    def _fill(self, jobs: Sequence[_Job]) -> None:
        cold = _cold_files(jobs)
        num_workers = max((file.num_workers for file in cold), default=0) or num_copy_workers()
        total = sum(job.num_bytes for job in jobs)
        try:
            with progress.shown(f"loading {self._headers[0].path.parent.name}", total) as count:
                run_workers(jobs, lambda job: _fill(job, cold, count), min(num_workers, len(jobs)))
                finish_uploads()
        except EOFError as error:
            raise CorruptCheckpointError(f"{error}: it was cut short while it was open") from error

    def open(self, keys: Iterable[str]) -> None:
        """Open the files of these tensors. Raises: CorruptCheckpointError if one has changed since; OSError."""
        for key in keys:
            self._open(self._places[key][0])

    def _open(self, header: SafetensorsHeader) -> Reader:
        with self._lock:
            if header.path not in self._files:
                # download caches hold links to their files
                file = store_of(header.path).open(header.path, through_links=True)
                if file.num_bytes != header.num_bytes:
                    file.close()
                    raise CorruptCheckpointError(f"{header.path}: it has changed since it was opened", str(header.path))
                self._files[header.path] = file
            return self._files[header.path]

    def close(self) -> None:
        """Close all files; idempotent."""
        for file in self._files.values():
            file.close()
        self._files = {}


def _jobs(file: Reader, entry: Entry, request: ReadRequest) -> Iterator[_Run | _Region]:
    """Cut a request into reads that fit a bounce buffer, or into one strided copy."""
    shape, dtype, into = entry.info.shape, entry.info.dtype, request.into.detach()
    if not is_run(shape, request.chunk):
        yield _Region(file, entry, request.chunk, into)
        return
    if is_plain_memory(into):
        into = into.view(-1)
    offset = entry.start + element_span(shape, request.chunk)[0] * dtype.itemsize
    for window in windows(into, RUN_BYTES // dtype.itemsize):
        num_bytes = window.numel() * dtype.itemsize
        yield _Run(file, offset, num_bytes, dtype, window)
        offset += num_bytes


def _joined(jobs: Sequence[_Run | _Region]) -> list[_Run | _Region]:
    """Join runs that follow each other both in the file and in memory, as long as they fit one read."""
    made: list[_Run | _Region] = []
    for job in jobs:
        last = made[-1] if made else None
        if (
            isinstance(job, _Run)
            and isinstance(last, _Run)
            and last.file is job.file
            and last.offset + last.num_bytes == job.offset
            and last.num_bytes + job.num_bytes <= RUN_BYTES
            and all(run.into.dtype == run.dtype == last.dtype and is_plain_memory(run.into) for run in (last, job))
            and last.into.data_ptr() + last.num_bytes == job.into.data_ptr()
            and last.into.untyped_storage().data_ptr() == job.into.untyped_storage().data_ptr()
        ):
            numel = last.into.numel() + job.into.numel()
            together = last.into.as_strided((numel,), (1,))
            made[-1] = _Run(job.file, last.offset, last.num_bytes + job.num_bytes, job.dtype, together)
        else:
            made.append(job)
    return made


def _spanned(jobs: Sequence[_Run | _Region]) -> Sequence[_Job]:
    """Put runs of the same object of a bucket together that one request gets; leave those of files."""
    if not any(job.file.is_remote for job in jobs):
        return jobs
    made: list[_Job] = []
    for job in jobs:
        last = made[-1] if made else None
        if isinstance(job, _Region):
            made.append(job)
        elif (
            isinstance(last, _Span)
            and last.file is job.file
            and 0 <= job.offset - (last.offset + last.num_bytes) <= _MOST_GAP_BYTES
            and job.offset + job.num_bytes - last.offset <= RUN_BYTES
        ):
            num_bytes = job.offset + job.num_bytes - last.offset
            made[-1] = _Span(last.file, last.offset, num_bytes, (*last.runs, job))
        else:
            made.append(_Span(job.file, job.offset, job.num_bytes, (job,)) if job.file.is_remote else job)
    return made


def _cold_files(jobs: Sequence[_Job]) -> set[Reader]:
    """Return the files whose wanted bytes are not cached. One answer per file: mixing both ways is slower."""
    spans: dict[Reader, tuple[int, int]] = {}
    for job in jobs:
        if not isinstance(job, _Region):
            first, stop = spans.get(job.file, (job.offset, 0))
            spans[job.file] = (first, max(stop, job.offset + job.num_bytes))
        elif job.file.is_remote:
            spans.setdefault(job.file, (0, 0))
    return {file for file, (first, stop) in spans.items() if not file.is_cached(first, stop - first)}


def _fill(job: _Job, cold: set[Reader], count: progress.Count) -> None:
    """Do one read."""
    count(job.num_bytes)
    if isinstance(job, _Span):
        _fill_span(job)
        return
    if isinstance(job, _Region):
        for box, into in mapped_boxes(job.entry, job.chunk, job.into, job.file.map):
            copy_from_host(into, box)
        return
    direct = job.file in cold and job.num_bytes >= _MIN_DIRECT_BYTES
    if job.into.dtype == job.dtype and is_plain_memory(job.into):
        address = job.into.data_ptr()
        if not direct:
            job.file.read_into([bytes_at(address, job.num_bytes)], job.offset)
            return
        if (address - job.offset) % ALIGNMENT == 0:
            job.file.read_blocks(bytes_at(address, job.num_bytes), job.offset)
            return
    if not direct and job.into.is_cpu and job.num_bytes >= _MIN_DIRECT_BYTES:
        skipped = job.offset % mmap.ALLOCATIONGRANULARITY
        mapping = job.file.map(job.offset - skipped, skipped + job.num_bytes)
        job.into.copy_(_values(torch.frombuffer(mapping, dtype=torch.uint8)[skipped:], job))
        return
    with bounce_buffer() as buffer:
        _cast(job, buffer, direct)


def _cast(job: _Run, buffer: Buffer, direct: bool) -> None:
    """Read a run into the buffer, and copy it to memory of any dtype and strides."""
    first = job.offset % ALIGNMENT if direct else 0
    if direct:
        job.file.read_aligned(buffer.view, job.offset - first, first + job.num_bytes)
    else:
        job.file.read_into([buffer.view[: job.num_bytes]], job.offset)
    data = buffer.tensor[first : first + job.num_bytes]
    job.into.copy_(_values(data if job.into.is_cpu else upload(data, job.into.device), job))  # a device casts by itself


def _values(data: torch.Tensor, job: _Run) -> torch.Tensor:
    if data.storage_offset() % job.dtype.itemsize:  # other programs write tensors at odd offsets, and a view is aligned
        data = data.clone()
    return data.view(job.dtype).view(job.into.shape)


def _fill_span(job: _Span) -> None:
    """Send one request, and copy what it brings to the memory of each run."""
    first = job.runs[0]
    if len(job.runs) == 1 and first.into.dtype == first.dtype and is_plain_memory(first.into):
        job.file.read_into([bytes_at(first.into.data_ptr(), first.num_bytes)], first.offset)
        return
    with bounce_buffer() as buffer:
        job.file.read_into([buffer.view[: job.num_bytes]], job.offset)
        for run in job.runs:
            data = buffer.tensor[run.offset - job.offset :][: run.num_bytes]
            run.into.copy_(_values(data if run.into.is_cpu else upload(data, run.into.device), run))
