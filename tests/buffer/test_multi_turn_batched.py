"""``MultiTurnRollout``: a test per sentence of its documentation; and code that was written for twinkle's rollouts."""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from agl_slime import errors
from agl_slime.agent.tools import ToolManager
from agl_slime.buffer.batched.api_multi_turn import APIMultiTurnRollout, OpenAI
from agl_slime.buffer.batched.multi_turn import MultiTurnRollout, Trajectory, trajectory_to_samples
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.types import Sample
from tests.agent.multi_turn_agents import CALL, look
from tests.harness.conversations import cut, generation_of
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer


class ScriptedSampler:
    """Answers each prompt from the script of its question, in order; keeps the calls."""

    def __init__(self, tokenizer: Any, script: dict[str, Sequence[Any]]) -> None:
        self.tokenizer = tokenizer
        self.script = {question: list(answers) for question, answers in script.items()}
        self.calls: list[list[list[int]]] = []
        self.sampled: dict[str, list[int]] = {question: [] for question in script}

    def sample(self, inputs: Any, sampling_params: Sequence[SamplingParams]) -> list[Generation]:
        self.calls.append([list(each["input_ids"]) for each in inputs])
        answers = []
        for each, params in zip(inputs, sampling_params, strict=True):
            text = self.tokenizer.decode(each["input_ids"], skip_special_tokens=False)
            question = next(question for question in self.script if f"user\n{question}<" in text)
            answer = self.script[question].pop(0)
            if isinstance(answer, Exception):
                answers.append(answer)
                continue
            generation = cut(generation_of(self.tokenizer, answer), self.tokenizer, params.max_new_tokens)
            self.sampled[question] += generation.output_ids
            answers.append(generation)
        return answers


def run(
    script: dict[str, Sequence[Any]], template: str = "groups_tools", **options: Any
) -> tuple[list[dict[str, Any]], ScriptedSampler]:
    tokenizer = chat_tokenizer("anthropic", template)
    sampler = ScriptedSampler(tokenizer, script)
    rollout = MultiTurnRollout(sampler=sampler, template=tokenizer, **{"tool_manager": ToolManager([look]), **options})
    return rollout([{**asking(question), "id": question} for question in script]), sampler


def asking(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}]}


def trained(trajectory: dict[str, Any]) -> list[int]:
    return [label for label in trajectory["labels"] if label != -100]


def test_all_live_trajectories_are_sampled_in_one_call_per_turn() -> None:
    results, sampler = run({"a": ["One."], "b": [CALL, "Two."], "c": [CALL, CALL, "Three."]})
    assert [len(call) for call in sampler.calls] == [3, 2, 1]
    assert [trajectory["id"] for trajectory in results] == ["a", "b", "c"]
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert sampler.tokenizer.decode(sampler.calls[0][0]).endswith(prompt)
    for trajectory in results:
        assert {"messages", "turns", "stop_reason", "truncated"} <= trajectory.keys()


def test_max_turns_ends_a_trajectory_and_is_six_by_default() -> None:
    ((trajectory,), _) = run({"a": [CALL] * 7})
    assert (trajectory["turns"], trajectory["truncated"], trajectory["end_reason"]) == (6, True, "max_turns")
    ((shorter,), _) = run({"a": [CALL] * 3}, max_turns=2)
    assert shorter["turns"] == 2
    assert shorter["messages"][-1]["role"] == "assistant"  # the last call is not made: no turn would read its result


def test_tool_responses_are_appended_and_bridge_tokens_are_not_trained() -> None:
    ((trajectory,), sampler) = run({"a": [CALL, "Three."]})
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory["messages"][2]["content"] == "three"
    assert trained(trajectory) == sampler.sampled["a"]
    [sample] = trajectory_to_samples(trajectory, reward=0.5, tokenizer=sampler.tokenizer, index=0, rollout_id=0)
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.5)
    assert trained_ids(sample) == sampler.sampled["a"]
    assert sample.metadata["tools"]["calls"] == {"look": 1}
    columns = (trajectory["input_ids"], trajectory["labels"], trajectory["logprobs"])
    assert all(label in (-100, token) for token, label, _ in zip(*columns, strict=True))
    assert all((logprob == 0.0) == (label == -100) for _, label, logprob in zip(*columns, strict=True))
    untrained = [token for token, label, _ in zip(*columns, strict=True) if label == -100]
    assert "<tool_response>\nthree\n</tool_response>" in sampler.tokenizer.decode(untrained)


