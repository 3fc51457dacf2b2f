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

from batchwright.client.client import AsyncClient as AsyncClient, Client as Client
from batchwright.client.errors import (
    ApiError as ApiError,
    ClientError as ClientError,
    ConflictError as ConflictError,
    ConnectionFailedError as ConnectionFailedError,
    InvalidRequestError as InvalidRequestError,
    NotAllowedError as NotAllowedError,
    NotAuthenticatedError as NotAuthenticatedError,
    NotFoundError as NotFoundError,
    QuotaExceededError as QuotaExceededError,
    ServiceUnavailableError as ServiceUnavailableError,
    TuningFailedError as TuningFailedError,
    UnexpectedResponseError as UnexpectedResponseError,
    WaitTimeoutError as WaitTimeoutError,
)
from batchwright.client.http_messages import Call as Call
from batchwright.client.sync import (
    Commands as Commands,
    Devices as Devices,
    Estimates as Estimates,
    Gpus as Gpus,
    Jobs as Jobs,
    Keys as Keys,
    Queues as Queues,
    Recommendations as Recommendations,
    Tunings as Tunings,
)
