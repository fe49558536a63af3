"""Databases with questions: twelve domains to train on and three held out, filled from a seed.

    python examples/sql/sql_data.py DIRECTORY [small|foreign]

writes two databases for each domain, tasks as train.jsonl and held_out.jsonl, and demonstrations.jsonl for
`agl-slime warm-up`. The second database has the same people and things with other figures and dates: a query that
gives the right result in both is no guess.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from sql_agent import Database, SmallSqlAgent, SqlAgent, read

# A line per domain: a place, a person and a date, a thing with a kind and a price, an event with a date and money.
FIELDS = ["place", "person", "since", "thing", "kind", "price", "event", "day", "paid"]
TRAIN = """branch customer joined product category price purchase bought amount
school pupil enrolled course subject fee lesson given cost
library reader registered book genre value loan lent fine
garage driver licensed car make worth repair finished bill
hotel guest greeted room style rate stay booked rent
club member elected sport level dues game played prize
farm worker hired crop variety yield harvest cut wage
theatre actor engaged play form budget show staged pay
harbour captain sworn ship class tonnage voyage sailed freight
bakery baker trained bread flour weight delivery placed total
stadium fan subscribed team league rank ticket sold charge
cinema critic accredited film studio length review printed income"""
HELD_OUT = """clinic patient admitted treatment specialty tariff visit seen invoice
gallery collector invited painting era estimate auction opened bid
airport pilot certified plane model range flight landed toll"""
_VALUES = """Bergen Cadiz Dublin Lyon Malmo Porto Turin Zagreb
Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Noah Olga Paul
Adler Berg Costa Duarte Evans Fischer Grant Hansen Ito Jensen Keller Lopez Moreau Novak
Alpha Breeze Comet Delta Ember Falcon Garnet Harbor Indigo Juniper Koala Lotus Meteor Nova
basic classic deluxe modern special"""
CITIES, FIRST, LAST, THINGS, SORTS = [line.split() for line in _VALUES.splitlines()]

TABLES = """CREATE TABLE {place} (id INTEGER PRIMARY KEY, city TEXT);
CREATE TABLE {person} (id INTEGER PRIMARY KEY, name TEXT, {since} DATE);
CREATE TABLE {thing} (id INTEGER PRIMARY KEY, name TEXT, {kind} TEXT, {price} REAL);
CREATE TABLE {event} (id INTEGER PRIMARY KEY, {person}_id INTEGER REFERENCES {person}, {thing}_id INTEGER
REFERENCES {thing}, {place}_id INTEGER REFERENCES {place}, {day} DATE, {paid} REAL);"""

# The number of joins, a question, its query.
QUESTIONS = """0|How many {thing}s have the {kind} {sort}?|SELECT COUNT(*) FROM {thing} WHERE {kind} = '{sort}'
0|What is the {price} of the {thing} {what}?|SELECT {price} FROM {thing} WHERE name = '{what}'
0|What is the sum of {paid} of {event}s {day} in {year}?|SELECT SUM({paid}) FROM {event} WHERE {day} LIKE '{year}%'
1|How many {event}s has the {person} {who}?|SELECT COUNT(*) FROM {event} {+person} WHERE name = '{who}'
1|What is the highest {paid} of {event}s in {city}?|SELECT MAX({paid}) FROM {event} {+place} WHERE city = '{city}'
2|What is the sum of {paid} of {event}s of {who} with the {kind} {sort}?|SELECT SUM({paid}) FROM {event} {+person} \
{+thing} WHERE {person}.name = '{who}' AND {kind} = '{sort}'
3|Which {person} has the largest sum of {paid} with the {kind} {sort} in {city}?|SELECT {person}.name FROM {event} \
{+person} {+thing} {+place} WHERE {kind} = '{sort}' AND city = '{city}' GROUP BY {person}.id ORDER BY SUM({paid}) DESC \
LIMIT 1"""


def words_of(line: str) -> dict[str, str]:
    """The words of a domain by field, and with a plus the table's join."""
    words = dict(zip(FIELDS, line.split(), strict=True))
    joins = {f"+{field}": "JOIN {0} ON {0}.id = {0}_id".format(words[field]) for field in ("place", "person", "thing")}
    return words | joins


