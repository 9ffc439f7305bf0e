"""Object stores of packages, as processes: moto (S3), azurite (Azure), and two that do not keep conditional puts.

Knows no checkpoints. A proxy in front of one breaks requests as a network does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-servers"
"""Made by `make`, from constraints.txt and package.json of this folder."""
PYTHON = str(ENVIRONMENT / "bin" / "python")
BIN = ENVIRONMENT / "node_modules" / ".bin"
PEERS = ENVIRONMENT / "peers"
"""Other clients of buckets, with which benchmarks/store.py compares ours."""

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that azurite has, the same everywhere."""

# the names that s3rver knows; the others take any
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "S3RVER",
    "AWS_SECRET_ACCESS_KEY": "S3RVER",
    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
}

# Two threads of moto can both find no object and both write it, which no store does: writes take their turns. A body is
# read before its turn, so that a slow sender holds up nobody. Requests go to moto's S3 directly, and a date is parsed
# once: its dispatcher and its parser of dates take as long as all the rest of an answer.
_MOTO = """
import functools, io, logging, sys, threading
logging.disable()
from moto.core import serialize
from moto.core.request import Request
from moto.s3.responses import S3Response
from werkzeug.serving import run_simple
from werkzeug.wrappers import Response

serialize.parse_to_aware_datetime = functools.cache(serialize.parse_to_aware_datetime)
Request.from_wsgi_server, turn = True, threading.Lock()

def application(environ, start_response):
    request = Request(environ)
    of_object = "/" in request.path.strip("/")
    respond = S3Response.key_dispatch if of_object else S3Response.ambiguous_dispatch
    status, headers, body = respond(request, request.raw_url, request.headers)
    response = Response(body, status, headers)
    if request.method == "HEAD" and "content-length" in headers:  # a body that is not sent has a length, too
        response.headers["Content-Length"] = headers["content-length"]
    return response(environ, start_response)

def serve(environ, start_response):
    if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
        return application(environ, start_response)
    if length := int(environ.get("CONTENT_LENGTH") or 0):
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
    with turn:
        return application(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""


# moto shares the processors with the clients that are compared, and works on each byte, which a bucket does elsewhere:
# it copies a whole object for each range of it, copies all parts twice to join them, reads a body in pieces of 64 KiB,
# and makes two checksums. Here it keeps what it was sent, joins parts by one copy, and its ETag is of the first bytes.
_SNAILMAIL = """
import hashlib, io, sys, time
import moto.s3.models, werkzeug.wsgi
from snailmail import Fixed, ObjectStore

class Held(io.BytesIO):
    def __init__(self, size):
        super().__init__()
    def write(self, data):
        super().__init__(data)  # kept as it is: reading all of it copies nothing
        return len(data)

class InMemory:
    SpooledTemporaryFile = Held

class Joined(list):
    def extend(self, part):
        self.append(part)
    def __bytes__(self):
        return b"".join(self)

class Digest:
    def __init__(self, data=b""):
        self.md5 = hashlib.md5(data)
    def update(self, data):
        self.md5.update(data[: 1 << 16])
    def hexdigest(self):
        return self.md5.hexdigest()

def read_all(stream):
    return stream._stream.read(stream.limit)

