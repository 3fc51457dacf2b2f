"""The SDK: a typed client of the service. Needs httpx and pydantic; neither torch nor FastAPI nor SQLAlchemy.

::

    from service.client import Client

    with Client("http://127.0.0.1:8000") as client:
        recommendation = client.tunings.tune(request)
        print(recommendation.plan, recommendation.environment)

``AsyncClient`` has the same calls for asyncio. The parts, from the outside in: ``client`` opens connections;
``calls``, ``tunings`` and ``jobs`` have every call once, as coroutines; ``blocking`` runs these without an event loop;
``core`` retries, waits, follows and pages; ``retrying`` says when; ``wire`` makes requests of documents and documents
of answers; ``network`` alone sends.
"""

from service.client.client import AsyncClient, Client
from service.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    ConnectionFailedError,
    InvalidRequestError,
    NotAllowedError,
    NotAuthenticatedError,
    NotFoundError,
    NotWaitedLongEnoughError,
    QuotaExceededError,
    ServiceUnavailableError,
    TuningFailedError,
    UnexpectedAnswerError,
)
from service.client.protocol import Call
from service.client.sync import Devices, Estimates, Gpus, Jobs, Keys, Queue, Recommendations, Tunings

__all__ = [
    "ApiError",
    "AsyncClient",
    "Call",
    "Client",
    "ClientError",
    "ConflictError",
    "ConnectionFailedError",
    "Devices",
    "Estimates",
    "Gpus",
    "InvalidRequestError",
    "Jobs",
    "Keys",
    "NotAllowedError",
    "NotAuthenticatedError",
    "NotFoundError",
    "NotWaitedLongEnoughError",
    "Queue",
    "QuotaExceededError",
    "Recommendations",
    "ServiceUnavailableError",
    "TuningFailedError",
    "Tunings",
    "UnexpectedAnswerError",
]
