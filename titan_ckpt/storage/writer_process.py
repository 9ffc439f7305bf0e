"""A process of its own that writes staged files, so that training keeps the interpreter to itself meanwhile.

Owns both ends of the line to it. The arena is shared memory, so no tensor is sent: a request names a file and how its
bytes are laid out, the answer is the file's digest or the error. The process commits nothing: that stays with the
trainer, so one that outlives its trainer, or is killed, leaves an attempt that nobody commits. It ends when its line
does, or its trainer: what the trainer has forked, such as dataloader workers, holds the line open and may live on.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from titan_ckpt.errors import SaveError
from titan_ckpt.storage.memory import Buffer, SharedBuffer, round_up
from titan_ckpt.storage.native_layout import Layout
from titan_ckpt.storage.rank_file_writer import write_rank_file

_OF_THE_TRAINER = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""What asks the trainer to end is its to answer: it may finish the save in flight, which needs its writer."""

_MAIN = f"from {__name__} import main; main()"
"""Not `-m`, which would warn that the package has imported the module before."""


_LOOK_SECONDS = 1.0
"""How long a writer may live on after its trainer, where its line does not end."""


class WriterProcess:
    """The trainer's end. The process is started here and may take seconds to come up; nothing waits before a write."""

    def __init__(self, shared: SharedBuffer) -> None:
        """Start a process that sees `shared`."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TRAINER)  # inherited: also while it comes up
        try:
            self._process = self._start(shared)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @staticmethod
    def _start(shared: SharedBuffer) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(shared.fd), str(len(shared.buffer.view)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[shared.fd],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # wherever the trainer found us
            start_new_session=True,  # a Ctrl-C is the trainer's to answer: it may finish the save in flight
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, path: Path, layout: Layout, header_at: int) -> str:
        """Have the file written from the shared memory: data from its begin, the unsealed header from `header_at`.

        Returns the file's digest; the file is durable. Raises: OSError as the process met it; SaveError if it died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "path": str(path),
            "data_start": layout.data_start,
            "data_bytes": layout.data_bytes,
            "header_at": header_at,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise SaveError(f"{path}: the writer process ended with {_cause(code)}; the next save starts another")
        found = json.loads(answer)
        if "errno" in found:
            raise OSError(found["errno"], found["message"], str(path))
        if "message" in found:
            raise SaveError(f"{path}: the writer process failed: {found['message']}")
        return str(found["digest"])

    def close(self) -> None:
        """End the process, after the write in hand."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def serve(shared: Buffer, trainer: int) -> None:
    """Answer requests from standard input until it ends, or the process `trainer` does."""
    for line in _requests(trainer):
        request = json.loads(line)
        header_at, start = request["header_at"], request["data_start"]
        template = bytes(shared.view[header_at : header_at + start])
        layout = Layout((), start, request["data_bytes"], template)
        answer: dict[str, object]
        try:
            digest = write_rank_file(
                Path(request["path"]), layout, lambda a, b: nullcontext(shared.view[a : round_up(b)])
            )
            answer = {"digest": digest}
        except OSError as error:
            answer = {"errno": error.errno, "message": error.strerror or str(error)}
        except Exception as error:
            answer = {"message": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _requests(trainer: int) -> Iterator[str]:
    """Yield lines of standard input, which come one at a time: the next one follows the answer."""
    while os.getppid() == trainer:
        if select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            yield line


def main() -> None:
    """Map the trainer's arena and serve, with signals that ask the trainer to end blocked since before the start."""
    fd, size, trainer = map(int, sys.argv[1:4])
    serve(Buffer.of(mmap.mmap(fd, size), size), trainer)
