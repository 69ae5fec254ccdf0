"""Counter-based random numbers: a function of (seed, choice, position), without a stream or a state.

The sampler calls it, so a request continues with the same numbers on any worker after any failure.
Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """One block of four random 32-bit words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits. 0 <= seed < 2**64, 0 <= choice < 2**32, 0 <= position < 2**64."""
    counter = (position & _MASK, position >> 32, choice, 0)
    w0, w1, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32))
    return ((w0 << 32 | w1) >> 11) * 2.0**-53
