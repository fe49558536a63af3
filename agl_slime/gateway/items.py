"""Items of OpenAI's responses as chat messages, and the tools that they declare."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.declared import (
    KIND_OF_ITEM,
    KIND_OF_OUTPUT,
    OPENAI_TOOLS,
    Tools,
    custom_arguments,
    custom_input,
    definitions,
    kind_of,
    openai_function,
    openai_tool,
)
from agl_slime.gateway.messages import Message, text_of
from agl_slime.gateway.protocol import Histories

JOIN = "__"  # between a namespace and a tool's name, in the function's name
DECLARING = frozenset(("additional_tools", "tool_search_output", "compaction_trigger"))
"""Items that are more than messages."""
COMPACTION = (
    "Summarize this conversation, so that it can be continued from the summary alone: what was asked, what was done "
    "and found, what was decided, and what is left to do. Answer with the summary only."
)
_SUMMARY = "A summary of the conversation up to here:\n\n"
_SUMMARY_MARK = "agl-slime:"
_FERNET = "gAAAA"  # begins what OpenAI's servers encrypt
# calls of server tools: the fields of arguments and of results
_SERVER_CALLS = {
    "web_search_call": (("action",), ("results",)),
    "file_search_call": (("queries",), ("results",)),
    "code_interpreter_call": (("code",), ("outputs",)),
    "mcp_call": (("arguments",), ("output", "error")),
}


@dataclass
class Items:
    """The messages of a list of items, and the ``tools`` that it declares, as functions. ``summary_index`` is the last
    summary among ``messages``; ``compacts``: the request asks for a summary."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    summary_index: int | None = None
    compacts: bool = False
    _answer: Message | None = None
    _call_ids: dict[str, Any] = field(default_factory=dict)  # by id of the item

    def add(self, item: Any, histories: Histories, param: str) -> None:
        """Add the next item. The parts of one answer (reasoning, text, calls) become one message."""
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(kind, str):
            raise GatewayRequestError(f"{param} is of type {kind!r:.80}, which is not served here", param=param)
        if self.compacts:
            raise GatewayRequestError(f"{param} follows a compaction_trigger, which must be the last item", param=param)
        if kind == "item_reference":
            item = _referenced_item(item.get("id"), histories, param)
            kind = item["type"]
        if kind == "message" and item.get("role") == "assistant":
            self._answer_message(new=True)["content"] += text_of(item.get("content"), f"{param}.content")
        elif kind == "reasoning":
            answer = self._answer_message(new=True)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + _reasoning(item, param)
        elif kind in ("function_call", "custom_tool_call") or kind in KIND_OF_ITEM:
            call = _call(item, kind)
            self._call_ids[str(item.get("id"))] = call["id"]
            self._answer_message().setdefault("tool_calls", []).append(call)
        elif kind in _SERVER_CALLS:
            call, result = _server_call(item, kind)
            self._answer_message().setdefault("tool_calls", []).append(call)
            self._add_result(call["id"], result)
        else:
            self._add_other(item, kind, histories, param)

    def _add_other(self, item: Mapping[str, Any], kind: str, histories: Histories, param: str) -> None:
        if kind == "message":
            self._add(item.get("role"), item.get("content"))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_result(item.get("call_id"), text_of(item.get("output"), f"{param}.output"))
        elif kind in KIND_OF_OUTPUT:
            call_id = item.get("call_id") or self._call_ids.get(str(item.get("id")))
            self._add_result(call_id or _call_of(item.get("id"), histories), self._output(item, kind, param))
        elif kind == "additional_tools":
            self._add("developer", definitions(self._declare(item, param)))
        elif kind == "agent_message":
            self._add("user", _between_agents(item, param))
        elif kind in ("compaction", "compaction_summary"):
            self.summary_index = len(self.messages)
            self._add("user", _SUMMARY + summary_of(item, param))
        elif kind == "compaction_trigger":
            self.compacts = True
            self._add("user", COMPACTION)
        else:
            raise GatewayRequestError(f"{param} is of type {kind!r:.80}, which is not served here", param=param)

    def _answer_message(self, *, new: bool = False) -> Message:
        """The answer that an item belongs to; text or reasoning (``new``) after calls begins another answer."""
        if self._answer is None or (new and self._answer.get("tool_calls")):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer

    def _add(self, role: Any, content: Any) -> None:
        self._answer = None
        self.messages.append({"role": role, "content": content})

    def _add_result(self, call_id: Any, text: str) -> None:
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": str(call_id or ""), "content": text})

    def _output(self, item: Mapping[str, Any], kind: str, param: str) -> str:
        output = item.get("output")
        if kind == "tool_search_output":
            return definitions(self._declare(item, param)) or "no tools found"
        if kind == "apply_patch_call_output":
            return "\n".join(str(part) for part in (item.get("status"), output) if part)
        return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)

    def _declare(self, item: Mapping[str, Any], param: str) -> list[dict[str, Any]]:
        declared = declared_tools(item.get("tools"), f"{param}.tools")
        tools = [function for _, _, _, function in declared if function is not None]
        self.tools += tools
        return tools