moto.s3.models.tempfile = InMemory
moto.s3.models.bytearray = Joined
moto.s3.models.md5_hash = Digest
moto.s3.models.MultipartChecksumBuilder.addPart = lambda self, part: None
moto.s3.models.MultipartChecksumBuilder.build = lambda self: None
werkzeug.wsgi.LimitedStream.readall = read_all
ObjectStore(bucket="box", latency=Fixed(int(sys.argv[2])), port=int(sys.argv[1]), max_records=0).start()
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: `url` of a bucket in it, and the endpoint."""

    url: str
    endpoint: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _process(command: list[str], port: int, folder: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """S3 as it should be, in memory."""
    port = free_port()
    with _process([PYTHON, "-c", _MOTO, str(port)], port, folder):
        yield _s3(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def snailmail(folder: Path, milliseconds: int) -> Iterator[Server]:
    """S3 as moto has it, every request of which takes longer. Of `make .venv-servers/.bench`."""
    port = free_port()
    with _process([PYTHON, "-c", _SNAILMAIL, str(port), str(milliseconds)], port, folder):
        yield Server("s3://box", f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def juicefs(folder: Path, key: str) -> Iterator[Server]:
    """A fast S3 on the disk, for whom conditions of a put do not count. `key`: its user and password."""
    port, volume = free_port(), f"sqlite3://{folder}/meta.db"
    program = str(ENVIRONMENT / "bin" / "juicefs")
    make = ["format", "--storage", "file", "--bucket", f"{folder}/data/", "--trash-days", "0", volume, "box"]
    subprocess.run([program, *make], check=True, capture_output=True)
    serve = ["gateway", "--no-banner", "--no-usage-report", "--keep-etag", "--cache-dir", f"{folder}/cache"]
    serve += ["--log", f"{folder}/gateway.log", volume, f"127.0.0.1:{port}"]
    environment = os.environ | {"MINIO_ROOT_USER": key, "MINIO_ROOT_PASSWORD": key}
    with _process([program, *serve], port, folder, environment):
        yield Server("s3://box", f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """Azure as it should be, in memory."""
    port = free_port()
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _process([str(BIN / "azurite-blob"), *options, "--blobPort", str(port)], port, folder):
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        _make_container(endpoint, "box")
        yield Server("az://box", endpoint)


@contextlib.contextmanager
def s3rver(folder: Path) -> Iterator[Server]:
    """A store that ignores If-None-Match."""
    port = free_port()
    options = ["-d", str(folder / "data"), "-s", "-a", "127.0.0.1", "-p", str(port), "--configure-bucket", "box"]
    with _process([str(BIN / "s3rver"), *options], port, folder):
        yield Server("s3://box", f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def localbucket(folder: Path) -> Iterator[Server]:
    """A store that keeps If-None-Match and accepts a stale If-Match."""
    port = free_port()
    command = [PYTHON, "-m", "localbucket", "--port", str(port), str(folder / "data")]
    (folder / "data" / "box").mkdir(parents=True)
    with _process(command, port, folder):
        yield Server("s3://box", f"http://127.0.0.1:{port}")


def _s3(endpoint: str) -> Server:
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/box", method="PUT")):
        return Server("s3://box", endpoint)


def _make_container(endpoint: str, name: str) -> None:
    """Make a container. Source of the string to sign: learn.microsoft.com, "Authorize with Shared Key"."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-08-06"
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(AZURE_KEY), to_sign.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        pass


@dataclass(frozen=True, slots=True)
class Answer:
    """The proxy answers so instead of the store: the status line, a body, and headers such as x-ms-error-code."""

    status: str
    body: str
    headers: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        head = [f"HTTP/1.1 {self.status}", f"Content-Length: {len(self.body.encode())}", *self.headers]
        return ("\r\n".join(head) + "\r\n\r\n" + self.body).encode()


def refusal(status: str, code: str, message: str, more: str = "") -> Answer:
    """Return an error as S3 and Azure write it."""
    error = f"<Error><Code>{code}</Code><Message>{message}</Message>{more}<RequestId>4442</RequestId></Error>"
    headers = ("Content-Type: application/xml", f"x-ms-error-code: {code}")
    return Answer(status, f'<?xml version="1.0" encoding="UTF-8"?>\n{error}', headers)


_BUSY = "Please reduce your request rate."
_REFUSALS = {
    "503": refusal("503 Service Unavailable", "ServiceUnavailable", _BUSY),
    "SlowDown": refusal("503 Slow Down", "SlowDown", _BUSY),
}

Fault = Literal["503", "SlowDown", "cut", "torn", "stall"] | Answer | None
"""cut: the server has processed the request, and its answer is lost; torn: half of it. stall: nothing is answered."""


