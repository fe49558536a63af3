"""Classes of forks, and their classification by messages, by tokens and, with a tokenizer, by text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agl_slime.tokens.blanks import squash
from agl_slime.tokens.codec import TokenArray, common_prefix, find_ids

if TYPE_CHECKING:
    from agl_slime.tokens.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)


class ForkReason(StrEnum):
    """The reason why a turn starts a segment of its own. ``TEMPLATE`` and ``RETOKENIZATION`` are drift, to be looked
    into; the agent caused the others, but for ``DROPPED_THINKING``. Without a tokenizer ``TEMPLATE``,
    ``DROPPED_THINKING`` and ``RETOKENIZATION`` are counted as ``EDITED_HISTORY``."""

    TEMPLATE = "template"
    """The template renders earlier messages differently once others follow: results omitted, regrouped, another end."""
    DROPPED_THINKING = "dropped_thinking"
    """The template drops earlier thinking, usually once a user message follows: its rule, not a fault."""
    RETOKENIZATION = "retokenization"
    """The text of an earlier answer is the same, its ids are not: it was tokenized again."""
    EDITED_HISTORY = "edited_history"
    """The agent changed an earlier answer or a message before it."""
    BRANCH = "branch"
    """The prompt continues an earlier point of the conversation: samples of one prompt, a search, a turn taken back."""
    COMPACTION = "compaction"
    """The agent shortened the conversation: a summary, or earlier messages omitted."""
    NEW_CONTEXT = "new_context"
    """The prompt has no sampled token: another agent's conversation, or a fresh context."""


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
    """Log the meaning of this kind of fork at the first one of the process; ``fix`` names a setting that helps."""
    if reason in _explained:
        return
    _explained.add(reason)
    level = logging.WARNING if reason in _BY_TEMPLATE else logging.INFO
    text = "A conversation forked (%s): %s%s Further forks of this kind are counted, not logged."
    logger.log(level, text, reason.value, _MEANING[reason], fix())


def classify_edit(*, replaced: bool, still_there: bool, dropped: int = 0, summary: bool = False) -> ForkReason:
    """The reason of edited messages. ``replaced``: there is another answer at the first difference; ``still_there``:
    later answers follow it; ``dropped``: by how many messages the history is shorter; ``summary``: one replaces
    them."""
    if dropped > 2 and (summary or still_there):
        return ForkReason.COMPACTION
    return ForkReason.EDITED_HISTORY if replaced or still_there else ForkReason.BRANCH


def refine_fork(fork: ForkReason | None, by_messages: ForkReason | None) -> ForkReason | None:
    """``fork`` as the tokens show it, or the more exact reason from the agent's messages; a template's fork stays."""
    return fork if fork in (None, *_BY_TEMPLATE) else by_messages or fork


def classify_fork(turn: Any, earlier_turns: Sequence[Any], tokenizer: ChatTokenizer | None) -> ForkReason:
    """The reason why a turn extends no segment of ``earlier_turns``: its own, else by tokens and text."""
    if turn.base_turn is not None:
        return turn.fork or ForkReason.BRANCH  # another turn has already extended that turn
    prompt = turn.prompt_ids
    earlier = [(previous, previous.token_ids) for previous in earlier_turns if len(previous.response_ids)]
    shared = [common_prefix(tokens, prompt) for _, tokens in earlier]
    longest = max(shared)
    if longest == len(prompt):
        return ForkReason.BRANCH
    # the longest earlier turn that the prompt extends
    extended = max((n for n, (_, tokens) in zip(shared, earlier, strict=True) if n == len(tokens)), default=0)
    rest = prompt[extended:]
    # the answers after the divergence in the most recent conversation that shares the prefix
    latest = next(tokens for n, (_, tokens) in zip(reversed(shared), reversed(earlier), strict=True) if n == longest)
    beyond = [each for each, tokens in reversed(earlier) if common_prefix(tokens, latest) == len(tokens) > longest > 0]
    lost = sorted(beyond, key=lambda previous: previous.length)
    if lost:
        if tokenizer is not None:
            drift = _rendering_drift(lost[0].token_ids[extended:], rest, tokenizer)
            if drift is not None:
                return drift
        replaced = extended <= len(lost[0].prompt_ids) <= longest  # the same prompt, another answer
        if replaced or any(find_ids(rest.tobytes(), answered.response_ids.tobytes()) >= 0 for answered in lost):
            return ForkReason.EDITED_HISTORY
    return ForkReason.BRANCH if extended else ForkReason.NEW_CONTEXT


def _rendering_drift(earlier: TokenArray, prompt: TokenArray, tokenizer: ChatTokenizer) -> ForkReason | None:
    """The reason why ``prompt`` begins with the text of ``earlier`` but not with its ids: re-tokenization if the text
    is the same, else the template's rendering. ``earlier`` ends with a sampled answer; both begin at the same point of
    the conversation. ``None`` if the texts differ in more than rendering."""
    earlier_text = tokenizer.decode(earlier.tolist(), skip_special_tokens=False)
    prompt_text = tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
    if prompt_text.startswith(earlier_text):
        return ForkReason.RETOKENIZATION
    earlier_text, prompt_text = squash(earlier_text), squash(prompt_text)
    special = tuple(token for token in getattr(tokenizer, "all_special_tokens", ()) if token)
    if _differs_in_rendering(earlier_text, prompt_text, special):
        dropped = {block[1] for block in _BLOCK.finditer(earlier_text) if block[0] not in prompt_text}
        return ForkReason.DROPPED_THINKING if dropped == {"think"} else ForkReason.TEMPLATE
    return None


def _differs_in_rendering(earlier: str, prompt: str, special_tokens: tuple[str, ...]) -> bool:
    """Whether ``prompt`` begins with ``earlier`` apart from its end-of-turn token and omitted tagged blocks."""
    text = content = _BLOCK.sub(lambda block: block[0] if block[0] in prompt else "", earlier)
    while special_tokens and content.endswith(special_tokens):
        content = next(content.removesuffix(token) for token in special_tokens if content.endswith(token))
    return prompt.startswith(text) or (prompt.startswith(content) and prompt.startswith(special_tokens, len(content)))
