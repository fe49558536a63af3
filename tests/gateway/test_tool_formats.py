"""Calls of tools in every format, for clients of each protocol, whole and streamed; and the text that sampled tokens
are to a client: no marks of calls, no end mark, no halves of characters."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from agl_slime.tokens.attributes import TOOLS as TOOL_COUNTS
from agl_slime.tokens.formats import get_tool_parser
from tests.gateway.protocols import (
    CHATS,
    TOOLS,
    Talk,
    assistant,
    body_of,
    delta_of,
    events_of,
    openai_client,
    text_of,
    user,
)
from tests.harness.engine_faults import Abort
from tests.harness.gateway import HELLO, Case, one_sample, post, prompts, serving, trained_once
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

CITIES = ["Rome", "Oslo\nand </think> <b>", "São Paulo"]
PARALLEL = [("weather", {"city": city}) for city in CITIES]
KINDS = pytest.mark.parametrize("kind", list(FORMATS))
Answer = tuple[str, list[tuple[str, Any]]]


def ask(case: Case, path: str, question: str, stream: bool) -> Answer:
    """The content and the calls of an answer."""
    body = body_of(path, [user(question)], tools=TOOLS[path], stream=stream)
    answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return streamed(path, events_of(answer)) if stream else whole(path, answer.json())


def whole(path: str, answer: dict[str, Any]) -> Answer:
    if path == "messages":
        calls = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        return text_of(path, answer), calls
    if path == "responses":
        functions = [item for item in answer["output"] if item["type"] == "function_call"]
    else:
        functions = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    return text_of(path, answer), [(call["name"], json.loads(call["arguments"])) for call in functions]


def streamed(path: str, events: Sequence[dict[str, Any]]) -> Answer:
    text, names, pieces = "".join(map(delta_of, events)), {}, {}
    if path == "responses":
        last = whole(path, events[-1]["response"])
        assert text == last[0]
        return last
    for event in events:
        for choice in event.get("choices", ()):
            for call in choice["delta"].get("tool_calls") or ():
                names.setdefault(call["index"], call["function"].get("name"))
                pieces[call["index"]] = pieces.get(call["index"], "") + (call["function"].get("arguments") or "")
        if event.get("content_block", {}).get("type") == "tool_use":
            names[event["index"]], pieces[event["index"]] = event["content_block"]["name"], ""
        elif "partial_json" in event.get("delta", {}):
            pieces[event["index"]] += event["delta"]["partial_json"]
    return text, [(name, json.loads(pieces[index])) for index, name in names.items()]


def broken(kind: str) -> str:
    """A call that cannot be read."""
    call = written(kind, [("weather", {"city": "Rome"})]).strip()
    if kind in ("qwen_xml", "seed"):
        return call.replace("=weather", "")
    if kind in ("glm", "hunyuan"):
        return call.replace("Rome</arg_value", "Rome</arg_valu")
    if kind in ("minimax", "deepseek_v32"):
        return call.replace('="weather"', '=""')
    return call.replace("Rome", 'Ro"me') if kind not in ("lfm2", "gemma4") else call.replace("weather", "")


def mention(kind: str) -> str:
    """A sentence with the mark that calls begin with."""
    if kind == "harmony":
        return "<|channel|>commentary<|message|>I write to=functions.weather now.<|end|><|start|>assistant"
    return f"I write {get_tool_parser(kind).marks()[-1]} now." if kind != "llama_json" else ""


def single_call(kind: str) -> str:
    return written(kind, [("weather", {"city": "Rome"})]).lstrip()


@KINDS
def test_parallel_calls_are_returned_and_mentioned_or_broken_ones_are_not(kind: str) -> None:
    text = "" if kind == "llama_json" else "Let me see."
    answers = [written(kind, PARALLEL, text), written(kind, [], "It is 20 degrees."), broken(kind)]
    answers.append(mention(kind) + single_call(kind))
    requests = [(path, stream) for path in CHATS for stream in (False, True)]
    with serving(*(answers * len(requests)), tokenizer=tokenizer_of(kind), sampling={"max_new_tokens": 1024}) as case:
        for number, (path, stream) in enumerate(requests):
            parallel, plain, bad, mentioned = (ask(case, path, f"{number} {n}?", stream) for n in range(len(answers)))
            assert parallel == (text, PARALLEL), (path, stream)
            assert plain == ("It is 20 degrees.", []), (path, stream)
            assert bad[1] == [], (path, stream)
            assert mentioned[1] == [("weather", {"city": "Rome"})], (path, stream)
        trained_once(case.turns, case.segments)
        completion = post(case, "completions", prompt="As it is:", max_tokens=1024)
        assert completion["choices"][0]["text"] == answers[-1]  # no template, no tools


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if get_tool_parser(kind).ends_thinking])
def test_a_call_before_the_end_of_thinking_is_made_in_one_sample(kind: str) -> None:
    """The next prompt is the sampled tokens, without a mark that they lack, and the results."""
    opening, closing = FORMATS[kind].thinking
    call, tokenizer = single_call(kind), tokenizer_of(kind, opens=True)
    mark, last = get_tool_parser(kind).marks()[-1], f"{mention(kind)}{closing}It is 20 degrees."
    answers = [f"I look.{call}", f"I look again.{call}{closing}", last]
    with serving(*answers * 3, *answers * 3, tokenizer=tokenizer, sampling={"max_new_tokens": 1024}) as case:
        for number, path in enumerate(CHATS):
            talk = Talk(case, path, tools=TOOLS[path])
            talk.ask(user(f"{number}?"))
            for _ in answers[1:]:
                assert talk.text == "", path
                talk.ask(*talk.results())
            assert talk.text == "It is 20 degrees.", path
        trained_once(case.turns, case.segments)
        assert [len(segment.placements) for segment in case.segments] == [3, 3, 3]
        added = f"<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n<|im_start|>assistant\n{opening}\n"
        assert prompts(case)[2].endswith(f"{answers[0]}{added}{answers[1]}{added}")
        for path in CHATS:
            for expected in (*[("", [("weather", {"city": "Rome"})])] * 2, ("It is 20 degrees.", [])):
                assert ask(case, path, "How?", stream=True) == expected
        case.close()
        tools = json.loads(case.summary[TOOL_COUNTS])
        assert (tools["calls"], tools["malformed"], tools["example"]) == ({"weather": 12}, 6, last[last.index(mark) :])


def stream_chat(case: Case, messages: list[Any] = HELLO, **fields: Any) -> tuple[Any, list[str]]:
    """The choice and the pieces of its content."""
    with openai_client(case).chat.completions.stream(model="m", messages=messages, **fields) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.current_completion_snapshot.choices[0]
    assert choice.message.content == "".join(pieces)
    return choice, pieces


@pytest.mark.parametrize("n_tokens", range(1, 12))
def test_an_update_within_a_character_is_not_seen_in_a_stream(n_tokens: int) -> None:
    text = "日本語のテキスト。😀 Ende"
    with serving(text, "Yes.", token_s=0.002) as case:
        case.engine.script("/generate", Abort(n_tokens=n_tokens), Abort(n_tokens=1), Abort(n_tokens=2))
        choice, pieces = stream_chat(case)
        assert choice.message.content == text
        assert len(pieces) > 3
        stream_chat(case, [*HELLO, assistant(text), user("Hello?")])
        one_sample(case)


def test_an_end_mark_that_is_sampled_at_the_limit_is_no_text() -> None:
    with serving("Forty two", "Forty two", "Yes.") as case:
        limit = len(case.tokenizer.encode("Forty two")) + 1
        choice, _ = stream_chat(case, max_tokens=limit)
        whole = post(case, "chat/completions", messages=HELLO, max_tokens=limit)["choices"][0]
        assert (choice.message.content, choice.finish_reason) == ("Forty two", "length")
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Forty two", "length")
        post(case, "chat/completions", messages=[*HELLO, assistant("Forty two"), user("Hello?")])
        first, _, third = case.turns
        assert first.response_ids[-1] == case.tokenizer.eos_token_id
        assert case.tokenizer.decode(third.prompt_ids[first.length :]).startswith("\n<|im_start|>user")
        assert third.fork is None


def test_special_token_in_an_answer_is_hidden_and_kept_in_next_prompt() -> None:
    with serving("Forty<|im_start|> two", "Yes.") as case:
        assert stream_chat(case)[0].message.content == "Forty two"
        stream_chat(case, [*HELLO, assistant("Forty two"), user("Hello?")])
        one_sample(case)
