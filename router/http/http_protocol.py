"""uvicorn's HTTP connection, made to answer one request at a time.

Used by http_server.py. A client may send its next request before the last one is answered (RFC 9112, 9.3.2), and
uvicorn then stops reading: it no longer sees that the client goes away, and the answer is generated for nobody.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    """A request that comes too early is dropped, and the connection closes behind the answer in work: the client
    asks again, as that RFC wants it to. Inherits because uvicorn offers no other way to a connection."""

    _deaf = False

    def data_received(self, data: bytes) -> None:
        """Nothing counts behind a request that came too early."""
        if not self._deaf:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        """A request has come."""
        answering = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = answering
            self.cycle.keep_alive = False
            self.flow.resume_reading()
            self._deaf = True

    def on_body(self, body: bytes) -> None:
        """A dropped request's body is nobody's."""
        if not self._deaf:
            super().on_body(body)
