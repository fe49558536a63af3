"""The page of runs, whose data are in it or come from a server.

Model output is data, never markup: it is stored in ``<script type="application/json">`` blocks, and the page's code
puts it into text nodes only. The content security policy allows that code alone, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from agl_slime.report.alarms import find_alarms
from agl_slime.report.read import RunReader
from agl_slime.report.summary import headline, sum_up
from agl_slime.support.http import json_bytes

SCRIPTS = ("base", "model", "charts", "trend", "step", "rollouts", "rollout", "tokens", "alarms", "main")
_NOT_IN_HTML = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@cache
def assets() -> tuple[str, str, str]:
    """Page, styles and code; the code is one function, so that its names are not global."""
    folder = files("agl_slime.report") / "web"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    license_text, main = read("uplot.LICENSE").replace("*/", ""), "\n".join(read(f"{name}.js") for name in SCRIPTS)
    code = f'/* uPlot\n{license_text}*/\n{read("uplot.js")}\n(() => {{\n"use strict";\n{main}\n}})();'
    return read("page.html"), read("uplot.css") + read("page.css"), code


def policy(*, live: bool) -> str:
    """The content security policy; a ``live`` page may send requests to its own server."""
    _, styles, code = assets()
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, styles)]
    rules = f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:; "
    return rules + ("connect-src 'self'; " if live else "") + "base-uri 'none'; form-action 'none'"


def script_json(value: Any) -> str:
    return json_bytes(value).decode("utf-8").translate(_NOT_IN_HTML)


def page(blocks: Iterable[tuple[str, str]] = (), *, title: str, live: bool, follow: bool = False) -> str:
    """The page with blocks of data: ids, and JSON by ``script_json``. A ``live`` page requests data from its server;
    ``follow`` adds updates."""
    template, styles, code = assets()
    data = "\n".join(f'<script type="application/json" id="{name}">{text}</script>' for name, text in blocks)
    fields = {
        "policy": policy(live=live),
        "title": html.escape(title.encode(errors="replace").decode()),
        "styles": styles,
        "data": data,
    }
    fields |= {"code": code, "follow": '<meta name="follow">' if follow else ""}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def run_data(reader: RunReader) -> dict[str, Any] | None:
    """The changes of a run since the last call (``RunReader.update``), with its result and all its alarms."""
    if (changes := reader.update()) is not None:
        changes["alarms"] = [asdict(alarm) for alarm in find_alarms(reader.metrics, reader.groups)]
        changes["headline"] = headline(sum_up(reader.metrics), alarms=len(changes["alarms"]))
    return changes
