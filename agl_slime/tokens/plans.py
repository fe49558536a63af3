"""The answers that a conversation holds, and the prompt that is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import Rendering


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """An answer that is held: message ``n_messages - 1``, ids ``[start:end]``. ``continued`` is the text that its
    message began with before it was sampled."""

    n_messages: int
    start: int
    end: int
    continued: str
    stop_text: str  # of the stop token that the engine sampled at its end; empty when there is none
    place: int  # ids ``[:place]`` are the prompt without the opening of the answer; 0 where that cannot be told apart


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt: ids ``[:kept]`` of what is held, then ``added``."""

    kept: int
    added: tuple[int, ...]
    place: int  # as in ``SampledTurn``
    open_boundaries: int
    rendering: Rendering | None  # of the whole conversation, less a partial answer, where it was made
    more_text: tuple[str, ...] = ()  # where no rendering was made: the last answer as the template writes it, and more
    fork: ForkReason | None = None

    @property
    def length(self) -> int:
        return self.kept + len(self.added)
