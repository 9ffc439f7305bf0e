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
from typing import Any, ClassVar, cast

from titan_ckpt import progress
from titan_ckpt.disk.direct import meanwhile
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.errors import ExportError, PeerError, counted, listed
from titan_ckpt.formats.publish.columns import ColumnExchange, Lost, agree, row_peers
from titan_ckpt.formats.publish.outputs import Outputs, SharedFiles
from titan_ckpt.formats.publish.plan import ExportFiles, ExportPlan, coverage_faults, plan_export
from titan_ckpt.formats.publish.publication import Unpublished, published
from titan_ckpt.formats.publish.record import Record
from titan_ckpt.formats.publish.upload import Uploads, everyone
from titan_ckpt.formats.publish.write import ExportWriter, RegionKey
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.mounted import local_path, store_of
from titan_ckpt.stores.store import Place
from titan_ckpt.weights.quantise import check_quantised
from titan_ckpt.weights.transforms import FileGroup, FilePiece

logger = logging.getLogger(__name__)


class FolderFormat(ABC):
    """A format of exports: its files, what lies beside the tensors, and how the result is read back."""

    last: ClassVar[str]
    """The companion without which no reader opens the folder; in a bucket it is written last."""

    @abstractmethod
    def pack(self, infos: Mapping[str, TensorInfo]) -> Mapping[str, Sequence[str]]:
        """Return file name -> its keys, of all tensors of an export."""

    def header(self, infos: Mapping[str, TensorInfo], quantised: Mapping[str, str]) -> Mapping[str, str]:
        """Return extra safetensors metadata of each file, beside {"format": "pt"}, for these quantised tensors."""
        return {}

    @abstractmethod
    def companions(self, files: ExportFiles) -> Mapping[str, bytes | Place]:
        """Return file name -> its bytes, or the file to copy. Called on rank 0 before anything is written.

        Raises: ExportError if they and the tensors disagree.
        """

    @abstractmethod
    def open(self, folder: Place, *, dequantise: bool) -> TensorReader:
        """Open the folder as any reader would; with `dequantise` false, its tensors are those that are stored."""

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

    def write(self, folder: Place, coordinator: Coordinator, record: Record = lambda _: None) -> None:
        """Write, prove, record and publish a folder. Collective: ranks without tensors take part too.

        1. All ranks plan. 2. Rank 0 makes the companions and the staging folder. 3. The ranks create the files at their
        final size, each rank some of them. 4. Every rank writes its slices; rank 0 also writes the companions. 5. Every
        rank makes durable what it wrote, reads it back through the format's own reader, and compares all names, shapes
        and dtypes. 6. Rank 0 publishes.
        Raises: ExportError on every rank, with nothing under the folder's name.
        """
        started = time.perf_counter()
        work = _Export(self, folder, coordinator)
        try:
            files = work.run(record)
        except BaseException as error:
            coordinator.peers.discard()  # an exchange may have been left in the middle
            if not isinstance(error, Exception):
                raise
            unsure = work.is_proved and isinstance(error, PeerError)  # another rank fell silent after that
            became = "it is proved, and may be published all the same" if unsure else "nothing was published"
            raise ExportError(f"export to {folder} failed, {became}: {error}") from error
        log_export(len(files.infos), files.num_bytes, folder, started, coordinator)

    def peers(self, folder: Place, coordinator: Coordinator) -> set[Ranks]:
        """Return the groups of ranks that exchange bytes while the folder is written."""
        if coordinator.world_size == 1:
            return set()
        return {*row_peers(self.groups).values()} if store_of(folder).is_mounted else {everyone(coordinator)}

    def plan(self, coordinator: Coordinator) -> ExportPlan:
        """Plan the files and this rank's part of them. Collective. Raises: ExportError."""
        return plan_export(self.groups, self.format.pack, self.format.header, coordinator, self.buffers)

    def check(self, coordinator: Coordinator) -> None:
        """Check that tensors and companions agree; compute and write nothing. Collective.

        Raises: ExportError on every rank, as `write` would.
        """
        files = self.plan(coordinator).files
        coordinator.on_rank_0("export/companions", lambda: [*self.format.companions(files)])


def log_export(num_tensors: int, num_bytes: int, folder: Place, started: float, coordinator: Coordinator) -> None:
    """Log, on rank 0, an export that is published. `started`: by time.perf_counter()."""
    if coordinator.rank == 0:
        what, seconds = counted(num_tensors, "tensor"), time.perf_counter() - started
        logger.info("exported %s, %s bytes, to %s in %.2f s", what, f"{num_bytes:,}", folder, seconds)


