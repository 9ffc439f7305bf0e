"""Refusals of stores, as S3 and Azure write them: one error names the right or the setting, before the first step."""

from __future__ import annotations

import http.client
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests import world
from tests.run_folder import RunFolder
from tests.steps_tests import save
from tests.stores.conftest import behind, place_in, through
from tests.stores.servers import CREDENTIALS, Answer, Fault, Proxy, Server, refusal
from tests.stores.test_manager_in_bucket import keys
from tests.test_bad_input import write_config
from titan_ckpt.cli.main import main
from titan_ckpt.config import CheckpointConfig, ExportConfig, InitialLoadConfig, SaveConfig
from titan_ckpt.directory.bucket_steps import BucketSteps
from titan_ckpt.directory.directory import CheckpointDirectory
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, CorruptCheckpointError, PreflightError
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.stores.answers import StoreError, store_error
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.store import StoreConfig

DENIED = refusal("403 Forbidden", "AccessDenied", "Access Denied")
DENIED_IN_BULK = Answer(
    "200 OK",
    '<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>k</Key>'
    "<Code>AccessDenied</Code><Message>Access Denied</Message></Error></DeleteResult>",
)
WITH_NAMES = refusal(
    "403 Forbidden", "AccessDenied",
    'User: arn:aws:iam::1:user/me may not perform s3:PutObject on "arn:aws:s3:::box/immutable/object-lock/k"',
)  # fmt: skip
SKEWED = refusal("403 Forbidden", "RequestTimeTooSkewed", "The difference between the request time and ...")
OTHER_REGION = refusal(
    "400 Bad Request", "AuthorizationHeaderMalformed",
    "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'",
    "<Region>eu-west-1</Region>",
)  # fmt: skip
NO_KEY = refusal(
    "400 Bad Request", "AuthorizationHeaderMalformed",
    "The authorization header is malformed; a non-empty Access Key (AKID) must be provided in the credential.",
)  # fmt: skip
REDIRECT = refusal("301 Moved Permanently", "PermanentRedirect", "...", "<Endpoint>box.s3.eu-west-1.example</Endpoint>")
LOCKED = refusal(
    "400 Bad Request", "InvalidRequest",
    "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters",
)  # fmt: skip
LOCKED_BUCKET = refusal("409 Conflict", "InvalidBucketState", "The request is not valid with the state of the bucket.")
IMMUTABLE = refusal("409 Conflict", "BlobImmutableDueToPolicy", "The blob is immutable due to a policy.")
NO_RIGHT = refusal("403 Forbidden", "AuthorizationPermissionMismatch", "This request is not authorized to ...")
NO_ACCOUNT = refusal("403 Forbidden", "AuthenticationFailed", "Server failed to authenticate the request.")
LATE = refusal(
    "403 Forbidden", "AuthenticationFailed", "Server failed to authenticate the request.",
    "<AuthenticationErrorDetail>Request date header too old: 'Mon, 23 Nov 2026'</AuthenticationErrorDetail>",
)  # fmt: skip
NO_STORE = Answer("404 Not Found", "<html><h1>404 Not Found</h1></html>", ("Content-Type: text/html",))
PAGE = Answer("403 Forbidden", "<!DOCTYPE html><html><h1>Blocked</h1></html>", ("Content-Type: text/html",))
PROXYS = Answer("407 Proxy Authentication Required", "")
FULL = refusal("403 Forbidden", "QuotaExceeded", "Bucket quota exceeded")


@pytest.mark.parametrize("where", ["folder", "export", "initial_load"])
def test_a_run_whose_bucket_is_not_there_ends_with_2(s3: Server, where: str, tmp_path: Path) -> None:
    """So that what starts it again after an error does not do so for ever."""
    none = f"{s3.url}-none/run"
    tables = {
        "folder": none, "export": {"format": "dcp", "folder": none}, "initial_load": [{"path": f"{none}/step-1"}],
    }  # fmt: skip
    store = {"endpoint": s3.endpoint, "retry_seconds": 3.0}
    run = write_config(tmp_path, {"checkpoint": {where: tables[where], "store": store}})
    assert main(["train", str(run)]) == 2


