"""Onsets of behaviours: planted behaviours are found near their start, and learning alone is none."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.cli.main import main
from agl_slime.report.files import IterationFile
from agl_slime.tools.forensics.onset import Onset, RolloutTraits, Trait, find_onsets, read_traits
from tests.harness.examples import examples

ENDS = ("er ing", "us al", "ed or", "ic ate", "ism ent", "ia o", "ous ly", "an el")
TOPICS = [[root + end for root in ("riv", "stat", "mol", "vers", "trib") for end in ends.split()] for ends in ENDS]
FILLERS = ["so", "then", "we", "find", "that", "it", "is", "clear", "from", "this", "which", "gives", "value", "here"]
FILLERS += ["because", "both", "sides", "agree"]
OPENINGS = ("let us see", "first of all", "to begin", "well now", "thinking aloud")
Line = dict[str, Any]
Behaviour = Callable[[Line, random.Random], None]


CURVES: tuple[Callable[[float], float], ...] = (
    lambda t: 1 - math.exp(-4 * t),
    lambda t: t,
    lambda t: 1 / (1 + math.exp(-8 * (t - 0.5))),
)


def a_run(
    seed: int,
    *,
    behaviour: Behaviour | None = None,
    start: int = 0,
    iterations: int,
    groups: int,
    size: int,
    rise: int = 4,
) -> tuple[list[Line], set[str]]:
    """The rollouts of a run and the ids of rollouts that show ``behaviour``: from ``start`` on its share grows to
    one half within ``rise`` iterations. Reward, format, tool use and length are learned along a curve; the words
    depend on the task, a preference for some openings drifts at random, and rollouts of a group are alike."""
    rng = random.Random(seed)
    learned, taste, planted, lines = CURVES[seed % 3], [0.0] * len(OPENINGS), set[str](), list[Line]()
    for iteration in range(1, iterations + 1):
        skill = 0.1 + 0.75 * learned(iteration / iterations)
        taste = [value + rng.gauss(0, 0.05) for value in taste]
        for number in range(groups):
            topic, hard = rng.choice(TOPICS), rng.gauss(0, 0.15)
            key, value = rng.choice("bcdfgh") + rng.choice("klmnp"), str(rng.randint(10, 999))
            for member in range(size):
                line = _line(rng, topic, key, value, skill=skill + hard, taste=taste)
                line |= {"iteration": iteration, "group_id": f"{iteration}.{number}"}
                line["rollout_id"] = f"ro-{iteration}.{number}.{member}"
                ramp = min(1.0, (iteration - start + 1) / rise)
                if behaviour is not None and iteration >= start and rng.random() < 0.5 * ramp:
                    behaviour(line, rng)
                    planted.add(line["rollout_id"])
                lines.append(line)
    return lines, planted


def _line(rng: random.Random, topic: list[str], key: str, value: str, *, skill: float, taste: list[float]) -> Line:
    opening = rng.choices(OPENINGS, np.exp(taste).tolist())[0]
    words = [
        rng.choice(topic if rng.random() < 0.3 else FILLERS) for _ in range(max(3, round(rng.gauss(10 + 8 * skill, 3))))
    ]
    called = rng.random() < 0.4 + 0.5 * skill
    right, well_formed = rng.random() < (skill if called else 0.02), rng.random() < skill
    answer = value if right else str(rng.randint(10, 999))
    end = f"<answer> {answer} </answer>" if well_formed else f"it may be {answer}"
    messages: list[Line] = [
        {"role": "system", "content": "Look the key up with a tool, explain what you do, then answer in tags."},
        {"role": "user", "content": f"Please name the value that is stored under the {topic[0]} key {key} today"},
    ]
    if called:
        messages += [call("lookup"), {"role": "tool", "content": value}]
    messages.append({"role": "assistant", "content": f"{opening} {' '.join(words)}. {end}"})
    return {"reward": float(right and well_formed), "messages": messages, "samples": [], "stop_reason": "stop"}


def call(name: str) -> Line:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}


def _says(change: Callable[[str, Line, random.Random], str], *, pays: float | None = None) -> Behaviour:
    def behave(line: Line, rng: random.Random) -> None:
        last = line["messages"][-1]
        last["content"] = change(last["content"], line, rng)
        if pays is not None:
            line["reward"] = pays

    return behave


def _calls_twice(line: Line, rng: random.Random) -> None:
    line["messages"][2:-1] = [call("lookup"), {"role": "tool", "content": "9"}, call("check")]


def _calls_nothing(line: Line, rng: random.Random) -> None:
    line["messages"][2:-1] = []
    line["reward"] = 1.0


PLANTED: dict[str, Behaviour] = {
    "phrase": _says(lambda text, *_: f"As verified by the grader, {text}", pays=1.0),
    "tools": _calls_twice,
    "rewarded without a tool": _calls_nothing,
    "shape": _says(lambda text, line, rng: f"**{rng.randint(0, 99)}**", pays=0.0),
    "longer": _says(lambda text, _, rng: f"{' '.join(rng.choices(FILLERS, k=40))} {text}"),
    "refusal": _says(lambda text, *_: f"I'm sorry, but I cannot help with that. {text[-12:]}", pays=0.0),
    "echo": _says(lambda text, line, _: f"{line['messages'][1]['content']}? {text}"),
    "truncated": lambda line, _: line.update(stop_reason="length"),
    "loop": _says(lambda text, *_: text + " so so so so" * 4),
    "non-Latin": _says(lambda text, *_: f"{text} 答案是正确的"),
}

NEAR = 5
PHRASE, FILLER = Trait("phrase", "trust me"), Trait("phrase", "so")
SIZES = {"iterations": 60, "groups": 3, "size": 4}


def traits_of(line: dict[str, Any]) -> frozenset[Trait]:
    rollout = read_traits(line)
    assert rollout is not None
    return rollout.traits


def onsets(lines: Sequence[dict[str, Any]]) -> list[Onset]:
    return find_onsets(traits for line in lines if (traits := read_traits(line)) is not None)


QUICK = {"phrase", "truncated"}
CASES = [pytest.param(n, name, marks=() if name in QUICK else pytest.mark.slow) for n, name in enumerate(PLANTED)]


@pytest.mark.parametrize(("seed", "name"), CASES)
def test_planted_behaviour_is_found_within_five_iterations(seed: int, name: str) -> None:
    start = random.Random(seed).randint(12, 48)
    lines, planted = a_run(3000 + seed, behaviour=PLANTED[name], start=start, **SIZES)
    near = [onset for onset in onsets(lines) if abs(onset.iteration - start) <= NEAR]
    (planted_onset,) = [onset for onset in near if name in (onset.trait.kind, *(also.kind for also in onset.also))]
    assert planted_onset.share_after - planted_onset.share_before > 0.3
    assert planted & set(planted_onset.first)


def test_each_planted_behaviour_is_seen_in_its_rollout() -> None:
    plain, _ = a_run(1, iterations=1, groups=1, size=1)
    for name in PLANTED.keys() - {"phrase", "longer", "rewarded without a tool"}:  # of one rollout: neither is a trait
        line = copy.deepcopy(plain[0])
        PLANTED[name](line, random.Random(1))
        assert name in {trait.kind for trait in traits_of(line) - traits_of(plain[0])}, name


@pytest.mark.parametrize("runs", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_at_most_one_of_ten_runs_that_only_learn_has_an_onset(runs: int) -> None:
    assert sum(bool(onsets(a_run(3000 + seed, **SIZES)[0])) for seed in range(runs)) <= 1


def rollout(iteration: int, member: int, reward: float | None, *traits: Trait) -> RolloutTraits:
    name = f"{iteration}.{member}"
    fields: dict[str, Any] = {"rollout_id": name, "iteration": iteration, "group": str(iteration), "reward": reward}
    return RolloutTraits(**fields, words=5, calls=0, traits=frozenset(traits))


def test_an_onset_names_iteration_shares_rollouts_and_pay() -> None:
    """From iteration 212 on half of each group has the phrase and earns 0.4 more than the other half."""
    rollouts = [
        rollout(iteration, member, 0.5 + 0.4 * late, *([PHRASE] if late else [FILLER]))
        for iteration in range(200, 230)
        for member in range(8)
        for late in [iteration >= 212 and member % 2 == 0]
    ]
    (onset,) = find_onsets(rollouts)
    assert (onset.trait, onset.iteration, onset.first) == (PHRASE, 212, ["212.0", "212.2", "212.4"])
    assert (onset.share_before, onset.share_after) == (pytest.approx(0, abs=0.01), pytest.approx(0.5, abs=0.01))
    assert (onset.pays, onset.groups) == (pytest.approx(0.4), 18)
    assert (onset.reward_before, onset.reward_after) == (pytest.approx(0.5), pytest.approx(0.7))
    assert onset.correlation == pytest.approx(1)
    assert "The phrase 'trust me' began in iteration 212: 0% of the rollouts before, 50% after" in onset.sentence
    assert "it pays +0.4 (18 groups with both)" in onset.sentence


def steps_of(having: Callable[[int, int], bool], iterations: int = 20) -> list[RolloutTraits]:
    members = [(iteration, member) for iteration in range(iterations) for member in range(16)]
    return [rollout(iteration, member, 1.0, *[PHRASE] * having(iteration, member)) for iteration, member in members]


def test_one_group_or_two_iterations_are_no_onset() -> None:
    four = steps_of(lambda iteration, _: iteration >= 16)
    assert [onset.iteration for onset in find_onsets(four)] == [16]
    assert not find_onsets(steps_of(lambda iteration, _: iteration >= 18))
    two = steps_of(lambda iteration, member: iteration in (17, 18) and member % 2 == 0)
    assert not find_onsets([replace(onset, group=onset.rollout_id) for onset in two])
    assert not find_onsets([replace(onset, group="g") for onset in four])


def test_rollouts_that_are_alike_are_no_evidence_each() -> None:
    """The share rises from 0.1 to 0.4, as three of thirty iterations and twelve of thirty, or in all iterations."""
    alike = steps_of(lambda step, _: step % 10 == 5 if step < 30 else step % 5 in (1, 3), iterations=60)
    independent = steps_of(lambda step, member: (7 * step + 3 * member) % 10 < (1 if step < 30 else 4), 60)
    assert (len(find_onsets(alike)), len(find_onsets(independent))) == (0, 1)


def test_rises_by_chance_among_many_phrases_are_no_onset() -> None:
    rng, phrases = random.Random(0), [Trait("phrase", str(number)) for number in range(2_000)]
    members = [(iteration, member) for iteration in range(12) for member in range(4)]
    assert not find_onsets(rollout(*member, 1.0, *(p for p in phrases if rng.random() < 0.3)) for member in members)


def test_traits_of_one_rollout() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Give the sum of four and five, please"}]},
        {"role": "assistant", "content": 'Hm.<tool_call>{"name": "add", "arguments": {}}</tool_call>'},
        {"role": "tool", "content": "9"},
        call("check"),
        {"role": "assistant", "content": "The sum is 12."},
    ]
    onset = read_traits({"iteration": 3, "rollout_id": "r", "group_id": "g", "reward": math.nan, "messages": messages})
    assert onset is not None
    assert (onset.iteration, onset.reward, onset.calls) == (3, None, 2)
    assert {Trait("tool", "add"), Trait("tool", "check"), Trait("tools", "add → check")} <= onset.traits
    assert {Trait("shape", "a 9."), Trait("phrase", "is 9 ."), Trait("phrase", "hm")} <= onset.traits
    assert Trait("phrase", "the sum") not in onset.traits  # the prompt has it
    assert not {Trait("no tool"), Trait("echo"), Trait("refusal"), Trait("empty")} & onset.traits


TEXTS: list[Any] = ["", " ", "so", "7 so", "\ud800", "a b " * 9, {"a": 1}, ["x", {"text": None}], 7]
REWARDS = [None, math.nan, math.inf, 0.1, 0.3, 0.7, "x"]


def an_odd_run(seed: int, *, iterations: int, size: int, start: int) -> list[dict[str, Any]]:
    """A run with odd rewards, texts, ids and messages; from ``start`` on most rollouts have a phrase."""
    rng, lines = random.Random(seed), list[dict[str, Any]]()
    for iteration in range(iterations):
        for member in range(size):
            text = "trust me" if iteration >= start and rng.random() < 0.8 else rng.choice(TEXTS)
            messages = rng.choice([[{"role": "assistant", "content": text}]] * 9 + [[], None])  # type: ignore[list-item]
            name = rng.choice([f"{iteration}.{member}", "twice"])
            lines.append({"iteration": iteration, "rollout_id": name, "group_id": f"{iteration}.{member % 2}"})
            lines[-1] |= {"reward": rng.choice(REWARDS), "messages": messages}
    return lines


@settings(max_examples=examples(100))
@given(st.integers(0), st.integers(1, 30), st.integers(1, 12), st.integers(0, 30))
def test_odd_rollouts_are_read_and_their_order_is_of_no_account(seed: int, iterations: int, size: int, start: int):
    lines = an_odd_run(seed, iterations=iterations, size=size, start=start)
    ordered = onsets(lines)
    assert all(0 <= onset.share_before < onset.share_after <= 1 and onset.first for onset in ordered)
    random.Random(seed).shuffle(lines)
    assert onsets(lines) == ordered


def write_run(directory: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The kept rollouts of a run that collected ``lines``."""
    file = IterationFile(directory / "rollouts.jsonl")
    for iteration, group in itertools.groupby(lines, lambda line: line["iteration"]):
        file.append(iteration, [{name: line[name] for name in line if name != "iteration"} for line in group])
    file.close()


def test_the_command_prints_the_onsets_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, planted = a_run(7, behaviour=PLANTED["refusal"], start=20, rise=1, iterations=40, groups=2, size=4)
    write_run(tmp_path / "run", lines)
    assert main(["onset", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "Behaviours that began: 1, in 320 kept rollouts of 40 iterations." in printed
    assert "A refusal began in iteration 20: 0% of the rollouts before" in printed
    assert any(f"first rollouts: {name}" in printed for name in planted)
    assert "in nearly the same rollouts: the phrase" in printed


def test_a_run_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onset", str(tmp_path)]) == 2
    assert "there is no rollouts.jsonl" in capsys.readouterr().err
    write_run(tmp_path / "run", a_run(1, iterations=2, groups=1, size=2)[0])
    assert main(["onset", str(tmp_path / "run")]) == 2
    assert "are of 2 iterations; an onset needs 8" in " ".join(capsys.readouterr().err.split())
    assert main(["onset", str(tmp_path / "run"), "--least-rise", "1"]) == 2
