"""The calls, grouped as the API groups them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Protocol, TypeVar

import httpx

from service.client.errors import ConnectionFailedError, NotWaitedLongEnoughError
from service.client.wire import Call, DocumentT, events_of, raise_for_problem
from service.domain import (
    ConfiguredJob,
    Event,
    GpuList,
    Job,
    JobPage,
    JobSubmission,
    JobSummary,
    ProbeList,
    RecommendationPage,
    RecommendationSummary,
    RecordedProbe,
    Tuning,
    TuningPage,
    TuningSubmission,
    TuningSummary,
)
from service.fleet import DeviceList, DeviceStatus
from tuner.catalogue import Gpu
from tuner.estimates import Estimate, EstimateRequest
from tuner.requests import TrainingRequest, TuningRequest
from tuner.results import Recommendation

_LONGEST_WAIT_SECONDS = 30.0
"""Of one long poll: below the idle limits of proxies, and below the service's own 60."""
_LONGEST_QUEUE_SECONDS = 15.0
"""What the service may let an estimate wait for its turn, and some more."""
_RETRIES = 20
_RETRY_SECONDS = 0.5

FollowedT = TypeVar("FollowedT", Tuning, Job)


class Caller(Protocol):
    """What the calls need of a client."""

    def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call that answers with a ``kind``."""

    def stream(self, call: Call, headers: dict[str, str]) -> AbstractContextManager[httpx.Response]:
        """Make a call whose answer is read as it comes."""


class _Resource:
    def __init__(self, client: Caller) -> None:
        self._client = client

    def _wait(self, kind: type[FollowedT], path: str, timeout_seconds: float | None) -> FollowedT:
        """Long polls until it has ended. Survives restarts of the service."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = _LONGEST_WAIT_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            seconds = min(left, _LONGEST_WAIT_SECONDS)
            call = Call("GET", path, {"wait": round(seconds, 3)})
            current = _retried(lambda: self._client.call(kind, call, seconds))  # noqa: B023 - called at once
            if current.state.terminal:
                return current
            if deadline is not None and time.monotonic() >= deadline:
                raise NotWaitedLongEnoughError(f"{current.id} is {current.state} after {timeout_seconds:g} s")

    def _events(self, path: str, after: int) -> Iterator[Event]:
        """Events to the last, connected anew where a connection breaks off."""
        failures = 0
        while True:
            try:
                for event in self._one_stream(path, after):
                    failures, after = 0, event.id
                    yield event
                    if event.state is not None and event.state.terminal:
                        return
            except _NothingMore:
                return
            except ConnectionFailedError:
                failures += 1
                if failures > _RETRIES:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _one_stream(self, path: str, after: int) -> Iterator[Event]:
        with self._client.stream(Call("GET", path), {"Last-Event-ID": str(after)}) as response:
            if response.status_code == HTTPStatus.NO_CONTENT:
                raise _NothingMore
            if not response.is_success:
                response.read()
                raise_for_problem(response)
            yield from events_of(response.iter_lines())


class _NothingMore(Exception):  # noqa: N818 - not an error: the stream is over
    """The service says that no more events will come."""


class Tunings(_Resource):
    """Tunings: the search for the largest micro-batch."""

    def submit(self, request: TuningRequest, *, fresh: bool = False) -> Tuning:
        """Submit a tuning, or get the one that answered the same question, unless ``fresh``.

        Raises:
            ApiError: when the service refuses it.
        """
        submission = TuningSubmission.model_validate({**dict(request), "fresh": fresh})
        return self._client.call(Tuning, Call("POST", "/v1/tunings", body=submission))

    def get(self, tuning_id: str) -> Tuning:
        """A tuning as it is now.

        Raises:
            ApiError: when there is none with this id.
        """
        return self._client.call(Tuning, Call("GET", f"/v1/tunings/{tuning_id}"))

    def wait(self, tuning_id: str, timeout_seconds: float | None = None) -> Tuning:
        """A tuning once it has ended.

        Raises:
            NotWaitedLongEnoughError: when it has not within ``timeout_seconds``.
            ApiError: when there is none with this id.
        """
        return self._wait(Tuning, f"/v1/tunings/{tuning_id}", timeout_seconds)

    def probes(self, tuning_id: str) -> tuple[RecordedProbe, ...]:
        """What was recorded so far, in order.

        Raises:
            ApiError: when there is no such tuning.
        """
        return self._client.call(ProbeList, Call("GET", f"/v1/tunings/{tuning_id}/probes")).items

    def events(self, tuning_id: str, after: int = 0) -> Iterator[Event]:
        """State changes and probes after event ``after``, as they happen, to the last; resumes broken connections.

        Raises:
            ApiError: when there is no such tuning.
            ConnectionFailedError: when the service stays away.
        """
        return self._events(f"/v1/tunings/{tuning_id}/events", after)

    def cancel(self, tuning_id: str) -> Tuning:
        """End a tuning; harmless when it has ended.

        Raises:
            ApiError: when there is no such tuning.
        """
        return self._client.call(Tuning, Call("POST", f"/v1/tunings/{tuning_id}/cancel"))

    def list(self, page_size: int = 50) -> Iterator[TuningSummary]:
        """Every tuning, newest first, fetched page by page."""
        cursor: str | None = None
        while True:
            query = {"limit": page_size, "cursor": cursor}
            page = self._client.call(TuningPage, Call("GET", "/v1/tunings", query))
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return


