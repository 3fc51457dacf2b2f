"""Read the data of a spec in a process of its own, before the first probe of a tuning."""

import os
import time

from batchwright.errors import DataOutsideRootsError, HostFailureError, HubUnavailableError, SpecError
from batchwright.probing.protocol import DataReport, DataRequest, ProbePaths
from batchwright.schemas.recommendation import DataReading
from batchwright.system.data_roots import DataRoots, literal_prefix
from batchwright.system.files import write_atomically
from batchwright.training.assembly import pretrained_folder
from batchwright.training.data.build import prepare_reading
from batchwright.training.data.files import DataFolders
from batchwright.training.data.first_reading import FirstReading, TimeIsUpError, place_in
from batchwright.training.evaluation.held_out_data import build_run_data
from batchwright.workloads.build import build_workload


def run_data_reading(paths: ProbePaths) -> None:
    """Read the data that is named in ``paths``, and write a ``DataReport`` there."""
    request = DataRequest.model_validate_json(paths.request.read_bytes())
    write_atomically(paths.result, _report(request, paths).model_dump_json())


def _report(request: DataRequest, paths: ProbePaths) -> DataReport:
    began = time.monotonic()
    reading = FirstReading(began + request.seconds, paths.progress)
    place, reason = None, ""
    try:
        place = _read(request, paths, reading)
    except (TimeIsUpError, DataOutsideRootsError) as error:
        reason = str(error)
    except HubUnavailableError as error:
        return DataReport(unavailable=tuple(error.problems))
    except SpecError as error:
        return DataReport(problems=tuple(error.problems))
    except HostFailureError as error:
        return DataReport(host_failure=f"{error.cause}: {error}")
    if request.named is not None:
        return DataReport(place=place or "")
    counts = {"read": reading.read, "total": reading.total, "unit": reading.unit, "reason": reason}
    return DataReport(reading=DataReading.model_validate({**counts, "seconds": time.monotonic() - began}))


def _read(request: DataRequest, paths: ProbePaths, reading: FirstReading) -> str | None:
    """Read the data, or return the place of the sample to name.

    Raises:
        DataOutsideRootsError: when this service may not read the data; a run elsewhere may.
    """
    spec, roots = request.spec, DataRoots.from_environment(os.environ)
    for read in (read for data in spec.data_by_field.values() for read in data.paths_read()):
        roots.resolve(read.path if read.pattern != read.path else literal_prefix(read.pattern))
    prepare_reading(spec)
    folders = DataFolders(roots, paths.directory / "datasets", reading=reading)
    if spec.reads_tokenizer_of_model and (found := pretrained_folder(spec, roots, weights=False)) is not None:
        folders = folders.with_pretrained(*found)
    data = build_run_data(spec, build_workload(spec), folders)
    parts = [part.samples for part in (data.training, data.held_out) if part is not None]
    if request.named is not None:
        return place_in(parts, request.named)
    reading.read_samples(parts)
    return None
