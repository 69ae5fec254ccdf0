"""Transport within one process: the bytes travel in the Chunk, which a memory link hands over as it is."""

from contracts.config import TransferConfig
from contracts.kv import BlockStore
from kv_transfer.channels.inline import InlineEnd, InlineTransport
from kv_transfer.transports.base import Transport


def create(store: BlockStore, config: TransferConfig) -> Transport:
    """It has no options."""
    return InlineTransport(InlineEnd(store))
