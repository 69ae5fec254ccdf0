"""The one tree of errors, and the one table that maps it to HTTP and gRPC.

Everything that can go wrong with a request or at start is one of these. Frontends look the status up
in `status_of`; links carry `ErrorInfo`. Nothing here does I/O.

    PdserveError
    ├── InvalidRequest              the caller must change the request
    │   ├── ContextLengthExceeded   prompt alone does not leave room for one token
    │   ├── KvCapacityExceeded      can never fit the KV pools: retrying cannot help
    │   └── RequestTooLarge         more bytes than a request may have
    ├── ModelNotFound
    ├── Unauthenticated             cluster secret missing or wrong
    ├── Overloaded                  bounded queue is full: retry after `retry_after` seconds
    ├── NotReady                    no worker of a required role
    ├── DeadlineExceeded
    ├── Cancelled                   the caller went away, or told us to stop
    ├── EngineFailed                a step of the engine raised
    ├── AttemptFailed               one attempt ended, the request may be placed again
    │   ├── Refused                 a worker has no room at the moment
    │   ├── WorkerLost              the session to a worker ended
    │   └── HandoverFailed          the KV hand-over of this attempt failed
    │       ├── PullNotFound        no Submit came for a parked Pull
    │       ├── PullGone            the attempt has already ended
    │       ├── Stale               the message names another incarnation
    │       ├── Incompatible        the two layouts differ (names both values)
    │       ├── Corrupt             a checksum or digest did not match
    │       └── PeerSilent          nothing was heard for too long
    └── StartupError                cannot start: one clear line for the operator
        ├── ConfigError
        └── ModelError              model files missing, damaged or of an unknown kind
"""

from dataclasses import dataclass, replace
from typing import ClassVar


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def info(self) -> "ErrorInfo":
        """The form that travels between processes."""
        return ErrorInfo(self.code, self.message, self.param, self.retry_after)


class InvalidRequest(PdserveError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class KvCapacityExceeded(InvalidRequest):
    code = "kv_capacity_exceeded"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"


class ModelNotFound(PdserveError):
    code = "model_not_found"


class Unauthenticated(PdserveError):
    code = "unauthenticated"


class Overloaded(PdserveError):
    code = "overloaded"


class NotReady(PdserveError):
    code = "not_ready"


class DeadlineExceeded(PdserveError):
    code = "deadline_exceeded"


class Cancelled(PdserveError):
    code = "cancelled"


class EngineFailed(PdserveError):
    code = "engine_failed"


class AttemptFailed(PdserveError):
    code = "attempt_failed"


class Refused(AttemptFailed):
    code = "refused"


class WorkerLost(AttemptFailed):
    code = "worker_lost"


class HandoverFailed(AttemptFailed):
    code = "handover_failed"


class PullNotFound(HandoverFailed):
    code = "pull_not_found"


class PullGone(HandoverFailed):
    code = "pull_gone"


class Stale(HandoverFailed):
    code = "stale"


class Incompatible(HandoverFailed):
    code = "incompatible"


class Corrupt(HandoverFailed):
    code = "corrupt"


class PeerSilent(HandoverFailed):
    code = "peer_silent"


class StartupError(PdserveError):
    code = "startup_error"


class ConfigError(StartupError):
    code = "config_error"


class ModelError(StartupError):
    code = "model_error"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it travels between processes."""

    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    def to_error(self) -> PdserveError:
        """The exception again; an unknown code becomes a plain PdserveError."""
        cls = _BY_CODE.get(self.code, PdserveError)
        return cls(self.message, param=self.param, retry_after=self.retry_after)


@dataclass(frozen=True, slots=True)
class Status:
    """How an error shows on the public APIs. `grpc` is the name of a grpc.StatusCode member; `retry_after` in
    seconds, where trying again can help."""

    http: int
    grpc: str
    openai_type: str
    retry_after: int | None = None


_TABLE: dict[type[PdserveError], Status] = {
    InvalidRequest: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    RequestTooLarge: Status(413, "INVALID_ARGUMENT", "invalid_request_error"),
    ModelNotFound: Status(404, "NOT_FOUND", "invalid_request_error"),
    Unauthenticated: Status(401, "UNAUTHENTICATED", "authentication_error"),
    Overloaded: Status(503, "UNAVAILABLE", "overloaded_error", retry_after=1),
    NotReady: Status(503, "UNAVAILABLE", "overloaded_error", retry_after=2),  # about what a worker takes to come back
    DeadlineExceeded: Status(504, "DEADLINE_EXCEEDED", "timeout_error"),
    Cancelled: Status(499, "CANCELLED", "cancelled_error"),
    AttemptFailed: Status(503, "UNAVAILABLE", "server_error", retry_after=1),
    PdserveError: Status(500, "INTERNAL", "server_error"),
}


def _subclasses(cls: type[PdserveError]) -> list[type[PdserveError]]:
    return [cls] + [leaf for child in cls.__subclasses__() for leaf in _subclasses(child)]


_BY_CODE: dict[str, type[PdserveError]] = {cls.code: cls for cls in _subclasses(PdserveError)}


def status_of(error: PdserveError) -> Status:
    """The status of the nearest class in the table; `retry_after` is the error's own where it has one."""
    status = next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)
    return status if error.retry_after is None else replace(status, retry_after=error.retry_after)


def error_codes() -> frozenset[str]:
    """Every code there is."""
    return frozenset(_BY_CODE)