@pytest.mark.parametrize(
    ("scheme", "verb", "answer", "advice"),
    [
        ("s3", "list", Answer("403 Forbidden", ""), "The credentials need s3:ListBucket"),
        ("s3", "create", Answer("301 Moved Permanently", ""), "Set AWS_REGION to the bucket's region"),
        ("s3", "list", PAGE, "a web server or a proxy has answered"),
        ("az", "create", PAGE, "a web server or a proxy has answered"),
        ("s3", "read", PROXYS, "a web server or a proxy has answered (see HTTPS_PROXY and NO_PROXY)"),
        ("s3", "upload", FULL, "The store, or its quota, is full"),
        ("s3", "create", DENIED, "The credentials need s3:PutObject"),
        ("s3", "upload", WITH_NAMES, "The credentials need s3:PutObject"),
        ("s3", "read", DENIED, "The credentials need s3:GetObject, and s3:ListBucket"),
        ("s3", "list", DENIED, "The credentials need s3:ListBucket"),
        ("s3", "delete", DENIED_IN_BULK, "The credentials need s3:DeleteObject"),
        ("s3", "read", SKEWED, "Set this machine's clock"),
        ("s3", "list", OTHER_REGION, "Set AWS_REGION=eu-west-1 in the environment"),
        ("s3", "create", REDIRECT, "Set AWS_REGION to the bucket's region in the environment, or correct"),
        ("s3", "create", LOCKED, "The bucket locks objects"),
        ("s3", "create", LOCKED_BUCKET, "The bucket locks objects"),
        ("s3", "read", refusal("403 Forbidden", "InvalidAccessKeyId", "..."), "Check the credentials"),
        ("s3", "list", NO_KEY, "Check the credentials"),
        ("s3", "create", NO_STORE, "Check the endpoint and the region"),
        ("s3", "upload", NO_STORE, "Check the endpoint and the region"),
        ("s3", "list", NO_STORE, "Check the endpoint and the region"),
        ("az", "create", NO_RIGHT, 'The credentials need "write"'),
        ("az", "delete", NO_RIGHT, 'The credentials need "delete"'),
        ("az", "list", NO_ACCOUNT, "Check the credentials"),
        ("az", "read", LATE, "Set this machine's clock"),
        ("az", "delete", IMMUTABLE, "The bucket locks objects"),
    ],
)
def test_a_refusal_names_the_right_or_the_setting(
    broken: tuple[Proxy, list[Fault]], scheme: str, verb: str, answer: Answer, advice: str
) -> None:
    """At the first answer, because another one would be the same."""
    proxy, fault = broken
    fault[0] = answer
    endpoint = proxy.endpoint + ("/devstoreaccount1" if scheme == "az" else "")
    bucket = Bucket(scheme, "box", StoreConfig(endpoint=endpoint, retry_seconds=60.0))
    acts: dict[str, Callable[[], object]] = {
        "create": lambda: bucket.create("k", b"x"),
        "upload": lambda: bucket.upload("k", iter([memoryview(b"x")]), 5 << 20),
        "read": lambda: bucket.read("k"),
        "list": lambda: bucket.list_objects("k"),
        "delete": lambda: bucket.delete(["k"]),
    }
    with pytest.raises(StoreError, match=re.escape(advice)) as caught:
        acts[verb]()
    assert caught.value.is_final and str(caught.value).startswith(f"{scheme}://box/k: rank 0 could not ")
    assert len(proxy.requests) <= 4
    proxy.requests.clear()


