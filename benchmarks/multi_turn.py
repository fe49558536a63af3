"""A tool conversation of 20 turns and 32,000 tokens: CPU of its prompts, its size in the store, CPU of its conversion.

    python benchmarks/multi_turn.py [--turns 20] [--tokens 32000]

Beside our figures: for the prompts, rendering and tokenizing the whole conversation in each turn; for storing and
converting, Agent Lightning's own form (lists of ids) and its ``TracerTraceToTriplet`` on the same spans, and nothing
but the ids and log-probs themselves as the limit. No engine runs; answers are random words.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from agl_slime.cli.demo.formats import LookupDemonstrations
from agl_slime.engine.client.generation import Generation
from agl_slime.support.agl import Rollout, Span
from agl_slime.tokens.attributes import GENERATE_SPAN
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.converter import convert_rollout
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.turn import Turn
from agl_slime.tools.demo_policy.tokenizer import train_tokenizer

WORDS = (
    "look",
    "again",
    "the",
    "tool",
    "returned",
    "a",
    "row",
    "of",
    "numbers",
    "that",
    "are",
    "not",
    "what",
    "was",
    "asked",
    "for",
    "in",
    "turn",
)


@dataclass
class Made:
    """The turns of one rollout, and the seconds of its prompts: ours, and rendered again each time."""

    turns: list[Turn]
    ours_s: float
    rendered_s: float
    forks: int


def make_conversation(tokenizer: Any, *, turns: int, tokens: int, seed: int = 0) -> Made:
    rng = random.Random(seed)
    per_turn = tokens // turns

    def text(n_tokens: int) -> str:
        words: list[str] = []
        length = 0
        while length < n_tokens:
            words += (rng.choice(WORDS) for _ in range(16))
            length = (
                len(tokenizer.encode(" ".join(words), add_special_tokens=False))
                if len(words) % 64 == 0
                else length + 40
            )
        return tokenizer.decode(tokenizer.encode(" ".join(words), add_special_tokens=False)[:n_tokens])

    context = ChatContext(
        template=ChatTemplate(tokenizer=tokenizer),
        messages=[{"role": "system", "content": text(200)}, {"role": "user", "content": text(100)}],
    )
    made: list[Turn] = []
    ours = rendered = 0.0
    for _ in range(turns):
        started = time.perf_counter()
        prompt = context.prompt_ids()
        ours += time.perf_counter() - started
        started = time.perf_counter()
        whole = tokenizer.apply_chat_template(context.messages, tokenize=False, add_generation_prompt=True)
        tokenizer.encode(whole, add_special_tokens=False)
        rendered += time.perf_counter() - started
        said = text(per_turn // 4)
        ids = (*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id)
        log_probs = tuple(-rng.random() * 3 for _ in ids)
        generation = Generation(
            output_ids=ids, log_probs=log_probs, text=said, finish_reason="stop", matched_stop=tokenizer.eos_token_id
        )
        messages = list(context.messages)
        started = time.perf_counter()
        context.add_answer(prompt, generation)
        ours += time.perf_counter() - started
        made.append(
            Turn.from_generation(
                context.token_ids[: len(prompt)],
                generation,
                messages=messages,
                base_turn=len(made) - 1 if made else None,
                kept_tokens=context.kept_tokens,
                fork=context.fork,
            )
        )
        context.add({"role": "tool", "content": text(per_turn - per_turn // 4 - 20)})
    return Made(made, ours, rendered, context.forks.total())


def spans_of(turns: list[Turn], *, list_form: bool) -> list[Span]:
    """As the runner writes them: one span per call, and the reward."""
    encoder = TurnEncoder()
    attributes = [(GENERATE_SPAN, lists_of(turn) if list_form else encoder.encode(turn)) for turn in turns]
    attributes.append(
        ("agentlightning.annotation", {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0})
    )
    common: dict[str, Any] = {"rollout_id": "ro-0", "attempt_id": "at-0"}
    return [
        Span.from_attributes(
            **common, sequence_id=i, name=name, attributes=values, start_time=float(i), end_time=i + 0.5
        )
        for i, (name, values) in enumerate(attributes)
    ]


def lists_of(turn: Turn) -> dict[str, Any]:
    """The form that Agent Lightning's adapters read."""
    assert turn.log_probs is not None
    return {
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "response_token_ids": turn.response_ids.tolist(),
        "logprobs.content": json.dumps([{"logprob": value} for value in turn.log_probs.tolist()]),
        "gen_ai.response.finish_reasons": [turn.finish_reason],
    }