class Recommendations(_Resource):
    """Recommendations: the answers of tunings."""

    def get(self, recommendation_id: str) -> Recommendation:
        """A recommendation.

        Raises:
            ApiError: when there is none with this id.
        """
        return self._client.call(Recommendation, Call("GET", f"/v1/recommendations/{recommendation_id}"))

    def list(
        self,
        *,
        fingerprint: str | None = None,
        device: str | None = None,
        model: str | None = None,
        page_size: int = 50,
    ) -> Iterator[RecommendationSummary]:
        """Recommendations that match, newest first, fetched page by page."""
        cursor: str | None = None
        filters = {"fingerprint": fingerprint, "device": device, "model": model, "limit": page_size}
        while True:
            call = Call("GET", "/v1/recommendations", {**filters, "cursor": cursor})
            page = self._client.call(RecommendationPage, call)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return


class Jobs(_Resource):
    """Jobs: training runs made from recommendations."""

    def submit(self, recommendation: Recommendation | str, training: TrainingRequest | None = None) -> Job:
        """Run a job from a recommendation, or from the id of a stored one.

        Raises:
            ApiError: when the service refuses it.
        """
        submission = _job_submission(recommendation, training, dry_run=False)
        return self._client.call(Job, Call("POST", "/v1/jobs", body=submission))

    def configure(self, recommendation: Recommendation | str, training: TrainingRequest | None = None) -> ConfiguredJob:
        """What ``submit`` would run: command, files, environment. Runs nothing.

        Raises:
            ApiError: when the service refuses it.
        """
        submission = _job_submission(recommendation, training, dry_run=True)
        return self._client.call(ConfiguredJob, Call("POST", "/v1/jobs", body=submission))

    def get(self, job_id: str) -> Job:
        """A job as it is now.

        Raises:
            ApiError: when there is none with this id.
        """
        return self._client.call(Job, Call("GET", f"/v1/jobs/{job_id}"))

    def wait(self, job_id: str, timeout_seconds: float | None = None) -> Job:
        """A job once it has ended.

        Raises:
            NotWaitedLongEnoughError: when it has not within ``timeout_seconds``.
            ApiError: when there is none with this id.
        """
        return self._wait(Job, f"/v1/jobs/{job_id}", timeout_seconds)

    def events(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """State changes and updates after event ``after``, as they happen, to the last; resumes broken connections.

        Raises:
            ApiError: when there is no such job.
            ConnectionFailedError: when the service stays away.
        """
        return self._events(f"/v1/jobs/{job_id}/events", after)

    def cancel(self, job_id: str) -> Job:
        """End a job; harmless when it has ended.

        Raises:
            ApiError: when there is no such job.
        """
        return self._client.call(Job, Call("POST", f"/v1/jobs/{job_id}/cancel"))

    def list(self, page_size: int = 50) -> Iterator[JobSummary]:
        """Every job, newest first, fetched page by page."""
        cursor: str | None = None
        while True:
            page = self._client.call(JobPage, Call("GET", "/v1/jobs", {"limit": page_size, "cursor": cursor}))
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return


class Devices(_Resource):
    """The devices of the service."""

    def list(self) -> tuple[DeviceStatus, ...]:
        """The devices, and who holds each."""
        return self._client.call(DeviceList, Call("GET", "/v1/devices")).items


class Estimates(_Resource):
    """Estimates: what would fit on GPUs that need not be there."""

    def create(self, request: EstimateRequest) -> Estimate:
        """What the workload would take. Comes when it is done: the request's own time limit counts.

        Raises:
            ApiError: when the service refuses it, cannot trace it, or is busy with others (`estimates-busy`).
        """
        call = Call("POST", "/v1/estimates", body=request)
        return self._client.call(Estimate, call, request.timeout_seconds + _LONGEST_QUEUE_SECONDS)


class Gpus(_Resource):
    """The GPUs that estimates know."""

    def list(self) -> tuple[Gpu, ...]:
        """The catalogue, with the source of every figure."""
        return self._client.call(GpuList, Call("GET", "/v1/gpus")).items


def _job_submission(
    recommendation: Recommendation | str, training: TrainingRequest | None, *, dry_run: bool
) -> JobSubmission:
    stored = isinstance(recommendation, str)
    return JobSubmission(
        recommendation_id=recommendation if stored else None,
        recommendation=None if stored else recommendation,
        training=training or TrainingRequest(),
        dry_run=dry_run,
    )


_ResultT = TypeVar("_ResultT")


def _retried(read: Callable[[], _ResultT]) -> _ResultT:
    """A read, tried again while the service restarts.

    Raises:
        ConnectionFailedError: when it stays away.
    """
    for _ in range(_RETRIES):
        try:
            return read()
        except ConnectionFailedError:
            time.sleep(_RETRY_SECONDS)
    return read()
