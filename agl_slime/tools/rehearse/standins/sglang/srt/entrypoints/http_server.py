from typing import Any


def launch_server(server_args: Any) -> None:
    """Serve an engine that answers at given speeds, in place of SGLang's."""
    from agl_slime.tools.rehearse.engine import serve

    serve(server_args.host, server_args.port)