def measure(function: Callable[[], Any], *, repeats: int = 5) -> tuple[Any, float, float]:
    """The result, the median seconds, and the most memory in MB that one call held at a time."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - started)
        del result
    gc.collect()
    tracemalloc.start()
    result = function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, statistics.median(seconds), peak / 1e6


def stored_bytes(spans: list[Span]) -> int:
    return sum(len(span.model_dump_json()) for span in spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32_000)
    options = parser.parse_args()
    from agentlightning.adapter import TracerTraceToTriplet

    source = LookupDemonstrations()
    texts = [
        str(message["content"])
        for conversation in source.demonstrations(random.Random(0), 32, quality="clean")
        for message in conversation
    ]
    tokenizer = train_tokenizer([*texts, " ".join(WORDS * 20)], vocab_size=360, max_length=200_000)
    made = make_conversation(tokenizer, turns=options.turns, tokens=options.tokens)
    total = len(made.turns[-1].token_ids)
    sampled = sum(len(turn.response_ids) for turn in made.turns)
    console = Console()
    console.print(f"{len(made.turns)} turns, {total:,} tokens, {sampled:,} of them sampled, {made.forks} forks")

    prompts = Table("prompts of all turns", "ms", title="Making prompts")
    prompts.add_row("agl-slime: earlier ids and the template's additions", f"{made.ours_s * 1e3:.1f}")
    prompts.add_row("rendered and tokenized again in each turn", f"{made.rendered_s * 1e3:.1f}")
    console.print(prompts)

    packed, listed = spans_of(made.turns, list_form=False), spans_of(made.turns, list_form=True)
    rollout = Rollout(rollout_id="ro-0", input={"label": "x"}, start_time=0.0, mode="train", metadata={})
    adapter = TracerTraceToTriplet(llm_call_match=GENERATE_SPAN.replace(".", r"\."))
    ours, ours_s, ours_mb = measure(lambda: convert_rollout(rollout, packed, tokenizer))
    same, same_s, same_mb = measure(lambda: convert_rollout(rollout, listed, tokenizer))
    triplets, theirs_s, theirs_mb = measure(lambda: adapter.adapt(listed))
    raw = total * 4 + sampled * 4
    table = Table(
        "form and reader", "bytes in the store", "conversion ms", "peak MB", "out", title="Storing and converting"
    )
    table.add_row("ids and log-probs alone (limit)", f"{raw:,}", "", "", "")

    def add(name: str, spans: list[Span], seconds: float, peak_mb: float, out: str) -> None:
        table.add_row(name, f"{stored_bytes(spans):,}", f"{seconds * 1e3:.1f}", f"{peak_mb:.1f}", out)

    add("agl-slime", packed, ours_s, ours_mb, f"{len(ours.samples)} Sample")
    add("agl-slime on Agent Lightning's lists", listed, same_s, same_mb, f"{len(same.samples)} Sample")
    add("TracerTraceToTriplet", listed, theirs_s, theirs_mb, f"{len(triplets)} triplets")
    console.print(table)
    trained = sum(sum(sample.loss_mask or ()) for sample in ours.samples)
    console.print(f"trained tokens {trained:,}, sampled {sampled:,}: {'equal' if trained == sampled else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
