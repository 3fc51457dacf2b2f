"""Blocking versions of the calls in ``batchwright.client.resources``, over the blocking transport.

A coroutine that is never suspended ends at its first ``send``, so that no event loop is needed, and the blocking client
may be used from any thread, whether an event loop runs there or not.
"""

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from batchwright.client.core import FollowedT
from batchwright.client.documents.work import JobSummary, RowT, TuningSummary
from batchwright.client.resources.api import (
    AsyncAudit,
    AsyncCommands,
    AsyncDevices,
    AsyncEstimates,
    AsyncGpus,
    AsyncKeys,
    AsyncQueues,
)
from batchwright.client.resources.jobs import AsyncJobs
from batchwright.client.resources.tunings import AsyncRecommendations, AsyncTunings
from batchwright.client.resources.webhooks import AsyncWebhooks
from batchwright.client.resources.work import AsyncWork
from batchwright.client.sdk_documents import Job, Tuning

CallsT_co = TypeVar("CallsT_co", covariant=True)
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine that is never suspended, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: ResultT = ended.value
        return result
    coroutine.close()
    raise RuntimeError("a call of the blocking client waited for an event loop")


def iterate(items: AsyncGenerator[ResultT, None]) -> Iterator[ResultT]:
    """Iterate over an asynchronous generator that is never suspended. Close it when the iteration ends early."""
    try:
        while True:
            try:
                item = run(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(items.aclose())


async def _next(items: AsyncIterator[ResultT]) -> ResultT:
    return await anext(items)


class Blocking(Generic[CallsT_co]):
    """Blocking calls made from asynchronous ones."""

    def __init__(self, calls: CallsT_co) -> None:
        self._calls = calls

    @property
    def calls(self) -> CallsT_co:
        """The asynchronous calls, over a blocking transport."""
        return self._calls


def blocking(
    method: Callable[Concatenate[CallsT_co, P], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[Blocking[CallsT_co], P], ResultT]:
    """Make the blocking version of a call."""

    @functools.wraps(method)
    def call(group: Blocking[CallsT_co], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return run(method(group.calls, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[CallsT_co, P], AsyncGenerator[ResultT, None]],
) -> Callable[Concatenate[Blocking[CallsT_co], P], Iterator[ResultT]]:
    """Make the blocking version of an iterator."""

    @functools.wraps(method)
    def call(group: Blocking[CallsT_co], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[ResultT]:
        return iterate(method(group.calls, *args, **kwargs))

    return call


class Work(Blocking[CallsT_co], Generic[CallsT_co, FollowedT, RowT]):
    """The calls that tunings and jobs share."""

    get = blocking(AsyncWork[FollowedT, RowT].get)
    wait = blocking(AsyncWork[FollowedT, RowT].wait)
    events = iterating(AsyncWork[FollowedT, RowT].events)
    cancel = blocking(AsyncWork[FollowedT, RowT].cancel)
    delete = blocking(AsyncWork[FollowedT, RowT].delete)
    set_priority = blocking(AsyncWork[FollowedT, RowT].set_priority)
    cancel_all = blocking(AsyncWork[FollowedT, RowT].cancel_all)
    delete_all = blocking(AsyncWork[FollowedT, RowT].delete_all)
    list = iterating(AsyncWork[FollowedT, RowT].list)


class Tunings(Work[AsyncTunings, Tuning, TuningSummary]):
    """Tunings: the search for the largest micro-batch."""

    submit = blocking(AsyncTunings.submit)
    tune = blocking(AsyncTunings.tune)
    probes = blocking(AsyncTunings.probes)


class Recommendations(Blocking[AsyncRecommendations]):
    """Recommendations: the results of tunings."""

    get = blocking(AsyncRecommendations.get)
    staleness = blocking(AsyncRecommendations.staleness)
    confirm = blocking(AsyncRecommendations.confirm)
    export = blocking(AsyncRecommendations.export)
    exported_file = blocking(AsyncRecommendations.exported_file)
    formats = blocking(AsyncRecommendations.formats)
    list = iterating(AsyncRecommendations.list)


class Jobs(Work[AsyncJobs, Job, JobSummary]):
    """Jobs: training runs made from recommendations."""

    submit = blocking(AsyncJobs.submit)
    configure = blocking(AsyncJobs.configure)
    logs = blocking(AsyncJobs.logs)
    checkpoints = blocking(AsyncJobs.checkpoints)
    resume = blocking(AsyncJobs.resume)


class Devices(Blocking[AsyncDevices]):
    """The devices of the service."""

    list = blocking(AsyncDevices.list)


class Queues(Blocking[AsyncQueues]):
    """The queue of waiting work."""

    list = blocking(AsyncQueues.list)


class Estimates(Blocking[AsyncEstimates]):
    """Estimates of what fits on GPUs, which need not be present."""

    create = blocking(AsyncEstimates.create)


class Gpus(Blocking[AsyncGpus]):
    """The catalogue of GPUs for estimates."""

    list = blocking(AsyncGpus.list)


class Commands(Blocking[AsyncCommands]):
    """The commands that the operator has registered, which a tuning can name."""

    list = blocking(AsyncCommands.list)


class Keys(Blocking[AsyncKeys]):
    """API keys; for callers with the scope `admin`."""

    create = blocking(AsyncKeys.create)
    list = blocking(AsyncKeys.list)
    revoke = blocking(AsyncKeys.revoke)


class Audit(Blocking[AsyncAudit]):
    """The audit log; for callers with the scope `admin`."""

    list = iterating(AsyncAudit.list)


class Webhooks(Blocking[AsyncWebhooks]):
    """Webhooks: receivers that are notified when tunings and jobs end. For callers with the scope `admin`."""

    create = blocking(AsyncWebhooks.create)
    rotate = blocking(AsyncWebhooks.rotate)
    delete = blocking(AsyncWebhooks.delete)
    test = blocking(AsyncWebhooks.test)
    deliveries = iterating(AsyncWebhooks.deliveries)
    resend = blocking(AsyncWebhooks.resend)
    list = blocking(AsyncWebhooks.list)
