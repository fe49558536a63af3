"""Why a prompt does not continue what is held: the classes of forks and all that tells them apart, by messages, by
tokens and, with a tokenizer, by text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agl_slime.tokens.blanks import squash
from agl_slime.tokens.codec import TokenArray, common_prefix

if TYPE_CHECKING:
    from agl_slime.tokens.tokenizer import ChatTokenizer


logger = logging.getLogger(__name__)


class ForkReason(StrEnum):
    """Why a turn starts a segment of its own. The first two are drift, to be looked into; the others are what the agent
    did.

    Without a tokenizer the first two cannot be told from an edit and are counted as ``EDITED_HISTORY``.
    """

    TEMPLATE = "template"
    """Earlier messages are rendered in another way once others follow: results left out, messages regrouped, another
    end of turn."""
    DROPPED_THINKING = "dropped_thinking"
    """The template drops earlier thinking, mostly once a user's message follows: no fault, but the template's rule."""
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
    ForkReason.TEMPLATE: "the chat template renders earlier messages differently once others follow; each such turn "
    "becomes a Sample of its own.",
    ForkReason.DROPPED_THINKING: "the template drops earlier thinking; what follows becomes a Sample of its own.",
    ForkReason.EDITED_HISTORY: "the agent changed messages that were part of an earlier prompt or answer.",
    ForkReason.BRANCH: "the agent went back to an earlier point of the conversation.",
    ForkReason.NEW_CONTEXT: "the agent began another conversation.",
}

_BY_TEMPLATE = (ForkReason.TEMPLATE, ForkReason.DROPPED_THINKING)
_BLOCK = re.compile(r"<(\w+)>.*?</\1>")


_explained: set[ForkReason] = set()


def explain_once(reason: ForkReason, fix: Callable[[], str] = str) -> None:
    """Log the meaning of forks of this kind, for the first one of the process; ``fix`` says what a user can set."""
    if reason in _explained:
        return
    _explained.add(reason)
    level = logging.WARNING if reason in _BY_TEMPLATE else logging.INFO
    text = "A conversation forked (%s): %s%s Further forks of this kind are counted, not logged."
    logger.log(level, text, reason.value, _MEANING[reason], fix())


def classify_edit(*, replaced: bool, still_there: bool, dropped: int = 0, summary: bool = False) -> ForkReason:
    """Why messages differ from those that are held: an answer stands at the first place that differs (``replaced``),
    later ones are ``still_there`` after it, the history is shorter by ``dropped`` messages, a ``summary`` stands for
    them."""
    if dropped > 2 and (summary or still_there):
        return ForkReason.COMPACTION
    return ForkReason.EDITED_HISTORY if replaced or still_there else ForkReason.BRANCH


def refine_fork(fork: ForkReason | None, told: ForkReason | None) -> ForkReason | None:
    """``fork`` as tokens show it, or what the agent's messages tell better; a template's doing is that."""
    return fork if fork in (None, *_BY_TEMPLATE) else told or fork


def classify_fork(turn: Any, before: Sequence[Any], tokenizer: ChatTokenizer | None) -> ForkReason:
    """Why a turn (``trace.turn.Turn``) goes on in no segment of the turns ``before`` it: as it says itself, else by
    tokens and text."""
    if turn.base_turn is not None:
        return turn.fork or ForkReason.BRANCH  # it extends a turn that another has extended already
    prompt = turn.prompt_ids
    earlier = [(other, other.token_ids) for other in before if len(other.response_ids)]
    shared = [common_prefix(held, prompt) for _, held in earlier]
    longest = max(shared)
    if longest == len(prompt):
        return ForkReason.BRANCH
    # so far it holds whole turns
    kept = max((n for n, (_, held) in zip(shared, earlier, strict=True) if n == len(held)), default=0)
    rest = prompt[kept:]
    # the sampled answers that the most recent conversation through this place holds after it
    latest = next(held for n, (_, held) in zip(reversed(shared), reversed(earlier), strict=True) if n == longest)
    beyond = [other for other, held in reversed(earlier) if common_prefix(held, latest) == len(held) > longest > 0]
    lost = sorted(beyond, key=lambda other: other.length)
    if lost:
        if tokenizer is not None:
            drift = _rendering_drift(lost[0].token_ids[kept:], rest, tokenizer)
            if drift is not None:
                return drift
        replaced = kept <= len(lost[0].prompt_ids) <= longest  # the prompt of that answer, then something else
        if replaced or any(contains(rest, other.response_ids) for other in lost):
            return ForkReason.EDITED_HISTORY
    return ForkReason.BRANCH if kept else ForkReason.NEW_CONTEXT


def _rendering_drift(held: TokenArray, prompt: TokenArray, tokenizer: ChatTokenizer) -> ForkReason | None:
    """Whether ``prompt`` begins with the text of ``held`` (same text: re-tokenisation; text rendered in another way:
    template), although not with its ids.

    ``held`` ends with a sampled answer; both begin at the same place of the conversation. ``None`` when the text was
    changed beyond rendering.
    """
    held_text = tokenizer.decode(held.tolist(), skip_special_tokens=False)
    prompt_text = tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
    if prompt_text.startswith(held_text):
        return ForkReason.RETOKENIZATION
    held_text, prompt_text = squash(held_text), squash(prompt_text)
    if _same_but_for_rendering(held_text, prompt_text, _special_tokens(tokenizer)):
        dropped = {block[1] for block in _BLOCK.finditer(held_text) if block[0] not in prompt_text}
        return ForkReason.DROPPED_THINKING if dropped == {"think"} else ForkReason.TEMPLATE
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
