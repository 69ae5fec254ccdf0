"""Which transports a worker offers or uses, in which order. The roles call it once at start."""

from contracts.config import Config
from contracts.kv import BlockStore
from contracts.seams import load_plug
from kv_transfer.transports.base import Transport


def open_transports(config: Config, store: BlockStore) -> dict[str, Transport]:
    """By name, the best first: a puller takes the first of its own that the exporter offers and that passes the
    verification of the link. transfer.transport forces one."""
    return {name: load_plug("transport", name).create(store, config.transfer) for name in _names(config, store)}


def _names(config: Config, store: BlockStore) -> list[str]:
    """One host: shared memory. Between devices: nccl. Else tcp. The link itself always works."""
    if config.transfer.transport != "auto":
        return [config.transfer.transport]
    shared = ["shared_memory"] if store.descriptor is not None else []
    devices = ["nccl"] if config.model.device != "cpu" else []
    return [*shared, *devices, "tcp", "grpc"]
