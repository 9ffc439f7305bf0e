"""Bucket: the requests that checkpoints need of an object store, each bounded in time.

Owns the client (obstore, of the extra `remote`), retries, what a lost answer means, and the variables and files of the
environment that the client does not read itself. Knows no checkpoints.
Source: obstore, https://developmentseed.org/obstore; retries with jitter inside one request are its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from titan_ckpt.errors import ConfigError, listed
from titan_ckpt.stores.answers import StoreError, lacks_bucket, store_error
from titan_ckpt.stores.objects import MAX_SMALL_BYTES, ObjectFacts, ObjectStore, Version
from titan_ckpt.stores.store import SCHEMES, StoreConfig, is_endpoint

_REQUEST_SECONDS = 60.0
"""Longest time of one request; a part of 64 MiB needs 1.1 MB/s to meet it."""
_ENDLESS = 10_000
"""More retries than fit into any retry time: the time alone bounds them."""
_NAMELESS = "invalid DeleteObjects response: missing field `Key`"
"""Error of the client where a gateway, such as that of JuiceFS, deletes objects and does not say which ones."""
_CUT = "request or response body error"
"""Error of the client where a connection ends, or stalls, in the middle of an answer."""
_NO_SUCH_RANGE = "status code: 416"
"""Answer to a range of an object that has no bytes."""

_Value = TypeVar("_Value")


class Bucket(ObjectStore):
    """A bucket of S3, GCS or Azure."""

    def __init__(self, scheme: str, name: str, settings: StoreConfig) -> None:
        """Make the client; nothing is sent. Raises: ConfigError if the extra is not installed or a setting is wrong."""
        super().__init__(scheme, name, settings)
        try:
            import obstore
        except ImportError:
            raise ConfigError(
                [f'{scheme}://{name}: needs the extra "remote": pip install titan-ckpt[remote]']
            ) from None
        self._api = obstore
        try:
            self._store = _client(scheme, name, settings)
        except ConfigError:
            raise
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError([str(store_error(error, "open", self.url(""), 0.0))], "checkpoint.store") from None

    def create(self, key: str, data: bytes) -> Version:
        """Put an object that must not exist; return its version, as far as it is known.

        `data` is unlike what anyone else would put, as an attempt's id makes it: where an answer was lost, the object
        is read back, and is this call's own if it holds the same bytes.
        Raises: FileExistsError; StoreError, after which the object may exist or come to exist.
        """
        return self._put_once(key, data, "create")

    def replace(self, key: str, data: bytes, version: Version) -> None:
        """Put an object over the content of that version only; otherwise as `create`.

        Raises: also StoreError if nobody has changed that content, and the store refuses all the same.
        """
        self._put_once(key, data, dict(version))

    def _put_once(self, key: str, data: bytes, mode: Any) -> Version:
        """Return the version that the answer names; nothing if an answer was lost."""
        if self.settings.single_writer:
            if mode == "create" and self.content(key) not in (None, data):
                raise FileExistsError(errno.EEXIST, "is there already", self.url(key))
            mode = "overwrite"
        started = time.monotonic()
        pause = 0.1
        most = max(len(data), MAX_SMALL_BYTES)
        while True:
            try:
                return _version(self._api.put(self._store, key, data, mode=mode, use_multipart=False))
            except (self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError) as error:
                content = self.content(key, most)
                if content == data:  # an answer was lost, and this is the second request
                    return {}
                if isinstance(mode, dict) and content is not None and self.read(key)[1] == mode:  # nobody changed it
                    raise StoreError(
                        errno.EINVAL,
                        f"{self.url(key)}: the store names {listed([*mode.values()], ', ')} as its version, and "
                        "refuses to replace that. An ETag that begins with W/ was made weak by a proxy, for example by "
                        "one that compresses: reach the store without it",
                        is_final=True,
                    ) from None
                if content is not None or mode != "create":
                    raise FileExistsError(errno.EEXIST, "another writer's content is there", self.url(key)) from None
                failure = store_error(error, "write", self.url(key), time.monotonic() - started)
                failure.is_final = False  # what was in the way is gone
            except FileNotFoundError as error:
                if isinstance(mode, dict) and not lacks_bucket(error):
                    raise FileExistsError(errno.EEXIST, "was deleted by another writer", self.url(key)) from None
                raise store_error(error, "write", self.url(key), time.monotonic() - started) from None
            except BaseException as error:
                if not self._is_of_client(error):
                    raise
                failure = store_error(error, "write", self.url(key), time.monotonic() - started)
                if not failure.is_final and self.content(key, most) == data:
                    return {}
            if failure.is_final or time.monotonic() - started > self.settings.retry_seconds:
                raise failure
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 5.0)

    def put(self, key: str, data: bytes) -> None:
        """Put an object over what is there, in one request if it is no larger than a part. Raises: StoreError."""
        if len(data) > self.part_bytes(len(data)):
            self.upload(key, iter([memoryview(data)]), self.part_bytes(len(data)))
            return
        with self._asking("write", key):
            self._api.put(self._store, key, data, use_multipart=False)

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        """Put a large object in requests of `part_bytes`.

        `parts` may be views of memory that does not change meanwhile; at most `concurrency` requests are in flight.
        Raises: StoreError; what `parts` raises. There is no object then.
        """
        errors: list[BaseException] = []

        def watched() -> Iterator[memoryview]:
            try:
                yield from parts
            except GeneratorExit:  # the client has failed, and takes no more parts
                raise
            except BaseException as error:  # the client would wrap it in an error of its own
                errors.append(error)
                raise

        try:
            with self._asking("write", key):
                self._api.put(
                    self._store,
                    key,
                    watched(),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=self.concurrency,
                )
        except BaseException:
            if errors:
                raise errors[0] from None
            raise

    def read(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> tuple[bytes, Version]:
        """Return a small object and its version.

        Raises: FileNotFoundError; StoreError; OSError with EFBIG if it is larger, before its bytes are sent.
        """
        with self._asking("read", key):
            answer = self._api.get(self._store, key)
            if answer.meta["size"] <= max_bytes:
                return answer.bytes().to_bytes(), _version(answer.meta)
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", self.url(key))

    def read_head(self, key: str, num_bytes: int) -> tuple[bytes, int]:
        """Return the first bytes of an object, and its size. Raises: FileNotFoundError; StoreError."""
        with self._asking("read", key):
            try:
                answer = self._api.get(self._store, key, options={"range": (0, num_bytes)})
            except self._api.exceptions.GenericError as error:
                if _NO_SUCH_RANGE not in str(error):
                    raise
                answer = self._api.get(self._store, key)
            return answer.bytes().to_bytes(), int(answer.meta["size"])

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop). Raises: FileNotFoundError; EOFError if the object is shorter; StoreError."""
        with self._asking("read", key):
            data = memoryview(self._api.get_range(self._store, key, start=start, end=stop))
        if len(data) != stop - start:
            raise EOFError(f"{self.url(key)} ends at byte {start + len(data)}")
        return data

    def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """Return the objects below `prefix`, which ends where a name does, by key. Raises: StoreError."""
        return self._whole(
            "list", prefix, lambda: _facts(self._api.list(self._store, prefix or None).collect(), prefix)
        )

    def list_files(self, prefix: str) -> list[ObjectFacts]:
        """Return the objects directly below `prefix`, by key. Raises: StoreError."""
        return _facts(self._level(prefix)["objects"], prefix)

    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, also of what only has objects below it. Raises: StoreError."""
        found = self._level(prefix)
        paths = {path.rstrip("/") for path in found["common_prefixes"]}
        return sorted(path.rpartition("/")[2] for path in paths | {f.key for f in _facts(found["objects"], prefix)})

    def _level(self, prefix: str) -> Mapping[str, Any]:
        return self._whole("list", prefix, lambda: self._api.list_with_delimiter(self._store, prefix or None))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error. Raises: StoreError."""

        def delete_all() -> None:
            try:
                self._api.delete(self._store, list(keys))
            except self._api.exceptions.GenericError as error:
                if _NAMELESS not in str(error) or any(map(self._is_there, keys)):
                    raise

        if not keys:
            return
        try:
            self._whole("delete", keys[0], delete_all)
        except FileNotFoundError:
            for key in keys:
                with contextlib.suppress(FileNotFoundError), self._asking("delete", key):
                    self._api.delete(self._store, key)

    def _is_there(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._api.head(self._store, key)
            return True
        return False

    def _whole(self, verb: str, key: str, ask: Callable[[], _Value]) -> _Value:
        """Ask until the answer is whole. The client asks again by itself, but not if a list is cut in the middle."""
        started = time.monotonic()
        while True:
            try:
                with self._asking(verb, key):
                    return ask()
            except StoreError as error:
                if _CUT not in str(error) or time.monotonic() - started > self.settings.retry_seconds:
                    raise
            time.sleep(random.uniform(0.05, 0.5))

    @contextlib.contextmanager
    def _asking(self, verb: str, key: str) -> Iterator[None]:
        """Raise the client's errors as StoreError or FileNotFoundError."""
        started = time.monotonic()
        try:
            yield
        except FileNotFoundError as error:
            if verb != "write" and not lacks_bucket(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", self.url(key)) from None
            raise store_error(error, verb, self.url(key), time.monotonic() - started) from None
        except BaseException as error:
            if not self._is_of_client(error):
                raise
            raise store_error(error, verb, self.url(key), time.monotonic() - started) from None

    def _is_of_client(self, error: BaseException) -> bool:
        """Return whether the client has failed: by an error of its own, or by a panic, which is no Exception."""
        return isinstance(error, self._api.exceptions.BaseError) or type(error).__name__ == "PanicException"


def _facts(listing: Iterable[Mapping[str, Any]], prefix: str) -> list[ObjectFacts]:
    """Return the objects of a listing by key, without those that stand for folders.

    A provider's console makes an empty object "run/" for a folder; the client's listings call it "run".
    """
    facts = [ObjectFacts(m["path"], int(m["size"]), _version(m), m["last_modified"].timestamp()) for m in listing]
    facts.sort(key=lambda f: f.key)
    keys = [f.key for f in facts]

    def is_folder(key: str) -> bool:
        below = bisect_left(keys, f"{key}/")
        return key == prefix or (below < len(keys) and keys[below].startswith(f"{key}/"))

    return [f for f in facts if f.num_bytes or not is_folder(f.key)]


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _client(scheme: str, name: str, settings: StoreConfig) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    endpoint = settings.endpoint or endpoint_of(scheme)
    common: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=min(_REQUEST_SECONDS, settings.retry_seconds)),
            "connect_timeout": timedelta(seconds=min(10.0, settings.retry_seconds)),
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": _ENDLESS,
            "retry_timeout": timedelta(seconds=settings.retry_seconds),
            "backoff": {"max_backoff": timedelta(seconds=min(15.0, max(0.2, settings.retry_seconds / 4)))},
        },
    }
    if scheme == "s3":
        require_usable_keys()
        common |= {"endpoint": endpoint} if endpoint else {}
        if not (endpoint or "").startswith("http://") and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
            common["unsigned_payload"] = True  # TLS protects bodies, and a SHA-256 of each costs time
        return S3Store(name, **common, **shared_credentials())
    if scheme == "gs":
        return GCSStore(name, **common | ({"base_url": endpoint} if endpoint else {}))
    assert scheme == "az", SCHEMES
    return AzureStore(name, **common | ({"endpoint": endpoint} if endpoint else {}))


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that name another server than the provider's own, as the providers' tools know them."""
_IN_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
"""The client aborts where a header cannot have such a value, as with the line break at the end of a mounted secret."""
_UNUSABLE = "a line break, a space around it or another control character, which no request can carry"


def endpoint_of(scheme: str) -> str | None:
    """Return the endpoint that the environment names for buckets of a scheme; None for the provider's own.

    Raises: ConfigError naming the variable without its value, which may hold a password.
    """
    name = next(filter(os.environ.get, _ENDPOINTS.get(scheme, ())), None)
    if name is not None and not is_endpoint(os.environ[name]):
        problem = f"{name}: expected an http(s) URL without user, password or query; set it so, or unset it"
        raise ConfigError([problem], "environment")
    return name and os.environ[name]


def require_usable_keys() -> None:
    """Check S3's variables. Raises: ConfigError naming those that no request can carry, without their values."""
    problems = [
        f"{name}: has {_UNUSABLE}; set it without" for name in _IN_HEADERS if not _is_usable(os.environ.get(name, ""))
    ]
    if problems:
        raise ConfigError(problems, "environment")


def shared_credentials() -> dict[str, Any]:
    """Return the keys of AWS's shared credentials file, which the client does not read; {} if others come first."""
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*others, "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")):
        return {}
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    profile = os.environ.get("AWS_PROFILE", "default")
    parser = ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ConfigParserError, UnicodeDecodeError):
        parser.read(path)
    if not parser.has_section(profile):
        return {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
             "aws_session_token": "session_token"}  # fmt: skip
    keys = {ours: parser[profile][theirs] for theirs, ours in names.items() if theirs in parser[profile]}
    if wrong := [name for name, value in keys.items() if not _is_usable(value)]:
        raise ConfigError([f"{path}: {name} of [{profile}] has {_UNUSABLE}" for name in wrong], "environment")
    return keys


def _is_usable(value: str) -> bool:
    return value.isprintable() and value == value.strip()
