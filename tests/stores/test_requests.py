"""Counts the requests of a save, a resume, an export and a look: the numbers in docs/buckets.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.stores.conftest import place_in, through
from tests.stores.counted_runs import two_ranks_work, work
from tests.stores.servers import Proxy, Server
from titan_ckpt.cli.main import main

KINDS = ("put", "list", "get", "delete")
ROWS = {
    "start": "a run starts: the store is tried, nothing is there",
    "resume": "a run starts and loads a step",
    "save": "a save",
    "save-and-remove": "a save with `keep`, which removes a step",
    "export-as-hf": "an export as one Hugging Face file",
    "export-as-dcp": "an export as DCP",
    "ls": "`titan-ckpt ls`, two steps and two exports",
}


def kind_of(method: str, path: str) -> str:
    """Return how a provider bills a request; those for the parts of an upload count as puts."""
    if method == "DELETE" or "?delete" in path:
        return "delete"
    if "list-type=2" in path:
        return "list"
    return "get" if method in ("GET", "HEAD") else "put"


def counted(requests: list[tuple[str, str]]) -> dict[str, Counter[str]]:
    """Return what was asked after each mark."""
    counts: dict[str, Counter[str]] = {}
    name = ""
    for method, path in requests:
        if path.startswith("/mark/"):
            name = path.removeprefix("/mark/")
        else:
            counts.setdefault(name, Counter())[kind_of(method, path)] += 1
    return counts


def test_the_requests_are_those_of_the_docs(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one rank and by two: what grows with the ranks are the requests for the files of each. The policy of the docs
    allows all of them.
    """
    tables, everything = [], set[tuple[str, str]]()
    for world, do in ((1, work), (2, two_ranks_work)):
        place = place_in(s3)
        with Proxy(s3.endpoint, lambda *_: None) as proxy:
            do(str(place), through(place, proxy, retry_seconds=30.0).bucket.settings, tmp_path / str(world))
            found = counted(proxy.requests)
            everything |= {(method, unquote(path).replace(place.key, "run-7")) for method, path in proxy.requests}
            proxy.requests.clear()
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            assert main(["ls", str(place)]) == 0
            found["ls"] = counted(proxy.requests)[""]
        tables.append(found)
    capsys.readouterr()
    page = (Path(__file__).parents[2] / "docs" / "buckets.md").read_text()
    policy, *_ = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    objects, lists = policy["Statement"]
    asked = {right for request in everything if (right := right_of(*request))}
    assert {action for action, _ in asked} <= {*objects["Action"], lists["Action"]}
    for action, place_of in asked:
        pattern = lists["Condition"]["StringLike"]["s3:prefix"] if action == lists["Action"] else objects["Resource"]
        assert fnmatch(place_of, pattern.removeprefix("arn:aws:s3:::my-bucket/")), (action, place_of)
    lines = [
        "| " + " | ".join([ROWS[name], *(cell(*(t[name][k] for t in tables)) for k in KINDS)]) + " |" for name in ROWS
    ]
    table = "\n".join(lines)
    assert table in page, f"docs/buckets.md should say\n{table}"


def right_of(method: str, path: str) -> tuple[str, str] | None:
    """Return the right that S3 asks for, and the object or the prefix that it is asked for; None for a mark.

    Source: docs.aws.amazon.com/service-authorization, "Actions, resources, and condition keys for Amazon S3".
    """
    url = urlsplit(path)
    query, key = parse_qs(url.query, keep_blank_values=True), unquote(url.path).removeprefix("/box").strip("/")
    if url.path.startswith("/mark/"):
        return None
    if "list-type" in query:
        return "s3:ListBucket", query["prefix"][0]
    if "delete" in query:
        return "s3:DeleteObject", "run-7/"
    if method == "DELETE":
        return "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject", key
    return "s3:GetObject" if method in ("GET", "HEAD") else "s3:PutObject", key


def cell(one: int, two: int) -> str:
    """Return the number for one rank, and what each further rank adds."""
    return f"{one}" if one == two else f"{one} + {two - one}"
