"""Questions whose answers stand in the documentation of Python's own installation, and an index of its pages.

    python examples/search/search_data.py DIRECTORY [small|foreign]

writes pages.sqlite (a page per function and per topic of ``help()``), tasks as train.jsonl and held_out.jsonl, and
demonstrations.jsonl. The held-out questions are about other modules. With ``small`` all questions ask for a default;
``foreign`` makes the demonstrations of ``openai_agent.answer_small`` from them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from search_agent import Library, SearchAgent, SmallSearchAgent

TRAIN = """ast asyncio base64 bisect calendar codecs compileall contextlib copy csv difflib dis filecmp
fileinput fnmatch fractions functools gettext glob gzip hashlib html imaplib inspect io json
linecache locale logging lzma mimetypes multiprocessing os pathlib pickle pickletools pkgutil
platform plistlib posixpath pprint pstats py_compile quopri runpy sched secrets selectors shlex
signal smtplib socket ssl stat string subprocess symtable tarfile tempfile timeit token tokenize
trace traceback types typing unicodedata urllib.parse urllib.request uuid warnings webbrowser
zipfile"""
HELD_OUT = """argparse bz2 cProfile collections concurrent.futures configparser ctypes.util dataclasses enum heapq
itertools math operator profile random re shutil statistics sysconfig textwrap threading time
tracemalloc unittest weakref xml.etree.ElementTree zlib"""


def functions(module: str) -> Iterator[tuple[str, inspect.Signature, str]]:
    """Names, signatures and documentation of a module's functions."""
    for name, function in inspect.getmembers(importlib.import_module(module), inspect.isroutine):
        try:
            signature, text = inspect.signature(function), inspect.getdoc(function) or ""
        except (TypeError, ValueError):  # written in C without a signature
            continue
        if not name.startswith("_") and text:
            yield f"{module}.{name}", signature, text


def questions(module: str, *, small: bool) -> Iterator[dict[str, Any]]:
    for page, signature, text in functions(module):
        shown = f"{page}{signature}"[: SmallSearchAgent.page_chars if small else None]
        for name, parameter in signature.parameters.items():
            default = parameter.default
            simple = isinstance(default, bool | int | str) and re.fullmatch(r"'?[\w.-]+'?", repr(default))
            if simple and str(parameter) in shown:
                question = f"What is the default of {name} in {page}?"
                yield {"question": question, "answer": repr(default), "page": page}
        summary = re.split(r"\.\s|\n\n", " ".join(text.split()))[0]
        if not small and 20 < len(summary) < 160:
            question = f"Which function of {module} has this description? {summary}"
            yield {"question": question, "answer": page.rpartition(".")[2], "page": page}


def make_index(path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE pages USING fts5(name, text)")
        pages = {f"topic.{name}": text for name, text in topics.items()}
        for module in (TRAIN + " " + HELD_OUT).split():
            pages |= {page: f"{page}{signature}\n{text}" for page, signature, text in functions(module)}
        connection.executemany("INSERT INTO pages VALUES (?, ?)", pages.items())


def demonstration(agent: SearchAgent, task: dict[str, Any], *, foreign: bool = False) -> dict[str, Any]:
    """A conversation that searches, opens the page and answers."""
    library, messages = Library(task["index"], agent.page_chars), agent.build_prompt(task)
    query = re.sub(r"What is the default of|Which function of|has this description|\bin\b|\?", "", task["question"])
    for name, arguments in (("search", {"query": " ".join(query.split())}), ("open", {"page": task["page"]})):
        call = {"id": f"call{len(messages):05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        result = getattr(library, name)(**arguments)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    messages.append({"role": "assistant", "content": f"{task['answer']} [{task['page']}]"})
    return {"messages": messages} if foreign else {"task": task, "messages": messages}


def main(directory: Path, agent: SearchAgent, *, foreign: bool = False, seed: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    index, rng = (directory / "pages.sqlite").resolve(), random.Random(seed)
    make_index(index)
    small, library = isinstance(agent, SmallSearchAgent), Library(str(index))
    tasks = {
        split: [
            {**question, "index": str(index)}
            for module in names.split()
            for question in questions(module, small=small)
            if question["page"] in library.search(question["question"]).splitlines()
        ]
        for split, names in (("train", TRAIN), ("held_out", HELD_OUT))
    }
    for split, each in tasks.items():
        write(directory / f"{split}.jsonl", rng.sample(each, len(each)))
    demonstrations = [demonstration(agent, task, foreign=foreign) for task in rng.sample(tasks["train"], 80)]
    write(directory / "demonstrations.jsonl", demonstrations)


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), SmallSearchAgent() if sys.argv[2:] else SearchAgent(), foreign="foreign" in sys.argv[2:])
