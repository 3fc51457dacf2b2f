"""The yardstick of ``api_load.py``: a FastAPI application whose routes return stored bytes, and do nothing else.

python benchmarks/api_load_bare.py RECOMMENDATION LIST    (files with the bytes)

It says where it listens on standard error, as the service does.
"""

import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response


def bare_app(recommendation: bytes, tunings: bytes) -> FastAPI:
    """The routes that are measured, with the same paths."""
    app = FastAPI()

    @app.get("/v1/recommendations/{recommendation_id}")
    async def get_recommendation(recommendation_id: str) -> Response:
        """The same one, whatever is asked for."""
        del recommendation_id
        return Response(recommendation, media_type="application/json")

    @app.get("/v1/tunings")
    async def list_tunings(limit: int) -> Response:
        """The same page, whatever is asked for."""
        del limit
        return Response(tunings, media_type="application/json")

    return app


if __name__ == "__main__":
    application = bare_app(*(Path(name).read_bytes() for name in sys.argv[1:3]))
    # As the service runs its own: see service/batchwright_service/entrypoints/serve.py.
    config = uvicorn.Config(application, log_level="warning", log_config=None, server_header=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"listens on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])
