"""Random trees of conversations over real vocabularies and templates: an agent edits its conversations as agents do,
and an engine answers with tokens that no tokenizer would give. Each sampled token is trained once, recorded prompts are
the prompts that were sent, and edits of form alone make no fork."""

from __future__ import annotations

import copy
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agl_slime.agent.access import EngineAccess
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
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
            kind = self.rng.randrange(4)
            calls = message.get("tool_calls") or []
            if kind == 1 and message.get("content"):
                message["content"] = [{"type": "text", "text": message["content"] + " \n"}]
            elif kind == 2:
                message.pop("reasoning_content", None)
                for call in calls:
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            elif kind == 3 and calls:
                message["content"] = None
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
