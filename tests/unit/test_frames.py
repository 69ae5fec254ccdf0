"""Checksums, digest and the size of frames."""

import struct

import pytest
import xxhash

from contracts.config import MOST_FRAME_BYTES
from contracts.errors import ConfigError
from kv_transfer.frames import blocks_per_frame, checksum, digest


@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 700_001])
def test_pieces_give_the_checksum_of_the_whole(size: int) -> None:
    data = bytes(i * 31 % 251 for i in range(size))
    assert checksum(memoryview(data)) == checksum(data) == xxhash.xxh3_64_intdigest(data)


def test_known_value_of_the_empty_input() -> None:
    assert checksum(b"") == digest([]) == 0x2D06800538D394C2  # from the XXH3 reference


def test_digest_is_over_little_endian_words_in_order() -> None:
    assert digest([1, 2**64 - 1]) == xxhash.xxh3_64_intdigest(struct.pack("<2Q", 1, 2**64 - 1))
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize(("frame", "block", "expected"), [(100, 10, 10), (109, 10, 10), (9, 10, 1), (10, 10, 1)])
def test_frames_hold_whole_blocks_and_at_least_one(frame: int, block: int, expected: int) -> None:
    assert blocks_per_frame(frame, block) == expected


def test_a_block_that_no_message_can_carry_is_refused() -> None:
    assert blocks_per_frame(1, MOST_FRAME_BYTES) == 1
    with pytest.raises(ConfigError, match=r"smaller kv\.block_size"):
        blocks_per_frame(1, MOST_FRAME_BYTES + 1)
