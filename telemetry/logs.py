"""Logging of a process: one readable line per record on stderr.

Entry points call `configure_logging` once. Libraries of ours only ever use logging.getLogger(__name__).
"""

import logging


def configure_logging(level: str, role: str, name: str) -> None:
    """Send records of at least `level` (debug, info, warning, error) to stderr, each in one line that
    names the process. Replaces earlier handlers of the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(f"%(asctime)s.%(msecs)03d %(levelname)-7s {role}/{name} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _OneLine(logging.Formatter):
    """Joins the lines of a record (a traceback, a message with a line break) by " | ", so that a line in
    the log is a record and nothing a client sends can look like one."""

    def __init__(self, form: str) -> None:
        super().__init__(form.replace("\n", " "), datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())