def test_a_trajectory_that_exceeds_its_tokens_is_truncated() -> None:
    results, _ = run({"a": ["One."], "b " * 300: ["never asked"]}, max_trajectory_tokens=200)
    assert [(trajectory["end_reason"], trajectory["turns"]) for trajectory in results] == [("stop", 1), ("length", 0)]
    assert set(results[1]["labels"]) == {-100}
    ((free,), _) = run({"a": [CALL, "Three."]})
    limit = len(free["input_ids"]) - 2
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, max_trajectory_tokens=limit)
    assert len(trajectory["input_ids"]) == limit
    assert (trajectory["stop_reason"], trajectory["truncated"]) == ("length", True)
    first = len(free["segments"][0]["input_ids"]) - len(trained(free)) + 2  # too short for the result of the tool
    ((stopped,), _) = run({"a": [CALL, "never asked"]}, max_trajectory_tokens=first)
    assert len(stopped["input_ids"]) <= first
    assert (stopped["stop_reason"], stopped["truncated"]) == ("length", True)


def test_tools_and_sampling_may_differ_per_call_and_per_trajectory() -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")

    def tool(value: str) -> Callable[..., str]:
        def look(key: str) -> str:
            """Look."""
            return value

        return look

    trajectories = [{**asking(question), "value": question * 2} for question in "ab"]
    for managers in (
        [ToolManager([tool("aa")]), ToolManager([tool("bb")])],
        lambda trajectory: ToolManager([tool(trajectory["value"])]),
    ):
        sampler = ScriptedSampler(tokenizer, {"a": [CALL, "One."], "b": [CALL, "Two."]})
        results = MultiTurnRollout(sampler=sampler, template=tokenizer)(
            [dict(t) for t in trajectories], tool_manager=managers, sampling_params=SamplingParams(max_new_tokens=100)
        )
        assert [trajectory["messages"][2]["content"] for trajectory in results] == ["aa", "bb"]
    with pytest.raises(errors.ConfigError, match="got 1 for 2"):
        MultiTurnRollout(sampler=sampler, template=tokenizer)(trajectories, tool_manager=[ToolManager([look])])


