"""Answers of an engine, for tests that drive a conversation by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.tokens.codec import common_prefix
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.turn import Turn


def generation_of(
    tokenizer: Any, text: str, *, stop: str | None = None, finish: FinishReason = "stop", matched: str | None = None
) -> Generation:
    """``text`` as sampled: its end is the token ``stop`` (by default the tokenizer's end token), the stop string
    ``matched``, or a cut."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    matched_stop: int | str | None = matched
    if finish == "stop" and matched is None:
        matched_stop = int(tokenizer.convert_tokens_to_ids(stop)) if stop else int(tokenizer.eos_token_id)
        ids.append(matched_stop)
    if matched is not None:
        text = text.removesuffix(matched)
    return Generation(
        output_ids=tuple(ids),
        log_probs=tuple(-((i % 9) + 1) / 16 for i in range(len(ids))),
        text=text,
        finish_reason=finish,
        matched_stop=matched_stop,
        prompt_tokens=1,
    )


def answer(context: ChatContext, tokenizer: Any, text: str, **end: Any) -> tuple[list[int], Generation]:
    """One turn of ``context``; returns its prompt and its answer."""
    generation = generation_of(tokenizer, text, **end)
    prompt = context.prompt_ids()
    context.add_answer(prompt, generation)
    return prompt, generation


def linked(turns: Sequence[Turn]) -> list[Turn]:
    """``turns`` as their conversation records them: each names the earlier turn that it continues."""
    made: list[Turn] = []
    for turn in turns:
        shared = [common_prefix(earlier.token_ids, turn.prompt_ids) for earlier in made]
        extended = [n == len(earlier.token_ids) for n, earlier in zip(shared, made, strict=True)]
        # among the longest prefixes, the last turn that is extended whole
        base = max(range(len(made)), key=lambda index: (shared[index], extended[index], index), default=None)
        fields: dict[str, Any] = {}
        if base is not None:
            fork = ForkReason.BRANCH if shared[base] else ForkReason.NEW_CONTEXT
            fields = {"base_turn": base, "kept_tokens": shared[base], "fork": None if extended[base] else fork}
        made.append(replace(turn, **fields))
    return made


def cut(generation: Generation, tokenizer: Any, max_new_tokens: int) -> Generation:
    """The answer as an engine gives it that stops at ``max_new_tokens``."""
    if len(generation.output_ids) <= max_new_tokens:
        return generation
    ids = generation.output_ids[:max_new_tokens]
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return Generation(output_ids=ids, log_probs=generation.log_probs[: len(ids)], text=text, finish_reason="length")


class ScriptedClient:
    """A client with scripted answers, in order; an answer is cut at ``max_new_tokens``."""

    def __init__(self, tokenizer: Any, answers: Sequence[str | Generation | Exception]) -> None:
        self._tokenizer = tokenizer
        self._answers = list(answers)
        self.prompts: list[list[int]] = []
        self.sampling: list[SamplingParams] = []
        self.generations: list[Generation] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, routing_key: str | None = None
    ) -> Generation:
        self.prompts.append(list(input_ids))
        self.sampling.append(sampling)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        generation = generation_of(self._tokenizer, answer) if isinstance(answer, str) else answer
        generation = cut(generation, self._tokenizer, sampling.max_new_tokens)
        self.generations.append(generation)
        return generation


def text_of(tokenizer: Any, ids: Any) -> str:
    """With special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)
