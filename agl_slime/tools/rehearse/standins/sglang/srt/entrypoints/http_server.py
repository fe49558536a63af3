from typing import Any


def launch_server(server_args: Any) -> None:
    """In place of SGLang: an engine that answers at given speeds."""
    from agl_slime.tools.rehearse.engine import serve

    serve(server_args.host, server_args.port)
