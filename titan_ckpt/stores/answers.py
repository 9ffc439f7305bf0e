"""StoreError: a bucket's answer as an error that says who asked for what, and holds no credential.

Owns the reading of the client's error texts. Sends no request.
"""

from __future__ import annotations

import errno
import os
import re

from titan_ckpt.errors import listed, without_credentials

_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>\s*([^<]{1,100}?)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<\n]{1,300})")
_CAUSE = re.compile(
    r'(?:message|error): "([^"\n]{1,200})"|kind: (Timeout)|(TimedOut|IncompleteMessage|ConnectionReset)|'
    r"(InvalidCertificate|UnknownIssuer|NotValidForName)"
)
_SECRET_NAME = re.compile(r"(?i)key|secret|token|password|sas|connection_string|credential")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_SAID = re.compile(r"<(?:Code|Message|AuthenticationErrorDetail)>([^<]{1,400})|\(code: (\w+)\)|(redirect without LOC)")
_NAMES = re.compile(r"\"[^\"]*\"|arn:\S+")
"""Messages quote such text, for example an object's own name, which says nothing about the cause."""
_OTHER_REGION = re.compile(r"AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint|redirect without")
_REGION = re.compile(r"<Region>\s*([\w-]{1,40})\s*</Region>|expecting '([\w-]{1,40})'")
_CLOCK = re.compile(r"RequestTimeTooSkewed|(?i:date header too old)|RequestExpired|RequestTimeTooOld")
_LOCKED = re.compile(r"BlobImmutable|InvalidBucketState|ObjectLock|(?i:object lock|retention polic|immutab)")
_WRONG_CREDENTIALS = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired|AuthenticationFailed|"
    r"InvalidAuthenticationInfo|non-empty Access Key"
)
"""S3 answers 400 to a token that was right once, and to an empty key as to another region's."""
_FULL = re.compile(r"QuotaExceeded|StorageFull")
_PAGE = re.compile(r"(?i)<html|<!doctype html")
_RIGHTS = {
    "s3": {
        "read": "s3:GetObject, and s3:ListBucket, without which an object that is not there is answered so, too",
        "write": "s3:PutObject",
        "list": "s3:ListBucket for the prefix",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "read": "storage.objects.get",
        "write": "storage.objects.create and storage.objects.delete, which an overwrite needs",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": {verb: f'"{verb}", as the role Storage Blob Data Contributor has it' for verb in ("read", "write", "delete")}
    | {"list": '"list" and "read", as the role Storage Blob Data Contributor has them'},
}
_IS_PATH = re.compile(r"_FILE$|^GOOGLE_APPLICATION_CREDENTIALS$")
"""Variables that name a file of credentials, and do not hold its content. Errors quote its path."""
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_LEAST_SECRET = 6
_MACHINES_ROLE = re.compile(r"//169\.254\.|/latest/(?:api/token|meta-data/)|/computeMetadata/|/metadata/identity/")
"""URLs at which the client asks a machine of the provider for its role, if the environment has no credentials."""
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT"}


class StoreError(OSError):
    """A bucket refused a request, or did not answer in time. `is_final`: asking again gives the same answer."""

    def __init__(self, code: int, message: str, *, is_final: bool) -> None:
        super().__init__(code, message)
        self.is_final = is_final

    @property
    def says_setting_is_wrong(self) -> bool:
        """Return whether the bucket, its endpoint or its region is not there, so that starting again is no use."""
        return self.is_final and self.errno in (errno.ENOENT, errno.EINVAL)

    def __str__(self) -> str:
        return str(self.strerror)


def store_error(error: BaseException, verb: str, url: str, seconds: float) -> StoreError:
    """Return the error of a request that was given up: `verb` names what was asked ("read")."""
    code, is_final, advice = _meaning(error, verb, url)
    answer = _answer(str(error))
    return StoreError(
        code, f"{url}: rank {_rank()} could not {verb} it in {seconds:.1f} s; the last answer: {answer}. {advice}",
        is_final=is_final,
    )  # fmt: skip


def _meaning(error: BaseException, verb: str, url: str) -> tuple[int, bool, str]:
    """Return an answer's errno, whether asking again gives the same answer, and the next step for the user.

    Source: the error codes of S3's and Azure Blob Storage's references.
    """
    text, kind = str(error), type(error).__name__
    said = _NAMES.sub("", " ".join(part for groups in _SAID.findall(text) for part in groups))
    status = int(match[1][:3]) if (match := _STATUS.search(text)) else 0
    variables = _VARIABLES.get(url.partition(":")[0], "the credentials")
    if verb == "open":
        return errno.EINVAL, True, f"Check checkpoint.store, and in the environment {variables}"
    if _MACHINES_ROLE.search(text.partition("\n")[0]):
        return errno.EACCES, bool(status), f"No credentials were found: set {variables}, or give this machine a role"
    if lacks_bucket(error):
        return errno.ENOENT, True, "Create the bucket, or correct its name, endpoint or region"
    if _CLOCK.search(said):
        return errno.EACCES, True, "Set this machine's clock: it is too far from the store's"
    is_refusal = 300 <= status < 500 and status not in (408, 409, 429)
    is_token = is_refusal and "performing token request" in text  # else the service of tokens has not answered
    is_unknown = status == 401 or kind == "UnauthenticatedError" or is_token
    if is_unknown or _WRONG_CREDENTIALS.search(said):
        return errno.EACCES, True, "Check the credentials, and that they are those of this endpoint"
    if _OTHER_REGION.search(said):
        named = next((name for match in _REGION.finditer(text) for name in match.groups() if name), None)
        value = f"AWS_REGION={named}" if named else "AWS_REGION to the bucket's region"
        return errno.EINVAL, True, f"Set {value} in the environment, or correct checkpoint.store.endpoint"
    if _LOCKED.search(said):
        return errno.EACCES, True, "The bucket locks objects or their versions; take one without a retention policy"
    if status == 507 or _FULL.search(said):
        return errno.ENOSPC, True, "The store, or its quota, is full"
    if status == 407 or (is_refusal and _PAGE.search(text)):
        page = "a web server or a proxy has answered (see HTTPS_PROXY and NO_PROXY)"
        return errno.EINVAL, True, f"Check the endpoint and the region of the bucket: {page}"
    if status == 403 or kind == "PermissionDeniedError" or "AccessDenied" in said:
        right = _RIGHTS.get(url.partition(":")[0], {}).get(verb, f"the right to {verb}")
        return errno.EACCES, True, f"The credentials need {right}"
    if is_refusal or status == 501:
        return errno.EINVAL, True, "Check the endpoint and the region of the bucket"
    if "with invalid path" in text:
        return errno.EINVAL, True, "Such an object is not one of titan_ckpt: move it away, or choose another folder"
    if status:
        return errno.EIO, False, "Raise checkpoint.store.retry_seconds"
    return errno.EIO, False, f"Is the endpoint right, and can this machine reach it? It is {_endpoint_of(url)}"


def _endpoint_of(url: str) -> str:
    """Say where the endpoint of a bucket is set; a command has no settings of a run."""
    variable = _ENDPOINTS.get(url.partition(":")[0])
    return "checkpoint.store.endpoint" + (f", or {variable} in the environment" if variable else "")


def lacks_bucket(error: BaseException) -> bool:
    """Return whether the answer says that the bucket itself is not there."""
    return any(sign in str(error) for sign in _NO_BUCKET)


def without_secrets(text: str) -> str:
    """Return the text without users and queries of URLs, keys of Amazon, and values of this process's secrets."""
    text = _KEY_ID.sub("***", without_credentials(text))
    names = [name for name in os.environ if _SECRET_NAME.search(name) and not _IS_PATH.search(name)]
    secrets = {os.environ[name] for name in names if len(os.environ[name]) >= _LEAST_SECRET}
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
