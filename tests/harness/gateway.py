"""A gateway over an engine that says what a test wants, and what was written of it as turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import httpx

from agl_slime.agent.access import EngineAccess
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.codec import token_array
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

# Tools in the system message, answers as they are: what most templates come to.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUICK = ClientSettings(
    backoff_base_s=0.001, backoff_cap_s=0.01, max_attempts=3, idle_timeout_s=30.0, total_timeout_s=60.0
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]
BODY = {"model": "m", "messages": HELLO}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL_TWO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@dataclass
class Case:
    """``says`` are the answers to come, in order; the last one is said again and again."""

    gateway: Gateway
    engine: ScriptedEngine
    attempt: Attempt
    llm: LLM
    tokenizer: Any
    spans: list[Any] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return decode_turns(self.spans)

    @property
    def segments(self) -> list[Segment]:
        turns = self.turns
        return merge_turns(turns, untrained={number for number, turn in enumerate(turns) if turn.untrained})

    @property
    def summary(self) -> dict[str, Any]:
        """What the last span says of the rollout as a whole."""
        return self.spans[-1].attributes

    @property
    def payloads(self) -> list[dict[str, Any]]:
        """What the engine was asked."""
        return [received.payload for received in self.engine.received if received.path == "/generate"]

    def close(self) -> None:
        run_blocking(self.gateway.close(self.attempt))

    def open(self, rollout_id: str, **resources: LLM) -> tuple[Attempt, dict[str, Any], list[Any]]:
        spans: list[Any] = []
        llm = LLM(endpoint=self.engine.url, model="scripted", sampling_parameters={"max_new_tokens": 256})
        attempt, served = self.gateway.open(rollout_id, "at-1", {"main_llm": llm, **resources}, writer(spans))
        assert attempt is not None
        return attempt, served, spans


def writer(spans: list[Any]) -> Callable[[str, dict[str, Any], float], None]:
    return lambda name, attributes, started: spans.append(SimpleNamespace(name=name, attributes=attributes))


@contextmanager
def serving(
    *says: str | list[int],
    settings: GatewaySettings | None = None,
    template: str = TEMPLATE,
    sampling: dict[str, Any] | None = None,
    judge: bool = False,
    tokenizer: Any = None,
    **engine_options: Any,
) -> Iterator[Case]:
    """A gateway with one attempt open, over an engine that gives each prompt the next of the texts, or token ids, in
    ``says``."""
    tokenizer = tokenizer or small_tokenizer(template)
    engine = engine_saying(tokenizer, says, **engine_options)
    access = EngineAccess(tokenizer=tokenizer, settings=QUICK)
    with in_thread(engine), Gateway(settings, access=access) as gateway:
        spans: list[Any] = []
        parameters = {"temperature": 1.0, "max_new_tokens": 256, **(sampling or {})}
        llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters=parameters)
        resources = {"main_llm": llm, **({"judge": llm.model_copy()} if judge else {})}
        attempt, served = gateway.open("ro-1", "at-1", resources, writer(spans))
        assert attempt is not None
        case = Case(gateway, engine, attempt, served["main_llm"], tokenizer, spans)  # type: ignore[arg-type]
        case.resources = served  # type: ignore[attr-defined]
        yield case


def engine_saying(tokenizer: Any, says: Sequence[str | list[int]], **options: Any) -> ScriptedEngine:
    """An engine that gives each new prompt the next of the texts, or token ids."""
    return ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        next_id=talking(tokenizer, says),
        **options,
    )


def talking(tokenizer: Any, says: Sequence[str | list[int]]) -> Callable[[Sequence[int]], int]:
    """A ``next_id`` that gives each new prompt the next of the texts, or token ids, then the end token; a prompt that
    ends within an answer gets the rest of it."""
    begun: dict[int, tuple[list[int], int]] = {}  # of prompt and answer so far: the answer, and how much of it
    left = list(says)

    def next_id(ids: Sequence[int]) -> int:
        answer, at = begun.get(hash(tuple(ids)), ([], 0))
        if not answer:
            said = left.pop(0) if left else says[-1]
            ids_said = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
            answer = [*ids_said, tokenizer.eos_token_id]
        if at + 1 < len(answer):
            begun[hash((*ids, answer[at]))] = answer, at + 1
        return answer[at]

    return next_id


def trained_once(turns: Sequence[Turn], segments: Sequence[Segment]) -> None:
    """Each sampled token of a turn that is trained is under mask 1 exactly once, where it was sampled."""
    placed = [at.turn for segment in segments for at in segment.placements]
    assert sorted(placed) == [n for n, turn in enumerate(turns) if not turn.untrained and len(turn.response_ids)]
    for segment in segments:
        for at in segment.placements:
            turn = turns[at.turn]
            assert segment.token_ids[: at.start].tolist() == turn.prompt_ids.tolist()
            assert segment.token_ids[at.start : at.end].tolist() == turn.response_ids.tolist()
            assert segment.loss_mask[at.start : at.end].all()
        trained = sum(len(turns[at.turn].response_ids) for at in segment.placements)
        assert int(segment.loss_mask.sum()) == trained
    assert all(len(token_array(turn.prompt_ids)) for turn in turns)


# -- what a client does, and what must hold ---------------------------------------------------------------------------


def calling(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def posted_at_once(
    case: Case, url: str, times: int, *, answered: int, elsewhere: Sequence[str] = ()
) -> tuple[list[httpx.Response], list[httpx.Response]]:
    """The same request, so many times while the engine holds its answers until ``answered`` of them are answered
    without it; these responses, and then the others' with those of ``elsewhere``."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(times + len(elsewhere)) as pool:
        client.post(f"{case.engine.url}/pause_generation", json={}).raise_for_status()
        try:
            futures = [pool.submit(client.post, url, json=BODY) for _ in range(times)]
            others = [pool.submit(client.post, address, json=BODY) for address in elsewhere]
            first = [*islice(as_completed(futures, timeout=60), answered)]
        finally:
            client.post(f"{case.engine.url}/continue_generation", json={}).raise_for_status()
        later = [future for future in futures if future not in first]
        return [future.result() for future in first], [future.result() for future in (*later, *others)]


def chat(case: Case, body: Any = BODY, **options: Any) -> httpx.Response:
    """The response to a chat completion."""
    return httpx.post(f"{case.llm.endpoint}/chat/completions", json=body, **options)


def post(case: Case, path: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{case.llm.endpoint}/{path}", json={"model": "m", **body}, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.json()


def prompts(case: Case) -> list[str]:
    return [case.tokenizer.decode(payload["input_ids"]) for payload in case.payloads]


def offered_tools(case: Case) -> dict[str, Any]:
    """The tools that the last prompt begins with, by name."""
    head, _, _ = prompts(case)[-1].removeprefix("<|im_start|>system\n").partition("<tool_call>")
    tools = [json.loads(line)["function"] for line in head.splitlines() if line.startswith("{")]
    return {tool["name"]: tool for tool in tools}


def gateway_counts(case: Case) -> dict[str, int]:
    """What the gateway has counted of the rollout."""
    return json.loads(case.summary["agl_slime.gateway.seen"])


def left_out(case: Case) -> set[str]:
    return {what.removeprefix("left_out/") for what in gateway_counts(case) if what.startswith("left_out/")}


def one_sample(case: Case, turns: int = 2) -> None:
    assert [turn.fork for turn in case.turns] == [None] * turns
    assert len(case.segments) == 1
    trained_once(case.turns, case.segments)
