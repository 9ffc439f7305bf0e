"""The bucket client on S3 and Azure: what it puts and reads, what a lost answer means, and what an error says."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_hostile_bytes import peak_mib
from tests.stores import servers
from tests.stores.conftest import behind, place_in, through
from tests.stores.servers import Answer, Server, refusal
from titan_ckpt.config import InitialLoadConfig
from titan_ckpt.directory.bucket_steps import BucketSteps, probe
from titan_ckpt.encoding.paths import require_local
from titan_ckpt.encoding.toml import read_toml
from titan_ckpt.errors import ConfigError, PreflightError
from titan_ckpt.stores.answers import StoreError, store_error
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import StoreConfig, open_location, require_places, split_url

KEY_ID = "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("endpoint", "chosen", "is_unsigned"),
    [(None, None, True), ("https://host", None, True), ("http://host", None, False), (None, "false", False)],
)
def test_bodies_are_signed_where_tls_does_not_protect_them(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, chosen: str | None, is_unsigned: bool
) -> None:
    """A choice of the environment is left to the client, which reads it itself."""
    if chosen is not None:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", chosen)
    store = Bucket("s3", "box", StoreConfig(endpoint=endpoint))._store
    assert (str(store.config.get("unsigned_payload")).lower() == "true") == is_unsigned


def test_an_object_that_is_too_large_is_not_read(place: BucketPath) -> None:
    """A manifest or a lease of 40 MiB is refused by name before its bytes are there."""
    (place / "lease.json").bucket.put((place / "lease.json").key, bytes(40 * 2**20))
    peak_mib()
    before = peak_mib()
    with pytest.raises(OSError, match=f"larger than .*{place.key}/lease.json"):
        (place / "lease.json").read()
    with pytest.raises(OSError, match=f"larger than .*{place.key}/lease.json"):
        place.bucket.read_whole(place / "lease.json", 2**20)
    assert peak_mib() - before < 20
    assert (place / "lease.json").read(40 * 2**20) == bytes(40 * 2**20)


def test_objects_are_created_once_and_replaced_by_version(place: BucketPath) -> None:
    """A second create, and a replace of an old version, fail and change nothing; two calls of one put are one."""
    bucket, key = place.bucket, (place / "a.json").key
    bucket.create(key, b"first")
    bucket.create(key, b"first")
    with pytest.raises(FileExistsError):
        bucket.create(key, b"second")
    content, version = bucket.read(key)
    assert content == b"first"
    bucket.replace(key, b"third", version)
    with pytest.raises(FileExistsError):
        bucket.replace(key, b"fourth", version)
    assert (place / "a.json").read() == b"third"
    bucket.delete([key])
    with pytest.raises(FileExistsError):
        bucket.replace(key, b"fifth", version)
    with pytest.raises(FileNotFoundError):
        bucket.read(key)
    bucket.delete([key])


def test_an_answer_that_does_not_name_what_is_deleted_is_looked_after(s3: Server) -> None:
    """The gateway of JuiceFS answers so, and deletes; an answer like that with the object still there is an error."""
    place = place_in(s3)
    key = (place / "a").key
    nameless = Answer("200 OK", "<DeleteResult><Deleted></Deleted></DeleteResult>")
    with servers.Proxy(s3.endpoint, lambda method, _: nameless if method == "POST" else None) as proxy:
        bucket = through(place, proxy).bucket
        bucket.delete([key])
        bucket.create(key, b"x")
        with pytest.raises(StoreError, match="could not delete it"):
            bucket.delete([key])


def test_large_objects_are_uploaded_from_views_and_read_by_range(server: Server) -> None:
    """Parts are views of memory that the caller keeps, and no more of them are asked for than may be in flight."""
    place = place_in(server, part_mib=5, concurrency=2)
    data = bytes(range(256)) * (4 << 12) + b"the end"
    source = memoryview(bytearray(data * 4))
    given = 0

    def parts() -> Iterator[memoryview]:
        nonlocal given
        for start in range(0, len(source), 5 << 20):
            given += 1
            yield source[start : start + (5 << 20)]

    key = (place / "big").key
    place.bucket.upload(key, parts(), 5 << 20)
    assert given == 4
    assert place.bucket.read_head(key, 10) == (data[:10], len(source))
    place.bucket.create((place / "empty").key, b"")
    assert place.bucket.read_head((place / "empty").key, 10) == (b"", 0)
    place.bucket.delete([(place / "empty").key])
    assert place.bucket.read_range(key, 100, 6 << 20) == source[100 : 6 << 20]
    with pytest.raises(EOFError):
        place.bucket.read_range(key, len(source) - 5, len(source) + 5)
    assert [(f.key, f.num_bytes) for f in place.bucket.list_objects(place.key)] == [(key, len(source))]
    assert place.bucket.list_objects(place.key[:-1]) == []  # a prefix ends where a name does


def test_an_upload_whose_source_fails_leaves_no_object(place: BucketPath) -> None:
    """The source's own error is raised, and what was uploaded is aborted."""

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(5 << 20))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        place.bucket.upload((place / "big").key, parts(), 5 << 20)
    assert place.bucket.list_objects(place.key) == []
    if place.bucket.scheme == "s3":
        with urllib.request.urlopen(f"{place.bucket.settings.endpoint}/box?uploads") as answer:
            assert (place / "big").key not in answer.read().decode()


