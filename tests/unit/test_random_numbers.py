"""Random numbers: the published vectors, and that each part of the key counts."""

import pytest

from engine.random_numbers import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the authors' Random123 library for philox4x32 with ten rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_every_part_of_the_key_changes_the_number() -> None:
    keys = [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1), (2**63 - 1, 0, 1), (2**32, 0, 1), (0, 0, 2**32 + 1)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert numbers == [uniform(*key) for key in keys]


def test_numbers_are_even_over_the_unit_interval() -> None:
    numbers = [uniform(5, 0, position) for position in range(1, 4001)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    for tenth in range(10):
        share = sum(tenth / 10 <= number < (tenth + 1) / 10 for number in numbers)
        assert abs(share - 400) < 100  # five standard deviations