def test_traces_are_named_by_step_outcome_and_id_and_chosen_by_callbacks(tmp_path: Path) -> None:
    run({"a/../x": ["One."], "b": [CALL]}, trace_dir=tmp_path, max_turns=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-fail-b.json", "0-ok-a_.._x.json"]
    trace = json.loads((tmp_path / "0-fail-b.json").read_text())
    assert trace["messages"][1]["content"] == CALL
    assert "input_ids" not in trace

    script = {"a": ["One."], "b": ["Two."], "c": ["Three."]}
    callbacks = {"trace_callback": lambda t: t["id"] != "a", "success_callback": lambda t: t["id"] == "c"}
    run(script, trace_dir=tmp_path / "some", **callbacks)
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["0-fail-b.json", "0-ok-c.json"]

    def broken(trajectory: Any) -> bool:
        raise RuntimeError("a callback fails")

    ((trajectory, *_), _) = run(script, trace_dir=tmp_path, trace_callback=broken)
    assert trajectory["stop_reason"] == "stop"


def test_rewritten_turns_are_in_the_segments() -> None:
    """A template that leaves thinking out of each answer makes several sequences of one trajectory; each sampled token
    has its label in one of them."""
    tokenizer = chat_tokenizer("anthropic", "reasoner")
    answers = [
        generation_of(tokenizer, f"hm\n</think>\n\n{CALL}"),
        generation_of(tokenizer, "well\n</think>\n\nThree."),
    ]

    class InOrder:
        def sample(self, inputs: Any, sampling_params: Any) -> list[Generation]:
            calls.append(inputs)
            return [answers[len(calls) - 1]]

    calls: list[Any] = []
    rollout = MultiTurnRollout(
        sampler=InOrder(), template=tokenizer, tool_manager=ToolManager([look]), tool_parser="hermes"
    )
    (trajectory,) = rollout([asking("a")])
    assert [trained(segment) for segment in trajectory["segments"]] == [list(answer.output_ids) for answer in answers]
    assert trajectory["input_ids"] == trajectory["segments"][-1]["input_ids"]
    assert len(trajectory_to_samples(trajectory, reward=1.0)) == 2


def test_errors_of_the_engine_are_the_callers() -> None:
    class Broken:
        def sample(self, inputs: Any, sampling_params: Any) -> Any:
            raise errors.EngineServerError("down")

    class Short:
        def sample(self, inputs: Any, sampling_params: Any) -> Any:
            return []

    tokenizer = chat_tokenizer("anthropic", "chatml")
    trajectories = [asking("a")]
    with pytest.raises(errors.EngineServerError, match="down"):
        MultiTurnRollout(sampler=Broken(), template=tokenizer)(trajectories)
    with pytest.raises(errors.EngineProtocolError, match="0 answers to 1 prompts"):
        MultiTurnRollout(sampler=Short(), template=tokenizer)(trajectories)


def test_a_context_overflow_ends_one_trajectory_and_no_other() -> None:
    full = errors.ContextOverflowError("the prompt has 9 tokens")
    results, sampler = run({"a": [CALL, full], "b": [CALL, "Two."], "c": [full], "d": [CALL, CALL, "Three."]})
    ends = [(trajectory["end_reason"], trajectory["turns"], trajectory["truncated"]) for trajectory in results]
    overflow = "context_overflow"
    assert ends == [(overflow, 1, True), ("stop", 2, False), (overflow, 0, True), ("stop", 3, False)]
    assert [trajectory["stop_reason"] for trajectory in results] == ["length", "stop", "length", "stop"]
    assert [trained(trajectory) for trajectory in results] == [sampler.sampled[question] for question in "abcd"]
    assert len(sampler.calls) == 3
    assert len(trajectory_to_samples(results[0], reward=1.0)) == 1


def test_sampler_context_overflow_loses_no_other_trajectory() -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")

    class Raises:
        def sample(self, inputs: Any, sampling_params: Any) -> list[Generation]:
            texts = [tokenizer.decode(each["input_ids"], skip_special_tokens=False) for each in inputs]
            if any("user\nfull<" in text and "three" in text for text in texts):
                raise errors.ContextOverflowError("too long")
            return [generation_of(tokenizer, "Done." if "three" in text else CALL) for text in texts]

    rollout = MultiTurnRollout(sampler=Raises(), template=tokenizer, tool_manager=ToolManager([look]))
    results = rollout([asking(question) for question in ("a", "full", "b", "c")])
    assert [trajectory["end_reason"] for trajectory in results] == ["stop", "context_overflow", "stop", "stop"]
    assert [trajectory["turns"] for trajectory in results] == [2, 1, 2, 2]


def test_managers_of_one_trajectory_are_closed_at_its_end() -> None:
    """As for tools that have a sandbox open."""
    closed: list[str] = []

    class Box:
        schema = {"name": "box"}

        def __init__(self, task: Any) -> None:
            self.name = task["id"]

        def __call__(self) -> str:
            return "ran"

        async def aclose(self) -> None:
            closed.append(self.name)

    script = {"a": ["One."], "b": [CALL, errors.EngineServerError("down")]}
    with pytest.raises(errors.EngineServerError):
        run(script, tool_manager=lambda trajectory: ToolManager([Box], task=trajectory))
    run({"a": ["One."]}, tool_manager=ToolManager([Box], task={"id": "shared"}))
    assert sorted(closed) == ["a", "b"]


def test_without_ray_remote_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(errors.MissingDependencyError, match="pip install ray"):
        MultiTurnRollout.remote(sampler=None, template=None)


@pytest.mark.ray
def test_the_rollout_runs_as_an_actor() -> None:
    ray: Any = pytest.importorskip("ray")
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    sampler = ScriptedSampler(tokenizer, {"a": [CALL, "Three."]})
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rollout_actor = MultiTurnRollout.remote(sampler=sampler, template=tokenizer, tool_manager=ToolManager([look]))
        reference = rollout_actor.__call__.remote([asking("a")])
        (trajectory,) = ray.get(reference, timeout=120)
    finally:
        ray.shutdown()
    assert trajectory["turns"] == 2
    assert trajectory["stop_reason"] == "stop"
    assert tokenizer.decode(trained(trajectory)) == f"{CALL}<|im_end|>Three.<|im_end|>"


USER = {"role": "user", "content": "a"}


class EchoTool:
    """Called with its name and a dict of arguments."""

    def __init__(self, **function: Any) -> None:
        self._info = {"type": "function", "function": {"name": "look", "description": "echoes", **function}}

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return f"echo[{tool_name}]:{arguments}"

    def tool_info(self) -> dict[str, Any]:
        return self._info


ECHO = "echo[look]:{'key': 'kz'}"


def test_stop_max_tokens_and_other_names_of_twinkle_are_taken_or_refused() -> None:
    stops: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [("a", ("a",), ()), (["a", "x"], ("a", "x"), ())]
    for stop, texts, ids in (*stops, ([7, 9], (), (7, 9)), (None, (), ())):
        params = SamplingParams(stop=stop)
        assert (params.stop, params.stop_token_ids) == (texts, ids)
        assert replace(params, temperature=0.5) == SamplingParams(stop=texts, stop_token_ids=ids, temperature=0.5)
    params = SamplingParams(temperature=0.7, max_tokens=4096)
    assert params.max_new_tokens == params.to_payload()["max_new_tokens"] == 4096
    assert replace(params, temperature=0.0).max_new_tokens == 4096
    payload = SamplingParams(seed=3, repetition_penalty=1.1).to_payload()
    assert (payload["sampling_seed"], payload["repetition_penalty"]) == (3, 1.1)
    with pytest.raises(errors.ConfigError, match="max_new_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(errors.ConfigError, match="num_samples must be 1, got 2"):
        SamplingParams(num_samples=2)


@pytest.mark.parametrize("function", [{}, {"parameters": {"blocks": "int, the block"}}])
def test_tools_are_called_with_their_name_and_a_dict(function: dict[str, Any]) -> None:
    """A tool that names no properties gets all arguments."""
    manager = ToolManager({})
    manager.register(EchoTool(**function))
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=manager)
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory["messages"][2]["content"] == ECHO
    assert ToolManager({"look": EchoTool()}).names == ("look",)
    assert ToolManager({}).names == ToolManager(None).names == ()


def test_unknown_keywords_and_a_single_trajectory_are_refused(tmp_path: Path) -> None:
    rollout = MultiTurnRollout(sampler=None, template=SimpleNamespace(), trace_dir=str(tmp_path / "traces"))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]  # before anything runs
    with pytest.raises(errors.ConfigError, match="sampling_parms: unknown;"):
        rollout([], sampling_parms=SamplingParams())
    with pytest.raises(errors.ConfigError, match="must be a list"):
        rollout({"messages": [USER]})  # type: ignore[arg-type]
    assert rollout([]) == []


