"""Items of OpenAI's responses as chat messages, and the tools that a request declares."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import function_tool
from agl_slime.gateway.declared import (
    KIND_OF_ITEM,
    KIND_OF_OUTPUT,
    OPENAIS,
    Tools,
    custom_arguments,
    custom_input,
    custom_tool,
    definitions,
    kind_of,
    openais_tool,
)
from agl_slime.gateway.messages import Message, text_of
from agl_slime.gateway.protocol import Kept

JOIN = "__"  # between a namespace and the name of its tool, where the model sees one name
DECLARING = frozenset(("additional_tools", "tool_search_output", "compaction_trigger"))
"""Items that say more than messages do."""
COMPACTION = (
    "Summarize this conversation, so that it can be continued from the summary alone: what was asked, what was done "
    "and found, what was decided, and what is left to do. Answer with the summary only."
)
_SUMMARY = "A summary of the conversation up to here:\n\n"
_SUMMARY_MARK = "agl-slime:"
# calls of tools that a server ran, by the fields that say what it was asked for and what it gave
_SERVERS_CALLS = {
    "web_search_call": (("action",), ("results",)),
    "file_search_call": (("queries",), ("results",)),
    "code_interpreter_call": (("code",), ("outputs",)),
    "mcp_call": (("arguments",), ("output", "error")),
}


@dataclass
class Items:
    """What a list of items comes to. ``tools`` are those that it declares, as the model sees them; ``compacted`` is the
    place of the last summary among ``messages``; ``compacts``: another one is asked for."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    compacted: int | None = None
    compacts: bool = False
    _answer: Message | None = None
    _ids: dict[str, Any] = field(default_factory=dict)  # of calls, by those of their items

    def add(self, item: Any, kept: Kept, where: str) -> None:
        """The next item. What the model gave in one answer (reasoning, a text, calls) is one message."""
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(kind, str):
            raise GatewayRequestError(f"{where} is of type {kind!r:.80}, which is not served here", param=where)
        if self.compacts:
            raise GatewayRequestError(f"{where} follows a compaction_trigger, which must be the last item", param=where)
        if kind == "item_reference":
            item = referred(item.get("id"), kept, where)
            kind = item["type"]
        if kind == "message" and item.get("role") == "assistant":
            self._of_answer(new=True)["content"] += text_of(item.get("content"), f"{where}.content")
        elif kind == "reasoning":
            answer = self._of_answer(new=True)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + _reasoning(item, where)
        elif kind in ("function_call", "custom_tool_call") or kind in KIND_OF_ITEM:
            call = _call(item, kind)
            self._ids[str(item.get("id"))] = call["id"]
            self._of_answer().setdefault("tool_calls", []).append(call)
        elif kind in _SERVERS_CALLS:
            call, result = _servers_call(item, kind)
            self._of_answer().setdefault("tool_calls", []).append(call)
            self._tool(call["id"], result)
        else:
            self._other(item, kind, kept, where)

    def _other(self, item: Mapping[str, Any], kind: str, kept: Kept, where: str) -> None:
        if kind == "message":
            self._say(item.get("role"), item.get("content"))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._tool(item.get("call_id"), text_of(item.get("output"), f"{where}.output"))
        elif kind in KIND_OF_OUTPUT:
            made = item.get("call_id") or self._ids.get(str(item.get("id")))
            self._tool(made or _call_of(item.get("id"), kept), self._output(item, kind, where))
        elif kind == "additional_tools":
            self._say("developer", definitions(self._declared(item, where)))
        elif kind in ("compaction", "compaction_summary"):
            self.compacted = len(self.messages)
            self._say("user", _SUMMARY + summary_of(item, where))
        elif kind == "compaction_trigger":
            self.compacts = True
            self._say("user", COMPACTION)
        else:
            raise GatewayRequestError(f"{where} is of type {kind!r:.80}, which is not served here", param=where)

    def _of_answer(self, *, new: bool = False) -> Message:
        """The answer that an item is part of; a text or reasoning (``new``) after calls begins another one."""
        if self._answer is None or (new and self._answer.get("tool_calls")):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer

    def _say(self, role: Any, content: Any) -> None:
        self._answer = None
        self.messages.append({"role": role, "content": content})

    def _tool(self, call_id: Any, text: str) -> None:
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": str(call_id or ""), "content": text})

    def _output(self, item: Mapping[str, Any], kind: str, where: str) -> str:
        output = item.get("output")
        if kind == "tool_search_output":
            return definitions(self._declared(item, where)) or "no tools found"
        if kind == "apply_patch_call_output":
            return "\n".join(str(part) for part in (item.get("status"), output) if part)
        return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)

    def _declared(self, item: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        tools = [form for _, _, _, form in declared(item.get("tools"), f"{where}.tools") if form is not None]
        self.tools += tools
        return tools


def read_items(items: list[Any], kept: Kept) -> Items:
    """Raises ``GatewayRequestError``, which names the item."""
    read = Items()
    for at, item in enumerate(items):
        read.add(item, kept, f"input[{at}]")
    return read


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise GatewayRequestError(f"{where}.content must be a list of parts, got {parts!r:.80}", param=where)
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if (known := KIND_OF_ITEM.get(kind)) is not None:
        name, arguments = known, OPENAIS[known].arguments(item)
    else:
        namespace = item.get("namespace")
        name = f"{namespace}{JOIN}{item.get('name')}" if namespace else item.get("name")
        arguments = custom_arguments(item.get("input")) if kind == "custom_tool_call" else item.get("arguments")
    return {"id": item.get("call_id") or item.get("id"), "function": {"name": name, "arguments": arguments}}


def _servers_call(item: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    """A call that a server made, and what it gave; of a search that is often not said."""
    asks, gives = _SERVERS_CALLS[kind]
    asked = {name: item[name] for name in asks if item.get(name) is not None}
    arguments = item.get("arguments") if kind == "mcp_call" else asked.get("action", asked)
    given = [item[name] for name in gives if item.get(name)] or [item.get("status") or "completed"]
    texts = (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in given)
    name = str(item.get("name") or kind.removesuffix("_call"))
    return {"id": str(item.get("id") or ""), "function": {"name": name, "arguments": arguments}}, "\n".join(texts)


def _call_of(made: Any, kept: Kept) -> Any:
    """The id of the call in an earlier answer's item, by the item's id."""
    try:
        return referred(made, kept, "")["call_id"]
    except (GatewayRequestError, KeyError):
        return made


def referred(made: Any, kept: Kept, where: str) -> Mapping[str, Any]:
    """The item of an earlier answer that has this id."""
    kind, _, rest = made.partition("_") if isinstance(made, str) else ("", "", "")
    answer, _, number = rest.rpartition("_") if kind == "fc" else (rest, "", "")
    if answer in kept:
        served = kept[answer][-1]
        if kind == "msg":
            return {"type": "message", "role": "assistant", "content": served["content"]}
        if kind == "rs":
            return {"type": "reasoning", "content": [{"text": served.get("reasoning_content", "")}]}
        if number.isdecimal() and int(number) < len(calls := served.get("tool_calls", ())):
            return {"type": "function_call", "call_id": calls[int(number)]["id"], **calls[int(number)]["function"]}
    raise GatewayRequestError(f"{where} refers to {made!r:.80}, which is no item of this rollout", param=where)


# -- summaries --------------------------------------------------------------------------------------------------------


def compacts(body: Mapping[str, Any]) -> bool:
    """Whether the answer to a request is a summary."""
    items = body.get("input")
    last = items[-1] if isinstance(items, list) and items else None
    return isinstance(last, Mapping) and last.get("type") == "compaction_trigger"


def is_summary(message: Message) -> bool:
    return message["content"].startswith(_SUMMARY)


def compaction_item(made: str, summary: str) -> dict[str, Any]:
    content = _SUMMARY_MARK + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()
    return {"id": f"cmp_{made}", "type": "compaction", "encrypted_content": content}


def summary_of(item: Mapping[str, Any], where: str) -> str:
    """The summary in an item that ``compaction_item`` made."""
    mark, found, content = str(item.get("encrypted_content") or "").partition(_SUMMARY_MARK)
    try:
        if not found or mark:
            raise ValueError(content)
        return base64.b64decode(content, altchars=b"-_", validate=True).decode()
    except ValueError:
        told = f"{where}: the encrypted content of a compaction item could not be verified; another server made it"
        raise GatewayRequestError(told, code="invalid_encrypted_content", param=where) from None


# -- tools ------------------------------------------------------------------------------------------------------------


def declared(tools: Any, where: str = "tools") -> Iterator[tuple[str, Mapping[str, Any], str, dict[str, Any] | None]]:
    """Of each tool its name to the model, what was declared, its namespace, and what the model sees of it: ``None``
    where a server runs it."""
    if not isinstance(tools or [], list):
        raise GatewayRequestError(f"{where} must be a list of tools, got {tools!r:.80}", param=where)
    for at, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(kind, str):
            raise GatewayRequestError(f"{where}[{at}] must be an object with a type", param="tools")
        inner = tool.get("tools") or [] if kind == "namespace" else [tool]
        if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
            raise GatewayRequestError(f"{where}[{at}].tools must be a list of objects", param="tools")
        namespace = str(tool.get("name") or "") if kind == "namespace" else ""
        for one in inner:
            if (of := one.get("type")) not in ("function", "custom"):
                yield kind_of(one), one, "", openais_tool(one, f"{where}[{at}]")
                continue
            if not isinstance(one.get("name"), str):
                raise GatewayRequestError(f"{where}[{at}] must have a name", param="tools")
            name = f"{namespace}{JOIN}{one['name']}" if namespace else one["name"]
            form = function_tool(name, one.get("description"), one.get("parameters"))
            yield name, one, namespace, custom_tool(name, one) if of == "custom" else form


def read_tools(tools: Any, found: list[dict[str, Any]]) -> Tools:
    """The tools of a request and those that its items declare. Deferred ones are shown at the beginning unless the
    client searches for tools."""
    shown, deferred, left_out = [], [], []
    known = [*declared(tools)]
    searches = any(name == "tool_search" and form is not None for name, _, _, form in known)
    for name, tool, _, form in known:
        if form is None:
            left_out.append(name)
        else:
            (deferred if searches and tool.get("defer_loading") else shown).append(form)
    names = {tool["function"]["name"] for tool in shown}
    loaded = {tool["function"]["name"]: tool for tool in (*deferred, *found)}
    more = tuple(tool for name, tool in loaded.items() if name not in names)
    return Tools(shown=tuple(shown), loaded=more, left_out=tuple(left_out))


def all_declared(body: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type and namespace of all tools of a request, by their names to the model."""
    items = body.get("input")
    declaring = (body, *items) if isinstance(items, list) else (body,)
    lists = (item.get("tools") for item in declaring if isinstance(item, Mapping))
    found = (one for tools in lists for one in declared(tools))
    return {name: (str(tool["type"]), namespace) for name, tool, namespace, _ in found}


def sent_back(kinds: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The arguments of calls as they come back in items, by the names of tools whose items have a form of their own."""

    def of(kind: str) -> Any:
        if kind == "custom":
            return lambda arguments: custom_arguments(custom_input(arguments))
        known = OPENAIS[kind]

        def form(arguments: Mapping[str, Any]) -> Any:
            fields = known.fields(arguments)
            return arguments if fields is None else known.arguments(fields)

        return form

    return {name: of(kind) for name, (kind, _) in kinds.items() if kind == "custom" or kind in OPENAIS}
