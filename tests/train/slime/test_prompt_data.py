"""slime's data sets as tasks: files, slices, and the shapes of slime's own examples."""

import base64
import datetime
import decimal
import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.loop.task_files import digest, read_rows, split_slice
from agl_slime.loop.tasks import read_tasks
from agl_slime.train.slime.args import PluginSettings, context_length, prompt_data
from agl_slime.train.slime.connection import Connection
from agl_slime.train.slime.flags import refused_keys
from agl_slime.train.slime.prompt_data import PromptData
from tests.harness.gateway import WEATHER
from tests.harness.slime_source import AGENT
from tests.harness.tokenizers import small_tokenizer

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason='reading parquet needs pyarrow: pip install "agl-slime[parquet]"')
    from pyarrow import parquet as files

    files.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=3)
    return path


def read(path: Any, **keys: Any) -> list[dict[str, Any]]:
    data = prompt_data(Namespace(prompt_data=str(path), **keys))
    assert data is not None
    return data.read()


# -- files and slices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_slice_of_a_file_is_as_of_a_list(write: Any, tmp_path: Path):
    file = write(tmp_path / f"tasks.{write.__name__}", *({"n": n, "text": "a\u2028b"} for n in range(8)))
    numbers = [*range(8)]
    for part, expected in (("", numbers), ("@[0:3]", numbers[0:3]), ("@[:-6]", numbers[:-6]), ("@[-2:]", numbers[-2:])):
        assert [task["n"] for task in read_tasks(f"{file}{part}")] == expected
        assert [row["n"] for _, row in read_rows(f"{file}{part}", flag="--x")] == expected
    assert len({digest(file), digest(f"{file}@[0:1]"), digest(f"{file}@[1:]")}) == 3


def test_a_path_with_brackets_that_are_no_slice_is_a_path():
    for path in ("a[1:2].jsonl", "a@[1].jsonl", "a@[1:2:3]", "a@[x:2]"):
        assert split_slice(path) == (Path(path), slice(None))


def test_empty_missing_and_damaged_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = jsonl(tmp_path / "tasks.jsonl", {"n": 1})
    with pytest.raises(ConfigError, match=r"--tasks .*tasks.jsonl@\[1:\]: contains no tasks"):
        read_tasks(f"{file}@[1:]")
    for missing in ("none.jsonl@[0:1]", "none.parquet@[0:1]"):
        with pytest.raises(ConfigError, match=r"--prompt-data .*none.* cannot be read"):
            read(tmp_path / missing)
    parquet(tmp_path / "whole.parquet", {"n": 1})
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"cut\.parquet: cannot be read") as caught:
        read_tasks(tmp_path / "cut.parquet")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "agl-slime\[parquet\]"'):
        read_tasks(tmp_path / "whole.parquet")


def test_parquet_values_become_json_and_bytes_are_refused(tmp_path: Path):
    when = datetime.datetime(2026, 1, 2, 3, 4)
    rows = [{"when": when, "cost": decimal.Decimal("1.50"), "calls": [{"a": 1, "b": None}, {"b": 2, "a": None}]}]
    (task,) = read_tasks(parquet(tmp_path / "values.parquet", *rows))
    assert task == {"when": "2026-01-02T03:04:00", "cost": 1.5, "calls": [{"a": 1}, {"b": 2}]}
    with pytest.raises(ConfigError, match="row 1: the column 'raw' has bytes"):
        read_tasks(parquet(tmp_path / "bytes.parquet", {"raw": [{"x": b"1"}]}))


# -- the shapes of slime's examples ----------------------------------------------------------------------------------

MESSAGES = {"messages": [{"role": "user", "content": "other"}], "question": "?", "label": "4"}
ANSWER = {"ground_truth": {"target": ["4", "four"]}, "style": "rule"}
TOOLS = {"prompt": QUESTION, "tools": json.dumps([WEATHER])}


