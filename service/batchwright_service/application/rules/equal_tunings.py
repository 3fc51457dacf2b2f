"""Answer a tuning from the recommendation of an equal one: its fingerprint is the same, but not all of its request."""

from datetime import UTC, datetime

from batchwright.planning.comparison.gain import with_gain
from batchwright.schemas.recommendation import DataReading, Recommendation
from batchwright.schemas.requests import Named, TuningRequest
from batchwright.schemas.results import DeviceInfo

_NOT_READ = DataReading(read=0, seconds=0.0, reason="an equal tuning with other data answers this one")


def answer_from(
    found: Recommendation, request: TuningRequest, device: DeviceInfo, names: Named, new_id: str
) -> Recommendation:
    """Return a stored recommendation as the answer to a request, or a copy of it that is to be stored.

    The fingerprint leaves out the parts of a request that do not affect memory, such as the data, the learning rate,
    and which of two equal GPUs. A job follows the request of its recommendation, so where such a part differs, the
    answer is a copy with the new request and the same evidence. It also is a copy where the caller names the tuning
    otherwise; a caller without names gets the stored one with its names. The gain over another baseline is what that
    evidence shows. A copy is created now; its evidence names the tuning that ran the probes. It says that nothing of
    other data was read.

    The request is complete, the names are those that its caller gave, and a copy gets the new id.
    """
    compared = [asked.model_dump(exclude={"probe_timeout_seconds", "quick"}) for asked in (found.request, request)]
    if compared[0] == compared[1] and (not names.is_named or names == found.names):
        return found
    evidence, (data, before) = found.evidence, [_data_of(asked) for asked in (request, found.request)]
    if data is None:
        evidence = evidence.model_copy(update={"data": None})
    elif data != before:
        evidence = evidence.model_copy(update={"data": _NOT_READ})
    changes = {
        "evidence": evidence,
        "id": new_id,
        "created_at": datetime.now(UTC),
        "request": request,
        "device": device,
        **dict(names),
    }
    return with_gain(found.model_copy(update=changes))


def _data_of(request: TuningRequest) -> object:
    """Return what the request says of the data in files; None if it names none, and for a command."""
    spec = None if request.command is not None else request.workload.with_files_of_data()
    return None if spec is None else spec.data_by_field
