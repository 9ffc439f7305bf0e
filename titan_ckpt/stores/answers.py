"""StoreError: a bucket's answer as an error that says who asked for what, and holds no credential.

Owns the reading of the client's error texts. Sends no request.
"""

from __future__ import annotations

import errno
import os
import re

from titan_ckpt.errors import listed

_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>\s*([^<]{1,100}?)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]{1,300})")
_CAUSE = re.compile(r'message: "([^"\n]{1,200})"|kind: (Timeout)|(TimedOut|IncompleteMessage|ConnectionReset)')
_QUERY = re.compile(r"\?[^\s'\")]*")
_USER = re.compile(r"//[^/\s@]+@")
_SECRET_NAME = re.compile(r"(?i)key|secret|token|password|sas|connection_string|credential")
_STALE_TOKEN = re.compile(r"<Code>\s*(ExpiredToken|InvalidToken|TokenRefreshRequired)\s*</Code>")
"""S3 answers 400 to credentials that were right."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_LEAST_SECRET = 6


class StoreError(OSError):
    """A bucket refused a request, or did not answer in time. `is_final`: asking again gives the same answer."""

    def __init__(self, code: int, message: str, *, is_final: bool) -> None:
        super().__init__(code, message)
        self.is_final = is_final

    def __str__(self) -> str:
        return str(self.strerror)


def store_error(error: Exception, verb: str, url: str, seconds: float) -> StoreError:
    """Return the error of a request that was given up: `verb` names what was asked ("read")."""
    text = str(error)
    status = int(match[1][:3]) if (match := _STATUS.search(text)) else 0
    code, is_final, advice = errno.EIO, False, "Is the endpoint right, and can this machine reach it?"
    if lacks_bucket(error):
        code, is_final, advice = errno.ENOENT, True, "Create the bucket, or correct its name, endpoint or region"
    elif (
        status in (401, 403)
        or _STALE_TOKEN.search(text)
        or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    ):
        code, is_final = errno.EACCES, True
        advice = "Check the credentials, their right to read, write, list and delete there, and this machine's clock"
    elif (300 <= status < 500 and status not in (408, 409, 429)) or status == 501:
        code, is_final, advice = errno.EINVAL, True, "Check the endpoint and the region of the bucket"
    elif status:
        advice = "Lower checkpoint.store.concurrency, or raise checkpoint.store.retry_seconds"
    answer = _answer(text)
    return StoreError(
        code, f"{url}: rank {_rank()} could not {verb} it in {seconds:.1f} s; the last answer: {answer}. {advice}",
        is_final=is_final,
    )  # fmt: skip


def lacks_bucket(error: Exception) -> bool:
    """Return whether the answer says that the bucket itself is not there."""
    return any(sign in str(error) for sign in _NO_BUCKET)


def without_secrets(text: str) -> str:
    """Return the text without queries and user names of URLs, and without values of this process's secrets."""
    text = _USER.sub("//", _QUERY.sub("", text))
    secrets = {v for name, v in os.environ.items() if _SECRET_NAME.search(name) and len(v) >= _LEAST_SECRET}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _answer(text: str) -> str:
    """Return the answer in one line. A body is not quoted: that of a refused signature has the key id in it."""
    head, _, details = text.partition("\n\nDebug source")
    if status := _STATUS.search(text):
        facts = [m[1].strip() for m in (_CODE.search(text), _MESSAGE.search(text)) if m]
        return without_secrets(status[1].strip() + (f" ({': '.join(facts)})" if facts else ""))
    causes = [next(filter(None, groups)) for groups in _CAUSE.findall(details)]
    last = head.splitlines()[0].rpartition(" - ")[2] if head else "none"
    return without_secrets(listed([last, *dict.fromkeys(causes)], ", ", most=4))


def _rank() -> str:
    """Return this rank's number as its launcher says it; processes that a rank starts inherit it."""
    return os.environ.get("RANK", "0")
