"""The table of statuses."""

import pytest

from contracts.errors import ErrorInfo, Overloaded, PdserveError, error_codes, status_of


@pytest.mark.parametrize("code", sorted(error_codes()))
def test_who_may_try_again_hears_when(code: str) -> None:
    status = status_of(ErrorInfo(code, "it failed").to_error())
    assert isinstance(status.retry_after, int) == (status.http == 503) == (status.grpc == "UNAVAILABLE")


def test_an_error_may_say_it_better() -> None:
    assert status_of(Overloaded("full", retry_after=30)).retry_after == 30
    assert status_of(PdserveError("broken")).retry_after is None
