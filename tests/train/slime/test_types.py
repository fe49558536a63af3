"""The structural twins of slime's types, and the two functions that hide how slime's versions differ."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from agl_slime import types
from agl_slime.types import DataSource, Sample, sample_from_fields
from tests.harness.slime_programs import slime_package


def a_full_sample() -> Sample:
    return sample_from_fields(
        group_index=3,
        index=7,
        rollout_id=5,
        prompt=[{"role": "user", "content": "hé"}],
        tokens=[1, 2, 3, 4],
        response="ok",
        response_length=2,
        reward={"correct": 1.0, "format": 0.5},
        loss_mask=[1, 0],
        weight_versions=["1", "2"],
        rollout_log_probs=[-0.25, 0.0],
        status=Sample.Status.TRUNCATED,
        metadata={"turns": 2},
    )


def test_a_sample_survives_its_dict_form_and_json() -> None:
    sample = a_full_sample()
    sample.prefix_cache_info.cached_tokens = 4
    sample.prefix_cache_info.total_prompt_tokens = 8
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again == sample
    assert again.status is Sample.Status.TRUNCATED


def test_dict_form_does_not_change_its_source() -> None:
    sample = a_full_sample()
    form = sample.to_dict()
    Sample.from_dict(form)
    assert form["status"] == "truncated"
    assert sample.status is Sample.Status.TRUNCATED


def test_fields_of_another_version_are_carried_along() -> None:
    form = {**a_full_sample().to_dict(), "field_of_tomorrow": [1, 2]}
    form.pop("spec_info")  # older versions had none
    again = Sample.from_dict(form)
    assert again.field_of_tomorrow == [1, 2]  # type: ignore[attr-defined]
    assert again.to_dict()["field_of_tomorrow"] == [1, 2]
    assert again.spec_info == Sample.SpecInfo()


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="done"):
        Sample.from_dict({**a_full_sample().to_dict(), "status": "done"})


def test_two_samples_share_nothing() -> None:
    one, other = Sample(), Sample()
    one.tokens.append(1)
    one.metadata["a"] = 1
    one.spec_info.spec_verify_ct = 1
    assert other == Sample()
    assert other.status is Sample.Status.PENDING


def test_fields_that_the_installed_slime_does_not_have_are_left_out() -> None:
    sample = sample_from_fields(response="x", a_field_that_no_version_has=1)
    assert sample.response == "x"
    assert not hasattr(sample, "a_field_that_no_version_has")


def test_a_data_source_must_have_all_five_methods() -> None:
    assert DataSource.__abstractmethods__ == {"get_samples", "add_samples", "save", "load", "__len__"}


# -- against slime's own source --------------------------------------------------------------------------------------


def class_of(file: Path, name: str) -> Any:
    """A class of a source file, compiled on its own."""
    torch = pytest.importorskip("torch")
    [node] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    import abc
    from enum import Enum

    scope: dict[str, Any] = {
        "__name__": __name__,
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
        "Enum": Enum,
        "Any": Any,
        "torch": torch,
        "abc": abc,
        "Sample": Sample,
    }
    exec(compile(ast.Module(body=[node], type_ignores=[]), str(file), "exec"), scope)
    return scope[name]


def described(cls: Any) -> dict[str, Any]:
    """Names and defaults of the fields of a dataclass, in order."""

    def default(field: dataclasses.Field[Any]) -> Any:
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        made = made.value if hasattr(made, "value") else made
        return vars(made) if dataclasses.is_dataclass(made) else made

    return {field.name: default(field) for field in dataclasses.fields(cls)}


@pytest.mark.slime
def test_the_twin_has_the_fields_defaults_and_status_values_of_slime() -> None:
    if types.HAS_SLIME:
        pytest.skip("the installed slime is used itself")
    theirs = class_of(slime_package() / "utils" / "types.py", "Sample")
    assert described(Sample) == described(theirs)
    assert list(described(Sample)) == list(described(theirs))
    assert [(status.name, status.value) for status in Sample.Status] == [
        (status.name, status.value) for status in theirs.Status
    ]
    form = a_full_sample().to_dict()
    assert theirs.from_dict(form).to_dict() == form
    assert Sample.from_dict(theirs.from_dict(form).to_dict()) == a_full_sample()


@pytest.mark.slime
def test_the_other_twins_have_the_shape_of_slime() -> None:
    if types.HAS_SLIME:
        pytest.skip("the installed slime is used itself")
    rollout = slime_package() / "rollout"
    for name in ("RolloutFnTrainOutput", "RolloutFnEvalOutput"):
        fields = [
            (field.name, field.default) for field in dataclasses.fields(class_of(rollout / "base_types.py", name))
        ]
        # newer slimes have more, with defaults
        assert [(field.name, field.default) for field in dataclasses.fields(getattr(types, name))] == fields[:2]
    [home] = slime_package().glob("*/data_source.py")
    assert class_of(home, "DataSource").__abstractmethods__ == DataSource.__abstractmethods__