def test_credentials_that_are_not_there_are_named_as_the_cause(
    broken: tuple[Proxy, list[Fault]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not a right or the endpoint; a key that cannot be read is an error of the settings, before any request. A
    service of tokens that does not answer says nothing about the credentials.
    """
    proxy, fault = broken
    fault[0] = NO_STORE
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.endpoint)
    bucket = Bucket("s3", "box", StoreConfig(endpoint=proxy.endpoint))
    with pytest.raises(StoreError, match="No credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        bucket.list_objects("k")
    proxy.requests.clear()
    for url, place in (("gs://b/a", "computeMetadata/v1/x"), ("az://b/a", "metadata/identity/oauth2/token?api=1")):
        text = (
            f"Error performing token request: Error performing GET http://169.254.169.254/{place} - HTTP error: timeout"
        )
        assert "No credentials were found: set " in str(store_error(RuntimeError(text), "list", url, 1.0))
    for reason, is_final, advice in (
        ("Server returned non-2xx status code: 400 Bad Request", True, "Check the credentials"),
        ("Server returned non-2xx status code: 503 Service Unavailable", False, "Raise checkpoint.store.retry_seconds"),
        ("HTTP error: error sending request", False, "can this machine reach it?"),
    ):
        text = f"Error performing token request: Error performing POST https://oauth2.example/token - {reason}"
        refusal_of = store_error(RuntimeError(text), "list", "gs://b/a", 1.0)
        assert advice in str(refusal_of) and refusal_of.is_final is is_final
    for url, variable in (("s3://b/a", "AWS_ENDPOINT_URL"), ("az://b/a", "AZURE_STORAGE_ENDPOINT")):
        unreached = store_error(RuntimeError("HTTP error: error sending request"), "list", url, 1.0)
        assert f"checkpoint.store.endpoint, or {variable} in the environment" in str(unreached)
    with pytest.raises(ConfigError, match=r"Account must be specified\. .* the environment AZURE_STORAGE_ACCOUNT_NAME"):
        Bucket("az", "box", StoreConfig())
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json.* in the environment GOOGLE_APPLICATION_CREDENTIALS"):
        Bucket("gs", "box", StoreConfig())


def test_a_wrong_endpoint_is_no_other_writer(broken: tuple[Proxy, list[Fault]]) -> None:
    """A single writer's put has no condition that another writer could break."""
    proxy, fault = broken
    fault[0] = NO_STORE
    bucket = Bucket("s3", "box", StoreConfig(endpoint=proxy.endpoint, single_writer=True))
    with pytest.raises(StoreError, match="Check the endpoint and the region"):
        bucket.create("k", b"x")
    with pytest.raises(StoreError, match="Check the endpoint and the region"):
        bucket.replace("k", b"x", {"e_tag": "1"})
    proxy.requests.clear()


@pytest.fixture(scope="module")
def broken() -> Iterator[tuple[Proxy, list[Fault]]]:
    """A proxy that answers everything with one thing."""
    fault: list[Fault] = [None]
    with Proxy("http://127.0.0.1:9", lambda method, path: fault[0]) as proxy:
        yield proxy, fault


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", r"lease\.json|-exports/probe-", "s3:GetObject, and s3:ListBucket"),
        ("PUT", "", "s3:PutObject"),
        ("GET", r"box\?.*list-type", "s3:ListBucket"),
        ("POST", r"box\?delete", "s3:DeleteObject"),
    ],
)
def test_a_missing_right_is_said_before_the_first_step(s3: Server, method: str, path: str, right: str) -> None:
    """Once, and naming it; the lease is not kept. As for steps, so for exports."""
    place = place_in(s3)

    def decide(asked: str, url: str) -> Fault:
        return DENIED if asked == method and re.search(path, url) else None

    with Proxy(s3.endpoint, decide) as proxy:
        directory = CheckpointDirectory(through(place, proxy), Coordinator(0, 1, None, "", 30.0))
        with pytest.raises((PreflightError, StoreError), match=re.escape(f"The credentials need {right}")):
            directory.preflight(10)
        directory.close()
        with pytest.raises(StoreError, match=re.escape(f"The credentials need {right}")):
            BucketExports(through(place, proxy) / "exports").check()
    assert "lease.json" not in keys(place) or b'"holder": null' in (place / "lease.json").read()


