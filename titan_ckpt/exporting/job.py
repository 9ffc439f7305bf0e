"""ExportJob: one export that is decided, and is made now or in a background thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_ckpt.config import ExportConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ExportError
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.formats.publish.record import MadeExports
from titan_ckpt.stores.bucket import Location
from titan_ckpt.weights.transforms import FileGroup


class FolderWriter(Protocol):
    """The tensors of an export, and how a format writes, proves and publishes them as a folder."""

    @property
    def groups(self) -> Sequence[FileGroup]:
        """Return the tensors whose columns ranks may put together; none if the format stores shards as they are."""

    def write(self, folder: Location, coordinator: Coordinator) -> object:
        """Publish the folder. Collective; any thread may call it. Raises: an error, with nothing under its name."""


@dataclass(frozen=True, slots=True)
class ExportJob:
    """One export that is decided and not yet made."""

    config: ExportConfig
    step: int
    folder: Location
    writer: FolderWriter
    made: MadeExports | BucketExports

    def run(self, coordinator: Coordinator) -> None:
        """Publish the folder, record it, and remove exports that have expired. Collective. Raises: ExportError."""
        became = "failed"
        try:
            self.writer.write(self.folder, coordinator)
            became = "is published, and what follows it failed"
            if coordinator.rank == 0:
                self.made.record(self.config, self.step)
            coordinator.on_rank_0("export-expire", lambda: self.made.expire(self.config, self.step))
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"export of step {self.step} to {self.folder} {became}: {error}") from error
