"""One export of one folder by all ranks: plan, write, prove and publish it, or leave nothing.

Owns the order of the steps and the handling of errors. Knows no format: the caller passes the names of files, the
companions and the reader that proves the result.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from titan_ckpt import progress
from titan_ckpt.disk.workers import meanwhile
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import ExchangeBroken, Ranks
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.formats.publish.exchange import everyone, row_peers
from titan_ckpt.formats.publish.plan import ExportPlan, Infos, OutputFiles, is_shared, plan_export
from titan_ckpt.formats.publish.publication import (
    Unpublished,
    compare_infos,
    coverage_faults,
    log_export,
    published,
    refuse_changed,
)
from titan_ckpt.formats.publish.record import RecordExport, unrecorded
from titan_ckpt.formats.publish.write import ExportWriter
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.store import Place, store_of
from titan_ckpt.weights.quantize import check_quantized
from titan_ckpt.weights.transforms import FileGroup

Companions = Mapping[str, bytes | Place]
"""File name -> its bytes, or the file to copy."""

logger = logging.getLogger(__name__)


class FolderFormat(ABC):
    """A format of exports: its files, what lies beside the tensors, and how the result is read back."""

    last: ClassVar[str]
    """The companion without which no reader opens the folder; in a bucket it is written last."""

    @abstractmethod
    def pack(self, infos: Infos) -> Mapping[str, Sequence[str]]:
        """Return file name -> its keys, of all tensors of an export."""

    def header(self, infos: Infos, quantized: Mapping[str, str]) -> Mapping[str, str]:
        """Return extra safetensors metadata of each file, beside {"format": "pt"}, for these quantized tensors."""
        return {}

    @abstractmethod
    def companions(self, infos: Infos, file_of: Mapping[str, str], quantized: Mapping[str, str]) -> Companions:
        """Return the files beside the tensors. Called on rank 0 before anything is written.

        `infos`: all tensors. `file_of`: key -> the file that it is in. `quantized`: as of `header`.
        Raises: ExportError if they and the tensors disagree.
        """

    @abstractmethod
    def open(self, folder: Place, *, dequantize: bool) -> TensorReader:
        """Open the folder as any reader would; with `dequantize` false, its tensors are those that are stored."""

    @abstractmethod
    def check(self, reader: TensorReader) -> None:
        """Check the re-opened folder on rank 0 before it is published. Raises if its values are wrong."""


@dataclass(frozen=True, slots=True)
class FolderExport:
    """Tensors, and the format of the folder into which they are exported."""

    groups: Sequence[FileGroup]
    format: FolderFormat
    changed: Callable[[], list[str]] = list
    """Returns the names of the live tensors that have changed since the export was decided."""
    buffers: Collection[str] = ()
    """Names of tensors whose replicas may differ: those of a module are written by one rank."""

    def write(self, folder: Place, coordinator: Coordinator, record: RecordExport = unrecorded) -> None:
        """Write, prove, record and publish a folder. Collective: ranks without tensors take part too.

        1. All ranks plan. 2. Rank 0 makes the companions and the staging folder. 3. The ranks create the files at their
        final size, each rank some of them. 4. Every rank writes its slices; rank 0 also writes the companions. 5. Every
        rank makes durable what it wrote, reads it back through the format's own reader, and compares all names, shapes
        and dtypes. 6. Rank 0 publishes.
        Raises: ExportError on every rank, with nothing under the folder's name.
        """
        started = time.perf_counter()
        is_proved = False
        try:
            plan = self.plan(coordinator)
            companions = partial(self._companions, plan)
            with published(folder, coordinator, "export/", companions, record) as unpublished:
                self._fill(unpublished, plan, coordinator, f"exporting {folder.name}")
                is_proved = True
        except BaseException as error:
            coordinator.peers.discard()  # an exchange may have been left in the middle
            if not isinstance(error, Exception):
                raise
            unsure = is_proved and isinstance(error, PeerError)  # another rank fell silent after that
            became = "it is proved, and may be published all the same" if unsure else "nothing was published"
            raise ExportError(f"export to {folder} failed, {became}: {error}") from error
        log_export(len(plan.infos), plan.num_bytes, folder, started, coordinator)

    def peers(self, folder: Place, coordinator: Coordinator) -> set[Ranks]:
        """Return the groups of ranks that exchange bytes while the folder is written."""
        if coordinator.world_size == 1:
            return set()
        return {*row_peers(self.groups).values()} if is_shared(folder) else {everyone(coordinator)}

    def plan(self, coordinator: Coordinator) -> ExportPlan:
        """Plan the files and this rank's part of them. Collective. Raises: ExportError."""
        return plan_export(self.groups, self.format.pack, self.format.header, coordinator, self.buffers)

    def check(self, coordinator: Coordinator) -> None:
        """Check that tensors and companions agree; compute and write nothing. Collective.

        Raises: ExportError on every rank, as `write` would.
        """
        plan = self.plan(coordinator)
        coordinator.on_rank_0("export/companions", lambda: [*self._companions(plan)])

    def _companions(self, plan: ExportPlan) -> Companions:
        return self.format.companions(plan.infos, plan.file_of, plan.quantized)

    def _fill(
        self,
        unpublished: Unpublished[Companions],
        plan: ExportPlan,
        coordinator: Coordinator,
        what: str,
    ) -> None:
        """Write everything into the unpublished folder and prove it."""
        companions = dict(unpublished.prepared or {})
        unpublished.keep_last(companions, self.format.last, "export/last", coordinator)
        share = 2 * plan.num_bytes // coordinator.world_size  # written, and read back
        outputs = OutputFiles(unpublished.path, plan.layouts, coordinator)
        with (
            progress.shown(what, share) as count,
            closing(ExportWriter(outputs, plan, coordinator, count)) as writer,
        ):
            writer.connect(self.groups)
            writer.create()
            written = coordinator.gather_results(
                "export/write", lambda: self._write(unpublished.path, companions, writer)
            )
            if broken := dict.fromkeys(why for why, _ in written if why):
                raise ExportError("; ".join(broken))
            if faults := coverage_faults(plan.infos, (parts for _, parts in written)):
                raise ExportError(f"{len(faults)} tensor(s) are not whole: {'; '.join(faults)}")
            if not outputs.is_shared:  # a rank reads what it has uploaded
                coordinator.together("export/uploaded", lambda: outputs.sync(unpublished.require_own))
            coordinator.together("export/prove", lambda: self._prove(unpublished, plan, outputs, writer))

    def _write(
        self, path: Place, companions: Companions, writer: ExportWriter
    ) -> tuple[str | None, Mapping[str, Sequence[Any]]]:
        """Write this rank's part, and return its parts of tensors that the plan does not divide.

        The first is why the exchange with other ranks broke off, if one of these is to blame.
        """
        try:
            writer.write(self.groups)
        except ExchangeBroken as error:
            return str(error), {}
        for name, content in companions.items():
            store_of(path).put_companion(path / name, content)
        return None, writer.undivided

    def _prove(
        self, unpublished: Unpublished[Any], plan: ExportPlan, outputs: OutputFiles, writer: ExportWriter
    ) -> None:
        refuse_changed(self.changed())
        source = unpublished.as_source()
        with ExitStack() as stack:
            stored = reader = stack.enter_context(self.format.open(source, dequantize=False))
            stack.enter_context(meanwhile(outputs.sync))  # what is read back becomes durable
            if faults := compare_infos(plan.infos, stored.tensors):
                raise ExportError(f"the re-opened export differs in {len(faults)} tensor(s): {'; '.join(faults)}")
            writer.prove(stored)
            if plan.quantized:
                reader = stack.enter_context(self.format.open(source, dequantize=True))
                check_quantized(self.groups, reader)
            if unpublished.staged is not None:  # on rank 0
                self.format.check(reader)
        writer.close()
