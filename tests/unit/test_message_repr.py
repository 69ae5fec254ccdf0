"""What is written to a log or a traceback must not give anybody a permission."""

import pytest

from contracts.handover import Endpoint, Introduce, Introduced
from contracts.requests import AttemptKey, SamplingParams
from contracts.session import Hello, Source, Submit
from kv_transfer.orders import ReceiveOrder
from tests.helpers.handover import LAYOUT, fetch, pull

PERMISSION = "an-open-sesame"
KEY = AttemptKey("1-1", 1)
SUBMIT = Submit(KEY, 1, PERMISSION.encode(), (1,), (), SamplingParams(1, 0), "", 1, "")


@pytest.mark.parametrize(
    "message",
    [
        Hello("router-0", 1, PERMISSION),
        SUBMIT,
        Introduce("d", PERMISSION, 1, LAYOUT),
        Introduced((Endpoint("tcp", f"127.0.0.1:1/{PERMISSION}"),)),
        pull(secret=PERMISSION),
        pull(ticket=PERMISSION.encode()),
        fetch(KEY, [PERMISSION.encode()]),
        fetch(KEY, [], secret=PERMISSION),
        ReceiveOrder(KEY, PERMISSION.encode(), Source("p", "p", 1), (), 0, 1, "", 1.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_permission_shows(message: object) -> None:
    assert PERMISSION not in repr(message)