def test_an_upload_that_is_refused_before_all_its_parts_are_taken_says_why(s3: Server) -> None:
    """The client closes the source then, which is no error of the source."""
    place = place_in(s3)
    with behind(s3, refusal("403 Forbidden", "AccessDenied", "Access Denied"), "PUT", "/big", times=10_000) as proxy:
        refused = through(place, proxy, concurrency=1)
        with pytest.raises(StoreError, match="credentials"):
            refused.bucket.upload((place / "big").key, (memoryview(bytes(5 << 20)) for _ in range(4)), 5 << 20)
    assert place.bucket.list_objects(place.key) == []


@pytest.mark.parametrize("fault", ["503", "SlowDown", Answer("429 Too Many Requests", "", ("Retry-After: 3600",))])
def test_a_busy_store_is_asked_again(s3: Server, fault: servers.Fault) -> None:
    """Two refusals cost time and nothing else."""
    place = place_in(s3)
    with behind(s3, fault, "PUT", "/a", times=2) as proxy:
        through(place, proxy).bucket.create((place / "a").key, b"x")
    assert (place / "a").read() == b"x"
    assert [method for method, _ in proxy.requests] == ["PUT"] * 3


def test_a_lost_answer_is_read_back(server: Server) -> None:
    """The server has created or replaced the object and the connection is cut: the call succeeds, as the put did."""
    place = place_in(server)
    with behind(server, "cut", "PUT", "/a") as proxy:
        through(place, proxy).bucket.create((place / "a").key, b"x")
    version = place.bucket.read((place / "a").key)[1]
    with behind(server, "cut", "PUT", "/a") as proxy:
        through(place, proxy).bucket.replace((place / "a").key, b"y", version)
    assert (place / "a").read() == b"y"


def test_an_answer_that_ends_in_the_middle_is_asked_for_again(server: Server) -> None:
    """Reads, lists and deletions are sent again, until the retry time is over."""
    place = place_in(server)
    key = (place / "a").key
    place.bucket.create(key, bytes(1000))
    left = 0

    def tear(method: str, path: str) -> servers.Fault:
        nonlocal left
        left -= 1
        return "torn" if left >= 0 else None

    with servers.Proxy(server.endpoint, tear) as proxy:
        torn = through(place, proxy).bucket
        for ask, expected in (
            (lambda: torn.read(key)[0], bytes(1000)),
            (lambda: [f.key for f in torn.list_objects(place.key)], [key]),
            (lambda: torn.list_names(place.key), ["a"]),
            (lambda: torn.delete([key, f"{key}2"]), None),
        ):
            left = 1
            assert ask() == expected and left < 0
        left = 99
        with pytest.raises(StoreError, match="could not list it in"):
            through(place, proxy, retry_seconds=0.2).bucket.list_objects(place.key)
    assert place.bucket.list_objects(place.key) == []


