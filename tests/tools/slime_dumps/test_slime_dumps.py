"""slime's runs in the report: files are read without trust, and absent figures are not shown."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.report.read import RunReader
from agl_slime.tools.pages.file import write_report
from agl_slime.tools.slime_dumps.runs import SlimeRun, SlimeRuns, dump_files
from agl_slime.types import Sample
from tests.harness.examples import examples
from tests.harness.report_runs import floats
from tests.harness.slime_dumps import save

torch = pytest.importorskip("torch")


def a_sample(index: int, *, group: int, reward: Any = 1.0, version: str = "3", **fields: Any) -> dict[str, Any]:
    """As slime's Sample.to_dict gives it: a prompt of 3 tokens, then 2 sampled, 1 of a tool, 1 sampled."""
    sample = Sample(
        group_index=group, index=index, rollout_id=index, prompt=[{"role": "user", "content": "What is 2?"}],
        tokens=[5, 6, 7, 8, 9, 10, 11 + index], response="two", response_length=4, reward=reward,
        loss_mask=[1, 1, 0, 1],
        rollout_log_probs=[-0.5, -0.25, 0.0, -1.0], weight_versions=[version], status=Sample.Status.COMPLETED,
    )  # fmt: skip
    return {**sample.to_dict(), **fields}


def train_row(sample: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """As slime's train dump has it, log-probs 0.125 above the engine's."""
    engine = torch.tensor(sample["rollout_log_probs"], dtype=torch.float32)
    return {
        "tokens": torch.tensor(sample["tokens"]), "response_lengths": sample["response_length"],
        "loss_masks": torch.tensor(sample["loss_mask"], dtype=torch.int), "rollout_log_probs": engine,
        "log_probs": engine + 0.125, "advantages": torch.full((4,), 0.5), "sample_index": sample["index"],
        "rollout_position": sample["index"], "data_parallel_rank": 0, **fields,
    }  # fmt: skip


def write_dumps(path: Path, *, steps: int = 2, train: bool = True) -> list[list[dict[str, Any]]]:
    """--dump-details of steps of 2 groups of 2, and an evaluation after the first."""
    every = []
    for step in range(steps):
        samples = [a_sample(i, group=i // 2, reward=float(i % 2), version=str(step + 1)) for i in range(4)]
        save(path / "rollout_data" / f"{step}.pt", {"rollout_id": step, "samples": samples})
        if train:
            rows = [train_row(sample) for sample in reversed(samples)]
            dump = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": rows, "dp_shards": []}
            save(path / "train_data" / f"{step}.pt", dump)
        every.append(samples)
    tested = [a_sample(i, group=0, reward=0.25 * i) for i in range(4)]
    save(path / "rollout_data" / "eval_0.pt", {"rollout_id": 0, "samples": tested})
    return every


def whole(reader: RunReader, rollout_id: str) -> dict[str, Any]:
    line = reader.rollout(rollout_id)
    assert line is not None
    return json.loads(line)


def read_run(path: Path) -> tuple[RunReader, dict[str, Any]]:
    reader = RunReader(path, SlimeRuns())
    update = reader.update()
    assert update is not None
    return reader, update


def test_steps_groups_and_log_probs_equal_the_files(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    reader, update = read_run(tmp_path)
    assert update["name"] == tmp_path.name
    assert update["metrics"]["iteration"] == [0, 1]
    columns = update["metrics"]["columns"]
    assert columns["rollout/reward_mean"] == [0.5, 0.5]
    assert columns["val/reward_mean"] == [0.375, None]
    assert columns["train/logprob_diff_max"] == [0.125, 0.125]
    assert columns["train/tokens_trained"] == [12, 12]
    assert columns["train/loss"] == [None, None]  # not in slime's files
    assert update["groups"]["size"] == [2, 2, 2, 2]
    assert {update["words"][number] for number in update["members"]["outcome"]} == {"trained"}
    rollout = whole(reader, "1-g1-3")
    assert rollout["reward"] == 1.0
    assert [message["content"] for message in rollout["messages"]] == ["What is 2?", "two"]
    sample = rollout["samples"][0]
    assert sample["prompt_length"] == 3
    assert sample["weight_versions"] == [["2", 0, 4]]
    engine, trainer = floats(sample["engine_log_probs"]), floats(sample["trainer_log_probs"])
    np.testing.assert_array_equal(engine, np.array([-0.5, -0.25, np.nan, -1.0], "f4"))
    np.testing.assert_array_equal(trainer - engine, np.array([0.125, 0.125, np.nan, 0.125], "f4"))
    assert floats(sample["advantages"])[0] == 0.5
    assert write_report([tmp_path], convert=SlimeRuns()).stat().st_size > 50_000


@pytest.mark.parametrize("train", [True, False])
def test_files_that_slime_does_not_write_are_absent_not_damaged(tmp_path: Path, train: bool) -> None:
    write_dumps(tmp_path, train=train)
    reader, update = read_run(tmp_path)
    assert update["damage"] == []
    about = {"settings": True, "train data": not train, "tokenizer.json": True}
    for words, absent in about.items():
        assert any(words in sentence for sentence in update["absent"]) == absent
    assert len(update["absent"]) == sum(about.values())
    if not train:
        assert {update["words"][number] for number in update["members"]["outcome"]} == {"ready"}
        assert not any(update["metrics"]["columns"].get("train/logprob_diff_max", ()))
        assert np.isnan(floats(whole(reader, "0-g0-0")["samples"][0]["trainer_log_probs"])).all()
        assert any("--dump-details" in sentence for sentence in update["absent"])


def test_tokenizer_beside_the_dumps_gives_texts_and_environment_turns(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    assert "‹5›" in whole(read_run(tmp_path)[0], "0-g0-0")["samples"][0]["pieces"]
    reader = RunReader(tmp_path, SlimeRuns(LOOKUP_POLICY))
    reader.update()
    rollout = whole(reader, "0-g0-0")
    assert not any("‹" in piece for piece in rollout["samples"][0]["pieces"])
    assert [message["role"] for message in rollout["messages"]] == ["user", "assistant", "environment", "assistant"]


def test_samples_of_one_rollout_are_one_member_with_named_rewards(tmp_path: Path) -> None:
    samples = [a_sample(0, group=0, reward={"exact": 0.5, "style": 1.0}), a_sample(1, group=0, rollout_id=0)]
    save(tmp_path / "data_7.pt", {"rollout_id": 7, "samples": samples})
    reader, update = read_run(tmp_path)
    assert update["metrics"]["iteration"] == [7]
    assert update["members"]["samples"] == [2]
    rollout = whole(reader, "7-g0-0")
    assert (rollout["reward"], rollout["rewards"]) == (0.5, {"exact": 0.5, "style": 1.0})


def test_later_files_are_read_and_a_rewritten_file_replaces_its_step(tmp_path: Path) -> None:
    every = write_dumps(tmp_path, steps=3, train=False)
    reader, _ = read_run(tmp_path)
    assert reader.update() is None
    rows = [train_row(sample) for sample in every[1]]
    save(tmp_path / "train_data" / "1.pt", {"samples": rows, "dp_shards": []})
    second = reader.update()
    assert second is not None
    assert second["metrics"]["iteration"] == [0, 1, 2]
    trained = [second["words"][number] for number in second["members"]["outcome"]]
    assert trained == ["ready"] * 4 + ["trained"] * 4 + ["ready"] * 4


def test_train_data_in_columns_of_a_rank_is_read_as_well(tmp_path: Path) -> None:
    """As slime wrote it before 624b824."""
    samples = write_dumps(tmp_path, steps=1, train=False)[0]
    rows = [train_row(sample) for sample in samples]
    names = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "log_probs", "advantages")
    columns: dict[str, Any] = {name: [row[name] for row in rows[2:]] for name in names} | {"partition": [2, 3]}
    save(
        tmp_path / "train_data" / "0_1.pt", {"rank": 1, "rollout_data": {**columns, "raw_reward": [0.0, 1.0, 0.0, 9.0]}}
    )
    reader, update = read_run(tmp_path)
    assert [update["words"][number] for number in update["members"]["outcome"]] == ["ready"] * 2 + ["trained"] * 2
    assert whole(reader, "0-g1-3")["reward"] == 9.0


class _Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class _Own:
    """A class that only the person who ran slime has."""

    def __init__(self) -> None:
        self.value = 1


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    save(tmp_path / "0.pt", {"samples": [a_sample(0, group=0, metadata={"x": _Runs(tmp_path / "made")})]})
    _, update = read_run(tmp_path)
    assert not (tmp_path / "made").exists()
    assert any("0.pt" in sentence for sentence in update["damage"])


def test_objects_of_unknown_classes_are_left_out_and_the_sample_is_shown(tmp_path: Path) -> None:
    sample = a_sample(0, group=0, reward=np.float64(0.75), metadata={"own": _Own(), "source_name": "maths"})
    save(tmp_path / "0.pt", {"samples": [sample]})
    reader, _ = read_run(tmp_path)
    rollout = whole(reader, "0-g0-0")
    assert (rollout["reward"], rollout["source"]) == (0.75, "maths")


HUGE = torch.zeros(1, dtype=torch.long).expand(2**40)
BROKEN: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: path.write_bytes(save(path, {"samples": [a_sample(0, group=0)]}).read_bytes()[:-700]),
    "empty": lambda path: path.write_bytes(b""),
    "a FIFO": lambda path: os.mkfifo(path),
    "no samples": lambda path: save(path, {"model": torch.zeros(2)}),
    "samples that are none": lambda path: save(path, {"samples": [1, {}, {"tokens": "x"}]}),
    "a view of what is not there": lambda path: save(path, {"samples": [a_sample(0, group=0, tokens=HUGE)]}),
    "mask of another length": lambda path: save(path, {"samples": [a_sample(0, group=0, loss_mask=[1])]}),
    "huge length": lambda path: save(path, {"samples": [a_sample(0, group=0, response_length=2**62)]}),
    "compressed": lambda path: _compressed(path),
}


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"0" * 10_000_000)


def test_a_damaged_file_is_one_sentence_and_the_others_are_shown(tmp_path: Path) -> None:
    for number, (name, damage) in enumerate(BROKEN.items()):
        run = tmp_path / str(number)
        write_dumps(run, steps=1)
        damage(run / "rollout_data" / "1.pt")
        _, update = read_run(run)
        about = [sentence for sentence in update["damage"] if "1.pt" in sentence]
        assert len(about) == 1, (name, update["damage"])
        assert "\n" not in about[0]
        assert update["groups"]["iteration"] == [0, 0], name


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_whatever_bytes_change_the_report_is_made(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("run")
    file = save(path / "0.pt", {"samples": [a_sample(i, group=0) for i in range(2)]})
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    update = RunReader(path, SlimeRuns()).update()
    assert update is not None
    assert update["damage"] or sum(update["members"]["samples"]) == 2  # no Sample is missing without a word


FIELD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=8),
    st.lists(st.floats(), max_size=8), st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    st.just([[1], {"a": None}]),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(a_sample(0, group=0))), FIELD, max_size=4), metadata=st.booleans()
)
@example(changes={"reward": 10**400, "prompt": [{"role": "user", "content": [{"type": 10**400}]}]}, metadata=False)
def test_whatever_fields_hold_the_other_samples_are_shown(tmp_path_factory, changes, metadata):
    path = tmp_path_factory.mktemp("run")
    if metadata and "metadata" not in changes:
        changes["metadata"] = {"weight_spans": [["1", -5, 99]], "turn_spans": 3, "tools": {"calls": []}}
        changes["metadata"]["segment"] = -(2**70)
    save(path / "0.pt", {"samples": [a_sample(0, group=0), {**a_sample(1, group=1), **changes}]})
    reader, update = read_run(path)
    assert whole(reader, "0-g0-0")["reward"] == 1.0
    assert not any("rollouts.jsonl" in sentence for sentence in update["damage"])


def test_checkpoints_are_no_run(tmp_path: Path) -> None:
    save(tmp_path / "global_dataset_state_dict_3.pt", {"sample_offset": 1})
    assert not dump_files(tmp_path)


def test_of_many_rollouts_some_of_every_step_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.tools.slime_dumps.runs._ALL_BYTES", 0)
    samples = [a_sample(i, group=i // 4, reward=float(i)) for i in range(16)]
    for step in range(3):
        save(tmp_path / f"{step}.pt", {"samples": samples})
    run = SlimeRun(tmp_path)
    run.update()
    lines = [json.loads(line) for line in run.run.rollouts.read_text().splitlines()]
    assert [rollout["iteration"] for rollout in lines if rollout["label"] == "best"] == [0, 1, 2]
    assert len(lines) == 9
