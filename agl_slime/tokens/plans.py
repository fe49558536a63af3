"""The sampled answers of a conversation, and its next prompt."""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import Rendering


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A sampled answer: message ``n_messages - 1``, ids ``[start:end]``. ``continued`` is the text that its message
    began with before sampling."""

    n_messages: int
    start: int
    end: int
    continued: str
    stop_text: str  # of the stop token that the engine sampled at its end; empty without one
    history_end: int  # ids ``[:history_end]`` are the prompt without its generation prompt; 0 if not separable


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt: ids ``[:kept]`` of the last prompt and answer, then ``added``."""

    kept: int
    added: tuple[int, ...]
    history_end: int  # as in ``SampledTurn``
    open_boundaries: int
    rendering: Rendering | None  # of the whole conversation without a partial answer, if it was rendered
    more_text: tuple[str, ...] = ()  # without a rendering: the last answer as the template writes it, and the new text
    fork: ForkReason | None = None

    @property
    def length(self) -> int:
        return self.kept + len(self.added)
