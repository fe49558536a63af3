"""Random trees of conversations over real vocabularies and templates: an agent edits its conversations as agents do,
and an engine answers with tokens that no tokenizer would give. Each sampled token is trained once, recorded prompts are
the prompts that were sent, and edits of form alone make no fork. Which answers are trained is the same answer by answer
and by a search of all.

Then many clients of a few rollouts at once, over all four protocols: streamed and not, given up in the middle, sent
again, refused. Each sampled token is trained at most once and is the engine's, nothing is a 500, no answer goes to two
requests, and the attempt closes."""

import asyncio
import copy
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.agent.access import EngineAccess
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.resumable import Progress
from agl_slime.errors import EngineServerError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.tree import TimedAnswer, UntrainedTurns
from agl_slime.support.agl import LLM
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.gateway.protocols import PROTOCOLS, assistant, body_of, delta_of, text_of, user
from tests.harness.chat_templates import TEMPLATES
from tests.harness.gateway import WEATHER, trained_once, writer
from tests.harness.vocabularies import chat_tokenizer

_TEXT = "the| cat|é|日本| 12|\n|  |```|🙂| a|b|_x|</| <b>|\t|'s|ﬁ|…"
_WORDS = _TEXT.split("|")
_PROTOCOL = ChatCompletions()


@dataclass
class RandomEngine:
    """Answers of random words, each encoded by itself, with thinking and calls of tools now and then."""

    tokenizer: Any
    rng: random.Random
    thinks: bool
    opened: bool
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    _encoded: dict[str, list[int]] = field(default_factory=dict)

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.prompts.append(tuple(input_ids))
        rng = self.rng
        # no two answers are the same to a client
        unique = list(self.tokenizer.encode(f"{rng.randrange(1 << 32):08x}", add_special_tokens=False))
        pieces = self.words(1, 6)
        thinks = self.opened or (self.thinks and rng.random() < 0.5)
        if thinks:
            pieces = [*([] if self.opened else ["<think>"]), "\n", *pieces, "\n", "</think>", "\n\n", *self.words(1, 4)]
        for _ in range(rng.choice((0, 0, 1, 2))):
            call = {"name": "weather", "arguments": {"city": "".join(self.words(0, 3)), "n": rng.randrange(9)}}
            pieces += ["<tool_call>", "\n", json.dumps(call, ensure_ascii=rng.random() < 0.5), "\n", "</tool_call>"]
        ids = [token for piece in pieces for token in self._encode(piece)]
        cut = rng.random() < 0.2 and not thinks
        end = self.tokenizer.eos_token_id
        ids = [*unique, *ids[: rng.randrange(len(ids) + 1)]] if cut else [*ids, *unique, end]
        text = self.tokenizer.decode(ids if cut else ids[:-1], skip_special_tokens=False)
        log_probs = tuple(-rng.randrange(1, 64) / 16 for _ in ids)
        finish: dict[str, Any] = {"finish_reason": "length"}
        if not cut:
            finish = {"finish_reason": "stop", "matched_stop": end}
        return Generation(output_ids=tuple(ids), log_probs=log_probs, text=text, **finish)

    def _encode(self, piece: str) -> list[int]:
        if piece not in self._encoded:
            self._encoded[piece] = self.tokenizer.encode(piece, add_special_tokens=False)
        return self._encoded[piece]

    def words(self, least: int, most: int) -> list[str]:
        return [self.rng.choice(_WORDS) for _ in range(self.rng.randrange(least, most + 1))]


class FixedAccess(EngineAccess):
    def __init__(self, tokenizer: Any, engine: RandomEngine) -> None:
        super().__init__(tokenizer=tokenizer)
        self._engine = engine

    def client(self, llm: LLM, tokenizer: Any) -> Any:
        return self._engine


@dataclass
class Conversation:
    """The messages as a client received them. ``turn`` is the last answer among them."""

    messages: list[dict[str, Any]]
    turn: int | None = None
    intact: bool = True  # edits, if any, are covered by normalisation


