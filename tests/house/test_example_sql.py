"""``examples/sql``: queries that attack the database change nothing and end; a reward for the right result only."""

import asyncio
import json
import random
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.demonstrations import answers, warm_up_sample
from tests.harness.gateway import calling, one_sample, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "sql"


@pytest.fixture(scope="module")
def task(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A question of a held-out domain, with its two databases."""
    _, data = modules
    directory = tmp_path_factory.mktemp("sql")
    words = data.words_of(data.HELD_OUT.splitlines()[0])
    data.make_databases(directory, words, seed=1)
    return data.make_task(directory, words, random.Random(0), joins=3)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
ATTACKS = {
    "INSERT INTO clinic VALUES (9, 'Oslo')": "not authorized",
    "DELETE FROM visit": "not authorized",
    "DROP TABLE visit": "not authorized",
    "UPDATE visit SET invoice = 0 RETURNING 1": "not authorized",
    "CREATE TEMP TABLE t AS SELECT 1": "not authorized",
    "VACUUM INTO '/tmp/copy.sqlite'": "authorization denied",
    "ATTACH '/tmp/other.sqlite' AS other": "not authorized",
    "PRAGMA writable_schema = 1": "not authorized",
    "PRAGMA query_only = 0": "not authorized",
    "SELECT * FROM pragma_database_list": "not authorized|prohibited",
    "BEGIN IMMEDIATE": "not authorized",
    "SELECT load_extension('/tmp/x.so')": "not authorized",
    "SELECT 1; DROP TABLE visit": "one statement",
    ENDLESS.format("max(i)"): "interrupted",
    ENDLESS.format("i") + " LIMIT 10000000": "more than 1000 rows",
    ENDLESS.format("group_concat(i)"): "too big|interrupted",
    "SELECT zeroblob(1000000000)": "too big",
    "SELECT * FROM visit a, visit b, visit c, visit d ORDER BY a.seen || b.seen": "interrupted",
    "SELECT prize FROM visit": "no such column",
    "": "no query",
    "SELECT '\0'": "null character|unrecognized",
}


@pytest.mark.parametrize("sql", ATTACKS)
def test_a_query_that_attacks_changes_nothing_and_ends(
    sql: str, modules: Any, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _ = modules
    if "interrupted" in ATTACKS[sql]:  # by the time limit
        monkeypatch.setattr(agent, "SECONDS", 0.2)
    before = Path(task["database"]).read_bytes()
    with pytest.raises((sqlite3.Error, sqlite3.Warning, ValueError), match=ATTACKS[sql]):
        agent.read(task["database"], sql)
    assert agent.Database(task["database"]).query(sql).startswith("Error: ")
    assert agent.score_query(task, sql)["score"] == 0.0
    assert Path(task["database"]).read_bytes() == before
    assert {path.suffix for path in Path(task["database"]).parent.iterdir()} == {".sqlite"}


def test_only_the_right_result_in_both_databases_is_worth_one(modules: Any, task: dict[str, Any]) -> None:
    agent, _ = modules
    (row,) = agent.read(task["database"], task["query"])
    guess = f"SELECT {row[0]!r}"
    assert agent.read(task["database"], guess) == [row]
    scores = [agent.score_query(task, sql)["score"] for sql in (task["query"], guess, "SELECT 1", "SELECT", "")]
    assert scores == [1.0, 0.1, 0.1, 0.0, 0.0]


def test_tools_show_the_schema_and_the_prompts_have_it(modules: Any, task: dict[str, Any]) -> None:
    agent, data = modules
    database = agent.Database(task["database"])
    assert database.tables() == "clinic, patient, treatment, visit"
    assert database.schema("patient") == "patient(id, name, admitted)"
    assert database.schema('patient"); DROP TABLE visit; --').startswith("Error: ")
    *_, prompt, answer = data.demonstration(agent.SmallSqlAgent(), task)["messages"]
    assert prompt["content"].endswith(f"patient_id, treatment_id, clinic_id, seen, invoice)\n{task['question']}")
    assert agent.SmallSqlAgent().score(task, SimpleNamespace(response=answer["content"]))["right"] == 1.0
    conversation = data.demonstration(agent.SqlAgent(), task)["messages"]
    called = [message["tool_calls"][0]["function"] for message in conversation if message.get("tool_calls")]
    assert called[-1] == {"name": "query", "arguments": {"sql": task["query"]}}


LONG = {"max_new_tokens": 2000}  # of a tokenizer with short tokens


def test_langgraphs_agent_plays_the_task(modules: Any, task: dict[str, Any]) -> None:
    pytest.importorskip(
        "langchain_community", reason="plays: pip install langchain langchain-community langchain-openai"
    )
    import langgraph_agent

    looks = calling("sql_db_list_tables", tool_input=""), calling("sql_db_schema", table_names="clinic, visit")
    with serving(
        *looks, calling("sql_db_query", query=task["query"]), "Done.", sampling=LONG, context_length=10**6
    ) as case:
        assert asyncio.run(langgraph_agent.answer(task, case.llm)) == {"score": 1.0, "right": 1.0}
        one_sample(case, 4)


def test_the_warm_up_sees_the_tokens_of_langgraphs_agent(modules: Any, task: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("langchain_community", reason="plays: pip install langchain langchain-openai")
    import langgraph_agent

    agent, data = modules
    row = data.demonstration(agent.SmallSqlAgent(), task, foreign=True)
    tokenizer, sample = warm_up_sample(row, tmp_path)
    with serving(*answers(row), tokenizer=tokenizer, sampling=LONG, context_length=10**6) as case:
        assert asyncio.run(langgraph_agent.answer_small(task, case.llm)) == {"score": 1.0, "right": 1.0}
        (turn,) = case.turns
    assert [*turn.prompt_ids, *turn.response_ids] == sample.tokens
    assert len(turn.response_ids) == sample.response_length == sum(sample.loss_mask)
    function = row["messages"][-1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])  # as OpenAI's clients write them
    assert warm_up_sample(row, tmp_path)[1].tokens == sample.tokens


def test_an_agent_without_an_end_has_no_reward(modules: Any, task: dict[str, Any]) -> None:
    pytest.importorskip("langchain_community", reason="plays: pip install langchain langchain-openai")
    import langgraph_agent

    with serving(*[calling("unknown")] * 10, sampling=LONG, context_length=10**6) as case:
        assert asyncio.run(langgraph_agent.answer_small(task, case.llm)) == {"score": 0.0, "right": 0.0}
