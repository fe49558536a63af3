"""Why a prompt does not continue what is held: the classes of forks, told apart by tokens and, with a tokenizer, by
text."""

from __future__ import annotations

import functools
import logging
import re
from enum import Enum
from typing import TYPE_CHECKING

from agl_slime.tokens.codec import TokenArray
from agl_slime.tokens.template import squash

if TYPE_CHECKING:
    from agl_slime.tokens.tokenizer import ChatTokenizer


logger = logging.getLogger(__name__)


class ForkReason(str, Enum):
    """Why a turn starts a segment of its own. The first two are drift, to be looked into; the others are what the agent
    did.

    Without a tokenizer the first two cannot be told from an edit and are counted as ``EDITED_HISTORY``.
    """

    TEMPLATE = "template"
    """An earlier answer is rendered in another way than it was sampled: a tagged block (thinking) left out, white
    space, another end of turn."""
    RETOKENIZATION = "retokenization"
    """The text of an earlier answer is the same, its ids are not: somewhere text was tokenised again."""
    EDITED_HISTORY = "edited_history"
    """An earlier answer, or what stands before it, was changed by the agent."""
    BRANCH = "branch"
    """The prompt goes on from an earlier point of the conversation: several samples for one prompt, a search, a turn
    taken back."""
    COMPACTION = "compaction"
    """The agent made a shorter conversation of what was held: a summary, or earlier messages left out."""
    NEW_CONTEXT = "new_context"
    """The prompt holds no sampled token: another agent's conversation, or a context that was started anew."""


_MEANING = {
    ForkReason.TEMPLATE: "the chat template renders earlier messages differently once others follow (thinking dropped, "
    "messages regrouped); each such turn becomes a Sample of its own.",
    ForkReason.EDITED_HISTORY: "the agent changed messages that were part of an earlier prompt or answer.",
    ForkReason.BRANCH: "the agent went back to an earlier point of the conversation.",
    ForkReason.NEW_CONTEXT: "the agent began another conversation.",
}

_BLOCK = re.compile(r"<(\w+)>.*?</\1>")


@functools.cache
def explain_once(reason: ForkReason) -> None:
    """Log what forks of this kind mean, for the first one of the process."""
    level = logging.WARNING if reason is ForkReason.TEMPLATE else logging.INFO
    text = "A conversation forked (%s): %s Further forks of this kind are counted, not logged."
    logger.log(level, text, reason.value, _MEANING[reason])


def rendering_drift(held: TokenArray, prompt: TokenArray, tokenizer: ChatTokenizer) -> ForkReason | None:
    """Whether ``prompt`` begins with the text of ``held`` (same text: re-tokenisation; text rendered in another way:
    template), although not with its ids.

    ``held`` ends with a sampled answer; both begin at the same place of the conversation. ``None`` when the text was
    changed beyond rendering.
    """
    held_text = tokenizer.decode(held.tolist(), skip_special_tokens=False)
    prompt_text = tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
    if prompt_text.startswith(held_text):
        return ForkReason.RETOKENIZATION
    if _same_but_for_rendering(squash(held_text), squash(prompt_text), _special_tokens(tokenizer)):
        return ForkReason.TEMPLATE
    return None


def _same_but_for_rendering(held: str, prompt: str, special_tokens: tuple[str, ...]) -> bool:
    """``prompt`` begins with ``held`` but for its end-of-turn token and tagged blocks that are left out."""
    kept = content = _BLOCK.sub(lambda block: block[0] if block[0] in prompt else "", held)
    while special_tokens and content.endswith(special_tokens):
        content = next(content.removesuffix(token) for token in special_tokens if content.endswith(token))
    return prompt.startswith(kept) or (prompt.startswith(content) and prompt.startswith(special_tokens, len(content)))


def _special_tokens(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    return tuple(token for token in getattr(tokenizer, "all_special_tokens", ()) if token)


def contains(haystack: TokenArray, needle: TokenArray) -> bool:
    """Whether ``needle`` occurs in ``haystack`` as a run of tokens."""
    hay, wanted = haystack.tobytes(), needle.tobytes()
    at = hay.find(wanted)
    while at != -1 and at % haystack.itemsize:
        at = hay.find(wanted, at + 1)
    return at != -1
