from protos.pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullerMessage(_message.Message):
    __slots__ = ("pull", "alive", "ack", "abandon", "goodbye", "introduce", "probe", "fetch")
    PULL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    INTRODUCE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    pull: PullRequest
    alive: Alive
    ack: Ack
    abandon: Abandon
    goodbye: _common_pb2.Goodbye
    introduce: Introduce
    probe: Probe
    fetch: FetchRequest
    def __init__(self, pull: _Optional[_Union[PullRequest, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., goodbye: _Optional[_Union[_common_pb2.Goodbye, _Mapping]] = ..., introduce: _Optional[_Union[Introduce, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., fetch: _Optional[_Union[FetchRequest, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("key", "hashes", "deadline_ms", "incarnation", "puller", "secret", "layout", "transport", "traceparent", "channel")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULLER_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    deadline_ms: int
    incarnation: int
    puller: str
    secret: str
    layout: _common_pb2.KvLayout
    transport: str
    traceparent: str
    channel: bytes
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., deadline_ms: _Optional[int] = ..., incarnation: _Optional[int] = ..., puller: _Optional[str] = ..., secret: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., transport: _Optional[str] = ..., traceparent: _Optional[str] = ..., channel: _Optional[bytes] = ...) -> None: ...

class Introduce(_message.Message):
    __slots__ = ("puller", "secret", "incarnation", "layout")
    PULLER_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    puller: str
    secret: str
    incarnation: int
    layout: _common_pb2.KvLayout
    def __init__(self, puller: _Optional[str] = ..., secret: _Optional[str] = ..., incarnation: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("transport", "channel")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    transport: str
    channel: bytes
    def __init__(self, transport: _Optional[str] = ..., channel: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("key", "ticket", "incarnation", "puller", "secret", "layout", "transport", "first_block", "traceparent", "channel")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULLER_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    ticket: bytes
    incarnation: int
    puller: str
    secret: str
    layout: _common_pb2.KvLayout
    transport: str
    first_block: int
    traceparent: str
    channel: bytes
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., ticket: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., puller: _Optional[str] = ..., secret: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., transport: _Optional[str] = ..., first_block: _Optional[int] = ..., traceparent: _Optional[str] = ..., channel: _Optional[bytes] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExporterMessage(_message.Message):
    __slots__ = ("chunk", "progress", "last", "ended", "failed", "introduced")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    INTRODUCED_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    progress: Progress
    last: Last
    ended: Ended
    failed: PullFailed
    introduced: Introduced
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., last: _Optional[_Union[Last, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., failed: _Optional[_Union[PullFailed, _Mapping]] = ..., introduced: _Optional[_Union[Introduced, _Mapping]] = ...) -> None: ...

class Introduced(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("first_block", "count", "checksums", "payload")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    count: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, first_block: _Optional[int] = ..., count: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("computed", "queued")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    computed: int
    queued: int
    def __init__(self, computed: _Optional[int] = ..., queued: _Optional[int] = ...) -> None: ...

class Last(_message.Message):
    __slots__ = ("token", "kv_tokens", "blocks", "digest")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    token: _common_pb2.Token
    kv_tokens: int
    blocks: int
    digest: int
    def __init__(self, token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullFailed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.ErrorInfo
    def __init__(self, error: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...