EXPIRED = [
    refusal("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    refusal("403 Forbidden", "ExpiredTokenException", "The security token included in the request is expired"),
    refusal("401 Unauthorized", "NoAuthenticationInformation", "Token expired"),
]


def test_credentials_that_expire_end_no_run_that_is_to_go_on(
    s3: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves and exports of a while are left out with a warning each, and are made once the credentials are there."""
    place, step = place_in(s3), 0

    def decide(method: str, url: str) -> Fault:
        return EXPIRED[step - 2] if 2 <= step <= 4 else None

    with Proxy(s3.endpoint, decide) as proxy:
        store = StoreConfig(endpoint=proxy.endpoint, retry_seconds=3.0)
        run = RunFolder(tmp_path, str(place), store)
        exports = (ExportConfig("dcp", interval=1, folder=str(place / "exports")),)
        with world.manager(run, torch.nn.Linear(2, 2), on_failure="warn", export=exports) as manager:
            manager.load()
            for step in range(1, 7):
                manager.save(step)
                manager.wait()
    commits = [key.split("/")[2].partition(".")[0] for key in keys(place) if "/commits/" in key]
    assert commits == ["opened", "step-1", "step-5", "step-6"]
    assert {f"exports/step-{n}/.metadata" for n in (1, 5, 6)} <= {*keys(place)}
    assert [n for n in range(1, 7) if f"step {n} is not saved" in caplog.text] == [2, 3, 4]


def test_a_web_server_is_no_empty_store(s3: Server) -> None:
    """It answers every request with a page: a run that only loads does not start afresh."""
    page = Answer("200 OK", "<html><h1>Hello</h1></html>", ("Content-Type: text/html",))
    with Proxy(s3.endpoint, lambda method, path: page) as proxy:
        place = through(place_in(s3), proxy, retry_seconds=2.0)
        directory = CheckpointDirectory(place, Coordinator(0, 1, None, "", 30.0))
        with pytest.raises(PreflightError, match="Is the endpoint right"):
            directory.steps()


def test_a_folder_of_another_layout_is_refused(s3: Server) -> None:
    """A folder from a disk that was copied here, or another program's: nothing is started beside it."""
    for name in ("step-10/MANIFEST.json", "step-10/.metadata", "commits/checkpoint-7.bin"):
        place = place_in(s3)
        place.bucket.create((place / name).key, b"{}")
        with pytest.raises(
            CorruptCheckpointError, match=r"(step-10|checkpoint-7\.bin): not a checkpoint of titan_ckpt in"
        ):
            CheckpointDirectory(place, Coordinator(0, 1, None, "", 30.0)).steps()


def test_a_bucket_that_keeps_versions_works_and_is_warned_about(s3: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Steps are saved, removed and saved again; old versions go on taking space."""
    ask(s3, "PUT", "/versions", b"")
    rule = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    ask(s3, "PUT", "/versions?versioning", rule)
    place = place_in(Server("s3://versions", s3.endpoint))
    steps = BucketSteps(place)
    with caplog.at_level(logging.WARNING):
        steps.open()
        steps.begin_probe(10)
    assert "keeps old versions" in caplog.text
    for step in (1, 2):
        save(steps, step)
    steps.remove(steps.inspect(1))
    steps.resume_from(1)
    save(steps, 2)
    steps.close()
    assert [step.step for step in steps.survey().steps] == [2]


def ask(server: Server, method: str, path: str, body: bytes) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc)
    connection.request(method, path, body)
    assert connection.getresponse().status < 300
    connection.close()


def test_what_was_in_the_way_and_is_gone_is_no_refusal(s3: Server) -> None:
    """A create meets an object that its owner deletes before it can be read: it is asked again."""
    place = place_in(s3)
    gone = refusal("412 Precondition Failed", "PreconditionFailed", "At least one of the pre-conditions ...")
    with behind(s3, gone, "PUT", "/a") as proxy:
        through(place, proxy).bucket.create((place / "a").key, b"x")
    assert (place / "a").read() == b"x"


def test_ranks_wait_longer_than_a_store_is_asked() -> None:
    """A commit that reads back and fences takes three times the retry time."""
    with pytest.raises(ConfigError, match=r"store.retry_seconds: a commit may take 3 x 120 s"):
        CheckpointConfig(folder="s3://b/run", save=SaveConfig(interval=1, timeout_seconds=300.0))
    source = InitialLoadConfig("s3://b/base")
    CheckpointConfig(initial_load=(source,), save=SaveConfig(interval=1, timeout_seconds=300.0))  # commits to a disk
    with pytest.raises(ConfigError, match="at most 600"):
        StoreConfig(retry_seconds=601.0)