class Proxy:
    """A proxy that asks `fault(method, path)` what happens to each request. A context manager."""

    def __init__(self, endpoint: str, fault: Callable[[str, str], Fault]) -> None:
        self.requests: list[tuple[str, str]] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.forwarding = 0
        """Requests that the server works on, or that `fault` is asked about."""
        self._upstream = re.fullmatch(r"http://([^:/]+):(\d+)(.*)", endpoint)
        self._fault = fault
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = free_port()

    @property
    def endpoint(self) -> str:
        assert self._upstream is not None
        return f"http://127.0.0.1:{self.port}{self._upstream[3]}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accepted, "127.0.0.1", self.port))
        self._ready.set()
        self._loop.run_forever()
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        self._turn()  # what is being accepted is known then; a server that is closed would leave it open
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for writer in self._open:
            with contextlib.suppress(AttributeError):  # asyncio's own, of a connection that has just been closed
                writer.transport.abort()  # also where a client does not take the rest of an answer
        server.close()
        self._turn()
        self._loop.close()

    def _turn(self) -> None:
        """Let the loop turn a few times: it accepts and closes connections in several steps."""
        for _ in range(10):
            self._loop.run_until_complete(asyncio.sleep(0))

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        task = self._loop.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass

    @contextlib.contextmanager
    def _closing(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._open.add(writer)
        try:
            yield
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = re.search(r"(?i)\ncontent-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        method, path = head.split(" ", 2)[:2]
        self.requests.append((method, path))
        self.forwarding += 1
        try:
            fault = self._fault(method, path)
            answer = fault if isinstance(fault, Answer) else _REFUSALS.get(fault or "")
            data = await self._forward(head, body) if fault in (None, "cut", "torn") else b""
        finally:
            self.forwarding -= 1
        if fault == "stall":
            await asyncio.sleep(3600)
        if answer is not None:
            writer.write(answer.to_bytes())
            await writer.drain()
            return True
        if fault == "cut":
            return False
        writer.write(data[: data.index(b"\r\n\r\n") + 30] if fault == "torn" else data)
        await writer.drain()
        return False

    async def _forward(self, head: str, body: bytes) -> bytes:
        """Return the server's answer."""
        assert self._upstream is not None
        reader, writer = await asyncio.open_connection(self._upstream[1], int(self._upstream[2]))
        head = re.sub(r"(?i)\r\nconnection: [^\r]*", "", head).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
        with self._closing(writer):
            writer.write(head.encode("latin-1") + body)
            await writer.drain()
            return await reader.read()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


_S3_USER = (
    "Authorization: AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request, SignedHeaders=, Signature="
)


class GoogleProxy(Proxy):
    """An S3 server as Google Cloud Storage: its XML interface is that of S3 but for the conditions of a put.

    Every content has a generation, and a put may ask for one; 0 is that of nothing.
    Source: cloud.google.com/storage/docs/xml-api/reference-headers, x-goog-if-generation-match.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server.endpoint, lambda *_: None)
        self._etags: dict[int, str] = {}

    async def _forward(self, head: str, body: bytes) -> bytes:
        condition = re.search(r"(?i)\r\nx-goog-if-generation-match: (\d+)", head)
        if condition is not None:
            wanted = int(condition[1])
            same = f"If-Match: {self._etags.get(wanted)}" if wanted else "If-None-Match: *"
            head = head.replace(condition[0], f"\r\n{same}")
        head = re.sub(r"(?i)\r\nauthorization: [^\r]*", "", head).replace("\r\n", f"\r\n{_S3_USER}\r\n", 1)
        answer = await super()._forward(head, body)
        if etag := re.search(rb"(?i)\r\netag: ([^\r]*)", answer.partition(b"\r\n\r\n")[0]):
            generation = zlib.crc32(etag[1]) or 1
            self._etags[generation] = etag[1].decode()
            answer = answer.replace(b"\r\n", b"\r\nx-goog-generation: %d\r\n" % generation, 1)
        return answer

    @property
    def account(self) -> str:
        """Return the key of a service account that signs nothing."""
        nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
        return json.dumps(nobody | {"gcs_base_url": self.endpoint, "disable_oauth": True})


def require_installed() -> None:
    """Raises: FileNotFoundError that says how the servers are installed."""
    for path in (PYTHON, PEERS, BIN / "azurite-blob", BIN / "s3rver"):
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is not there: run `make .venv-servers/.ready`")