class Api:
    """Answers with ``messages``, in order; keeps the options of each request."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages or [{"content": "One."}])
        self.requests: list[dict[str, Any]] = []

    def chat(self, messages: Any, **options: Any) -> Any:
        self.requests.append({**options, "messages": [*messages]})
        answer = self.messages.pop(0)
        calls = [SimpleNamespace(model_dump=lambda call=call, **_: {**call}) for call in answer.get("tool_calls", ())]
        message = SimpleNamespace(content=answer.get("content"), tool_calls=calls or None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.requests[0].items() if name != "messages"}


def run_api(api: Api, *, step: dict[str, int] | None = None, **options: Any) -> Trajectory:
    (trajectory,) = APIMultiTurnRollout(api=api, **options)([{"messages": [USER], "id": "t"}], **step or {})  # type: ignore[arg-type]
    assert trajectory["stop_reason"] == "stop", trajectory
    return trajectory


NEUTRAL = {"temperature": 1.0, "top_p": 1.0}


def test_api_gets_only_the_set_parameters() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"max_new_tokens": 256}, {"max_tokens": 256}),  # its default value
        ({"stop": [7, 9]}, {"extra_body": {"stop_token_ids": [7, 9]}}),
        ({"seed": 3, "repetition_penalty": 1.1}, {"seed": 3, "extra_body": {"repetition_penalty": 1.1}}),
        ({"extra": {"regex": "a+"}}, {"extra_body": {"regex": "a+"}}),
    ]
    for params, sent in cases:
        for sampling in (SamplingParams(**params), replace(SamplingParams(**params), top_p=1.0)):
            api = Api()
            run_api(api, sampling_params=sampling)
            assert api.options() == NEUTRAL | sent


def twinkles(**fields: Any) -> Any:
    """An object with the fields of twinkle's ``SamplingParams``."""
    names = ("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs")
    plain = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "num_samples": 1}
    return SimpleNamespace(**{**dict.fromkeys(names), **plain, **fields})


