"""What all exports share: how one comes to have its name, by a rename or by its last file, and what is checked before.

Owns the order of these steps. Knows no format: the caller says which file makes a folder loadable.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import ExportError, counted, listed
from titan_ckpt.formats.publish.record import RecordExport, Staged, exports_at, unrecorded
from titan_ckpt.geometry.boxes import overlap
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.stores.store import Place, store_of

_Prepared = TypeVar("_Prepared")
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Unpublished(Generic[_Prepared]):
    """A folder that ranks fill, and that nobody takes for an export yet."""

    path: Place
    is_renamed: bool
    """Whether it gets its name at once. Else its last file makes it loadable, and no other is written after that."""
    prepared: _Prepared | None = None
    """On rank 0, what `prepare` has returned."""
    staged: Staged | None = None
    """On rank 0, until it is published."""
    last: tuple[str, bytes] | None = None
    """Name and content of the last file, until it is written."""
    require_own: Callable[[], None] = lambda: None
    """Call it before a file comes to be there. Raises: ExportError if another export has begun to fill the folder."""

    def put_last(self, name: str, content: bytes) -> None:
        """Write the last file, on rank 0; one that would make a folder loadable at once is kept for the publication."""
        if self.is_renamed:
            store_of(self.path).put_new(self.path / name, content)
        else:
            self.last = name, content

    def keep_last(self, files: dict[str, Any], name: str, tag: str, coordinator: Coordinator) -> None:
        """Take from rank 0's `files` the one that is kept, and tell all ranks, which read it back. Collective."""
        if self.is_renamed:
            return
        if isinstance(content := files.pop(name, None), bytes):
            self.last = name, content
        text: Json = None if self.last is None else [self.last[0], self.last[1].decode("latin-1")]
        shared = coordinator.broadcast(tag, text)
        if isinstance(shared, list):
            self.last = str(shared[0]), str(shared[1]).encode("latin-1")

    def as_source(self) -> Place:
        """Return the folder as a reader will find it, with its last file. Raises: StoreError."""
        found: Place = store_of(self.path).seen(self.path, dict([self.last] if self.last else []))
        return found


@contextlib.contextmanager
def published(
    folder: Place,
    coordinator: Coordinator,
    tag: str,
    prepare: Callable[[], _Prepared],
    record: RecordExport = unrecorded,
) -> Iterator[Unpublished[_Prepared]]:
    """Give all ranks an empty folder to fill, and publish it as `folder` after the block, if all succeed. Collective.

    `prepare` is called on rank 0 first, and `record` there too. In a bucket the block sets `last` on rank 0. After an
    error nothing has the folder's name, or in a bucket no loadable folder has, unless another rank fell silent after
    the publication.
    Raises: FileExistsError; OSError; PeerError; the errors of `prepare`.
    """
    exports = exports_at(folder.parent)
    unpublished: Unpublished[_Prepared] = Unpublished(folder, exports.renames)

    def begin() -> list[str]:
        unpublished.prepared = prepare()
        unpublished.staged = exports.begin(folder.name)
        return [unpublished.staged.path.name, unpublished.staged.attempt]

    def publish() -> None:
        if unpublished.staged is not None:
            unpublished.staged.publish(record, unpublished.last)
            unpublished.staged = None

    try:
        name, attempt = coordinator.on_rank_0(f"{tag}begin", begin)
        unpublished.path = folder.parent / name
        unpublished.require_own = partial(exports.require_own, folder.name, attempt)
        yield unpublished
        coordinator.together(f"{tag}publish", publish)
    except BaseException:
        if unpublished.staged is not None:
            with contextlib.suppress(OSError):  # a later export removes what is left
                unpublished.staged.abandon()
        raise


def log_export(num_tensors: int, num_bytes: int, folder: Place, started: float, coordinator: Coordinator) -> None:
    """Log, on rank 0, an export that is published. `started`: by time.perf_counter()."""
    if coordinator.rank == 0:
        what, seconds = counted(num_tensors, "tensor"), time.perf_counter() - started
        logger.info("exported %s, %s bytes, to %s in %.2f s", what, f"{num_bytes:,}", folder, seconds)


def refuse_changed(names: Sequence[str]) -> None:
    """Raises: ExportError if there are names: those of live tensors that an export has read, and that have changed."""
    if names:
        raise ExportError(
            f"{listed(names, ', ', ' ')} of the frozen base changed while the export was reading "
            f"{'it' if len(names) == 1 else 'them'}. Call wait() before code that changes the base"
        )


def compare_infos(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo]) -> list[str]:
    """Return one line for each tensor that is missing, unexpected, or has a different shape or dtype."""
    faults = [f"{key} is missing" for key in expected if key not in found]
    faults += [f"{key} is not the model's" for key in found if key not in expected]
    both = [key for key in expected if key in found]
    return faults + [f"{k}: expected {expected[k]}, found {found[k]}" for k in both if expected[k] != found[k]]


def coverage_faults(infos: Mapping[str, TensorInfo], written: Iterable[Mapping[str, Sequence[Any]]]) -> list[str]:
    """Return one line for each tensor whose parts, written by all ranks, leave a hole or overlap.

    `written`: for each rank, key -> [offsets, sizes] of each part; equal parts of several ranks are replicas.
    """
    parts: dict[str, set[Chunk]] = {}
    for table in written:
        for key, chunks in table.items():
            parts.setdefault(key, set()).update(Chunk(tuple(offsets), tuple(sizes)) for offsets, sizes in chunks)
    faults = []
    for key, boxes in parts.items():
        number = sum(box.numel for box in boxes)
        total = Chunk.whole(infos[key].shape).numel
        if number != total or (len(boxes) > 1 and overlap([*boxes]) is not None):
            faults.append(
                f"{key}: {number} elements in {len(boxes)} parts were written of {total}. Its lazy tensor does not "
                "say whose layout it has (LazyTensor.like), and the blocks of all ranks do not make it up"
            )
    return faults
