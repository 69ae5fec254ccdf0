"""Draws the next token of a row from its logits. The torch runner calls it once per row that draws.

Everything is computed from this one row, with numpy on one thread, so a row's token never depends on its
neighbours. Among equal logits the lowest id comes first, everywhere.
"""

import numpy as np
import numpy.typing as npt

from contracts.requests import TokenLogprobs
from engine.random_numbers import uniform
from engine.runners.base import Draw, Drawn

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperatures below this are greedy
_NUCLEUS_FIRST = 256  # best ids that top_p looks at first; while they are too few, it looks at
_NUCLEUS_GROWTH = 16  # this many times more
_SPAN = 256  # ids summed at a time on the way to the one that is drawn


def draw_token(logits: Logits, draw: Draw) -> Drawn:
    """Draw from `logits` [vocab], which is not changed.

    The order of the filters is that of Hugging Face: banned ids, temperature, top_k, top_p. top_k keeps exactly k
    ids; top_p keeps the fewest best ids whose probability reaches it, at least one. Log-probabilities are
    the log-softmax of the logits as the model made them, before any of this.
    """
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        return Drawn(0, None, finite=False)
    allowed = _without(logits, draw.banned)
    token = int(allowed.argmax()) if _is_greedy(draw) else _sample(allowed, draw)
    return Drawn(token, None if draw.logprobs is None else _logprobs(logits, token, draw.logprobs))


def _is_greedy(draw: Draw) -> bool:
    return draw.temperature < GREEDY_BELOW or draw.top_k == 1


def _without(logits: Logits, banned: tuple[int, ...]) -> Logits:
    """Logits with the banned ids at minus infinity; ids outside the vocabulary cannot be drawn anyway."""
    inside = [token for token in banned if token < len(logits)]
    if not inside:
        return logits
    masked = logits.copy()
    masked[inside] = -np.inf
    return masked


def _sample(logits: Logits, draw: Draw) -> int:
    # The best logit becomes 0, so the weights are at most 1 at any temperature; what overflows is -inf, weight 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(draw.temperature))
    point = uniform(draw.seed, 0, draw.position)
    vocab = len(logits)
    kept = draw.top_k if 0 < draw.top_k < vocab else vocab
    if draw.top_p < 1.0:
        ids = _nucleus(logits, weights, kept, draw.top_p)
    elif kept < vocab:
        ids = _best(logits, kept)
    else:
        return _invert(weights, point)
    return int(ids[_invert(weights[ids], point)])


def _nucleus(logits: Logits, weights: Logits, kept: int, top_p: float) -> Ids:
    """The fewest best ids, in order, whose weight reaches top_p of the weight of the `kept` best."""
    if kept < len(logits):
        ids = _best(logits, kept)
        reached = np.cumsum(weights[ids], dtype=np.float64)
        target = top_p * reached[-1]
    else:
        target = top_p * weights.sum(dtype=np.float64)
        size = min(kept, _NUCLEUS_FIRST)
        ids = _best(logits, size)
        while (reached := np.cumsum(weights[ids], dtype=np.float64))[-1] < target and size < kept:
            size = min(kept, size * _NUCLEUS_GROWTH)
            ids = _best(logits, size)
    return ids[: int(np.searchsorted(reached, target)) + 1]


def _best(logits: Logits, count: int) -> Ids:
    """The `count` best ids, best first."""
    if count < len(logits):
        least = np.partition(logits, -count)[-count]
        candidates = np.flatnonzero(logits >= least)
    else:
        candidates = np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]


def _invert(weights: Logits, point: float) -> int:
    """Index where the cumulated weight first exceeds `point` (0 to 1) of the whole: spans of 256, then within
    the span, in float64."""
    spans = np.add.reduceat(weights, np.arange(0, len(weights), _SPAN), dtype=np.float64)
    bounds = np.cumsum(spans)
    target = point * bounds[-1]
    span = int(np.searchsorted(bounds, target, side="right"))
    inner = np.cumsum(weights[span * _SPAN : (span + 1) * _SPAN], dtype=np.float64)
    # The two sums round differently: what lies beyond the span's own sum belongs to its last weight.
    rest = min(target - (bounds[span - 1] if span else 0.0), np.nextafter(inner[-1], 0.0))
    return span * _SPAN + int(np.searchsorted(inner, rest, side="right"))


def _logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64) - logits.max()
    scale = np.log(np.exp(shifted).sum())
    top = tuple((int(i), float(shifted[i] - scale)) for i in _best(logits, count)) if count else ()
    return TokenLogprobs(float(shifted[token] - scale), top)