@dataclass(slots=True)
class _Export:
    what: FolderExport
    folder: Place
    coordinator: Coordinator
    is_proved: bool = False

    def run(self, record: Record) -> ExportFiles:
        """Take all steps. If it raises, it leaves no staging folder behind."""
        plan = self.what.plan(self.coordinator)
        files = plan.files
        companions = partial(self.what.format.companions, files)
        with published(self.folder, self.coordinator, "export/", companions, record) as unpublished:
            self._fill(unpublished, plan, dict(unpublished.prepared or {}))
            self.is_proved = True
        return files

    def _fill(
        self,
        unpublished: Unpublished[Mapping[str, bytes | Place]],
        plan: ExportPlan,
        companions: dict[str, bytes | Place],
    ) -> None:
        """Write everything into the unpublished folder and prove it."""
        path = unpublished.path
        share = 2 * plan.files.num_bytes // self.coordinator.world_size  # written, and read back
        unpublished.keep_last(companions, self.what.format.last, "export/last", self.coordinator)
        folder, layouts = local_path(path), plan.files.layouts
        outputs: Outputs = (
            Uploads(path, layouts, self.coordinator)
            if folder is None
            else SharedFiles(folder, layouts, self.coordinator)
        )
        with (
            progress.shown(f"exporting {self.folder.name}", share) as count,
            closing(ExportWriter(outputs, plan, count)) as writer,
        ):
            groups, pieces = self._peers(outputs, writer)
            outputs.connect()

            def create() -> ColumnExchange | None:
                columns = self._columns(plan, writer, groups, pieces)
                outputs.begin()
                return columns

            columns = self.coordinator.together("export/create", create)
            broken = self.coordinator.gather_results(
                "export/write", lambda: self._write(path, self._in_turn(plan, outputs), companions, writer, columns)
            )
            if any(broken):
                raise ExportError("; ".join(dict.fromkeys(filter(None, broken))))
            parts = self.coordinator.gather("export/parts", cast("Any", writer.undivided))
            if faults := coverage_faults(plan.files.infos, cast("Any", parts)):
                raise ExportError(f"{len(faults)} tensor(s) are not whole: {'; '.join(faults)}")
            if outputs.is_sequential:  # a rank reads what others have uploaded
                self.coordinator.together("export/uploaded", writer.sync)
            self.coordinator.together("export/prove", lambda: self._prove(unpublished, plan, writer))

    def _peers(
        self, outputs: Outputs, writer: ExportWriter
    ) -> tuple[list[Ranks], dict[Ranks, dict[RegionKey, FilePiece]]]:
        """Connect the ranks that share rows; return the groups of this rank, and its pieces for each. Collective."""
        pieces: dict[Ranks, dict[RegionKey, FilePiece]] = {}
        if self.coordinator.world_size == 1 or outputs.is_sequential:
            return [], pieces

        def wanted() -> set[Ranks]:
            peers = row_peers(self.what.groups)
            for place, piece in writer.strided(self.what.groups, peers).items():
                pieces.setdefault(peers[piece.key], {})[place] = piece
            return {*peers.values()}

        return self.coordinator.peers.connect(self.coordinator, wanted), pieces

    def _columns(
        self,
        plan: ExportPlan,
        writer: ExportWriter,
        groups: Sequence[Ranks],
        pieces: Mapping[Ranks, Mapping[RegionKey, FilePiece]],
    ) -> ColumnExchange | None:
        """Agree with each group on the rows that are put together of several ranks' columns, if there are any."""
        boxes: dict[Ranks, dict[str, list[Chunk]]] = {}
        for ranks, of_group in pieces.items():
            for piece in of_group.values():
                boxes.setdefault(ranks, {}).setdefault(piece.key, []).append(piece.chunk)
        shapes = {key: (info.shape, info.dtype.itemsize) for key, info in plan.files.infos.items()}
        in_order = [key for layout in plan.files.layouts.values() for key in layout.entries]
        rounds = agree(self.coordinator, groups, boxes, shapes, in_order)
        every = {place: piece for of_group in pieces.values() for place, piece in of_group.items()}
        return writer.columns(self.coordinator, rounds, every) if rounds else None

    def _write(
        self,
        path: Place,
        groups: Sequence[FileGroup],
        companions: Mapping[str, bytes | Place],
        writer: ExportWriter,
        columns: ColumnExchange | None,
    ) -> str | None:
        """Write this rank's part. Return why the exchange with other ranks broke off, if one of these is to blame."""
        try:
            writer.write(groups, columns)
        except Lost as error:
            return str(error)
        for name, content in companions.items():
            store_of(path).put_companion(path / name, content)
        return None

    def _in_turn(self, plan: ExportPlan, outputs: Outputs) -> list[FileGroup]:
        """Return the groups in another order on each rank, because writers of one file wait for each other.

        The order stays as it is if any group is collective. Of sequential outputs it is that of the files on all ranks.
        """
        groups = list(self.what.groups)
        if outputs.is_sequential:
            starts = {
                key: outputs.position(name, entry.start)
                for name, layout in plan.files.layouts.items()
                for key, entry in layout.entries.items()
            }
            return sorted(groups, key=lambda group: min(map(starts.__getitem__, group.infos)))
        if any(group.collective for group in groups):
            return groups
        number = {name: i for i, name in enumerate(plan.files.layouts)}
        first = self.coordinator.rank * len(number) // self.coordinator.world_size
        return sorted(groups, key=lambda g: (number[plan.files.file_of[next(iter(g.infos))]] - first) % len(number))

    def _prove(self, unpublished: Unpublished[Any], plan: ExportPlan, writer: ExportWriter) -> None:
        refuse_changed(self.what.changed())
        source = unpublished.as_source()
        with ExitStack() as stack:
            stored = reader = stack.enter_context(self.what.format.open(source, dequantise=False))
            stack.enter_context(meanwhile(writer.sync))  # what is read back becomes durable
            if faults := compare_infos(plan.files.infos, stored.tensors):
                raise ExportError(f"the re-opened export differs in {len(faults)} tensor(s): {'; '.join(faults)}")
            writer.prove(stored)
            if plan.files.quantised:
                reader = stack.enter_context(self.what.format.open(source, dequantise=True))
                check_quantised(self.what.groups, reader)
            if self.coordinator.rank == 0:
                self.what.format.check(reader)
        writer.close()


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
