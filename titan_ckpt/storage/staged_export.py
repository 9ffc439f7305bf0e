"""One export of one folder by all ranks: plan, write, prove, publish; or nothing.

Owns the order of the steps and what becomes of errors. Knows no format: names of files, companions and the reader that
proves the result are handed in.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from titan_ckpt import posix, progress
from titan_ckpt.distributed import Coordinator
from titan_ckpt.errors import ExportError, PeerError
from titan_ckpt.storage.assembly import Assembly, Boxes, whole_rows
from titan_ckpt.storage.base import TensorReader
from titan_ckpt.storage.engine import meanwhile
from titan_ckpt.storage.export_plan import ExportPlan, MakeHeader, PackFiles, coverage_faults, plan_export
from titan_ckpt.storage.export_writer import ExportWriter, Place, Together, create_file
from titan_ckpt.storage.staged_folder import StagedFolder, copy_file, write_file
from titan_ckpt.tensors import Chunk, TensorInfo
from titan_ckpt.transforms import FileGroup, FilePiece

logger = logging.getLogger(__name__)

_THROUGH_MAPPINGS = "shards of columns are written through mappings of the files, which is slower"


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """What a format adds to its tensors."""

    pack: PackFiles
    companions: Callable[[ExportPlan], Mapping[str, bytes | Path]]
    """File name -> its bytes, or the file to copy it from. Called on rank 0, before anything is written. May raise."""
    open_reader: Callable[[Path], TensorReader]
    """How anybody would open the folder: this proves it."""
    check: Callable[[TensorReader], None]
    """Called with the re-opened folder before it is published. Raises what is wrong with its values."""
    header: MakeHeader | None = None
    """Metadata of every file, beyond that of any."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """A published export."""

    folder: Path
    files: tuple[str, ...]
    """Names of the files with tensors."""
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors, without headers."""
    seconds: float


def export_folder(
    folder: Path, groups: Sequence[FileGroup], layout: FolderFormat, coordinator: Coordinator, *, fsync: bool
) -> ExportSummary:
    """Write, prove and publish a folder. Collective: ranks without tensors take part too.

    1. All ranks plan. 2. Rank 0 makes companions and the staging folder. 3. Ranks share the creation of the files, at
    their final size. 4. Every rank writes its slices; rank 0 the companions. 5. Every rank makes durable what it wrote,
    and re-reads it by the format's own reader; it compares all names, shapes and dtypes. 6. Rank 0 publishes.
    Raises: ExportError on every rank, with nothing under the folder's name.
    """
    started = time.perf_counter()
    work = _Export(folder, groups, layout, coordinator, fsync)
    try:
        plan = work.run()
    except Exception as error:
        unsure = work.is_proved and isinstance(error, PeerError)  # another rank fell silent after that
        became = "it is proved, and may be published all the same" if unsure else "nothing was published"
        raise ExportError(f"export to {folder} failed, {became}: {error}") from error
    seconds = time.perf_counter() - started
    summary = ExportSummary(folder, tuple(plan.layouts), len(plan.infos), plan.num_bytes, seconds)
    logger.info("exported %d tensors, %d bytes, to %s in %.2f s", summary.num_tensors, plan.num_bytes, folder, seconds)
    return summary


