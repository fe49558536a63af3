"""The structural twins of slime's types, and the two functions that hide how slime's versions differ."""

import abc
import ast
import dataclasses
import json
from enum import Enum
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
    form = sample.to_dict()
    assert Sample.from_dict(json.loads(json.dumps(form))) == sample
    assert form["status"] == "truncated"  # not changed by from_dict
    assert sample.status is Sample.Status.TRUNCATED
    with pytest.raises(ValueError, match="done"):
        Sample.from_dict({**form, "status": "done"})


def test_fields_of_another_version_are_carried_along_or_left_out() -> None:
    form = {**a_full_sample().to_dict(), "field_of_tomorrow": [1, 2]}
    form.pop("spec_info")  # older versions had none
    sample = Sample.from_dict(form)
    assert sample.field_of_tomorrow == [1, 2]  # type: ignore[attr-defined]
    assert sample.to_dict()["field_of_tomorrow"] == [1, 2]
    assert sample.spec_info == Sample.SpecInfo()
    sample = sample_from_fields(response="x", a_field_that_no_version_has=1)
    assert sample.response == "x"
    assert not hasattr(sample, "a_field_that_no_version_has")


# -- against slime's own source --------------------------------------------------------------------------------------


def class_of(file: Path, name: str) -> Any:
    """A class of a source file, compiled on its own."""
    torch = pytest.importorskip("torch")
    [node] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    scope: dict[str, Any] = {"__name__": __name__, "dataclass": dataclasses.dataclass, "field": dataclasses.field}
    scope |= {"Enum": Enum, "Any": Any, "torch": torch, "abc": abc, "Sample": Sample}
    exec(compile(ast.Module(body=[node], type_ignores=[]), str(file), "exec"), scope)
    return scope[name]


def described(cls: Any) -> dict[str, Any]:
    """Names and defaults of the fields of a dataclass, in order."""

    def default(field: dataclasses.Field[Any]) -> Any:
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        made = made.value if hasattr(made, "value") else made
        return vars(made) if dataclasses.is_dataclass(made) else made

    return {field.name: default(field) for field in dataclasses.fields(cls)}


@pytest.fixture
def package() -> Path:
    if types.HAS_SLIME:
        pytest.skip("the installed slime is used itself")
    return slime_package()


@pytest.mark.slime
def test_the_twin_has_the_fields_defaults_and_status_values_of_slime(package: Path) -> None:
    theirs = class_of(package / "utils" / "types.py", "Sample")
    assert list(described(Sample).items()) == list(described(theirs).items())
    assert [(status.name, status.value) for status in Sample.Status] == [
        (status.name, status.value) for status in theirs.Status
    ]
    form = a_full_sample().to_dict()
    assert theirs.from_dict(form).to_dict() == form
    assert Sample.from_dict(theirs.from_dict(form).to_dict()) == a_full_sample()


@pytest.mark.slime
def test_the_other_twins_have_the_shape_of_slime(package: Path) -> None:
    for name in ("RolloutFnTrainOutput", "RolloutFnEvalOutput"):
        theirs, ours = class_of(package / "rollout" / "base_types.py", name), getattr(types, name)
        fields = [[(field.name, field.default) for field in dataclasses.fields(cls)] for cls in (theirs, ours)]
        assert fields[1] == fields[0][:2]  # newer slimes have more, with defaults
    [home] = package.glob("*/data_source.py")
    methods = {"get_samples", "add_samples", "save", "load", "__len__"}
    assert class_of(home, "DataSource").__abstractmethods__ == DataSource.__abstractmethods__ == methods