@pytest.mark.parametrize(
    ("write", "row", "input_key", "label_key", "expected"),
    [
        (jsonl, {"prompt": QUESTION, "label": "4", "extra_info": {"index": 1}}, "prompt", "label", {}),  # dapo-math
        (parquet, {"messages": QUESTION, "label": "4"}, "messages", "label", {"prompt": QUESTION}),  # gsm8k
        (parquet, {"prompt": QUESTION, "reward": ANSWER, "metadata": None}, "prompt", "reward", {"label": ANSWER}),
        (jsonl, {"index": 7, "metadata": {"env": "x", "index": 8}}, "index", None, {"prompt": 7, "env": "x"}),
        (jsonl, MESSAGES, "question", "label", {"prompt": "?", "messages": None}),  # build_prompt takes messages first
        (jsonl, TOOLS, "prompt", None, {"tools": [WEATHER]}),
        (jsonl, {**TOOLS, "tools": [WEATHER]}, "prompt", None, {}),
    ],
)
def test_rows_of_slimes_examples(write, row, input_key, label_key, expected, tmp_path):
    keys = {"tool_key": "tools", "metadata_key": "metadata", "label_key": label_key}
    (task,) = read(write(tmp_path / f"rows.{write.__name__}", row), input_key=input_key, **keys)
    expected = {name: value for name, value in {**row, **expected}.items() if value is not None}
    assert {name: value for name, value in task.items() if value is not None} == expected
    if input_key != "index":
        assert SGLangLitAgent.build_prompt(object.__new__(SGLangLitAgent), task) == expected["prompt"]


@pytest.mark.parametrize("form", ["record", "base64", "uri", "path", "part"])
def test_geo3k_images_take_the_place_of_their_marks(form: str, tmp_path: Path):
    (tmp_path / "figure.png").write_bytes(PNG)
    image: Any = {
        "record": {"bytes": PNG, "path": None},
        "base64": base64.b64encode(PNG).decode(),
        "uri": URI,
        "path": str(tmp_path / "figure.png"),
        "part": {"type": "image", "image": URI, "max_pixels": 50176},
    }[form]
    row = {"problem": "<image>Find x in <image>.", "answer": "3", "images": [image, image]}
    keys: dict[str, Any] = {"input_key": "problem", "label_key": "answer", "multimodal_keys": {"image": "images"}}
    (task,) = read(parquet(tmp_path / "geo3k.parquet", row), **keys)
    part = {"type": "image", "image": URI} | ({"max_pixels": 50176} if form == "part" else {})
    content = [part, {"type": "text", "text": "Find x in "}, part, {"type": "text", "text": "."}]
    assert task["prompt"] == [{"role": "user", "content": content}]
    assert "images" not in task
    json.dumps(task)


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        ({"q": "?"}, {"input_key": "question"}, "line 1: there is no 'question', which --input-key names; it has q"),
        ({"input": "?"}, {"label_key": "label"}, "there is no 'label', which --label-key names"),
        ({"input": "?", "tools": "{"}, {}, "line 1: tools is not JSON"),
        ({"input": "?", "i": ["x"]}, {"multimodal_keys": {"image": "i"}}, "image x is neither a file nor base64"),
        ({"input": "?", "i": [URI]}, {"multimodal_keys": {"image": "i"}}, "has 0 times <image>, and the row 1 images"),
        ({"input": "?"}, {"multimodal_keys": {"video": "v"}}, "--multimodal-keys names 'video': .* images alone"),
        (["?"], {}, "line 1: expected an object, got list"),
    ],
)
def test_a_row_that_the_keys_do_not_fit_is_named(row: Any, keys: dict[str, Any], text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=text):
        read(jsonl(tmp_path / "rows.jsonl", row), **keys)


# -- lengths and order -----------------------------------------------------------------------------------------------


def test_rows_with_a_longer_prompt_than_the_limit_are_left_out(tmp_path: Path):
    tokenizer = small_tokenizer()
    file = jsonl(tmp_path / "rows.jsonl", *({"input": "x " * n} for n in (1, 200, 2)), {"input": 5})
    sizes = [len(tokenizer.apply_chat_template([{"role": "user", "content": "x " * n}])["input_ids"]) for n in (1, 200)]
    assert sizes[0] < 100 < sizes[1]
    tasks = PromptData(path=str(file), max_prompt_len=100).read(tokenizer)
    assert [task["prompt"] for task in tasks] == ["x ", "x x ", 5]
    with pytest.raises(ConfigError, match=r"no prompt has at most 1 tokens \(--rollout-max-prompt-len\)"):
        PromptData(path=f"{file}@[0:3]", max_prompt_len=1).read(tokenizer)