def read_items(items: list[Any], histories: Histories) -> Items:
    """Read a list of items. Raises ``GatewayRequestError`` naming the item."""
    read = Items()
    for index, item in enumerate(items):
        read.add(item, histories, f"input[{index}]")
    return read


def _reasoning(item: Mapping[str, Any], param: str) -> str:
    content = item.get("content") or item.get("summary") or []
    if not isinstance(content, list):
        raise GatewayRequestError(f"{param}.content must be a list of parts, got {content!r:.80}", param=param)
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def _between_agents(item: Mapping[str, Any], param: str) -> str:
    """A message of one agent of Codex to another. Its ``encrypted_content`` is the text of the policy's call as it is:
    only OpenAI's servers encrypt it."""
    content = item["content"] if isinstance(item.get("content"), list) else [item.get("content")]
    texts = [part.get("encrypted_content", part) if isinstance(part, Mapping) else part for part in content]
    text = text_of(texts, f"{param}.content", join="\n")
    if any(isinstance(part, str) and part.startswith(_FERNET) for part in texts):
        raise _made_elsewhere("an agent message", param)
    return f"Message from {item.get('author')} to {item.get('recipient')}:\n\n{text}"


def _made_elsewhere(subject: str, param: str) -> GatewayRequestError:
    message = f"{param}: the encrypted content of {subject} could not be verified; another server made it"
    return GatewayRequestError(message, code="invalid_encrypted_content", param=param)


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if (tool := KIND_OF_ITEM.get(kind)) is not None:
        name, arguments = tool, OPENAI_TOOLS[tool].arguments(item)
    else:
        namespace = item.get("namespace")
        name = f"{namespace}{JOIN}{item.get('name')}" if namespace else item.get("name")
        arguments = custom_arguments(item.get("input")) if kind == "custom_tool_call" else item.get("arguments")
    return {"id": item.get("call_id") or item.get("id"), "function": {"name": name, "arguments": arguments}}


