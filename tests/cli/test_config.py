"""Settings of a run, by flags and by file: unusable ones are one sentence that names the flag."""

import contextlib
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.agent.access import sampling_of
from agl_slime.cli.config_file import config_values, parse_train_config
from agl_slime.cli.options import GROUPS, name_of
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError
from agl_slime.gateway.server import client_sampling
from agl_slime.report.files import check_run_dir
from agl_slime.support.agl import LLM
from agl_slime.train.local.settings import LocalTrainerSettings
from tests.harness.examples import examples

URL = "http://x:1"
SLIME = {"trainer": "slime"}
NO_REWARDS = LocalTrainerSettings(std_normalization=False, rewards_normalization=False)
TIES = LocalTrainerSettings(rewards="right,format?")
REPEATED: dict[str, Any] = {"deterministic": True, "max_staleness": 1}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"group_min_ratio": 0.0}, r"^--group-min-ratio .*\(0, 1\], got 0\.0"),
        ({"group_timeout": 0.0}, "^--group-timeout must be above 0 seconds"),
        ({"max_staleness": -1}, r"^--max-staleness must be 0 \(synchronous\) or more"),
        ({"temperature": math.inf}, "^--temperature must be a finite number .* got inf"),
        ({"seed": -1}, "^--seed must be 0 or more, got -1"),
        ({"rollout_batch_size": 10**23}, "^--rollout-batch-size must be at most 100000"),
        ({"n_samples_per_prompt": 1}, "^--n-samples-per-prompt 1: there is nothing to compare"),
        ({"resume": True}, "^--resume needs --output-dir"),
        ({"resume": True, "overwrite": True, "output_dir": Path("x")}, "give one of them$"),
        ({"chat_template_kwargs": "{x"}, "^--chat-template-kwargs must be a JSON object"),
        (
            {"chat_template_kwargs": '{"chat_template": "{{ x"}'},
            "^chat_template of --chat-template-kwargs is no Jinja template; correct it in line 1: unexpected end",
        ),
        ({"actor_num_gpus_per_node": 4}, "^--actor-num-gpus-per-node with --trainer local: only slime uses it"),
        ({"eval_sglang_url": URL}, f"^--eval-sglang-url {URL}: only asynchronous training uses it"),
        ({"engine": "sglang", "sglang_url": URL}, f"^--engine sglang: the server at --sglang-url {URL} already runs"),
        ({"eval_sampling": '{"temp": 0}'}, "^--eval-sampling .*temp"),
        ({"eval_sampling": '{"top_p": 2}'}, "^--eval-sampling .*top_p must be in"),
        ({"weight_pause": "in_place"}, "^--weight-pause with --trainer local: nothing is sampled while"),
        ({**REPEATED, "drop_zero_variance": True}, "^--drop-zero-variance with --deterministic True: which group"),
        ({**REPEATED, "group_pilot": 2}, "^--group-pilot with --deterministic True: which group"),
        ({"local": TIES, "group_pilot": 2}, r"^--group-pilot with --local.rewards right,format\?: it drops the groups"),
        ({"eval_interval": 0, "eval_tasks": Path("t")}, "^--eval-tasks with --trainer local: there are no validations"),
        ({"store_host": "10.0.0.1"}, "^--store-host with --trainer local: the runners are in this process"),
        ({"local": NO_REWARDS}, r"^--local\.no-std-normalization: with --local\.no-rewards-normalization"),
        ({**SLIME, "resume": True, "output_dir": Path("x")}, "^--resume with --trainer slime: slime keeps its own"),
        ({**SLIME, "env": "x"}, "^--env x with --trainer slime: .* take --trainer local"),
        ({**SLIME, "group_pilot": 2}, "^--group-pilot with --trainer slime: both processes must agree on groups"),
        ({**SLIME, "weight_pause": "in_place"}, "^--weight-pause with --trainer slime"),
        ({**SLIME, "engine": "sglang"}, "^--engine with --trainer slime: slime starts its own engines"),
        ({**SLIME, "local": LocalTrainerSettings(lr=1e-3)}, "^--local.lr 0.001 with --trainer slime"),
    ],
)
def test_invalid_settings_name_the_flag(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_config(**settings)


def test_template_settings_are_sampling_parameters_hidden_from_the_engine() -> None:
    assert train_config().template == {}
    config = train_config(chat_template_kwargs='{"preserve_thinking": true}', later_systems="first")
    assert config.template == {"chat_template_kwargs": {"preserve_thinking": True}, "later_systems": "first"}
    llm = LLM(endpoint=URL, model="m", sampling_parameters={"temperature": 0.5, **config.template})
    assert sampling_of(llm) == SamplingParams(temperature=0.5)
    empty = {"chat_template_kwargs": {}, "later_systems": ""}
    assert sampling_of(LLM(endpoint="", model="m", sampling_parameters=empty)).extra == {}
    assert client_sampling(llm.sampling_parameters) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("alias", "flag"),
    [
        ("--learning-rate=1e-5", "--local.lr"),
        ("--batch_size", "--rollout-batch-size"),
        ("--max-steps", "--num-iterations"),
        ("--beta", "--local.kl-coef"),
    ],
)
def test_flags_of_other_trainers_are_answered_with_ours(alias: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{alias.partition(chr(61))[0]}: there is no such flag; give {flag}"):
        parse_train_config([alias, "1"])
    parse_train_config([flag, "2"])  # the named flag exists


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
words = texts | st.sampled_from(["--seed", "-1", "5"])  # values that would be flags on a command line
paths = words.map(Path).filter(lambda path: not os.path.exists(path))
counts = st.integers(1, 1000)
positive = st.floats(1e-6, 1e6)
local_settings = st.builds(
    LocalTrainerSettings,
    lr=positive,
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    grad_clip=positive | st.just(math.inf),
    clip_high=st.none() | positive,
    aggregation=st.sampled_from(["token", "rollout"]),
    gradient_checkpointing=st.booleans(),
    rewards=st.sampled_from(["", "right", "right=1,format=0.2"]),
)
configs = st.builds(
    train_config,
    tasks=st.none() | paths,
    model_path=st.none() | paths,
    num_iterations=counts,
    temperature=positive,
    top_k=st.just(-1) | counts,
    max_concurrent=counts,
    max_turns=st.none() | counts,
    group_timeout=st.none() | positive,
    drop_zero_variance=st.booleans(),
    chat_template_kwargs=st.dictionaries(texts, st.booleans()).map(json.dumps),
    track=st.lists(st.sampled_from(["wandb", "mlflow"]), unique=True).map(tuple),
    trained_models=st.lists(words).map(tuple),
    external_plugins=st.lists(paths).map(tuple),
    multi_turn_scheduler=st.none() | texts,
    local=local_settings,
)


def toml(values: dict[str, Any]) -> str:
    """Values as TOML, which has no None: such values are omitted."""
    lines, tables = [], []
    for name, value in values.items():
        if isinstance(value, dict):
            tables.append(f"[{name}]\n{toml(value)}")
        elif value is not None:
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{name} = {text.replace(chr(127), chr(92) + 'u007f')}")
    return "\n".join([*lines, *tables])


def written(config: TrainConfig, directory: Path) -> Path:
    """The config.json of a run with these settings."""
    check_run_dir(directory, settings=config_values(config), overwrite=True).begin()
    return directory / "config.json"


def parse(path: Path, *flags: str) -> TrainConfig:
    return parse_train_config(["--config", str(path), *flags])


@settings(max_examples=examples(50))
@given(config=configs, as_toml=st.booleans())
def test_the_next_run_has_the_settings_that_a_run_writes(config, as_toml, tmp_path_factory):
    path = written(config, tmp_path_factory.mktemp("run"))
    if as_toml:
        values = json.loads(path.read_text())
        for name in ("output_dir", "resume", "overwrite"):
            del values[name]
        path = path.with_suffix(".toml")
        path.write_text(toml(values))
    assert parse(path) == config


def test_the_command_line_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        'num-iterations = 7\nmodel = "smollm2"\ntrack = ["wandb"]\nkeep_best = true\n'
        'env = "x"\nenv_arguments = ["--env.a", "1"]\n'
        "[local]\nlr = 1\nn-minibatches = 2\n[chat_template_kwargs]\npreserve_thinking = true\n"
        "[eval_sampling]\ntemperature = 0\n"
    )
    flags = "--local.lr 0.5 --track mlflow --no-keep-best --env.b --top-k -1"
    config = parse_train_config([*flags.split(), "--config", str(path)])
    assert (config.loop.num_iterations, config.local.n_minibatches, config.local.lr) == (7, 2, 0.5)
    assert config.model_path == Path("smollm2")
    assert (config.track, config.keep_best) == (("mlflow",), False)
    assert config.environment.arguments == ("--env.a", "1", "--env.b")
    assert config.template == {"chat_template_kwargs": {"preserve_thinking": True}}
    assert config.validation_sampling == {"temperature": 0}


