"""How an export comes to have its name: all at once, by a rename, or in a bucket by its last file.

Owns the order of these steps. Knows no format: the caller says which file makes a folder loadable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.formats.publish.record import Record, Staged, exports_at
from titan_ckpt.stores.mounted import store_of
from titan_ckpt.stores.store import Place

_Prepared = TypeVar("_Prepared")


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
    record: Record = lambda _: None,
) -> Iterator[Unpublished[_Prepared]]:
    """Give all ranks an empty folder to fill, and publish it as `folder` after the block, if all succeed. Collective.

    `prepare` is called on rank 0 first, and `record` (see Record) there too. In a bucket the block sets `last` on rank
    0. After an error nothing has the folder's name, or in a bucket no loadable folder has, unless another rank fell
    silent after the publication.
    Raises: FileExistsError; OSError; PeerError; the errors of `prepare`.
    """
    exports = exports_at(folder.parent)
    unpublished: Unpublished[_Prepared] = Unpublished(folder, exports.renames)

    def begin() -> str:
        unpublished.prepared = prepare()
        unpublished.staged = exports.begin(folder.name)
        return unpublished.staged.path.name

    def publish() -> None:
        if unpublished.staged is not None:
            unpublished.staged.publish(record, unpublished.last)
            unpublished.staged = None

    try:
        unpublished.path = folder.parent / coordinator.on_rank_0(f"{tag}begin", begin)
        yield unpublished
        coordinator.together(f"{tag}publish", publish)
    except BaseException:
        if unpublished.staged is not None:
            with contextlib.suppress(OSError):  # a later export removes what is left
                unpublished.staged.abandon()
        raise
