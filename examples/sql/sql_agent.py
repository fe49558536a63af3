"""An agent that answers questions over an SQLite file with the tools ``tables``, ``schema`` and ``query``.

The result of its last query is compared with that of the task's own query, in two databases: 1 if both are equal, 0.1
for another query that runs.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agl_slime import SGLangLitAgent, Trajectory

SECONDS, MOST_ROWS, MOST_BYTES, SHOWN_ROWS = 2.0, 1000, 1_000_000, 20
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
PRAGMAS = {"table_info", "table_xinfo", "foreign_key_list", "index_list", "index_info", "index_xinfo"}  # the schema
PRAGMAS |= {"read_uncommitted"}  # asked by SQLAlchemy


def connect(path: str | Path) -> sqlite3.Connection:
    """A connection whose limits are SQLite's own: the file is open read-only, the authorizer permits nothing but
    reading, the progress handler ends queries after some seconds."""
    end = time.monotonic() + SECONDS

    def authorize(action: int, name: str | None, *_: Any) -> int:
        harmless = action == sqlite3.SQLITE_PRAGMA and name in PRAGMAS
        return sqlite3.SQLITE_OK if action in READS or harmless else sqlite3.SQLITE_DENY

    address = f"file:{quote(str(path))}?mode=ro&immutable=1"
    connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)  # of a value and of the query
    connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
    connection.set_authorizer(authorize)
    return connection


def read(path: str | Path, sql: str) -> list[tuple[Any, ...]]:
    """The rows of one SELECT. Raises ``sqlite3.Error``."""
    with closing(connect(path)) as connection:
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(MOST_ROWS + 1)
    if cursor.description is None:
        raise sqlite3.ProgrammingError("this is no query")
    if len(rows) > MOST_ROWS:
        raise sqlite3.DataError(f"the result has more than {MOST_ROWS} rows")
    return rows


class Database:
    """The tools of one rollout."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.last_query = ""

    def tables(self) -> str:
        """List the tables."""
        return ", ".join(name for (name,) in read(self._path, "SELECT name FROM sqlite_master WHERE type = 'table'"))

    def schema(self, table: str) -> str:
        """List the columns of a table.

        Args:
            table: Name of the table.
        """
        quoted = table.replace('"', '""')
        columns = [name for _, name, *_ in read(self._path, f'PRAGMA table_info("{quoted}")')]
        return f"{table}({', '.join(columns)})" if columns else "Error: there is no such table"

    def query(self, sql: str) -> str:
        """Run a SELECT and return its rows.

        Args:
            sql: A query in SQLite's dialect.
        """
        self.last_query = sql
        try:
            rows = read(self._path, sql)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"Error: {error}"
        shown = "\n".join(" | ".join(map(str, row)) for row in rows[:SHOWN_ROWS])
        return shown + (f"\n({len(rows)} rows)" if len(rows) > SHOWN_ROWS else "") or "no rows"


def score_query(task: dict[str, Any], sql: str) -> dict[str, float]:
    """The reward of a query, and whether it is right."""
    try:
        for path in (task["database"], task["database"].replace(".sqlite", ".second.sqlite")):
            if _comparable(read(path, sql)) != _comparable(read(path, task["query"])):
                return {"score": 0.1, "right": 0.0}
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return {"score": 0.0, "right": 0.0}
    return {"score": 1.0, "right": 1.0}


def _comparable(rows: list[tuple[Any, ...]]) -> list[str]:
    """Rows in any order, with money to the cent."""
    return sorted(repr([round(value, 2) if isinstance(value, float) else value for value in row]) for row in rows)


class SqlAgent(SGLangLitAgent):
    max_turns, most_joins = 10, 3
    system = "Answer the question with the tools: look at the tables, then run a query."

    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        database = Database(task["database"])
        return [database.tables, database.schema, database.query]

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task["question"]}]

    def score(self, task: dict[str, Any], trajectory: Trajectory) -> dict[str, float]:  # type: ignore[override]
        return score_query(task, trajectory.tools["query"].__self__.last_query)


class SmallSqlAgent(SqlAgent):
    """The task at the size of SmolLM2-135M: the schema is in the prompt, and the query is the answer."""

    max_turns, most_joins = 1, 1
    system = "Write the query."

    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        return []

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        database = Database(task["database"])
        schema = "\n".join(database.schema(table) for table in database.tables().split(", "))
        system, question = super().build_prompt(task)
        return [system, {"role": "user", "content": f"{schema}\n{question['content']}"}]

    def score(self, task: dict[str, Any], trajectory: Trajectory) -> dict[str, float]:  # type: ignore[override]
        return score_query(task, trajectory.response)
