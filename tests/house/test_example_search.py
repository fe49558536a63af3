"""``examples/search``: any query has an answer, and only a page that was opened is cited for a reward."""

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.harness.demonstrations import answers, warm_up_sample
from tests.harness.gateway import calling, one_sample, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "search"


@pytest.fixture(scope="module")
def task(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    _, data = modules
    index = tmp_path_factory.mktemp("search") / "pages.sqlite"
    data.make_index(index)
    questions = data.questions("shutil", small=True)
    return {**next(each for each in questions if each["page"] == "shutil.rmtree"), "index": str(index)}


def test_no_answer_is_matched_by_an_empty_one(modules: Any) -> None:
    agent, data = modules
    tasks = [task for name in ("difflib", "shutil") for task in data.questions(name, small=True)]
    assert len(tasks) > 10
    assert [task for task in tasks if agent.score_answer(task, "", set())["score"]] == []


QUERIES = ['"', "shutil AND (", "name: rmtree NEAR(", "-*^", "", "a " * 50_000, "\0rmtree", "); DROP TABLE pages", "_"]


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_every_query_has_an_answer(query: str, modules: Any, task: dict[str, Any]) -> None:
    agent, _ = modules
    before = Path(task["index"]).read_bytes()
    library = agent.Library(task["index"])
    found = library.search(query)
    assert found.startswith("Error: ") or len(found.splitlines()) <= agent.RESULTS
    assert library.open(f"{query} pages") == "Error: there is no such page"
    assert library.opened == set()
    assert Path(task["index"]).read_bytes() == before


def test_the_answer_and_an_opened_page_are_rewarded(modules: Any, task: dict[str, Any]) -> None:
    agent, data = modules
    assert (task["question"], task["answer"]) == ("What is the default of ignore_errors in shutil.rmtree?", "False")
    opened = {"shutil.rmtree"}
    cases = {
        "False [shutil.rmtree]": 1.0,
        "`False` [shutil.copy]": 0.7,
        "True [shutil.rmtree]": 0.0,
        "False": 0.7,
        "": 0.0,
    }
    assert {text: agent.score_answer(task, text, opened)["score"] for text in cases} == pytest.approx(cases)
    assert agent.score_answer(task, "False [shutil.rmtree]", set())["score"] == pytest.approx(0.7)
    library = agent.Library(task["index"])
    assert "shutil.rmtree" in library.search("default of ignore_errors in shutil.rmtree").splitlines()
    assert "ignore_errors=False" in library.open("shutil.rmtree")
    assert library.opened == opened
    conversation = data.demonstration(agent.SmallSearchAgent(), task)["messages"]
    assert conversation[-1]["content"] == "False [shutil.rmtree]"
    assert len(conversation[-2]["content"]) == 160
    assert not set(data.TRAIN.split()) & set(data.HELD_OUT.split())


@pytest.fixture
def openai_agent() -> Any:
    sdk = pytest.importorskip("agents", reason="plays: pip install openai-agents")
    if not hasattr(sdk, "Runner"):
        pytest.skip("the package `agents` of this directory stands before OpenAI's: pip install openai-agents")
    return import_module("openai_agent")


LONG: Any = {"sampling": {"max_new_tokens": 2000}, "context_length": 10**6}


def test_openais_agent_plays_the_task(modules: Any, task: dict[str, Any], openai_agent: Any) -> None:
    calls = calling("search", query="rmtree"), calling("open", page="shutil.rmtree")
    with serving(*calls, "False [shutil.rmtree]", **LONG) as case:
        assert asyncio.run(openai_agent.answer(task, case.llm)) == {"score": 1.0, "right": 1.0, "cites": 1.0}
        one_sample(case, 3)


def test_the_warm_up_sees_the_tokens_of_openais_agent(
    modules: Any, task: dict[str, Any], openai_agent: Any, tmp_path: Path
) -> None:
    agent, data = modules
    row = data.demonstration(agent.SmallSearchAgent(), task, foreign=True)
    tokenizer, sample = warm_up_sample(row, tmp_path)
    with serving(*answers(row), tokenizer=tokenizer, **LONG) as case:
        assert asyncio.run(openai_agent.answer_small(task, case.llm))["score"] == 1.0
        one_sample(case, 3)
        assert [*case.turns[-1].prompt_ids, *case.turns[-1].response_ids] == sample.tokens


@pytest.mark.parametrize("call", [calling("open", page="shutil.rmtree"), calling("delete", page="shutil.rmtree")])
def test_an_agent_without_an_answer_has_no_reward(
    call: str, modules: Any, task: dict[str, Any], openai_agent: Any
) -> None:
    with serving(*[call] * 3, **LONG) as case:
        assert asyncio.run(openai_agent.answer_small(task, case.llm))["score"] == 0.0