@pytest.mark.parametrize("shuffle", [False, True])
def test_rollout_shuffle_decides_on_the_order(shuffle: bool, tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", *({"input": str(n)} for n in range(8)))
    args = Namespace(agl_agent=AGENT, prompt_data=str(file), rollout_seed=1, rollout_shuffle=shuffle)
    connection = Connection(PluginSettings.from_args(args, {}))
    drawn = [group.task["prompt"] for group in connection.tasks.take(16)]
    connection.stop()
    assert connection.epoch_size == 8
    assert sorted(drawn[:8]) == sorted(drawn[8:]) == [str(n) for n in range(8)]
    assert (drawn[:8] == sorted(drawn[:8])) is not shuffle
    assert (drawn[:8] == drawn[8:]) is not shuffle


def test_evaluation_sets_have_their_keys_lengths_and_template_arguments(tmp_path: Path):
    file = jsonl(tmp_path / "eval.jsonl", {"q": "one", "a": "1"}, {"q": "two", "a": "2"})
    keys: dict[str, Any] = {"input_key": "q", "label_key": "a", "metadata_key": None, "tool_key": None}
    keys |= (own := {"repetition_penalty": 1.1, "skip_special_tokens": True, "no_stop_trim": False})
    keys |= {"metadata_overrides": {"level": 3, "a": "x", "prompt": "x"}, "rm_type": None, "apply_chat_template": True}
    args = Namespace(eval_datasets=[Namespace(name="two", path=f"{file}@[1:]", **keys)], agl_agent=AGENT)
    args.apply_chat_template_kwargs = {"enable_thinking": False}
    args.rollout_max_context_len, args.eval_max_context_len, args.eval_max_prompt_len = 100, 200, 64
    settings = PluginSettings.from_args(args, {})
    assert settings.sampling == {"context_length": 100, "chat_template_kwargs": {"enable_thinking": False}}
    (evaluation,) = settings.eval_sets
    assert evaluation.sampling == {**settings.sampling, "context_length": 200, **own}
    lengths = [context_length(args), context_length(args, evaluation=True), context_length(Namespace())]
    assert lengths == [{"context_length": 100}, {"context_length": 200}, {}]
    assert evaluation.data.max_prompt_len == 64
    assert evaluation.data.read() == [{"q": "two", "a": "x", "prompt": "two", "label": "2", "level": 3}]
    args.eval_datasets[0].n_samples_per_eval_prompt = 0
    with pytest.raises(ConfigError, match="n_samples_per_eval_prompt must be at least 1, got 0"):
        PluginSettings.from_args(args, {})
    args.eval_datasets[0].n_samples_per_eval_prompt = None
    args.eval_datasets[0].apply_chat_template_kwargs = "thinking"
    with pytest.raises(ConfigError, match="apply_chat_template_kwargs must be an object, got 'thinking'"):
        PluginSettings.from_args(args, {})


REWARD, AGENTS = "agl_slime.slime_hooks.reward_of_agent", "agl_slime.slime_hooks.generate"


@pytest.mark.parametrize(
    ("keys", "flags", "ours", "generate"),
    [
        ({"rm_type": "math"}, {}, True, True),
        ({"custom_rm_path": "mine.rm"}, {}, True, True),
        ({"custom_rm_path": "mine.rm"}, {"custom_rm_path": "mine.rm"}, False, False),  # the warning names the flag
        ({"custom_rm_path": REWARD}, {}, False, False),
        ({"custom_generate_function_path": "mine.generate"}, {}, True, False),
        ({"rm_type": "math", "custom_generate_function_path": AGENTS}, {}, True, True),
        ({"custom_generate_function_path": AGENTS}, {}, False, False),
        ({"custom_generate_function_path": "mine.generate", "rm_type": "math"}, {}, True, False),
        ({"apply_chat_template": False}, {"apply_chat_template": True}, True, False),
        ({"apply_chat_template": False}, {}, False, False),
        ({"min_eval_samples": 4}, {}, True, False),
        ({"key_of_tomorrow": 0}, {}, True, False),
    ],
)
def test_a_key_of_an_evaluation_set_without_effect_is_refused(keys, flags, ours, generate):
    args = Namespace(eval_datasets=[Namespace(name="aime", path="none.jsonl", **keys)], **flags)
    key, value = next(iter(keys.items()))
    named = f"evaluation data set aime: {key} {value!r} has no effect"
    assert any(named in text for text in refused_keys(args)) == ours
    args.rollout_function_path = "slime.rollout.sglang_rollout.generate_rollout"  # which reads its own keys
    assert [*refused_keys(args)] == [] or AGENTS in keys.values()
    args.custom_generate_function_path = AGENTS  # which gives rewards, too
    texts = [*refused_keys(args)]
    assert ["has no effect, as the reward is the agent's" in text for text in texts] == [True] * generate
    with pytest.raises(ConfigError, match="aime") if texts else nullcontext():
        PluginSettings.from_args(args, {"AGL_SLIME_AGENT": AGENT})