def test_sampling_parameters_of_twinkle_are_taken() -> None:
    api, theirs = Api(), twinkles(max_tokens=256, seed=3, stop="E", top_k=5, repetition_penalty=1.1)
    run_api(api, sampling_params=theirs)
    extra = {"top_k": 5, "repetition_penalty": 1.1}
    assert api.options() == NEUTRAL | {"stop": ["E"], "max_tokens": 256, "seed": 3, "extra_body": extra}
    untouched = Api()
    run_api(untouched, sampling_params=twinkles())
    assert untouched.options() == NEUTRAL
    ((trajectory,), _) = run({"a": ["One two three four five."]}, sampling_params=twinkles(max_tokens=2))
    assert (trajectory["stop_reason"], len([x for x in trajectory["labels"] if x != -100])) == ("length", 2)


def test_sampling_parameters_that_cannot_be_kept_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (twinkles(num_samples=2), "num_samples must be 1, got 2"),
        (twinkles(prompt_logprobs=1), "prompt_logprobs is 1"),
        ({"temperature": 1.0}, "sampling_params must be SamplingParams"),
    ]
    for params, sentence in cases:
        with pytest.raises(errors.ConfigError, match=sentence):
            APIMultiTurnRollout(api=Api(), sampling_params=params)  # type: ignore[arg-type]


class TwinklesManager:
    """As twinkle's ``ToolManager``: called with OpenAI's form of a call; has ``tool_infos``."""

    def __init__(self, tool: EchoTool) -> None:
        self.tool = tool

    def tool_infos(self) -> list[dict[str, Any]]:
        return [self.tool.tool_info()]

    def __call__(self, call: dict[str, Any]) -> str:
        return self.tool(call["function"]["name"], call["function"]["arguments"])


def test_a_tool_manager_of_twinkle_runs_its_tools() -> None:
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=TwinklesManager(EchoTool()))
    assert trajectory["messages"][2]["content"] == ECHO
    assert trajectory["tools_called"]["calls"] == {"look": 1}


IMPORTS = """
from twinkle.data_format import Trajectory
from twinkle.data_format.sampling import SamplingParams
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.tools.tool_manager import ToolManager
"""


@patch.dict(sys.modules)
def test_twinkles_import_paths_lead_here_where_twinkle_is_not_installed() -> None:
    importlib.import_module(paths := "agl_slime.buffer.batched.twinkle")
    exec(IMPORTS, names := dict[str, Any]())
    ours = (MultiTurnRollout, APIMultiTurnRollout, OpenAI, SamplingParams, ToolManager)
    assert [names[each.__name__] for each in ours] == [*ours]
    del sys.modules[paths]
    with patch("importlib.util.find_spec"), pytest.raises(errors.ConfigError, match="twinkle is installed"):
        importlib.import_module(paths)


def test_calls_without_an_id_get_one_shared_with_their_results() -> None:
    call = {"function": {"name": "look", "arguments": "{}"}}
    api = Api({"tool_calls": [call, call]}, {"tool_calls": [{**call, "id": "mine"}]}, {"content": "One."})
    messages = run_api(api, tool_manager=ToolManager([EchoTool()]))["messages"]
    ids = [[call["id"] for call in message["tool_calls"]] for message in messages if message.get("tool_calls")]
    assert ids == [["call_1_0", "call_1_1"], ["mine"]]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [*ids[0], *ids[1]]


def test_two_rollouts_with_one_directory_keep_both_traces(tmp_path: Path) -> None:
    for text in ("first", "second"):
        run_api(Api({"content": text}), trace_dir=tmp_path, step={"global_step": 7})
    traces = {path.name: json.loads(path.read_text())["messages"][-1]["content"] for path in tmp_path.iterdir()}
    assert traces == {"7-ok-t.json": "first", "7-ok-t-2.json": "second"}
