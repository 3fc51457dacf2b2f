"""Use cases of tunings and of the recommendations that they end with."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from batchwright.client.documents.staleness import Staleness
from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.work import ProbeList, QueuePosition, Tuning, TuningSubmission
from batchwright.client.documents.workers import ServedDevice
from batchwright.errors import UnreadableDocumentError
from batchwright.hardware.matching import with_catalogue_name
from batchwright.planning.tuning_conditions import TuningConditions, conditions_of
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import HardwareRequest, TuningRequest
from batchwright_service.application import views
from batchwright_service.application.application_context import ApplicationContext
from batchwright_service.application.rules.device_checks import (
    check_cards_of_ranks,
    check_packages_of_probes,
    probe_environment,
)
from batchwright_service.application.rules.equal_tunings import answer_from
from batchwright_service.application.rules.hardware_matches import one_of_each_kind, workers_with
from batchwright_service.application.rules.idempotency import SubmissionResponse
from batchwright_service.application.rules.stale_recommendations import StaleRecommendations, confirmation_of
from batchwright_service.application.rules.stored_warm_start import find_warm_start
from batchwright_service.application.work import WorkCases, model_name, payload
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.errors import InvalidInputError, NotFoundError
from batchwright_service.fast_path.queue_positions import QueuePositions
from batchwright_service.observability.tracing import current_trace_parent
from batchwright_service.store.models import Idempotency, NewWork, RecommendationFilter, RecommendationRow, WorkItem


class TuningCases(WorkCases[TuningSubmission, Tuning]):
    """Use cases of tunings. Safe to share between threads.

    A submission is served the stored tuning with the same fingerprint. A recommendation for the same request under
    other versions or another memory limit is never served: it warm-starts the new tuning.
    """

    kind = WorkKind.TUNING

    def __init__(self, context: ApplicationContext, positions: QueuePositions) -> None:
        super().__init__(context, positions)
        self._stale = StaleRecommendations(context.store.recommendations, context.live_workers)

    def probes(self, tuning_id: str) -> ProbeList:
        """Return the recorded probes of a tuning.

        Raises:
            NotFoundError: when no tuning has this id.
        """
        self._item(tuning_id)
        return ProbeList(items=tuple(self._store.evidence.probes(tuning_id)))

    # --- recommendations ---

    def recommendation_texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        """Return stored recommendations as JSON, by their ids; unknown ids are left out."""
        return self._store.recommendations.texts([name for name in recommendation_ids if views.is_identifier(name)])

    def recommendations(
        self,
        wanted: RecommendationFilter,
        limit: int,
        cursor: str | None,
        *,
        stale: bool | None = None,
        total: bool = False,
    ) -> bytes:
        """Return ``recommendation_rows`` as a ``RecommendationPage`` in JSON."""
        rows = self.recommendation_rows(wanted, limit, cursor, stale=stale)
        matching = self._store.recommendations.count(self._stale.filter(wanted, stale)) if total else None
        return views.recommendation_page(*rows, matching)

    def recommendation_rows(
        self, wanted: RecommendationFilter, limit: int, cursor: str | None, *, stale: bool | None = None
    ) -> tuple[list[RecommendationRow], str | None]:
        """Return the rows of a page of recommendations, newest first, and the cursor of the next one.

        Raises:
            InvalidCursorError: when the cursor does not belong to this list.
        """
        before, search = views.position_after(cursor, "rec", wanted.search)
        wanted = self._stale.filter(replace(wanted, search=search), stale)
        rows = self._store.recommendations.newest(wanted, limit + 1, before)
        return self._stale.marked(rows[:limit]), views.cursor_after(rows, limit, search)

    def staleness(self, recommendation_id: str) -> Staleness:
        """Return what changed on the device of a recommendation since it was made.

        Raises:
            NotFoundError: when there is none with this id.
        """
        (row,) = self._stale.marked([self._store.recommendations.row(recommendation_id)])
        return Staleness(**{name: getattr(row, name) for name in Staleness.model_fields})

    def confirm(
        self, recommendation_id: str, caller: Caller, idempotency: Idempotency | None = None
    ) -> SubmissionResponse:
        """Submit a tuning for the request of a recommendation under today's conditions, which one probe may confirm.

        Raises:
            NotFoundError: when there is none with this id.
            NotConfirmableError: when no live worker has its kind of device.
            RequestError: as ``submit``.
            QuotaExceededError: when the caller's key has used its quota.
        """
        stored = self._store.recommendations.get(recommendation_id)
        submission, served = confirmation_of(stored, self._context.live_workers())
        if served is None:
            return self.submit(submission, caller, idempotency)
        request = self._admitted(submission)

        def respond() -> SubmissionResponse:
            return self._submit_to(served, request, submission, caller, idempotency)

        return self._respond(idempotency, respond)

    # --- helpers ---

    def _submit(
        self, submission: TuningSubmission, caller: Caller, idempotency: Idempotency | None
    ) -> SubmissionResponse:
        request = self._admitted(submission)
        if request.hardware is not None:
            return self._submit_for_hardware(request, request.hardware, submission, caller, idempotency)
        served = self._context.live_device(submission.device).served
        return self._submit_to(served, request, submission, caller, idempotency)

    def _submit_to(
        self,
        served: ServedDevice,
        request: TuningRequest,
        submission: TuningSubmission,
        caller: Caller,
        idempotency: Idempotency | None,
    ) -> SubmissionResponse:
        """Queue a tuning for a device, or serve a stored one."""
        if request.command is not None:
            check_cards_of_ranks(request.command, served, self._store.devices.list())
        request = request.model_copy(update={"device": served.device.id})
        environment = probe_environment(request, served)
        conditions = conditions_of(request, served.device, environment=environment, versions=served.versions)
        work = _placed(self._new(request, submission, caller), conditions, served)
        if not submission.fresh:
            if (stored := self._stored_tuning(work.fingerprint)) is not None:
                return self._serve_stored(stored, replace(work, priority=0), request, served, idempotency)
            work = replace(work, warm_start_from=find_warm_start(self._store.recommendations, conditions))
        placed = (served.device.id, served.hardware)
        alive = [worker.served for worker in self._context.live_workers()]
        check_packages_of_probes(request, [other for other in alive if (other.device.id, other.hardware) == placed])
        return self._queue_tuning(work, submission, idempotency)

    def _submit_for_hardware(
        self,
        request: TuningRequest,
        hardware: HardwareRequest,
        submission: TuningSubmission,
        caller: Caller,
        idempotency: Idempotency | None,
    ) -> SubmissionResponse:
        """Queue a tuning for any worker with the hardware, also while there is none, or serve a stored one.

        The recommendation depends on the kind of device, which is known when a worker has taken the tuning: the stored
        recommendations for the kinds that live workers have now are served.

        Raises:
            SpecError: when the catalogue has no such GPU.
        """
        ranks = 1 if request.command is None else request.command.parallelism.world_size
        if hardware.devices_per_node != ranks and ranks > 1:
            raise InvalidInputError(
                f"the command starts {ranks} ranks, each with a GPU: give `devices_per_node: {ranks}` in `hardware`"
            )
        request = request.model_copy(update={"hardware": with_catalogue_name(hardware)})
        need = HardwareNeed.of_request(request)
        work = replace(self._new(request, submission, caller), hardware=need.lane)
        for served in one_of_each_kind(workers_with(need, self._context.live_workers())):
            environment = probe_environment(request, served)
            peers = (served.device.id,) * (need.devices_per_node - 1)
            conditions = conditions_of(
                request, served.device, environment=environment, versions=served.versions, peers=peers
            )
            if submission.fresh:
                continue
            if (stored := self._stored_tuning(conditions.fingerprint)) is not None:
                work = replace(_placed(work, conditions, served), priority=0)
                return self._serve_stored(stored, work, request, served, idempotency)
            found = work.warm_start_from or find_warm_start(self._store.recommendations, conditions)
            work = replace(work, warm_start_from=found)
        alive = workers_with(need, self._context.live_workers())
        check_packages_of_probes(request, [worker.served for worker in alive])
        return self._queue_tuning(work, submission, idempotency)

    def _new(self, request: TuningRequest, submission: TuningSubmission, caller: Caller) -> NewWork:
        """Return new work for any device."""
        return NewWork(
            id=self._context.identifiers.new("tun"),
            kind=WorkKind.TUNING,
            device=ANY_DEVICE,
            model=model_name(request.spec),
            effective_batch_size=request.effective_batch_size,
            fingerprint="",
            payload=payload(request),
            priority=submission.priority,
            key_id=caller.key_id,
            names=submission.names,
            address=caller.address,
            trace_parent=current_trace_parent(),
            fresh=submission.fresh,
        )

    def _queue_tuning(
        self, work: NewWork, submission: TuningSubmission, idempotency: Idempotency | None
    ) -> SubmissionResponse:
        queued = self._queue(work, idempotency)
        if not submission.fresh:
            self._context.hit_counter.count(hit=False)
        return queued

    def _admitted(self, submission: TuningSubmission) -> TuningRequest:
        """Return the request that would be run: of a command, with the parts that the operator has registered.

        Raises:
            RequestError: when this service does not run the model, or not at this effective batch.
        """
        request = submission.to_request()
        if not isinstance(submission.spec, CommandSpec):
            complete = self._context.policy.complete(submission.workload)
            return request.model_copy(update={"spec": complete})
        commands = self._context.commands
        with self._context.policy.files.slot():
            changes: dict[str, object] = {"spec": commands.resolved(submission.spec)}
        default = TuningRequest.model_fields["probe_timeout_seconds"].default
        given = None if submission.probe_timeout_seconds == default else submission.probe_timeout_seconds
        if (timeout := commands.probe_timeout(submission.spec, given)) is not None:
            changes["probe_timeout_seconds"] = timeout
        admitted = request.model_copy(update=changes)
        if (fault := admitted.division_fault) is not None:
            raise InvalidInputError(fault)
        return admitted

    def _stored_tuning(self, fingerprint: str) -> Tuning | None:
        """Return the tuning with the newest conclusive recommendation of this fingerprint, or None."""
        tuning_id = self._store.recommendations.tuning_with(fingerprint)
        with suppress(NotFoundError, UnreadableDocumentError):  # deleted since, or of another version
            return None if tuning_id is None else self.get(tuning_id)
        return None

    def _serve_stored(
        self,
        stored: Tuning,
        work: NewWork,
        request: TuningRequest,
        served: ServedDevice,
        idempotency: Idempotency | None,
    ) -> SubmissionResponse:
        """Serve a submission from the stored tuning with the same fingerprint, or from a copy of its recommendation."""
        found, new_id = stored.recommendation, self._context.identifiers.new("rec")
        if found is None or (answer := answer_from(found, request, served.device, work.names, new_id)) is found:
            tuning = stored
            if idempotency is not None:
                self._store.submissions.store_request(idempotency, stored.id)
        else:
            tuning = views.tuning(self._store.submissions.add_succeeded(work, answer, idempotency), answer)
        self._context.hit_counter.count(hit=True)
        return SubmissionResponse(tuning.id, tuning.model_dump_json(), queued=False)

    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> Tuning:
        found = item.recommendation_id
        return views.tuning(item, self._store.recommendations.get(found) if found else None, queue)


def _placed(work: NewWork, conditions: TuningConditions, served: ServedDevice) -> NewWork:
    """Return the work for one device, whose fingerprints are known."""
    return replace(
        work,
        device=conditions.device.id,
        hardware=served.hardware,
        fingerprint=conditions.fingerprint,
        request_fingerprint=conditions.request_fingerprint,
    )
