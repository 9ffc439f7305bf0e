"""One export of one folder by all ranks: plan, write, prove and publish it, or leave nothing.

Owns the order of the steps and the handling of errors. Knows no format: the caller passes the names of files, the
companions and the reader that proves the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from titan_ckpt import progress
from titan_ckpt.disk import posix
from titan_ckpt.disk.direct import meanwhile
from titan_ckpt.disk.unpublished_folder import copy_file
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.distributed.peer_groups import Ranks
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.formats.publish.columns import ColumnExchange, Lost, agree, row_peers
from titan_ckpt.formats.publish.plan import ExportPlan, MakeHeader, PackFiles, coverage_faults, plan_export
from titan_ckpt.formats.publish.publication import Unpublished, published
from titan_ckpt.formats.publish.upload import Uploads
from titan_ckpt.formats.publish.write import ExportWriter, Place, create_file
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.stores.bucket import BucketPath, Location
from titan_ckpt.stores.source import Source
from titan_ckpt.weights.transforms import FileGroup, FilePiece

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """The format of an export: its files, what lies beside the tensors, and how the result is proved."""

    pack: PackFiles
    companions: Callable[[ExportPlan], Mapping[str, bytes | Path]]
    """Returns file name -> its bytes, or the file to copy. Called on rank 0 before anything is written. May raise."""
    open_reader: Callable[[Source], TensorReader]
    """Opens the folder as any reader would; the proof reads through it."""
    check: Callable[[TensorReader], None]
    """Called with the re-opened folder before it is published. Raises if its values are wrong."""
    last: str
    """The companion without which no reader opens the folder; in a bucket it is written last."""
    header: MakeHeader | None = None
    """Extra safetensors metadata of each file, beside {"format": "pt"}."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """A published export."""

    folder: Location
    files: tuple[str, ...]
    """Names of the files with tensors."""
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors, without headers."""
    seconds: float


def export_folder(
    folder: Location, groups: Sequence[FileGroup], layout: FolderFormat, coordinator: Coordinator
) -> ExportSummary:
    """Write, prove and publish a folder. Collective: ranks without tensors take part too.

    1. All ranks plan. 2. Rank 0 makes the companions and the staging folder. 3. The ranks create the files at their
    final size, each rank some of them. 4. Every rank writes its slices; rank 0 also writes the companions. 5. Every
    rank makes durable what it wrote, reads it back through the format's own reader, and compares all names, shapes and
    dtypes. 6. Rank 0 publishes.
    Raises: ExportError on every rank, with nothing under the folder's name.
    """
    started = time.perf_counter()
    work = _Export(folder, groups, layout, coordinator)
    try:
        plan = work.run()
    except BaseException as error:
        coordinator.peers.discard()  # an exchange may have been left in the middle
        if not isinstance(error, Exception):
            raise
        unsure = work.is_proved and isinstance(error, PeerError)  # another rank fell silent after that
        became = "it is proved, and may be published all the same" if unsure else "nothing was published"
        raise ExportError(f"export to {folder} failed, {became}: {error}") from error
    seconds = time.perf_counter() - started
    summary = ExportSummary(folder, tuple(plan.layouts), len(plan.infos), plan.num_bytes, seconds)
    logger.info(f"exported {summary.num_tensors} tensors, {plan.num_bytes:,} bytes, to {folder} in {seconds:.2f} s")
    return summary