@dataclass(slots=True)
class _Export:
    folder: Path
    groups: Sequence[FileGroup]
    layout: FolderFormat
    coordinator: Coordinator
    fsync: bool
    is_proved: bool = False

    def run(self) -> ExportPlan:
        """Take all steps; leaves no staging folder behind when it raises."""
        plan = plan_export(self.groups, self.layout.pack, self.coordinator, self.layout.header)
        companions: Mapping[str, bytes | Path] = {}
        staged: StagedFolder | None = None
        path, error = "", None
        try:
            if self.coordinator.rank == 0:
                companions = self.layout.companions(plan)
                staged = StagedFolder.begin(self.folder)
                path = str(staged.path)
        except Exception as caught:
            error = caught
        try:
            path = str(self.coordinator.broadcast("export/begin", path, error))
            self._fill(Path(path), plan, companions)
            self.is_proved = True
            self._together("export/publish", lambda: staged.publish(self.fsync) if staged is not None else None)
        except BaseException:
            if staged is not None:
                with contextlib.suppress(OSError):  # a later export removes what is left
                    staged.abandon()
            raise
        return plan

    def _fill(self, path: Path, plan: ExportPlan, companions: Mapping[str, bytes | Path]) -> None:
        """Write everything into the staging folder and prove it."""
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        mine = list(plan.layouts)[rank::world_size]
        share = 2 * plan.num_bytes // world_size  # written, and read back
        with (
            progress.shown(f"exporting {self.folder.name}", share),
            ExportWriter(path, plan, direct=self.fsync) as writer,
        ):
            with contextlib.ExitStack() as stack:
                pieces = writer.strided(self.groups) if world_size > 1 else {}
                offer = self._offer(stack, pieces)
                address = offer and offer.address
                addresses = self._together("export/create", lambda: self._create(path, plan, mine), address)
                together = self._meet(plan, offer, addresses, pieces)
                self._together("export/write", lambda: self._write(path, plan, companions, writer, together))
                if writer.gave_up:
                    raise ExportError("another rank gave up, and did not say why")
            parts = self.coordinator.gather("export/parts", cast("Any", writer.undivided))
            if faults := coverage_faults(plan.infos, cast("Any", parts)):
                raise ExportError(f"{len(faults)} tensor(s) are not whole: {'; '.join(faults)}")
            self._together("export/prove", lambda: self._prove(path, plan, writer))

    def _offer(self, stack: contextlib.ExitStack, pieces: Mapping[Place, FilePiece]) -> Assembly | None:
        boxes: dict[str, list[Chunk]] = {}
        for piece in pieces.values():
            boxes.setdefault(piece.key, []).append(piece.chunk)
        try:
            timeout = self.coordinator.timeout_seconds
            return stack.enter_context(Assembly(self.coordinator.rank, boxes, timeout)) if boxes else None
        except OSError as error:
            logger.info("%s: %s", _THROUGH_MAPPINGS, error)
            return None

    def _meet(
        self, plan: ExportPlan, offer: Assembly | None, addresses: Sequence[Any], pieces: Mapping[Place, FilePiece]
    ) -> Together | None:
        """Agree on whether ranks put rows together, and on which. Collective."""
        if sum(address is not None for address in addresses) < 2:
            return None
        tables: Mapping[int, Boxes] | None = {}
        try:
            tables = {} if offer is None else offer.connect(addresses)
        except (OSError, ValueError) as error:
            logger.info("%s: %s", _THROUGH_MAPPINGS, error)
            tables = None
        if not all(self.coordinator.gather("export/meet", tables is not None)) or not tables or offer is None:
            return None
        shapes = {key: (info.shape, info.dtype.itemsize) for key, info in plan.infos.items()}
        in_order = [key for layout in plan.layouts.values() for key in layout.entries]
        return Together(offer, list(whole_rows(tables, shapes, in_order)), pieces)

    def _create(self, path: Path, plan: ExportPlan, names: Sequence[str]) -> None:
        for name in names:
            create_file(path / name, plan.layouts[name])

    def _write(
        self,
        path: Path,
        plan: ExportPlan,
        companions: Mapping[str, bytes | Path],
        writer: ExportWriter,
        together: Together | None,
    ) -> None:
        writer.write(self._in_turn(plan), together)
        for name, content in companions.items():
            if (path / name).parent != path and not (path / name).parent.exists():
                posix.mkdir((path / name).parent)
            if isinstance(content, Path):
                copy_file(content, path / name, self.fsync)
            else:
                write_file(path / name, content, self.fsync)

    def _in_turn(self, plan: ExportPlan) -> list[FileGroup]:
        """Start each rank at another file, for writers of one file wait for each other; not where order is fixed."""
        groups = list(self.groups)
        if any(group.collective for group in groups):
            return groups
        number = {name: i for i, name in enumerate(plan.layouts)}
        first = self.coordinator.rank * len(number) // self.coordinator.world_size
        return sorted(groups, key=lambda g: (number[plan.file_of[next(iter(g.infos))]] - first) % len(number))

    def _prove(self, path: Path, plan: ExportPlan, writer: ExportWriter) -> None:
        sync = writer.sync if self.fsync else None
        with self.layout.open_reader(path) as reader, meanwhile(sync):  # what is durable is what is read back
            faults = compare_infos(plan.infos, reader.tensors)
            if faults:
                raise ExportError(f"the re-opened export differs in {len(faults)} tensor(s): {'; '.join(faults)}")
            writer.prove(reader)
            self.layout.check(reader)
        writer.close()

    def _together(self, tag: str, step: Callable[[], None], value: Any = None) -> list[Any]:
        """Take a step on every rank; return each rank's value. Raises: as `Coordinator.gather`."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:
            error = caught
        return cast("list[Any]", self.coordinator.gather(tag, value, error))


def compare_infos(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo]) -> list[str]:
    """Return one line for each tensor that is missing, too many, or of another shape or dtype."""
    faults = [f"{key} is missing" for key in expected if key not in found]
    faults += [f"{key} is not the model's" for key in found if key not in expected]
    both = [key for key in expected if key in found]
    return faults + [f"{k}: expected {expected[k]}, found {found[k]}" for k in both if expected[k] != found[k]]
