"""Small HTTP servers on 127.0.0.1."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def answer(self, status: int = 200, body: bytes = b"", content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def served_by(handler: type[Handler]) -> Iterator[str]:
    """The URL of a server whose requests ``handler`` answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def server_that_answers(status: int, body: bytes, content_type: str = "application/json") -> Iterator[str]:
    """Its URL; each GET request gets the same response."""

    class Same(Handler):
        def do_GET(self) -> None:
            self.answer(status, body, content_type)

    with served_by(Same) as url:
        yield url
