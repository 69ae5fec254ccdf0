"""The sampler: ties, filters, extreme parameters, damaged logits, and the distribution that it draws from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.random_numbers import uniform
from engine.runners.base import Draw
from engine.sampler import Logits, draw_token

SAMPLE = Draw(seed=11, position=1, temperature=1.0, top_p=1.0, top_k=0, logprobs=None)
GREEDY = replace(SAMPLE, temperature=0.0)
VOCAB = 1000


def noise(seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Logits:
    """Random logits."""
    return np.random.default_rng(seed).standard_normal(vocab, np.float32) * np.float32(scale)


def draws(logits: Logits, draw: Draw, count: int = 300) -> set[int]:
    """The ids drawn at `count` positions."""
    return {draw_token(logits, replace(draw, position=position)).token_id for position in range(1, count + 1)}


@pytest.mark.parametrize("draw", [GREEDY, replace(SAMPLE, temperature=1e-6), replace(SAMPLE, top_k=1)])
def test_greedy_takes_the_lowest_id_of_a_tie(draw: Draw) -> None:
    logits = noise()
    logits[[321, 77, 900]] = logits.max() + 1
    assert draw_token(logits, draw).token_id == 77


@pytest.mark.parametrize("temperature", [1e-6, 1.1e-5, 1e-3, 2.0, 1e9])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_no_temperature_makes_an_inf_or_nan(temperature: float, scale: float) -> None:
    logits = noise(scale=scale)
    drawn = draw_token(logits, replace(SAMPLE, temperature=temperature, logprobs=3))
    assert drawn.finite
    assert 0 <= drawn.token_id < VOCAB
    assert drawn.logprobs is not None
    assert np.isfinite([drawn.logprobs.logprob, *(value for _, value in drawn.logprobs.top)]).all()


def test_tiny_temperature_above_greedy_is_still_the_best_id() -> None:
    assert draws(noise(), replace(SAMPLE, temperature=1.1e-5), 50) == {int(noise().argmax())}


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damaged_logits_are_reported(damage: float) -> None:
    logits = noise()
    logits[500] = damage
    drawn = draw_token(logits, replace(SAMPLE, logprobs=2))
    assert not drawn.finite
    assert drawn.logprobs is None


def test_frequencies_are_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.05, 0.25, 0.2], np.float32))
    drawn = [draw_token(logits, replace(SAMPLE, position=p)).token_id for p in range(1, 4001)]
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.05, 0.25, 0.2]).max() < 0.04


def test_temperature_sampling_inverts_the_distribution_in_order_of_ids() -> None:
    logits = noise(vocab=5000)
    cumulated = np.cumsum(torch.softmax(torch.from_numpy(logits).double() / 0.7, 0).numpy())
    for position in range(1, 200):
        expected = int(np.searchsorted(cumulated, uniform(11, 0, position), side="right"))
        drawn = draw_token(logits, replace(SAMPLE, temperature=0.7, position=position)).token_id
        assert drawn == expected


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[400:500] = 1.0
    assert draws(logits, replace(SAMPLE, top_k=3)) == {400, 401, 402}


@pytest.mark.parametrize("top_k", [0, VOCAB, 10**9])
def test_top_k_off(top_k: int) -> None:
    assert draws(noise(), replace(SAMPLE, top_k=top_k), 50) == draws(noise(), SAMPLE, 50)


def test_tiny_top_p_keeps_one() -> None:
    for top_p in (0.0, 1e-9):
        assert draws(noise(), replace(SAMPLE, top_p=top_p), 30) == {int(noise().argmax())}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.97), (7, 0.6), (500, 0.9), (7, 1.0)])
@pytest.mark.parametrize("vocab", [30, 9000])  # fewer ids than the first look, and more than one growth of it
def test_filters_keep_what_hugging_face_keeps(top_k: int, top_p: float, vocab: int) -> None:
    logits = noise(4, vocab, scale=0.5)
    kept = hugging_face_kept(logits, 0.8, min(top_k, vocab), top_p)
    drawn = draws(logits, replace(SAMPLE, temperature=0.8, top_k=top_k, top_p=top_p), 600)
    assert drawn <= kept
    assert len(drawn) > 0.9 * min(len(kept), 40)


def hugging_face_kept(logits: Logits, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The ids that temperature, top_k and top_p leave, each by its definition, one after the other."""
    scores = torch.from_numpy(logits).double() / temperature
    if top_k:
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    ordered, ids = scores.sort(descending=True)
    shares = ordered.softmax(0)
    kept = (shares.cumsum(0) - shares < top_p) & (shares > 0)
    return set(ids[kept].tolist())


def test_banned_ids_are_never_drawn_and_unknown_ones_do_no_harm() -> None:
    logits = noise(vocab=6)
    best = int(logits.argmax())
    others = set(range(6)) - {best, 2}
    banned = (best, 2, 6, 10**6)
    assert draws(logits, replace(SAMPLE, temperature=5.0, banned=banned)) == others
    assert draw_token(logits, replace(GREEDY, banned=banned)).token_id in others
    assert int(logits.argmax()) == best  # the caller's logits are as they were


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = noise()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    best = int(logits.argmax())
    drawn = draw_token(logits, replace(SAMPLE, temperature=0.3, top_k=5, banned=(best,), logprobs=4))
    assert drawn.logprobs is not None
    assert drawn.token_id != best
    assert drawn.logprobs.logprob == pytest.approx(float(expected[drawn.token_id]), abs=1e-9)
    assert [token for token, _ in drawn.logprobs.top] == np.argsort(-logits)[:4].tolist()
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(sorted(expected.tolist())[:-5:-1], abs=1e-9)


def test_zero_logprobs_give_the_drawn_tokens_alone() -> None:
    drawn = draw_token(noise(), replace(GREEDY, logprobs=0))
    assert drawn.logprobs is not None
    assert drawn.logprobs.top == ()
    assert draw_token(noise(), GREEDY).logprobs is None


def test_top_logprobs_order_ties_by_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[::3] = 1.0
    drawn = draw_token(logits, replace(GREEDY, logprobs=500))
    assert drawn.logprobs is not None
    ordered = [*range(0, VOCAB, 3), *(token for token in range(VOCAB) if token % 3)]
    assert [token for token, _ in drawn.logprobs.top] == ordered[:500]


@pytest.mark.parametrize("point", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_an_id_that_has_weight(
    monkeypatch: pytest.MonkeyPatch, point: float
) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, choice, position: point)
    banned = (*range(40), *range(210, 250))
    for seed in range(200):
        logits = noise(seed, vocab=250, scale=8.0)
        assert 40 <= draw_token(logits, replace(SAMPLE, banned=banned)).token_id < 210


def test_the_same_key_draws_the_same_and_seeds_differ() -> None:
    logits = noise(scale=1.0)
    runs = [[draw_token(logits, replace(SAMPLE, seed=s, position=p)).token_id for p in range(1, 20)] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert draw_token(logits, replace(SAMPLE, seed=2**63 - 1)).finite
