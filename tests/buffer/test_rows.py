"""Rows of a generator's input file: their instance ids, and the rewards of answers to math problems."""

import time

import pytest

from agl_slime.buffer.client import read_rows
from agl_slime.buffer.generators.base_generator import boxed_reward
from agl_slime.errors import ConfigError


@pytest.mark.parametrize("instance_id", ["123456789012345678901234567890", "NaN", "[1]", r'"x\ud83d"', "1.5", "true"])
def test_an_instance_id_that_names_nothing_is_refused_by_its_row(tmp_path, instance_id):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "0"}\n{"instance_id": null, "prompt": "1"}\n{"instance_id": 7.0, "prompt": "2"}\n')
    assert [row["instance_id"] for row in read_rows(path)] == [0, 1, 7]
    path.write_text(path.read_text() + f'{{"instance_id": {instance_id}, "prompt": "2"}}\n')
    with pytest.raises(ConfigError, match=r"the instance_id of row 3 is .*give a text or a 64-bit integer"):
        read_rows(path)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{42.0}", "42", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4", 1.0),
        (r"\boxed{50\%}", r"\frac12", 0.0),
        (r"\boxed{50\%}", "1/2", 1.0),
        (r"\boxed{ (1, 2) }", "(1,2)", 1.0),
        (r"\boxed{\text{Tuesday}}", "Tuesday", 1.0),
        (r"\boxed{x^2}", r"\boxed{x^{2}}", 0.0),
        (r"\boxed{4}", r"the answer is \boxed{4}", 1.0),
        ("42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", "0.5", 1.0),  # the last complete box counts
        (r"\boxed{7} and then \boxed{unfinished", "7", 1.0),
        (r"\boxed{1/0}", "42", 0.0),
        (r"\boxed{1,2}", "12", 0.0),  # a comma separates thousands or two numbers
        (r"\boxed{1,2}", "1, 2", 1.0),
        (r"\boxed{12,34}", "1234", 0.0),
        (r"\boxed{-1,234,567.5}", "-1234567.5", 1.0),
        (r"\boxed{1{,}234}", "1234", 1.0),
        (r"\boxed{1e3}", "1000", 1.0),
        (r"\boxed{1e10000000}", "1e10000000", 1.0),
    ],
)
def test_numbers_are_compared_as_numbers_and_the_rest_as_text(response, label, reward):
    assert boxed_reward(response, label) == reward


@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{1e10000000}",
        r"\boxed{-1e-99999999}",
        r"\boxed{1/1e10000000}",
        rf"\boxed{{{'9' * 200_000}}}",
        "\\boxed{" * 20_000,
    ],
)
def test_no_answer_holds_the_process(answer):
    """An exponent of seven digits must not be expanded."""
    began = time.process_time()
    assert boxed_reward(answer, "42") == 0.0
    assert time.process_time() - began < 1
