"""TLS of a worker's data connections: both sides prove that the cluster's authority has signed their certificate.

Transports that open sockets of their own call it once, at start. It must never be lenient: TLS 1.3 only, and whoever
shows no certificate gets no connection. Host names are not checked, as workers are addressed by IP: what counts is
who signed.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from contracts.config import TransferConfig
from contracts.errors import StartupError


@dataclass(frozen=True, slots=True)
class Tls:
    """What the accepting and the connecting side wrap their sockets with."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(config: TransferConfig) -> Tls | None:
    """None when the configuration names no files. Raises StartupError with the name of the file that is missing or
    no good."""
    if not config.tls_cert:
        return None
    for file in (config.tls_cert, config.tls_key, config.tls_ca):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise StartupError(f"cannot read the TLS file {file}: {error.strerror}") from error
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.num_tickets = 0  # no session is ever resumed
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise StartupError(f"{config.tls_cert} and {config.tls_key} are no TLS certificate and key") from error
        try:
            context.load_verify_locations(config.tls_ca)
        except ssl.SSLError as error:
            raise StartupError(f"{config.tls_ca} holds no TLS certificate") from error
    return Tls(server, client)


def _no_password() -> str:
    """Without it, OpenSSL would ask for one on the terminal."""
    return ""
