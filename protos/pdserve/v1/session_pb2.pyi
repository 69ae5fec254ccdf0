from protos.pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_ROUTER: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class ScrapeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScrapeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    goodbye: _common_pb2.Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., goodbye: _Optional[_Union[_common_pb2.Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "secret")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: int
    secret: str
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_p", "top_k", "min_tokens", "stop", "include_stop", "stop_token_ids", "ignore_eos", "logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "incarnation", "ticket", "prompt_ids", "relayed", "sampling", "cache_salt", "deadline_ms", "traceparent", "source", "prefix")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    incarnation: int
    ticket: bytes
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    relayed: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    cache_salt: str
    deadline_ms: int
    traceparent: str
    source: Source
    prefix: Source
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., incarnation: _Optional[int] = ..., ticket: _Optional[bytes] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., relayed: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., prefix: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    reason: str
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: WorkerFrame
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[_Union[WorkerFrame, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker", "capacity", "load")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    capacity: WorkerCapacity
    load: WorkerLoad
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("id", "role", "address", "incarnation", "pid", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: Role
    address: str
    incarnation: int
    pid: int
    state: WorkerState
    def __init__(self, id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("blocks", "slots", "backlog_tokens", "max_context", "layout")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    slots: int
    backlog_tokens: int
    max_context: int
    layout: _common_pb2.KvLayout
    def __init__(self, blocks: _Optional[int] = ..., slots: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("load", "events")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("free_blocks", "free_slots", "backlog_tokens", "running", "waiting", "stuck", "draining", "linked")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    free_slots: int
    backlog_tokens: int
    running: int
    waiting: int
    stuck: bool
    draining: bool
    linked: bool
    def __init__(self, free_blocks: _Optional[int] = ..., free_slots: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., stuck: _Optional[bool] = ..., draining: _Optional[bool] = ..., linked: _Optional[bool] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("reserved", "tokens", "failed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    tokens: Tokens
    failed: Failed
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("key", "tokens", "cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    cached_tokens: int
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    error: _common_pb2.ErrorInfo
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...
