"""A record is one line that names its process."""

import logging
from collections.abc import Iterator

import pytest

from telemetry.logs import configure_logging


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_are_single_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "decode", "decode-0")
    log = logging.getLogger("worker.drain")
    log.debug("hidden")
    log.info("from a client: a\nb")
    try:
        int("bad")
    except ValueError:
        log.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "INFO" in lines[0]
    assert "decode/decode-0" in lines[0]
    assert lines[0].endswith("worker.drain: from a client: a | b")
    assert "ValueError: invalid" in lines[1]


def test_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "router", "router-0")
    configure_logging("error", "router", "router-1")
    logging.getLogger("x").error("once")
    assert capsys.readouterr().err.count("once") == 1
