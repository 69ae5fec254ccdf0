"""Takes a public address, or says in one line why not. Called by both servers of a router, and by
the launcher before it starts anything."""

import socket

from contracts.errors import StartupError


def listen(host: str, port: int, purpose: str) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises StartupError when the address is taken or is
    not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # the address is said already
        raise StartupError(f"cannot listen for {purpose} on {host}:{port}: {reason}") from error