@dataclass
class Audit:
    """One rollout of such an agent. ``plain``: the template writes history as it was."""

    tokenizer: Any
    rng: random.Random
    plain: bool
    thinks: bool = True
    opened: bool = False
    spans: list[Any] = field(default_factory=list)
    continued: dict[int, int] = field(default_factory=dict)  # by turn: the turn whose conversation it continues

    def __post_init__(self) -> None:
        self.engine = RandomEngine(self.tokenizer, self.rng, self.thinks, self.opened)
        llm = LLM(endpoint="http://127.0.0.1:9", model="m", sampling_parameters={"max_new_tokens": 4096})
        self.attempt = Attempt(
            rollout_id="ro",
            attempt_id="at",
            roles={"main_llm": llm},
            settings=GatewaySettings(),
            access=FixedAccess(self.tokenizer, self.engine),
            write=writer(self.spans),
        )
        self.conversations: list[Conversation] = []

    async def run(self, turns: int) -> None:
        while len(self.engine.prompts) < turns:
            await self._step()
        self.check()

    async def _step(self) -> None:
        rng = self.rng
        if not self.conversations or rng.random() < 0.1:
            system = (
                [{"role": "system", "content": f"You are {self.rng.randrange(999)}."}] if rng.random() < 0.7 else []
            )
            conversation = Conversation([*system, {"role": "user", "content": self._text()}])
            self.conversations.append(conversation)
        else:
            conversation = self._changed(rng.choice(self.conversations[-6:]))
        n = rng.choice((1, 1, 1, 2))
        first = len(self.engine.prompts)
        for turn, message in enumerate(await self.ask(self._resent(conversation.messages), n=n), first):
            # an answer that continues a message, sent back as a message of its own, is an edit
            whole = conversation.messages[-1]["role"] != "assistant"
            branch = Conversation([*conversation.messages, message], turn=turn, intact=whole)
            if conversation.turn is not None and conversation.intact:
                self.continued[turn] = conversation.turn
            self.conversations.append(branch)

    async def ask(self, messages: list[dict[str, Any]], *, n: int = 1) -> list[dict[str, Any]]:
        """The messages of the answers."""
        call = _PROTOCOL.read({"messages": messages, "tools": [WEATHER], "n": n})
        work = self.attempt.respond(call, role="main_llm", key=secrets.token_bytes(8), retry=False)
        answered = await work.result()
        return [choice["message"] for choice in _PROTOCOL.answer({}, answered, str)["choices"]]

    def _changed(self, old: Conversation) -> Conversation:
        """The conversation as an agent continues it."""
        new = Conversation(copy.deepcopy(old.messages), old.turn, old.intact)
        kind = self.rng.random()
        answers = [n for n, message in enumerate(new.messages) if message["role"] == "assistant"]
        if kind < 0.1 and answers:  # its question asked once more
            del new.messages[self.rng.choice(answers) :]
            new.turn, new.intact = None, False
            return new
        if kind < 0.2 and answers:  # an answer rewritten
            index = self.rng.choice(answers)
            message = new.messages[index]
            message["content"], new.intact = "rewritten " + self._text(), False
            for _ in message.pop("tool_calls", ()):  # a result without its call is refused
                del new.messages[index + 1 : index + 2]
        elif kind < 0.25 and len(answers) > 1:  # a summary in place of old turns
            del new.messages[1 : answers[-1]]
            new.messages.insert(1, {"role": "user", "content": "so far: " + self._text()})
            new.intact = False
        for message in () if new.intact else new.messages:  # an edited history is as given
            message.pop("reasoning_content", None)
        last = new.messages[-1]
        if last.get("tool_calls"):
            for call in last["tool_calls"]:
                new.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._text()})
        else:
            new.messages.append({"role": "user", "content": self._text()})
        return new

    def _resent(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The history as some client would serialize it."""
        sent = []
        for message in copy.deepcopy(messages):
            kind = self.rng.randrange(3)
            calls = message.get("tool_calls") or []
            if kind == 1 and message.get("content"):
                message["content"] = [{"type": "text", "text": message["content"] + " \n"}]
            elif kind == 2:
                message.pop("reasoning_content", None)
                for call in calls:
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            sent.append(message)
        return sent

    def _text(self) -> str:
        return "".join(self.engine.words(1, 5)).strip() + f" {self.rng.randrange(1 << 32):08x}"

    def check(self) -> None:
        turns = decode_turns(self.spans)
        prompts = sorted(tuple(turn.prompt_ids.tolist()) for turn in turns)
        assert prompts == sorted(self.engine.prompts), "a prompt that is written is not the one that was sent"
        trained_once(turns, merge_turns(turns))
        for number, base in self.continued.items():
            turn, old = turns[number], turns[base]
            if self.plain:
                assert turn.prompt_ids[: old.length].tolist() == old.token_ids.tolist(), f"turn {number}, {base}"


# templates that write history verbatim
PLAIN = ("chatml", "groups_tools", "role_markers", "default_system", "ends_with_token")
CASES = [
    ("qwen", "groups_tools"),
    ("deepseek", "chatml"),
    ("anthropic", "role_markers"),
    ("deepseek", "reasoner"),
    ("qwen", "drops_thinking"),
    ("anthropic", "ends_with_token"),
]


async def audit(vocabulary: str, template: str, *, seed: int, turns: int) -> Audit:
    opened = TEMPLATES[template].opens_thinking
    done = Audit(chat_tokenizer(vocabulary, template), random.Random(seed), template in PLAIN, opened=opened)
    await done.run(turns)
    return done


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_every_sampled_token_is_trained_once(vocabulary: str, template: str) -> None:
    for seed in range(3):
        assert (await audit(vocabulary, template, seed=seed, turns=40)).continued


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_a_hundred_thousand_turns(vocabulary: str, template: str) -> None:
    for seed in range(170):
        await audit(vocabulary, template, seed=1000 + seed, turns=100)


@dataclass(eq=False)
class Answer:
    """As ``tree.Node``."""

    turn: int
    continued: bool = False


def searched(answers: list[TimedAnswer], branches: str) -> list[int]:
    if branches == "all":
        return []
    if branches == "last":
        parents = {answer.node: answer.parent for answer in answers}
        path, node = [], answers[-1].node
        while node is not None:
            path.append(node)
            node = parents[node]
        return sorted(answer.node.turn for answer in answers if answer.node not in path)
    last_request: dict[Any, int] = {}
    for answer in answers:
        last_request[answer.place] = max(last_request.get(answer.place, 0), answer.requested_at)
    repeated = (answer for answer in answers if last_request[answer.place] > answer.answered_at)
    return sorted(answer.node.turn for answer in repeated if not answer.node.continued)


@pytest.mark.parametrize("branches", ["used", "last", "all"])
@given(st.data())
def test_left_out_answers_are_the_same_incrementally_and_by_full_search(branches: Any, data: st.DataObject) -> None:
    """Requests begin and are answered in any order; each continues an answer that existed when it began, or asks for
    that answer once more."""
    left_out, answers, clock = UntrainedTurns(branches), [], 0
    pending: list[tuple[int, Any, bool]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if pending else 1, 2))):
            clock += 1
            parent = data.draw(st.sampled_from([None, *(answer.node for answer in answers)]))
            pending.append((clock, parent, data.draw(st.booleans())))
        begun, parent, extends = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        clock += 1
        if parent is not None and extends:
            parent.continued = True
        place: Any = (0, None if parent is None else parent.turn)
        node: Any = Answer(turn)
        answers.append(TimedAnswer(node, parent, place, begun, clock))
        left_out.add(answers[-1])
        assert list(left_out.turns) == searched(answers, branches)


RETRY = {"x-stainless-retry-count": "1"}


class StormyEngine(RandomEngine):
    """Reports its answers token by token, fails now and then, and keeps a log of its samples."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        super().__init__(tokenizer, rng, thinks=False, opened=False)
        self.log: list[tuple[tuple[int, ...], Generation]] = []
        self.running = 0

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        if self.rng.random() < 0.05:
            raise EngineServerError("full")
        done = await super().generate(input_ids, sampling)
        self.log.append((tuple(input_ids), done))
        report = options.get("on_progress")
        self.running += 1
        try:
            for n in range(1, len(done.output_ids)):
                await asyncio.sleep(self.rng.choice((0, 0, 0.001)))
                if report is not None:
                    text = self.tokenizer.decode(done.output_ids[:n], skip_special_tokens=False)
                    ids: Any = {"output_ids": done.output_ids[:n], "log_probs": done.log_probs[:n], "text": text}
                    part = Generation(**ids, finish_reason="abort")
                    report(Progress(text, lambda part=part: part))
        finally:
            self.running -= 1
        return done

    async def aclose(self) -> None:
        pass


class Client:
    """One conversation with the model, in one protocol, by a user who is easily distracted."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, rng: random.Random) -> None:
        self.http, self.endpoint, self.rng = http, endpoint, rng
        self.path = rng.choice(tuple(PROTOCOLS))
        self.messages: list[dict[str, Any]] = []
        self.whole: list[str] = []  # answers that were read to their ends

    async def step(self) -> None:
        rng = self.rng
        self.messages.append(user(f"{rng.randrange(1 << 40):x}?"))
        body = body_of(self.path, self.messages, stream=rng.random() < 0.6)
        kind = rng.random()
        if kind < 0.15:  # the same at once, as agents that take the best of several
            answers = await asyncio.gather(*(self.ask(body, patience=99, limit=99_999) for _ in range(3)))
        else:
            patience, limit = (99, 99_999) if kind < 0.6 else (rng.uniform(0.001, 0.02), rng.randrange(1, 9))
            answers = [await self.ask(body, patience=patience, limit=limit)]
        if answer := rng.choice(answers).strip():
            self.messages.append(assistant(answer))
        else:
            self.messages.pop()

    async def ask(self, body: dict[str, Any], *, patience: float, limit: int) -> str:
        """The text that was read; the request is sent again when it is refused or takes too long."""
        headers = dict.fromkeys(RETRY, "0")  # as the clients' packages send with a first try
        for _ in range(5_000):
            try:
                text = await asyncio.wait_for(self.read(body, headers, limit), patience)
            except TimeoutError:
                text, patience = None, 99
            if text is not None:
                return text
            headers = RETRY
            await asyncio.sleep(self.rng.uniform(0.005, 0.05))
        raise AssertionError("refused for ever")

    async def read(self, body: dict[str, Any], headers: dict[str, str], limit: int) -> str | None:
        async with self.http.post(f"{self.endpoint}/{self.path}", json=body, headers=headers) as answer:
            assert answer.status in (200, 429), (answer.status, await answer.text())
            if answer.status == 429:
                return None
            if not body["stream"]:
                self.whole.append(text_of(self.path, await answer.json()))
                return self.whole[-1]
            text, events = "", 0
            async for line in answer.content:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    text, events = text + delta_of(json.loads(line[6:])), events + 1
                if events >= limit:
                    answer.close()
                    return text
            self.whole.append(text)
            return text


def check(turns: Sequence[Turn], engine: StormyEngine) -> None:
    """Each turn is a sample of the engine for its prompt, or the beginning of one; no sample is two turns."""
    unused = list(engine.log)
    for turn in sorted(turns, key=lambda turn: turn.finish_reason == "abort"):
        prompt, ids = tuple(turn.prompt_ids.tolist()), tuple(turn.response_ids.tolist())
        assert turn.log_probs is not None
        sample = prompt, ids, tuple(turn.log_probs.tolist())
        size = len(ids) if turn.finish_reason == "abort" else None
        samples = [(sent, done.output_ids[:size], done.log_probs[:size]) for sent, done in unused]
        assert sample in samples, f"{ids} was not sampled after {prompt}"
        del unused[samples.index(sample)]


async def storm(seed: int, *, rollouts: int, clients: int, steps: int) -> int:
    rng = random.Random(seed)
    tokenizer = chat_tokenizer("qwen", "chatml")
    engine = StormyEngine(tokenizer, rng)
    llm = LLM(endpoint="http://127.0.0.1:9", model="m", sampling_parameters={"max_new_tokens": 4096})
    settings = GatewaySettings(max_in_flight=4, branches=rng.choice(("used", "all", "last")))
    with Gateway(settings, access=FixedAccess(tokenizer, engine)) as gateway:
        spans: list[list[Any]] = [[] for _ in range(rollouts)]
        opened = [gateway.open(f"ro-{n}", "at", {"main_llm": llm}, writer(target)) for n, target in enumerate(spans)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            people = [
                Client(http, served["main_llm"].endpoint, random.Random(rng.random()))  # type: ignore[union-attr]
                for _, served in opened
                for _ in range(clients)
            ]

            async def run(client: Client) -> None:
                for _ in range(steps):
                    await client.step()

            await asyncio.wait_for(asyncio.gather(*map(run, people)), 300)
            last = [asyncio.ensure_future(client.step()) for client in people]  # pending when the attempts close
            await asyncio.sleep(0.01)
            for attempt, _ in opened:
                assert attempt is not None
                await asyncio.wait_for(gateway.close(attempt), 4)
                assert attempt.closed
                assert not attempt._pending
            assert not gateway._by_secret
            for task in last:
                task.cancel()
            await asyncio.gather(*last, return_exceptions=True)
        assert engine.running == 0
        answers = [text.strip() for client in people for text in client.whole]
        assert len(set(answers)) == len(answers), "an answer went to two requests"
        turns = [decode_turns(written) for written in spans]
        for rollout in turns:
            trained_once(rollout, merge_turns(rollout))
        check([turn for rollout in turns for turn in rollout], engine)
    return sum(map(len, turns))


async def test_each_sampled_token_is_trained_at_most_once_whatever_clients_do() -> None:
    for seed in range(2):
        assert await storm(seed, rollouts=3, clients=5, steps=6) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_the_same_for_longer(seed: int) -> None:
    assert await storm(1000 + seed, rollouts=4, clients=4, steps=15) > 200
