"""Provide the SDK: a typed client of the service. Needs httpx, pydantic and cachetools, but not torch or FastAPI.

::

    from batchwright import Client

    with Client("http://127.0.0.1:8000") as client:
        recommendation = client.tunings.tune(request)
        print(recommendation.plan, recommendation.to_slurm().files[0].content)

`AsyncClient` has the same calls for asyncio. The pipeline of a call, from the outside in:

1. ``client`` opens connections; ``sync`` runs the coroutines below without an event loop.
2. ``resources`` has every call once, as a coroutine; ``resources.work`` has those that tunings and jobs share.
3. ``core`` retries within a retry budget, waits with long polls, resumes streams, follows pages, and keeps the
   latest documents.
4. ``http_messages`` builds requests and parses responses. ``documents`` are those of the API; ``sdk_documents``
   gives recommendations the library's methods.
5. ``transport`` alone sends. ``errors`` has the exceptions, which carry the service's problem document.

Where a new thing goes: a call, ``resources``; a resource, also ``sync``; an error of a status, ``errors``.

The package may import ``batchwright.library.recommendation``, and what ``documents`` may import. It needs nothing of
the service.
"""

from batchwright.client.client import AsyncClient, Client
from batchwright.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    ConnectionFailedError,
    InvalidRequestError,
    NotAllowedError,
    NotAuthenticatedError,
    NotFoundError,
    QuotaExceededError,
    ServiceUnavailableError,
    TuningFailedError,
    UnexpectedResponseError,
    WaitTimeoutError,
)
from batchwright.client.http_messages import Call
from batchwright.client.sync import (
    Commands,
    Devices,
    Estimates,
    Gpus,
    Jobs,
    Keys,
    Queues,
    Recommendations,
    Tunings,
)

__all__ = [
    "ApiError",
    "AsyncClient",
    "Call",
    "Client",
    "ClientError",
    "Commands",
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
    "Queues",
    "QuotaExceededError",
    "Recommendations",
    "ServiceUnavailableError",
    "TuningFailedError",
    "Tunings",
    "UnexpectedResponseError",
    "WaitTimeoutError",
]