def _server_call(item: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    """A call of a server tool, and its result; searches often have none."""
    argument_fields, result_fields = _SERVER_CALLS[kind]
    fields = {name: item[name] for name in argument_fields if item.get(name) is not None}
    arguments = item.get("arguments") if kind == "mcp_call" else fields.get("action", fields)
    results = [item[name] for name in result_fields if item.get(name)] or [item.get("status") or "completed"]
    texts = (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in results)
    name = str(item.get("name") or kind.removesuffix("_call"))
    return {"id": str(item.get("id") or ""), "function": {"name": name, "arguments": arguments}}, "\n".join(texts)


def _call_of(item_id: Any, histories: Histories) -> Any:
    """The id of the call in an item of an earlier answer."""
    try:
        return _referenced_item(item_id, histories, "")["call_id"]
    except (GatewayRequestError, KeyError):
        return item_id


def _referenced_item(item_id: Any, histories: Histories, param: str) -> Mapping[str, Any]:
    """The item of an earlier answer with this id."""
    kind, _, rest = item_id.partition("_") if isinstance(item_id, str) else ("", "", "")
    answer, _, number = rest.rpartition("_") if kind == "fc" else (rest, "", "")
    if answer in histories:
        served = histories[answer][-1]
        if kind == "msg":
            return {"type": "message", "role": "assistant", "content": served["content"]}
        if kind == "rs":
            return {"type": "reasoning", "content": [{"text": served.get("reasoning_content", "")}]}
        if number.isdecimal() and int(number) < len(calls := served.get("tool_calls", ())):
            return {"type": "function_call", "call_id": calls[int(number)]["id"], **calls[int(number)]["function"]}
    raise GatewayRequestError(f"{param} refers to {item_id!r:.80}, which is no item of this rollout", param=param)


# -- summaries --------------------------------------------------------------------------------------------------------


def compacts(body: Mapping[str, Any]) -> bool:
    """Whether the answer to a request is a summary."""
    items = body.get("input")
    last = items[-1] if isinstance(items, list) and items else None
    return isinstance(last, Mapping) and last.get("type") == "compaction_trigger"


def is_summary(message: Message) -> bool:
    return message["content"].startswith(_SUMMARY)


def compaction_item(answer_id: str, summary: str) -> dict[str, Any]:
    content = _SUMMARY_MARK + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()
    return {"id": f"cmp_{answer_id}", "type": "compaction", "encrypted_content": content}


def summary_of(item: Mapping[str, Any], param: str) -> str:
    """The summary in an item that ``compaction_item`` made."""
    prefix, mark, content = str(item.get("encrypted_content") or "").partition(_SUMMARY_MARK)
    try:
        if prefix or not mark:
            raise ValueError(content)
        return base64.b64decode(content, altchars=b"-_", validate=True).decode()
    except ValueError:
        raise _made_elsewhere("a compaction item", param) from None


# -- tools ------------------------------------------------------------------------------------------------------------


def declared_tools(
    tools: Any, param: str = "tools"
) -> Iterator[tuple[str, Mapping[str, Any], str, dict[str, Any] | None]]:
    """Each tool's name in prompts, declaration, namespace, and function (``None``: a server tool)."""
    if not isinstance(tools or [], list):
        raise GatewayRequestError(f"{param} must be a list of tools, got {tools!r:.80}", param=param)
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(kind, str):
            raise GatewayRequestError(f"{param}[{index}] must be an object with a type", param="tools")
        inner = tool.get("tools") or [] if kind == "namespace" else [tool]
        if not isinstance(inner, list) or not all(isinstance(inner_tool, Mapping) for inner_tool in inner):
            raise GatewayRequestError(f"{param}[{index}].tools must be a list of objects", param="tools")
        namespace = str(tool.get("name") or "") if kind == "namespace" else ""
        for inner_tool in inner:
            if (inner_kind := inner_tool.get("type")) not in ("function", "custom"):
                yield kind_of(inner_tool), inner_tool, "", openai_tool(inner_tool, f"{param}[{index}]")
                continue
            if not isinstance(inner_tool.get("name"), str):
                raise GatewayRequestError(f"{param}[{index}] must have a name", param="tools")
            name = f"{namespace}{JOIN}{inner_tool['name']}" if namespace else inner_tool["name"]
            yield name, inner_tool, namespace, openai_function(name, inner_tool, custom=inner_kind == "custom")


def read_tools(tools: Any, item_tools: list[dict[str, Any]]) -> Tools:
    """The tools of a request and of its items. Deferred ones are shown at once unless the client searches for tools."""
    listed, deferred, server_tools = [], [], []
    declared = [*declared_tools(tools)]
    searches = any(name == "tool_search" and function is not None for name, _, _, function in declared)
    for name, tool, _, function in declared:
        if function is None:
            server_tools.append(name)
        else:
            (deferred if searches and tool.get("defer_loading") else listed).append(function)
    names = {tool["function"]["name"] for tool in listed}
    loaded = {tool["function"]["name"]: tool for tool in (*deferred, *item_tools)}
    unlisted = tuple(tool for name, tool in loaded.items() if name not in names)
    return Tools(listed=tuple(listed), loaded=unlisted, server_tools=tuple(server_tools))


def all_declared(body: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type and namespace of all tools of a request, by name in prompts."""
    items = body.get("input")
    declaring = (body, *items) if isinstance(items, list) else (body,)
    lists = (item.get("tools") for item in declaring if isinstance(item, Mapping))
    tools = (tool for listed in lists for tool in declared_tools(listed))
    return {name: (str(tool["type"]), namespace) for name, tool, namespace, _ in tools}


def returned_arguments(kinds: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The arguments of calls after a client's round trip, by the names of tools with items of a special form."""

    def of_kind(kind: str) -> Any:
        if kind == "custom":
            return lambda arguments: custom_arguments(custom_input(arguments))
        tool = OPENAI_TOOLS[kind]

        def round_trip(arguments: Mapping[str, Any]) -> Any:
            fields = tool.fields(arguments)
            return arguments if fields is None else tool.arguments(fields)

        return round_trip

    return {name: of_kind(kind) for name, (kind, _) in kinds.items() if kind == "custom" or kind in OPENAI_TOOLS}
