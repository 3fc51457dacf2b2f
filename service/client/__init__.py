"""The SDK: a typed client of the service. Needs httpx and pydantic; neither torch nor FastAPI nor SQLAlchemy.

::

    from service.client import Client

    with Client("http://127.0.0.1:8000") as client:
        tuning = client.tunings.submit(request)
        tuning = client.tunings.wait(tuning.id)
        print(tuning.recommendation.micro_batch_size)
"""

from service.client.client import Client
from service.client.errors import ApiError, ClientError, ConnectionFailedError, NotWaitedLongEnoughError
from service.client.resources import Devices, Estimates, Gpus, Jobs, Recommendations, Tunings

__all__ = [
    "ApiError",
    "Client",
    "ClientError",
    "ConnectionFailedError",
    "Devices",
    "Estimates",
    "Gpus",
    "Jobs",
    "NotWaitedLongEnoughError",
    "Recommendations",
    "Tunings",
]
