"""The milestones of a request: one enum that feeds spans, metrics, benchmarks and simulator output."""

from enum import Enum


class Milestone(Enum):
    """In the order in which an undisturbed request passes them."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    PLACED = "placed"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    KV_FIRST_BYTE = "kv_first_byte"
    KV_LAST_BYTE = "kv_last_byte"
    KV_READY = "kv_ready"
    DECODE_STARTED = "decode_started"
    FINISHED = "finished"
