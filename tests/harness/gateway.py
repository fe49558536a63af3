"""A gateway over a scripted engine, and its spans as turns."""

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
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import QUICK, ScriptedEngine
from tests.harness.tokenizers import TEMPLATE, small_tokenizer

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
    """A gateway with one open attempt; ``llm`` is the agent's."""

    gateway: Gateway
    engine: ScriptedEngine
    attempt: Attempt
    llm: LLM
    tokenizer: Any
    resources: dict[str, Any]
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
        """The last span's attributes of the rollout as a whole."""
        return self.spans[-1].attributes

    @property
    def payloads(self) -> list[dict[str, Any]]:
        """The engine's requests."""
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
    *answers: str | list[int],
    settings: GatewaySettings | None = None,
    template: str = TEMPLATE,
    sampling: dict[str, Any] | None = None,
    judge: bool = False,
    tokenizer: Any = None,
    **engine_options: Any,
) -> Iterator[Case]:
    """A gateway with one open attempt over ``engine_saying``."""
    tokenizer = tokenizer or small_tokenizer(template)
    engine = engine_saying(tokenizer, answers, **engine_options)
    access = EngineAccess(tokenizer=tokenizer, settings=QUICK)
    with in_thread(engine), Gateway(settings, access=access) as gateway:
        spans: list[Any] = []
        parameters = {"temperature": 1.0, "max_new_tokens": 256, **(sampling or {})}
        llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters=parameters)
        resources = {"main_llm": llm, **({"judge": llm.model_copy()} if judge else {})}
        attempt, served = gateway.open("ro-1", "at-1", resources, writer(spans))
        assert attempt is not None
        yield Case(gateway, engine, attempt, served["main_llm"], tokenizer, served, spans)  # type: ignore[arg-type]


def engine_saying(
    tokenizer: Any, answers: Sequence[str | list[int]] | Callable[[str], str], **options: Any
) -> ScriptedEngine:
    """An engine that gives each new prompt the next of ``answers``, texts or token ids, or their result for it, and the
    end token; the last answer repeats. A prompt that ends within an answer gets the rest of it."""
    partial: dict[int, tuple[list[int], int]] = {}  # by the hash of prompt and partial answer: the answer, its length
    pending = [] if callable(answers) else list(answers)

    def next_id(ids: Sequence[int]) -> int:
        answer, n = partial.get(hash(tuple(ids)), ([], 0))
        if not answer:
            if callable(answers):
                new = answers(tokenizer.decode(list(ids)))
            else:
                new = pending.pop(0) if pending else answers[-1]
            new_ids = tokenizer.encode(new, add_special_tokens=False) if isinstance(new, str) else new
            answer = [*new_ids, tokenizer.eos_token_id]
        if n + 1 < len(answer):
            partial[hash((*ids, answer[n]))] = answer, n + 1
        return answer[n]

    return ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        next_id=next_id,
        **options,
    )


def trained_once(turns: Sequence[Turn], segments: Sequence[Segment]) -> None:
    """Each sampled token of a trained turn has mask 1 exactly once, at its own position."""
    placed = [placement.turn for segment in segments for placement in segment.placements]
    assert sorted(placed) == [n for n, turn in enumerate(turns) if not turn.untrained and len(turn.response_ids)]
    for segment in segments:
        for placement in segment.placements:
            turn = turns[placement.turn]
            sampled = slice(placement.start, placement.end)
            assert segment.token_ids[: placement.start].tolist() == turn.prompt_ids.tolist()
            assert segment.token_ids[sampled].tolist() == turn.response_ids.tolist()
            assert segment.loss_mask[sampled].all()
        trained = sum(len(turns[placement.turn].response_ids) for placement in segment.placements)
        assert int(segment.loss_mask.sum()) == trained
    assert all(len(turn.prompt_ids) for turn in turns)


# -- requests of a client ----------------------------------------------------------------------------------------------


def calling(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def posted_at_once(
    case: Case, url: str, times: int, *, answered: int, elsewhere: Sequence[str] = ()
) -> tuple[list[httpx.Response], list[httpx.Response]]:
    """The same request ``times`` times; the engine is paused until ``answered`` of them have a response. Returns these
    responses, and then all the later ones and the ones of ``elsewhere``."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(times + len(elsewhere)) as pool:
        client.post(f"{case.engine.url}/pause_generation", json={}).raise_for_status()
        try:
            futures = [pool.submit(client.post, url, json=BODY) for _ in range(times)]
            further = [pool.submit(client.post, address, json=BODY) for address in elsewhere]
            first = [*islice(as_completed(futures, timeout=60), answered)]
        finally:
            client.post(f"{case.engine.url}/continue_generation", json={}).raise_for_status()
        later = [future for future in futures if future not in first]
        return [future.result() for future in first], [future.result() for future in (*later, *further)]


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
    """The tools in the last prompt's system message, by name."""
    head, _, _ = prompts(case)[-1].removeprefix("<|im_start|>system\n").partition("<tool_call>")
    tools = [json.loads(line)["function"] for line in head.splitlines() if line.startswith("{")]
    return {tool["name"]: tool for tool in tools}


def gateway_counts(case: Case) -> dict[str, int]:
    """The gateway's counts of the rollout."""
    return json.loads(case.summary["agl_slime.gateway.seen"])


def left_out(case: Case) -> set[str]:
    return {name.removeprefix("left_out/") for name in gateway_counts(case) if name.startswith("left_out/")}


def one_sample(case: Case, turns: int = 2) -> None:
    assert [turn.fork for turn in case.turns] == [None] * turns
    assert len(case.segments) == 1
    trained_once(case.turns, case.segments)