@pytest.mark.parametrize("given", ["--actor-num-nodes 1", "--actor_num_gpus_per_node=4", "--rollout-num-gpus 2"])
def test_a_flag_of_slimes_chooses_its_trainer_unless_one_is_named(given: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("actor_num_nodes = 1")
    assert parse_train_config(given.split()).trainer == parse(path).trainer == "slime"
    assert parse(path, "--trainer", "local").trainer == parse_train_config([]).trainer == "local"
    path.write_text('trainer = "local"')
    assert parse(path, "--actor-num-nodes", "1").trainer == "local"


def test_a_written_run_is_neither_resumed_nor_replaced_by_its_file(tmp_path: Path) -> None:
    config = train_config(output_dir=tmp_path / "run", overwrite=True, seed=3)
    path = written(config, tmp_path / "run")
    assert parse(path) == replace(config, output_dir=None, overwrite=False)
    resumed = parse(path, "--resume", "--output-dir", str(tmp_path / "run"))
    assert (resumed.resume, resumed.output_dir) == (True, tmp_path / "run")


def test_a_password_is_not_written_and_has_to_be_given_again(tmp_path: Path) -> None:
    path = written(train_config(sglang_url="http://me:secret@host:1"), tmp_path / "run")
    assert "secret" not in path.read_text()
    with pytest.raises(ConfigError, match="sglang_url was written without its password; give --sglang-url"):
        parse(path)
    assert parse(path, "--sglang-url=http://x:1").sglang_url == "http://x:1"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.toml", "num_iteration = 3", "there is no setting num_iteration; the nearest is num_iterations$"),
        ("x.json", '{"local": {"rl": 3}}', "there is no setting local.rl; the nearest is local.lr$"),
        ("x.toml", "resume = true", "resume is not a setting for files; give --resume$"),
        ("x.toml", "resume", "not TOML: "),
        ("x.json", "[" * 100_000, "not JSON: "),
        ("x.toml", 'env_arguments = "--env.x"', "env_arguments must be a valid array, got '--env.x'$"),
        ("x.toml", "local = 3", "must be a JSON object of settings, "),
        ("x.toml", "seed = true", "seed must be a valid integer, got True$"),
        ("x.toml", 'local.betas = ["a", 1]', "local.betas must be a valid number, got "),
        ("x.toml", "num-iterations = 3\nnum_iterations = 4", "num-iterations is there twice, also as num_iterations;"),
        ("x.toml", 'model_path = "a"\nmodel = "b"', "model_path is there twice, also as model; leave one out$"),
        ("x.json", '{"seed": 1, "seed": 2}', "not JSON: 'seed' is there twice$"),
        ("x.toml", "num_iterations = 0", "num_iterations must be at least 1, got 0$"),
        ("x.json", '{"local": {"lr": -1.0}}', "local.lr must be above 0, got -1.0$"),
        ("x.toml", "temperature = 0.0", "temperature must be above 0: training needs samples that differ, got 0.0$"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"^--config .*{name}: {sentence}"):
        parse(tmp_path / name)


def test_a_flag_out_of_its_range_is_named_and_not_the_file_under_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_iterations": 0}')
    for flags, start in (
        (["--config", str(tmp_path / "config.json"), "--num_iterations", "-1"], "--num-iterations must be"),
        (["--resume", "--output-dir", str(tmp_path)], f"--config {tmp_path}/config.json: num_iterations must be"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_train_config(flags)
        assert str(caught.value).startswith(start)


def test_a_resumed_run_has_its_own_settings_under_flags_and_files(tmp_path: Path) -> None:
    """Also from another directory: the names of files are absolute."""
    agent, plugin, tasks = (tmp_path / name for name in ("mine.py", "plugin.py", "tasks.jsonl"))
    for path in (agent, plugin, tasks):
        path.touch()
    settings: dict[str, Any] = {"agent": f"{agent.name}:Mine", "tasks": Path(tasks.name), "seed": 3}
    settings |= {"external_plugins": (Path(plugin.name),), "model_path": Path("smollm2"), "num_iterations": 7}
    settings |= {"local": LocalTrainerSettings(lr=0.5, epochs=2), "env_python": None}
    with contextlib.chdir(tmp_path):
        written(train_config(**settings), tmp_path / "run")
    run = ["--resume", "--output-dir", str(tmp_path / "run")]
    settings |= {"agent": f"{agent}:Mine", "tasks": tasks, "external_plugins": (plugin,)}
    settings |= {"output_dir": tmp_path / "run", "resume": True}
    assert parse_train_config(run) == train_config(**settings)
    file = tmp_path / "settings.toml"
    file.write_text("seed = 5\nnum_iterations = 9\n[local]\nlr = 1.0\n")
    settings |= {"seed": 4, "num_iterations": 9, "local": LocalTrainerSettings(lr=1.0, epochs=3)}
    assert parse_train_config([*run, f"--config={file}", "--seed=4", "--local.epochs", "3"]) == train_config(**settings)
    with contextlib.chdir(tmp_path):  # a module of the directory is its file
        names = [
            written(train_config(agent=name), tmp_path / f"{name} run").read_text() for name in ("mine:Mine", "mine.py")
        ]
    assert [json.loads(text)["agent"] for text in names] == [f"{agent}:Mine", str(agent)]


def test_settings_of_a_resumed_environment_are_not_doubled(tmp_path: Path) -> None:
    written(train_config(env="x", env_arguments=("--env.a", "1")), tmp_path / "run")
    run = ["--resume", "--output-dir", str(tmp_path / "run")]
    for flags, arguments in (([], ("--env.a", "1")), (["--env.a", "1"], ("--env.a", "1")), (["--env.b"], ("--env.b",))):
        assert parse_train_config([*run, *flags]).environment.arguments == arguments


def test_keys_of_an_environment_are_not_written(tmp_path: Path) -> None:
    keys = ("--env.judge.api_key", "KEY1", "--env.token=KEY2", "--env.max_tokens", "3")
    text = written(train_config(env="x", env_arguments=keys), tmp_path / "run").read_text()
    assert ("KEY" in text, '"--env.max_tokens", "3"' in " ".join(text.split())) == (False, True)
    run = ["--resume", "--output-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=r"env_arguments was written without its password; give all --env\.KEY flags"):
        parse_train_config(run)
    assert parse_train_config([*run, *keys]).environment.arguments == keys


def test_help_begins_with_the_flags_of_a_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train_config(["--help"])
    _, *sections = re.split(r"\W ([a-z ]+) options \W", capsys.readouterr().out)
    assert sections[::2] == [*GROUPS, "local"]
    first = [name_of(path).replace("_", "-") for path in GROUPS["first run"][1].split()]
    assert re.findall(r"--([\w-]+) \S*[A-Z{]", sections[1].replace("--model {None}|PATH, ", "")) == first
    assert len(first) == 10