@dataclass(slots=True)
class _Export:
    folder: Location
    groups: Sequence[FileGroup]
    layout: FolderFormat
    coordinator: Coordinator
    is_proved: bool = False

    def run(self) -> ExportPlan:
        """Take all steps. If it raises, it leaves no staging folder behind."""
        plan = plan_export(self.groups, self.layout.pack, self.coordinator, self.layout.header)
        with published(self.folder, self.coordinator, "export/", lambda: self.layout.companions(plan)) as unpublished:
            self._fill(unpublished, plan, dict(unpublished.prepared or {}))
            self.is_proved = True
        return plan

    def _fill(
        self,
        unpublished: Unpublished[Mapping[str, bytes | Path]],
        plan: ExportPlan,
        companions: dict[str, bytes | Path],
    ) -> None:
        """Write everything into the unpublished folder and prove it."""
        path, rank, world_size = unpublished.path, self.coordinator.rank, self.coordinator.world_size
        own_files = list(plan.layouts)[rank::world_size]
        share = 2 * plan.num_bytes // world_size  # written, and read back
        uploads = None
        if isinstance(path, BucketPath):
            uploads = Uploads(path, plan.layouts, self.coordinator)
            if isinstance(content := companions.pop(self.layout.last, None), bytes):
                unpublished.last = self.layout.last, content
            unpublished.share_last("export/last", self.coordinator)
        with (
            progress.shown(f"exporting {self.folder.name}", share) as count,
            ExportWriter(path, plan, count, uploads) as writer,
        ):
            rounds_and_pieces = self._peers(plan, writer) if uploads is None else None
            if uploads is not None:
                uploads.start()

            def create() -> ColumnExchange | None:
                if rounds_and_pieces is None:
                    return None
                columns = self._columns(plan, writer, *rounds_and_pieces)
                assert isinstance(path, Path)
                for name in own_files:
                    create_file(path / name, plan.layouts[name])
                return columns

            columns = self.coordinator.together("export/create", create)
            broken = self.coordinator.gather_results(
                "export/write", lambda: self._write(path, plan, companions, writer, columns)
            )
            if any(broken):
                raise ExportError("; ".join(dict.fromkeys(filter(None, broken))))
            parts = self.coordinator.gather("export/parts", cast("Any", writer.undivided))
            if faults := coverage_faults(plan.infos, cast("Any", parts)):
                raise ExportError(f"{len(faults)} tensor(s) are not whole: {'; '.join(faults)}")
            if uploads is not None:  # a rank reads what others have uploaded
                self.coordinator.together("export/uploaded", writer.sync)
            self.coordinator.together("export/prove", lambda: self._prove(unpublished, plan, writer))

    def _peers(self, plan: ExportPlan, writer: ExportWriter) -> tuple[list[Ranks], dict[Ranks, dict[Place, FilePiece]]]:
        """Connect the ranks that share rows; return the groups of this rank, and its pieces for each. Collective."""
        pieces: dict[Ranks, dict[Place, FilePiece]] = {}
        if self.coordinator.world_size == 1:
            return [], pieces

        def wanted() -> set[Ranks]:
            peers = row_peers(self.groups)
            for place, piece in writer.strided(self.groups, peers).items():
                pieces.setdefault(peers[piece.key], {})[place] = piece
            return {*peers.values()}

        return self.coordinator.peers.connect(self.coordinator, wanted), pieces

    def _columns(
        self,
        plan: ExportPlan,
        writer: ExportWriter,
        groups: Sequence[Ranks],
        pieces: Mapping[Ranks, Mapping[Place, FilePiece]],
    ) -> ColumnExchange | None:
        """Agree with each group on the rows that are put together of several ranks' columns, if there are any."""
        boxes: dict[Ranks, dict[str, list[Chunk]]] = {}
        for ranks, of_group in pieces.items():
            for piece in of_group.values():
                boxes.setdefault(ranks, {}).setdefault(piece.key, []).append(piece.chunk)
        shapes = {key: (info.shape, info.dtype.itemsize) for key, info in plan.infos.items()}
        in_order = [key for layout in plan.layouts.values() for key in layout.entries]
        rounds = agree(self.coordinator, groups, boxes, shapes, in_order)
        every = {place: piece for of_group in pieces.values() for place, piece in of_group.items()}
        return writer.columns(self.coordinator, rounds, every) if rounds else None

    def _write(
        self,
        path: Location,
        plan: ExportPlan,
        companions: Mapping[str, bytes | Path],
        writer: ExportWriter,
        columns: ColumnExchange | None,
    ) -> str | None:
        """Write this rank's part. Return why the exchange with other ranks broke off, if one of these is to blame."""
        try:
            writer.write(self._in_turn(plan, path), columns)
        except Lost as error:
            return str(error)
        for name, content in companions.items():
            if isinstance(path, BucketPath):
                _upload(path / name, content)
                continue
            if (path / name).parent != path and not (path / name).parent.exists():
                posix.mkdir((path / name).parent)
            if isinstance(content, Path):
                copy_file(content, path / name)
            else:
                posix.write_file(path / name, content)
        return None

    def _in_turn(self, plan: ExportPlan, path: Location) -> list[FileGroup]:
        """Return the groups in another order on each rank, because writers of one file wait for each other.

        The order stays as it is if any group is collective. In a bucket it is that of the files on all ranks, because
        an object is written from its beginning; as many files as there are ranks are written side by side.
        """
        groups = list(self.groups)
        if isinstance(path, BucketPath):
            turn = {name: i // self.coordinator.world_size for i, name in enumerate(plan.layouts)}

            def place(group: FileGroup) -> tuple[int, int]:
                name = plan.file_of[key := next(iter(group.infos))]
                return turn[name], plan.layouts[name].entries[key].start

            return sorted(groups, key=place)
        if any(group.collective for group in groups):
            return groups
        number = {name: i for i, name in enumerate(plan.layouts)}
        first = self.coordinator.rank * len(number) // self.coordinator.world_size
        return sorted(groups, key=lambda g: (number[plan.file_of[next(iter(g.infos))]] - first) % len(number))

    def _prove(self, unpublished: Unpublished[Any], plan: ExportPlan, writer: ExportWriter) -> None:
        source = unpublished.as_source()
        with self.layout.open_reader(source) as reader, meanwhile(writer.sync):  # what is read back becomes durable
            faults = compare_infos(plan.infos, reader.tensors)
            if faults:
                raise ExportError(f"the re-opened export differs in {len(faults)} tensor(s): {'; '.join(faults)}")
            writer.prove(reader)
            self.layout.check(reader)
        writer.close()


def _upload(place: BucketPath, content: bytes | Path) -> None:
    """Put a small file, and compare what is read back. Raises: ExportError; StoreError."""
    data = content if isinstance(content, bytes) else content.read_bytes()
    place.bucket.put(place.key, data)
    if place.read() != data:
        raise ExportError(f"{place} read back differs from what was written")


def compare_infos(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo]) -> list[str]:
    """Return one line for each tensor that is missing, unexpected, or has a different shape or dtype."""
    faults = [f"{key} is missing" for key in expected if key not in found]
    faults += [f"{key} is not the model's" for key in found if key not in expected]
    both = [key for key in expected if key in found]
    return faults + [f"{k}: expected {expected[k]}, found {found[k]}" for k in both if expected[k] != found[k]]
