"""TLS of the tcp transport: who gets a channel, and what is said of files that are no good."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from contracts.config import Config, TransferConfig
from contracts.config_loader import load_config
from contracts.errors import ConfigError, StartupError
from kv_transfer.channels.tls import load_tls
from kv_transfer.transports import tcp
from protos.links.base import LinkClosed
from tests.helpers.handover import ByteStore
from tests.helpers.tcp_pair import certificates, chunk, connected

KEYS = ["tls_cert", "tls_key", "tls_ca"]


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


async def refused(exporter: TransferConfig, puller: TransferConfig) -> None:
    """And those of the exporter's cluster are still served."""
    transport = tcp.create(ByteStore(), puller)
    async with connected(exporter) as pair:
        with pytest.raises(LinkClosed):
            await transport.connect(pair.address)
        outlet, inlet = await pair.open()
        await chunk(outlet, [1], inlet, [2])
        outlet.close()
        inlet.close(reuse=True)
    await transport.close()


async def test_two_workers_of_one_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    mine, theirs = (certificates(folder(tmp_path, name), authority) for name in "ab")
    exporter, puller = tcp.create(ByteStore(), mine), tcp.create(ByteStore(), theirs)
    connection = await puller.connect(await exporter.serve("127.0.0.1"))
    await connection.close()
    await puller.close()
    await exporter.close()


async def test_the_bytes_are_not_on_the_wire(tmp_path: Path) -> None:
    """A puller without TLS hears nothing of an exporter that has it, and the other way round."""
    with_tls = certificates(tmp_path)
    await refused(with_tls, TransferConfig())
    await refused(TransferConfig(), with_tls)


async def test_a_certificate_of_another_authority_is_refused_by_the_exporter(tmp_path: Path) -> None:
    """This puller would take the exporter's certificate."""
    mine, foreign = (certificates(folder(tmp_path, name)) for name in "ab")
    await refused(mine, replace(foreign, tls_ca=mine.tls_ca))


async def test_a_certificate_of_another_authority_is_refused_by_the_puller(tmp_path: Path) -> None:
    """This exporter would take the puller's certificate."""
    mine, foreign = (certificates(folder(tmp_path, name)) for name in "ab")
    exporter = tcp.create(ByteStore(), replace(foreign, tls_ca=mine.tls_ca))
    puller = tcp.create(ByteStore(), mine)
    with pytest.raises(LinkClosed, match="CERTIFICATE_VERIFY_FAILED"):
        await puller.connect(await exporter.serve("127.0.0.1"))
    await puller.close()
    await exporter.close()


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_file_is_named(key: str, tmp_path: Path) -> None:
    config = certificates(tmp_path)
    Path(getattr(config, key)).unlink()
    with pytest.raises(StartupError, match=rf"{key}\.pem: No such file"):
        tcp.create(ByteStore(), config)


def put_nonsense(config: TransferConfig, key: str) -> None:
    Path(getattr(config, key)).write_text("no PEM at all")


def put_foreign_key(config: TransferConfig, key: str) -> None:
    trustme.CA().issue_cert("x").private_key_pem.write_to_path(getattr(config, key))


def put_locked_key(config: TransferConfig, key: str) -> None:
    """The system would ask the terminal for its password."""
    private = load_pem_private_key(Path(getattr(config, key)).read_bytes(), None)
    locked = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path(getattr(config, key)).write_bytes(locked)


@pytest.mark.parametrize(
    ("key", "spoil"),
    [*((key, put_nonsense) for key in KEYS), ("tls_key", put_foreign_key), ("tls_key", put_locked_key)],
)
def test_a_file_that_is_no_good_is_named(
    key: str, spoil: Callable[[TransferConfig, str], None], tmp_path: Path
) -> None:
    config = certificates(tmp_path)
    spoil(config, key)
    with pytest.raises(StartupError, match=rf"{key}\.pem"):
        load_tls(config)


@pytest.mark.parametrize("named", [[key] for key in KEYS] + [[key for key in KEYS if key != left] for left in KEYS])
def test_all_files_or_none(named: list[str]) -> None:
    with pytest.raises(ConfigError, match="all or none") as raised:
        load_config(settings={f"transfer.{key}": "x.pem" for key in named})
    assert raised.value.param in {f"transfer.{key}" for key in KEYS if key not in named}


def test_without_files_there_is_no_tls() -> None:
    assert Config().validate().transfer.tls_cert == ""
    assert load_tls(TransferConfig()) is None
