"""How an export comes to have its name: all at once, by a rename, or in a bucket by its last file.

Owns the order of these steps. Knows no format: the caller says which file makes a folder loadable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.formats.publish.record import Exports, MadeExports
from titan_ckpt.stores.mounted import local_path, store_of
from titan_ckpt.stores.objects import object_path
from titan_ckpt.stores.store import Place

_Prepared = TypeVar("_Prepared")
Record = Callable[[Any], None]
"""Records an export: right before it is published, with its folder on a disk, or with its last file in a bucket; there
once more after that, with None."""


@dataclass(slots=True)
class Unpublished(Generic[_Prepared]):
    """A folder that ranks fill, and that nobody takes for an export yet."""

    path: Place
    prepared: _Prepared | None
    """On rank 0, what `prepare` has returned."""
    last: tuple[str, bytes] | None = None
    """Name and content of the file that makes a folder in a bucket loadable; no other file is written after it."""

    def put_last(self, name: str, content: bytes) -> None:
        """Write the last file, on rank 0; one that would make a folder loadable at once is kept for the publication."""
        store = store_of(self.path)
        if store.is_mounted:
            store.put_new(self.path / name, content)
        else:
            self.last = name, content

    def keep_last(self, files: dict[str, Any], name: str, tag: str, coordinator: Coordinator) -> None:
        """Take from rank 0's `files` the one that is kept, and tell all ranks, which read it back. Collective."""
        if store_of(self.path).is_mounted:
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


def exports_at(root: Place) -> Exports:
    """Return the exports of runs whose folder this is, or that export to this place."""
    folder = local_path(root)
    return BucketExports(object_path(root)) if folder is None else MadeExports(folder)


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
    unpublished: Unpublished[_Prepared] = Unpublished(folder, None)
    publish_it: Callable[[], None] | None = None
    abandon_it: Callable[[], None] | None = None

    def begin() -> str:
        nonlocal publish_it, abandon_it
        unpublished.prepared = prepare()
        if (target := local_path(folder)) is not None:
            staged = StagedFolder.begin(target)

            def publish_folder() -> None:
                record(staged.path)
                staged.publish()

            publish_it, abandon_it = publish_folder, staged.abandon
            return str(staged.path)
        exports = BucketExports(object_path(folder.parent))
        id_ = exports.begin(folder.name)

        def publish_object() -> None:
            assert unpublished.last is not None
            exports.publish(folder.name, id_, *unpublished.last, record)

        publish_it, abandon_it = publish_object, partial(exports.abandon, folder.name, id_)
        return ""

    def publish() -> None:
        nonlocal publish_it
        if publish_it is not None:
            publish_it()
            publish_it = None

    try:
        path = coordinator.on_rank_0(f"{tag}begin", begin)
        if path:
            unpublished.path = Path(path)
        yield unpublished
        coordinator.together(f"{tag}publish", publish)
    except BaseException:
        if publish_it is not None and abandon_it is not None:
            with contextlib.suppress(OSError):  # a later export removes what is left
                abandon_it()
        raise
