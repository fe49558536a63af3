"""A model server that answers at once: ``/generate`` as SGLang does, chat completions as vLLM does with
``return_token_ids`` and ``logprobs``. Answers are cached by the length of the conversation.

python -m benchmarks.agl1_stub DIR WORDS [--calls]: the tokenizer's directory, the words of each answer, and whether it
ends with a tool call. Prompt ids are sent on request.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from typing import Any

import orjson

from benchmarks.multi_turn import WORDS
from benchmarks.scripted_engine import Engine, http_answer

# White space and thinking, which templates rewrite in a history.
_ANSWER = "<think>\n\n{words}\n</think>\n\n{words} \n"
_CALL = {"name": "tool_0", "arguments": {"path": "look/again"}}


class Desk:
    def __init__(self, model: str, words: int, calls: bool) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        text = _ANSWER.format(words=" ".join(random.Random(0).choices(WORDS, k=words)))
        self._message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            function = {**_CALL, "arguments": orjson.dumps(_CALL["arguments"]).decode()}
            self._message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
            text += f"<tool_call>\n{orjson.dumps(_CALL).decode()}\n</tool_call>"
        self._ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._ids += self._tokenizer.encode(self._tokenizer.eos_token, add_special_tokens=False)
        pairs = [[-0.5, one, None] for one in self._ids]
        meta: dict[str, Any] = {"id": "r", "finish_reason": {"type": "stop", "matched": self._ids[-1]}}
        meta |= {
            "prompt_tokens": "IDS",
            "completion_tokens": len(self._ids),
            "cached_tokens": 0,
            "weight_version": "0",
        }
        generated = {"text": text, "output_ids": self._ids, "meta_info": {**meta, "output_token_logprobs": pairs}}
        self._generated = orjson.dumps(generated)
        self._completions: dict[tuple[int, int, bool], bytes] = {}

    def ask(self, path: bytes, body: bytes, send: Any) -> None:
        if path == b"/generate":
            start = body.index(b"[", body.index(b'"input_ids"'))
            tokens = body.count(b",", start, body.index(b"]", start)) + 1
            send(http_answer(self._generated.replace(b'"IDS"', b"%d" % tokens)))
        elif path.endswith(b"/chat/completions"):
            asked = orjson.loads(body)
            messages, ids = asked["messages"], bool(asked.get("return_token_ids"))
            key = len(messages), len(messages[0]["content"]), ids
            if key not in self._completions:
                self._completions[key] = http_answer(orjson.dumps(self._completion(messages, asked.get("tools"), ids)))
            send(self._completions[key])
        elif path == b"/workers":
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            send(http_answer(b'{"model_path":"scripted","weight_version":"0","is_generation":true,"success":true}'))

    def _completion(self, messages: list[dict[str, Any]], tools: Any, ids: bool) -> dict[str, Any]:
        """As vLLM answers with ``return_token_ids`` and ``logprobs``, its template on the whole history."""
        how: Any = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
        rendered = self._tokenizer.apply_chat_template(messages, **how)
        prompt = self._tokenizer.encode(rendered, add_special_tokens=False)
        words = [self._tokenizer.decode([one]) for one in self._ids]
        content = [{"token": w, "logprob": -0.5, "bytes": list(w.encode()), "top_logprobs": []} for w in words]
        choice = {
            "index": 0,
            "message": self._message,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "token_ids": self._ids,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self._ids)}
        usage["total_tokens"] = len(prompt) + len(self._ids)
        told = {"id": "chatcmpl-r", "object": "chat.completion", "created": 0, "model": "scripted"}
        return {**told, **({"prompt_token_ids": prompt} if ids else {}), "choices": [choice], "usage": usage}


async def main(model: str, words: int, calls: bool) -> None:
    desk: Any = Desk(model, words, calls)
    gc.freeze()
    server = await asyncio.get_running_loop().create_server(lambda: Engine(desk), "127.0.0.1", 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), "--calls" in sys.argv[3:]))
