"""What a client did that cannot be served, with the HTTP status that says so."""

from __future__ import annotations

from agl_slime.errors import AglSlimeError


class BufferRequestError(AglSlimeError, ValueError):
    """A request that is refused; ``status`` is the HTTP status (503: later), the text one sentence for the client."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