def make_databases(directory: Path, words: dict[str, str], *, seed: int) -> None:
    """Both databases of a domain, with the same names."""
    for number, suffix in enumerate((".sqlite", ".second.sqlite")):
        names, rng = random.Random(f"{seed} {words}"), random.Random(f"{seed} {words} {number}")

        def day(rng: random.Random = rng) -> str:
            return str(date(2022, 1, 1) + timedelta(days=rng.randrange(3 * 365)))

        def money(rng: random.Random = rng) -> float:
            return rng.randrange(500, 99900) / 100

        people = names.sample([f"{first} {last}" for first in FIRST for last in LAST], 12)
        rows: dict[str, list[tuple[Any, ...]]] = {
            "place": [(city,) for city in names.sample(CITIES, 4)],
            "person": [(name, day()) for name in people],
            "thing": [(name, rng.choice(SORTS), money()) for name in names.sample(THINGS, 12)],
            "event": [(*(rng.randint(1, n) for n in (12, 12, 4)), day(), money()) for _ in range(300)],
        }
        path = directory / f"{words['event']}{suffix}"
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.executescript(TABLES.format(**words))
            for table, values in rows.items():
                marks = ", ".join("?" * len(values[0]))
                connection.executemany(f"INSERT INTO {words[table]} VALUES (NULL, {marks})", values)


def make_task(directory: Path, words: dict[str, str], rng: random.Random, *, joins: int) -> dict[str, Any]:
    """A question with an answer in both databases of the domain, and with at most ``joins`` joins."""
    paths = [(directory / f"{words['event']}{suffix}").resolve() for suffix in (".sqlite", ".second.sqlite")]
    templates = [line.split("|") for line in QUESTIONS.splitlines() if int(line[0]) <= joins]
    while True:
        n_joins, *texts = rng.choice(templates)
        values = {"year": rng.choice(("2022", "2023", "2024")), "sort": rng.choice(SORTS)}
        for key, table, column in (("who", "person", "name"), ("what", "thing", "name"), ("city", "place", "city")):
            (values[key],) = rng.choice(read(paths[0], f"SELECT {column} FROM {words[table]}"))
        question, query = (text.format(**words, **values) for text in texts)
        if all(rows and rows[0][0] for rows in (read(path, query) for path in paths)):
            return {"database": str(paths[0]), "question": question, "query": query, "joins": int(n_joins)}


def demonstration(agent: SqlAgent, task: dict[str, Any], *, foreign: bool = False) -> dict[str, Any]:
    """A conversation that answers the task with the tools of its agent, or of ``langgraph_agent.answer_small``."""
    database, messages = Database(task["database"]), agent.build_prompt(task)
    if foreign:
        return {"messages": [*messages, calling(0, "sql_db_query", query=task["query"])]}
    if isinstance(agent, SmallSqlAgent):
        return {"task": task, "messages": [*messages, {"role": "assistant", "content": task["query"]}]}
    schemas = [("schema", {"table": name}) for name in database.tables().split(", ")]
    for name, arguments in [("tables", {}), *schemas, ("query", {"sql": task["query"]})]:
        call, result = calling(len(messages), name, **arguments), getattr(database, name)(**arguments)
        (made,) = call["tool_calls"]
        messages += [call, {"role": "tool", "tool_call_id": made["id"], "name": name, "content": result}]
    return {"task": task, "messages": [*messages, {"role": "assistant", "content": messages[-1]["content"]}]}


def calling(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def main(directory: Path, agent: SqlAgent, *, foreign: bool = False, seed: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    domains = {"train": [*map(words_of, TRAIN.splitlines())], "held_out": [*map(words_of, HELD_OUT.splitlines())]}
    for words in domains["train"] + domains["held_out"]:
        make_databases(directory, words, seed=seed)

    def tasks(split: str, n: int) -> list[dict[str, Any]]:
        distinct: dict[str, dict[str, Any]] = {}
        for _ in range(20 * n):  # there may be fewer than n
            task = make_task(directory, rng.choice(domains[split]), rng, joins=agent.most_joins)
            distinct[task["question"]] = task
            if len(distinct) == n:
                break
        return [*distinct.values()]

    write(directory / "train.jsonl", tasks("train", 360))
    write(directory / "held_out.jsonl", tasks("held_out", 96))
    demonstrations = [demonstration(agent, task, foreign=foreign) for task in tasks("train", 80)]
    write(directory / "demonstrations.jsonl", demonstrations)


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} lines", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SmallSqlAgent() if sys.argv[2:] else SqlAgent(), foreign="foreign" in sys.argv[2:])
