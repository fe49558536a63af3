"""``python -m agl_slime.engine --model-path DIR``: serve a checkpoint with SGLang's protocol on the CPU.

The first line on standard output is JSON, ``{"url": "http://127.0.0.1:PORT", "serving": "…"}``, printed once requests
are answered: the address, and a sentence on the model and its memory. Everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
from pathlib import Path

from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError
from agl_slime.support.http import stop_signal
from agl_slime.support.net import require_token
from agl_slime.support.terminal import print_line

_PARENT_POLL_S = 0.25
TOKEN_VARIABLE = "AGL_SLIME_ENGINE_TOKEN"
WAIT = "--wait"  # instead of all flags: import the engine's libraries, then read the flags as a line of JSON from stdin


def main() -> int:
    about = "Serve a small checkpoint on the CPU with SGLang's protocol."
    parser = argparse.ArgumentParser(prog="python -m agl_slime.engine", description=about)
    add, token = parser.add_argument, os.environ.get(TOKEN_VARIABLE)
    add("--model-path", required=True, help="directory of a Hugging Face checkpoint with its tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on; any other than this machine's own needs --token")
    add("--port", type=int, default=30000, help="0 takes a free one")
    add("--token", default=token, help=f"asked of every request as a bearer token (or {TOKEN_VARIABLE})")
    add("--context-length", type=int, help="tokens of prompt and response together; by default the model's")
    add("--max-running-requests", type=int, default=128, help="requests that are decoded together; more wait")
    help_text = "of all running requests; by default as many as fit into a quarter of the memory"
    add("--max-total-tokens", type=int, help=help_text)
    add("--prefix-cache", type=int, choices=(0, 1), default=1, help="compute what prompts begin with alike only once")
    experts = "report the experts of each token to requests that ask for them; by default where the model has some"
    add("--enable-return-routed-experts", type=int, nargs="?", const=1, choices=(0, 1), default=None, help=experts)
    add("--deterministic", type=int, choices=(0, 1), default=0, help="equal requests get bit-equal answers")
    add("--torch-threads", type=int, help="by default 1 for a tiny model, else --cores")
    add("--cores", type=int, help="by default all that this process may use, at most OMP_NUM_THREADS")
    add("--random-seed", type=int, default=0)
    add("--parent-pid", type=int, help="end when this process is no longer the parent")
    args = parser.parse_args(_flags_from_stdin() if sys.argv[1:] == [WAIT] else None)
    try:
        require_token(args.host, args.token, setting="--token")
        if not (Path(args.model_path) / "config.json").is_file():  # checked before the slow import of torch
            raise ConfigError(f"--model-path {args.model_path!r} is no Hugging Face checkpoint (it has no config.json)")
        return asyncio.run(_serve(args))
    except (AglSlimeError, OSError) as error:
        print_line(f"error: {error}", to=sys.stderr)
        return 1


def _flags_from_stdin() -> list[str]:
    """The flags, once they are sent; this process imports meanwhile, and ends if the sender is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(ImportError):  # which _serve reports
        import transformers.modeling_utils  # noqa: F401  what every model is made of

        import agl_slime.engine.server  # noqa: F401
    return json.loads(lines.get())


async def _serve(args: argparse.Namespace) -> int:
    try:
        from agl_slime.engine.server import load_server
    except ImportError as error:
        message = f'the embedded engine needs torch and safetensors ({error}): pip install "agl-slime[local]"'
        raise MissingDependencyError(message) from error
    # The engine's thread gives the interpreter away at every tensor operation; with the default of 5 ms it would wait
    # that long to get it back from a busy event loop.
    sys.setswitchinterval(0.0002)
    limits = {"max_running": args.max_running_requests, "context_length": args.context_length, "seed": args.random_seed}
    limits |= {"prefix_cache": bool(args.prefix_cache), "deterministic": bool(args.deterministic)}
    experts = args.enable_return_routed_experts
    limits |= {"return_routed_experts": None if experts is None else bool(experts)}
    limits |= {"max_total_tokens": args.max_total_tokens, "torch_threads": args.torch_threads, "cores": args.cores}
    server = load_server(args.model_path, token=args.token, **limits)
    stop = stop_signal()
    async with server.listening(host=args.host, port=args.port) as url:
        print(json.dumps({"url": url, "serving": server.engine.summary}), flush=True)
        # kill -9 of the parent runs none of its clean-up: the orphan notices by its new parent
        while not stop.is_set() and args.parent_pid in (None, os.getppid()):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), _PARENT_POLL_S)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed by now. Unloading torch's libraries in the ordinary way takes seconds on a busy machine, and
    # whoever sent SIGTERM is waiting.
    os._exit(status)
