"""OpenAI's completions: text without a chat template. A prompt that begins with an earlier one continues it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import IMPOSED, Call, CallResult, Choice, grammar, number, strings
from agl_slime.gateway.chat import head_of, usage
from agl_slime.gateway.protocol import NO_HISTORIES, Decode, Histories, Protocol, Stream, sse, token_name

_HONOURED = "prompt model max_tokens max_completion_tokens max_new_tokens max_output_tokens stop n logprobs stream"
_HONOURED += " return_token_ids return_tokens_as_token_ids stream_options regex ebnf json_schema"
_HONOURED += " reasoning_effort reasoning thinking"
_KIND = "text_completion"
_DEFAULT_TOKENS = 16
_MOST_IDS = 2**31  # of int32; the engine checks its vocabulary


class Completions(Protocol):
    honoured = frozenset((*_HONOURED.split(), *IMPOSED))
    prefix = "cmpl-"

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        if (body.get("best_of") or 1) == 1:
            body = {key: value for key, value in body.items() if key != "best_of"}
        self.check_fields(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < _MOST_IDS for token in prompt):
            prompt = tuple(prompt)
        if not prompt or not isinstance(prompt, str | tuple):
            raise GatewayRequestError("prompt must be one text, or the token ids of one", param="prompt")
        return Call(
            messages=[{"role": "text", "content": prompt}],
            raw=True,
            max_tokens=self.max_tokens(body) or _DEFAULT_TOKENS,
            stop=strings(body, "stop"),
            n=number(body, "n", least=1, most=128) or 1,
            **self.call_fields(body),
            constraint=grammar(body),
            top_log_probs=self.top_log_probs(body, "logprobs"),
        )

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        ended = [_ended(body, n, choice, choice.content, result, decode) for n, choice in enumerate(result.choices)]
        return {**head_of(result, _KIND), "choices": ended, "usage": usage(result)}

    def stream(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> Stream:
        return _CompletionStream(body, head, decode)


class _CompletionStream(Stream):
    def begin(self) -> Iterator[bytes]:
        return iter(())

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[bytes]:
        yield sse({**head_of(self.head, _KIND), "choices": [_choice(index, content, None, None)]})

    def end(self, result: CallResult) -> Iterator[bytes]:
        for index, choice in enumerate(result.choices):
            last = _ended(self.body, index, choice, "", result, self.decode)
            yield sse({**head_of(self.head, _KIND), "choices": [last]})
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield sse({**head_of(self.head, _KIND), "choices": [], "usage": usage(result)})
        yield b"data: [DONE]\n\n"


def _choice(index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}


def _ended(
    body: Mapping[str, Any], index: int, choice: Choice, text: str, result: CallResult, decode: Decode
) -> dict[str, Any]:
    """A choice at its end, with the fields that vLLM adds for ``return_token_ids``."""
    ids = {"prompt_token_ids": result.prompt_ids.tolist(), "token_ids": choice.token_ids}
    ended = _choice(index, text, choice.finish, _logprobs(body, choice, decode))
    return ended | ids if body.get("return_token_ids") else ended


def _logprobs(body: Mapping[str, Any], choice: Choice, decode: Decode) -> dict[str, Any] | None:
    if body.get("logprobs") is None:  # 0 asks for the log-probs of sampled tokens alone
        return None
    decode = token_name if body.get("return_tokens_as_token_ids") else decode
    generation = choice.generation
    if generation is None:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": None, "text_offset": []}
    tokens = [decode([token]) for token in generation.output_ids]
    offsets = [*accumulate(map(len, tokens[:-1]), initial=0)][: len(tokens)]
    tops = [{decode([token]): value for token, value in top} for top in generation.top_log_probs] or None
    sampled = {"tokens": tokens, "token_logprobs": list(generation.log_probs)}
    return {**sampled, "top_logprobs": tops, "text_offset": offsets}
