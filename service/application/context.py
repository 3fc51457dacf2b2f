"""What the use cases share: where work is kept, what the operator allows, and who serves what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic_core import PydanticSerializationError

from service.application import views
from service.application.job_files import RunFiles
from service.application.rules.idempotency import OnceEach
from service.application.rules.policy import Policy
from service.domain.api_keys import Caller, Scope
from service.domain.identifiers import IdentifierSource
from service.domain.states import WorkKind
from service.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    NotOwnerError,
    ScopeMissingError,
    UnknownDeviceError,
)
from service.store.models import SeenDevice, WorkFilter, WorkItem, WorkRow
from service.store.store import Store
from tuner.schemas.base import Document
from tuner.schemas.workload import PythonModel, TransformersModel, WorkloadSpec


class ApplicationContext:
    """The store with the rules that hold for tunings and jobs alike. Safe to share between threads.

    Args:
        store: where work is kept.
        policy: what the operator allows.
        runs_dir: where jobs run.
        lease_seconds: a worker not heard of for longer is not counted as serving its device.
        notify: called after work was queued or cancelled, so that workers of this process look at once.
    """

    def __init__(
        self, store: Store, policy: Policy, runs_dir: Path, lease_seconds: float, notify: Callable[[], None]
    ) -> None:
        self.store = store
        self.policy = policy
        self.runs_dir = runs_dir
        self.runs = RunFiles(runs_dir)
        self.notify = notify
        self.identifiers = IdentifierSource()
        self.once = OnceEach(store.submissions)
        self._lease_seconds = lease_seconds

    def get(self, work_id: str, kind: WorkKind) -> WorkItem:
        """The work with this id.

        Raises:
            NotFoundError: when there is none of this kind.
        """
        item = self.store.work.get(work_id) if views.is_identifier(work_id) else None
        if item is None or item.kind is not kind:
            raise NotFoundError.of(kind, work_id)
        return item

    def cancel(self, work_id: str, kind: WorkKind, caller: Caller) -> WorkItem:
        """End work; what has ended stays as it is.

        Raises:
            NotFoundError: when there is none of this kind.
            NotOwnerError: when another key made it.
        """
        self.own(work_id, kind, caller, "cancel")
        item = self.store.submissions.cancel(work_id)
        self.notify()
        return item

    def delete(self, work_id: str, kind: WorkKind, caller: Caller) -> None:
        """Delete work that has ended, with all that was recorded of it, and a job's folder where that is on this host.

        The folder goes first: when this is interrupted, the row is there to delete the rest with.

        Raises:
            NotFoundError: when there is none of this kind.
            NotOwnerError: when another key made it.
            NotEndedError: when it has not ended.
            ConflictError: when the folder cannot be removed whole.
        """
        state = self.own(work_id, kind, caller, "delete").state
        if state.terminal and kind is WorkKind.JOB and not self.runs.remove(work_id):
            raise ConflictError(
                f"the folder of {work_id} cannot be removed: let the operator look at {self.runs.directory(work_id)}, "
                "and delete it again"
            )
        self.store.retention.delete(work_id)

    def page(
        self, kind: WorkKind, limit: int, cursor: str | None, wanted: WorkFilter
    ) -> tuple[list[WorkRow], str | None]:
        """Rows of a list, newest first, and the cursor of what follows.

        Raises:
            InvalidCursorError: when the cursor is not one of this list.
        """
        before = views.decode_cursor(cursor, views.PREFIXES[kind])
        rows = self.store.work.newest(kind, limit + 1, before, wanted)
        return rows[:limit], views.cursor_after(rows, limit)

    def is_alive(self, seen: SeenDevice) -> bool:
        """Whether a device's worker was heard of lately."""
        return seen.age_seconds <= self._lease_seconds

    def serving(self, device: str | None) -> SeenDevice:
        """The live worker for a device; for none, that of the first GPU, else of the CPU.

        Raises:
            UnknownDeviceError: when there is none.
            StoreUnavailableError: when there is none, and the database cannot be written: workers may be silent for it.
        """
        alive = [seen for seen in self.store.devices.list() if self.is_alive(seen)]
        alive.sort(key=lambda seen: (seen.served.device.kind == "cpu", len(seen.served.device.id), seen.served.slot))
        found = next((seen for seen in alive if device in {None, seen.served.device.id}), None)
        if found is None:
            self.store.queue.check()  # a worker that cannot write is silent: its device is not unknown
            served = ", ".join(sorted({seen.served.device.id for seen in alive})) or "none"
            raise UnknownDeviceError(f"device {device or '(any)'} is not served here; served: {served}")
        return found

    def own(self, work_id: str, kind: WorkKind, caller: Caller, verb: str) -> WorkItem:
        """The work with this id, if the caller may change it; ``verb`` is what they want.

        Raises:
            NotFoundError: when there is none of this kind.
            NotOwnerError: when another key made it.
        """
        item = self.get(work_id, kind)
        if not caller.may_change(item.key_id):
            raise NotOwnerError(
                f"{work_id!r} was not made with this API key: only that key, or one with the scope admin, can {verb} it"
            )
        return item


def check_priority(priority: int, caller: Caller) -> None:
    """Refuse to let a caller go before others who may not.

    Raises:
        ScopeMissingError: naming the priority and the scope.
    """
    if priority > 0 and not caller.may(Scope.ADMIN):
        raise ScopeMissingError(f"priority {priority}: above 0 needs the scope {Scope.ADMIN}; send at most 0")


def model_name(spec: WorkloadSpec) -> str:
    """A short name for lists: the architecture, the `model_type` or the target."""
    model = spec.model
    if isinstance(model, TransformersModel):
        return str(model.config["model_type"])
    return model.target if isinstance(model, PythonModel) else model.architecture.name


def payload(document: Document) -> str:
    """A request as it is stored.

    Raises:
        InvalidInputError: when a free part of it holds text that cannot be written (half a surrogate pair).
    """
    try:
        return document.model_dump_json()
    except PydanticSerializationError as error:
        raise InvalidInputError(f"the request cannot be stored: {error}") from None