def test_a_give_up_names_rank_object_seconds_and_the_last_answer(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes within the retry time, for refusals and for stalls."""
    monkeypatch.setenv("RANK", "3")
    place = place_in(s3)
    expected = {
        "SlowDown": r"s3://box/runs/\w+/a: rank 3 could not write it in [\d.]+ s; the last answer: 503 .*\(SlowDown: ",
        "stall": r"s3://box/runs/\w+/a: rank 3 could not write it in [\d.]+ s; the last answer: .*(?i:time)",
    }
    for fault, message in expected.items():
        started = time.monotonic()
        with behind(s3, fault, "PUT", "/a", times=99) as proxy, pytest.raises(StoreError, match=message):  # type: ignore[arg-type]
            through(place, proxy, retry_seconds=0.5).bucket.create((place / "a").key, b"x")
        assert time.monotonic() - started < 60


def test_no_error_holds_a_credential(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the secret is in the text of any error, whatever the server puts into its answer."""
    place = place_in(s3)
    secret = servers.CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    leak = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{secret} {KEY_ID}</Message>"
    text = f"Error performing GET https://user:pw@h/b?sig=abc - status code: 403 Forbidden: {leak}S3RVER"
    error = store_error(RuntimeError(text), "read", str(place), 1.0)
    assert "SignatureDoesNotMatch" in str(error) and error.is_final
    assert not any(secret in str(error) for secret in (*servers.CREDENTIALS.values(), "sig=", "user:pw", KEY_ID))
    monkeypatch.setenv("GOOGLE_CREDENTIALS", '{"private_key": "my-key"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/keys/mine.json")
    text = 'Unable to decode service account file {"private_key": "my-key"} of /keys/mine.json'
    assert "file *** of /keys/mine.json" in str(store_error(RuntimeError(text), "open", "gs://b", 0.0))


def test_a_cause_that_the_client_names_in_its_debug_text_alone_is_said() -> None:
    """A certificate that is not trusted, and a host without an address; no request comes so far."""
    for debug, cause in (
        ("error: InvalidCertificate(\n    UnknownIssuer,\n)", "InvalidCertificate, UnknownIssuer"),
        ('"dns error",\n error: "failed to lookup address information: ..."', "failed to lookup address information"),
    ):
        text = f"Error performing GET https://h/b - HTTP error: error sending request\n\nDebug source:\n{debug}"
        assert f"error sending request, {cause}" in str(store_error(RuntimeError(text), "list", "s3://b/a", 1.0))


def test_credentials_that_have_expired_are_named_as_the_cause() -> None:
    """S3 answers 400 to them, which is not the endpoint's fault."""
    body = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    error = store_error(RuntimeError(f"non-2xx status code: 400 Bad Request: {body}"), "read", "s3://b/a", 1.0)
    assert "ExpiredToken" in str(error) and "Check the credentials" in str(error) and error.is_final


def test_a_bucket_that_is_not_there_is_said_at_once(server: Server) -> None:
    """For every request, without retries, with the next step."""
    place = open_location(f"{server.url}-none/x", settings=StoreConfig(endpoint=server.endpoint, retry_seconds=600.0))
    assert isinstance(place, BucketPath)
    started = time.monotonic()
    for act in (
        lambda: place.bucket.create("x/a", b""),
        lambda: place.bucket.read("x/a"),
        lambda: place.bucket.list_objects("x"),
        lambda: place.bucket.upload("x/a", iter([memoryview(b"x")]), 5 << 20),
        lambda: probe(place),
    ):
        with pytest.raises(StoreError, match="Create the bucket"):
            act()
    assert time.monotonic() - started < 100


def test_the_probe_accepts_what_keeps_conditions(place: BucketPath) -> None:
    """And leaves nothing, also below a key with characters that a URL or a signature quotes."""
    probe(place / "my run" / "a+b&c=d;~" / "100% \u00fc %20")
    assert place.bucket.list_objects(place.key) == []


def test_a_folder_that_was_made_in_a_console_is_no_object(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an empty object "run/": no listing has it. An object that no path can name is said to be another's."""
    place = place_in(s3)
    for name in ("/", "/base/", "/base/model.bin", "//x"):
        with urllib.request.urlopen(urllib.request.Request(f"{s3.endpoint}/box/{place.key}{name}", method="PUT")):
            pass
        if name == "/base/model.bin":
            assert [f.key for f in place.bucket.list_objects(place.key)] == [f"{place.key}/base/model.bin"]
            assert place.bucket.list_names(place.key) == ["base"] and place.bucket.list_files(place.key) == []
            assert [path.name for path in (place / "base").listed().iterdir()] == ["model.bin"]
            assert not (place / "base").listed().is_file()
    with pytest.raises(StoreError, match=r"//x.*Such an object is not one of titan_ckpt: move it away"):
        place.bucket.list_objects(place.key)


def test_the_environment_names_an_endpoint_and_keys_that_a_request_can_carry(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS, too. A mounted secret often ends in a line break, at which the client panics."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    place = open_location(f"{s3.url}/none", settings=StoreConfig(retry_seconds=2.0))
    assert isinstance(place, BucketPath) and place.bucket.list_objects("none") == []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "my secret\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token ")
    both = r"(?s)AWS_SECRET_ACCESS_KEY: has a line break.*AWS_SESSION_TOKEN: "
    with pytest.raises(ConfigError, match=both) as caught:
        open_location(s3.url)
    assert "my secret" not in str(caught.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    monkeypatch.setenv("AWS_TOKEN", "token\n")  # a name that only the client knows
    place = open_location(f"{s3.url}/none", settings=StoreConfig(retry_seconds=2.0))
    assert isinstance(place, BucketPath)
    for act in (lambda: place.bucket.create("none", b"x"), lambda: place.bucket.read("none")):
        with pytest.raises(StoreError, match="InvalidHeaderValue"):
            act()


def test_the_probe_refuses_stores_by_name_of_what_they_lack(tmp_path: Path) -> None:
    """s3rver ignores If-None-Match, localbucket a stale If-Match; a single writer may use s3rver all the same."""
    servers.require_installed()
    cases = [
        (servers.s3rver, "a put with If-None-Match: \\* overwrites what is there"),
        (servers.localbucket, "a put with an old If-Match overwrites what is there"),
    ]
    for start, lack in cases:
        folder = tmp_path / start.__name__
        folder.mkdir()
        with start(folder) as server:
            with pytest.raises(PreflightError, match=lack):
                probe(place_in(server, retry_seconds=2.0))
            if start is servers.s3rver:  # localbucket deletes no list of objects
                probe(place_in(server, single_writer=True))


def test_urls_name_a_bucket_and_a_key() -> None:
    """In the form that pathlib gives them, too; what is no such URL is a path."""
    assert split_url("s3://b/run/ckpt/") == ("s3", "b", "run/ckpt")
    assert split_url(Path("gs://b/run")) == ("gs", "b", "run")
    assert split_url("az://c") == ("az", "c", "")
    assert split_url("s3://b.with.dots/my run/a+b%20/") == ("s3", "b.with.dots", "my run/a+b%20")
    for text in (
        "/data/run",
        "s3://",
        "s3://b/../x",
        "s3://b//x",
        "hf://b/x",
        "file:///x",
        "s3://user@b/x",
        "s3:b",
        "s3://a:b/x",
        "s3://b/x\ny",
    ):
        assert split_url(text) is None, text


def test_an_endpoint_with_a_password_is_refused(tmp_path: Path) -> None:
    """Settings are written to manifests and logs; the error is, too, and says nothing of them either. Nor does one of
    a line that is no TOML.
    """
    with pytest.raises(ConfigError, match=r'without user, password or query, found "https://\*\*\*@host"'):
        StoreConfig(endpoint="https://user:pw@host")
    for url in ("s3://AKIA:pw/of@box/x", "s3:/pw@box", "az://c/x?sv=1&sig=pw", "https://a.example/c/x?sig=pw"):
        for refuse in (
            InitialLoadConfig,
            lambda url: require_local({"a": url}),
            lambda url: require_places({"a": url}),
        ):
            with pytest.raises(ConfigError, match=r"found \"(s3|az|https):.*\*\*\*") as caught:
                refuse(url)
            assert "pw" not in str(caught.value) and "AKIA" not in str(caught.value)
    (tmp_path / "run.toml").write_text('folder = "s3://AKIA:pw@box/x\n')
    with pytest.raises(ConfigError, match=r"s3://\*\*\*@box/x"):
        read_toml(tmp_path / "run.toml")


class _Weakening(servers.Proxy):
    """A proxy that makes ETags weak, as nginx does when it compresses."""

    async def _forward(self, head: str, body: bytes) -> bytes:
        head_of, end, content = (await super()._forward(head, body)).partition(b"\r\n\r\n")
        return re.sub(rb'(?i)\r\netag: "', b'\r\nETag: W/"', head_of) + end + content


def test_a_weak_etag_is_no_second_writer(s3: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the ETag and the proxy, and no other process that would have to be stopped."""
    with _Weakening(s3.endpoint, lambda *_: None) as proxy:
        place = through(place_in(s3), proxy)
        steps = BucketSteps(place)
        steps.open()
        steps.close()
        assert any("is not given back" in line and 'W/"' in line for line in caplog.messages)
        with pytest.raises(StoreError, match=r'names W/".* as its version, and refuses to replace that'):
            BucketSteps(place).open()
