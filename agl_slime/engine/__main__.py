"""``python -m agl_slime.engine --model-path DIR``: serve a checkpoint with SGLang's protocol on the CPU.

The first line on standard output is JSON, ``{"url": "http://127.0.0.1:PORT"}``, printed once requests are answered;
everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PARENT_POLL_S = 0.25
TOKEN_VARIABLE = "AGL_SLIME_ENGINE_TOKEN"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        _check_host(args.host, args.token)
        _check_model_path(args.model_path)
        return asyncio.run(_serve(args))
    except (AglSlimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agl_slime.engine",
        description="Serve a small checkpoint on the CPU with SGLang's HTTP protocol.",
    )
    parser.add_argument("--model-path", required=True, help="directory of a Hugging Face checkpoint with its tokenizer")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any other than this machine's own needs --token"
    )
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"asked of every request as a bearer token (or {TOKEN_VARIABLE})",
    )
    parser.add_argument("--served-model-name", default=None, help="name in /v1/models; by default the model path")
    parser.add_argument(
        "--context-length",
        type=int,
        default=None,
        help="tokens of prompt and response together; by default the model's",
    )
    parser.add_argument(
        "--max-running-requests", type=int, default=128, help="requests that are decoded together; more wait"
    )
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; a model this small is slower on more than one"
    )
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is no longer the parent")
    return parser.parse_args(argv)


def _check_host(host: str, token: str | None) -> None:
    if host not in _LOOPBACK and not token:
        raise ConfigError(f"--host {host} can be reached from other machines: give a --token, or listen on 127.0.0.1")


def _check_model_path(path: str) -> None:
    # before torch is imported, so that a wrong path is told at once
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--model-path {path!r} is not a directory with a Hugging Face checkpoint (it has no config.json)"
        )


async def _serve(args: argparse.Namespace) -> int:
    try:
        import torch

        from agl_slime.engine.engine import EngineSettings
        from agl_slime.engine.server import load_server
    except ImportError as error:
        raise MissingDependencyError(
            f'the embedded engine needs torch and safetensors ({error}): pip install "agl-slime[local]"'
        ) from error
    from aiohttp import web

    torch.set_num_threads(args.threads)
    # The engine's thread gives the interpreter away at every tensor operation; with the default of 5 ms it would wait
    # that long to get it back from a busy event loop.
    sys.setswitchinterval(0.0002)
    settings = EngineSettings(
        max_running=args.max_running_requests, context_length=args.context_length, seed=args.random_seed
    )
    server = load_server(
        args.model_path, engine_settings=settings, served_model_name=args.served_model_name, token=args.token
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # handler_cancellation: a client that goes away ends its requests
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    watcher = asyncio.create_task(_watch_parent(args.parent_pid, stop)) if args.parent_pid is not None else None
    try:
        site = web.TCPSite(runner, args.host, args.port, backlog=4096)
        await site.start()
        port = runner.addresses[0][1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(json.dumps({"url": f"http://{host}:{port}"}), flush=True)
        await stop.wait()
    finally:
        if watcher is not None:
            watcher.cancel()
        server.engine.close()  # ends what runs, so that open requests are answered before the sockets close
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 1.5)
    return 0


async def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    # kill -9 of the parent runs none of its clean-up: the orphan notices by its new parent
    while os.getppid() == pid:  # noqa: ASYNC110 - the system sends no event for it
        await asyncio.sleep(_PARENT_POLL_S)
    stop.set()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed by now. Unloading torch's libraries in the ordinary way takes seconds on a busy machine, and
    # whoever sent SIGTERM is waiting.
    os._exit(status)
