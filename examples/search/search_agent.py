"""An agent that answers questions from Python's own documentation with the tools ``search`` and ``open``.

The right answer is worth 0.7. The page of the answer is worth 0.3 more, if the agent has opened it and cites it.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any
from urllib.parse import quote

from agl_slime import SGLangLitAgent, Trajectory

MOST_WORDS, RESULTS = 32, 5


class Library:
    """The tools of one rollout, over an FTS5 index that ``search_data.py`` has made."""

    def __init__(self, path: str, page_chars: int = 2000) -> None:
        self._address = f"file:{quote(path)}?mode=ro&immutable=1"
        self._page_chars = page_chars
        self.opened: set[str] = set()

    def search(self, query: str) -> str:
        """Search the documentation and return names of pages, the best first.

        Args:
            query: Words to look for.
        """
        # each word is a string of FTS5, so that none is an operator
        words = " OR ".join(f'"{word}"' for word in re.findall(r"[^\W_]+", query)[:MOST_WORDS])
        found = self._rows(
            "SELECT name FROM pages WHERE pages MATCH ? ORDER BY bm25(pages, 10) LIMIT ?", words, RESULTS
        )
        return "\n".join(name for (name,) in found) or "Error: no page has any of these words"

    def open(self, page: str) -> str:
        """Read a page.

        Args:
            page: Its name, as search returns it.
        """
        rows = self._rows("SELECT text FROM pages WHERE name = ?", page)
        if not rows:
            return "Error: there is no such page"
        self.opened.add(page)
        return rows[0][0][: self._page_chars]

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if not values[0]:
            return []
        with closing(sqlite3.connect(self._address, uri=True)) as connection:
            return connection.execute(sql, values).fetchall()


def score_answer(task: dict[str, Any], response: str, opened: set[str]) -> dict[str, float]:
    """The reward of an answer such as ``False [shutil.rmtree]``, and its parts."""
    answer, _, cited = response.strip().removesuffix("]").partition("[")
    right = answer.strip(" `'\"\n.") == task["answer"].strip("'")
    cites = cited.strip() == task["page"] and task["page"] in opened
    return {"score": 0.7 * right + 0.3 * (right and cites), "right": float(right), "cites": float(cites)}


class SearchAgent(SGLangLitAgent):
    max_turns, page_chars = 8, 2000
    system = (
        "Answer from the documentation: search, open a page, then write the answer and the page: 5 [module.function]"
    )

    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        library = Library(task["index"], self.page_chars)
        return [library.search, library.open]

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task["question"]}]

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> dict[str, float]:
        return score_answer(task, trajectory.response, trajectory.tools["open"].__self__.opened)


class SmallSearchAgent(SearchAgent):
    """For models without tools in their chat template, such as SmolLM2-135M."""

    tools_in_prompt, tool_parser = False, "hermes"
    max_turns, page_chars = 3, 160
    system = "Search, open a page, then write the answer and the page."
