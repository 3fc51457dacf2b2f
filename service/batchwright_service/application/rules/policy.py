"""The policy of the operator: allowed code, readable files, and the quota of each API key."""

import fnmatch
import glob
import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from batchwright.client.documents.problems import FieldFault
from batchwright.device_traits import CUDA_ALLOCATOR_VARIABLES
from batchwright.errors import DataOutsideRootsError
from batchwright.schemas.dataset.data_spec import PathRead
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.workload import PythonModel, TransformersModel, WorkloadSpec
from batchwright.system.data_roots import DataRoots, expand_glob, literal_prefix
from batchwright.workloads.pretrained.bounded_fetch import fetch_config_within
from batchwright.workloads.pretrained.folder_config import with_pretrained_config
from batchwright_service.application.rules.bulkhead import Bulkhead
from batchwright_service.errors import (
    DataPathNotAllowedError,
    HubModelNotAllowedError,
    InvalidInputError,
    TargetNotAllowedError,
)
from batchwright_service.store.models import UNLIMITED, Quota

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_MAX_IDENTIFIER_LENGTH = 64
_HUB_SECONDS = 10.0
"""The longest time of a fetch from the hub, which takes one second where the hub is well."""
_MAX_ENTRIES = 10_000
"""Entries of folders that are checked for one pattern, which bounds the time of a request; the run checks all."""


class Policy:
    """Check specs against the operator's settings. ``quota`` limits each API key; the store applies it."""

    def __init__(
        self,
        python_targets: Sequence[str],
        data_roots: Sequence[str],
        quota: Quota = UNLIMITED,
        hub_models: Sequence[str] = (),
    ) -> None:
        self.quota = quota
        self._hub_models = tuple(hub_models)
        self._targets = frozenset(python_targets)
        self._roots = DataRoots(data_roots)
        self._hub = Bulkhead("the model hub", slots=3, queue=5, wait_seconds=5.0)
        self.files = Bulkhead("the file systems of data and commands", slots=6, queue=4, wait_seconds=5.0)
        """For reads of files that an operator has allowed, which may lie on a network file system that hangs."""

    def complete(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Return an allowed spec, with the whole config of its pretrained model.

        Raises:
            TargetNotAllowedError, DataPathNotAllowedError, HubModelNotAllowedError: as in ``check_model``.
            SpecError: when the pretrained model has no usable config.
            HubUnavailableError: when the hub does not answer within seconds.
            DependencyBusyError: when too many requests wait for the hub or for files.
        """
        self.check_model(spec)
        if not isinstance(spec.model, TransformersModel) or spec.model.pretrained is None:
            return spec
        try:
            with self._hub.slot() if spec.model.hub_model else self.files.slot():
                return with_pretrained_config(spec, self._roots, partial(fetch_config_within, seconds=_HUB_SECONDS))
        except DataOutsideRootsError as error:
            raise DataPathNotAllowedError(f"spec.model.pretrained: {error}") from None

    def check_model(self, spec: WorkloadSpec) -> None:
        """Refuse code that is not allow-listed, and a pretrained model outside the data roots.

        Raises:
            TargetNotAllowedError: naming the target and the setting.
            DataPathNotAllowedError: naming the path and the setting.
            HubModelNotAllowedError: naming the model and the setting.
        """
        if isinstance(spec.model, TransformersModel) and spec.model.pretrained is not None:
            self._check_pretrained(spec.model, spec.model.pretrained)
        if isinstance(spec.model, PythonModel) and spec.model.target not in self._targets:
            allowed = ", ".join(sorted(self._targets)) or "none"
            raise TargetNotAllowedError(
                f"spec.model.target {spec.model.target!r} is not allow-listed (allowed: {allowed}); "
                "the operator adds it to BATCHWRIGHT_PYTHON_TARGETS"
            )

    def _check_pretrained(self, model: TransformersModel, place: str) -> None:
        if model.hub_model is None:
            self._check_path("spec.model", PathRead("pretrained", place, glob.escape(place)))
        elif not any(fnmatch.fnmatchcase(place, pattern) for pattern in self._hub_models):
            allowed = ", ".join(self._hub_models) or "none"
            raise HubModelNotAllowedError(
                f"spec.model.pretrained: {place!r} is neither an absolute path nor an allow-listed model of the hub "
                f"(allowed: {allowed}); the operator adds it to BATCHWRIGHT_HUB_MODELS"
            )

    def check_data(self, spec: WorkloadSpec) -> None:
        """Refuse paths outside the data roots, and patterns that lead outside by a link on this host.

        The run checks every file again when it opens it: links may be added later, or exist on its host alone.

        Raises:
            DataPathNotAllowedError: naming the path and the setting.
        """
        for field, data in spec.data_by_field.items():
            for read in data.paths_read():
                self._check_path(f"spec.{field}", read)

    @staticmethod
    def check_foreign(recommendation: Recommendation, probe_variables: Collection[str]) -> None:
        """Refuse a submitted recommendation that sets other environment variables than the probes here set.

        Any other variable, such as LD_PRELOAD, would let the sender run arbitrary code.

        Raises:
            InvalidInputError: naming the variables, or a field with an invalid value.
        """
        allowed = {*probe_variables, *CUDA_ALLOCATOR_VARIABLES}
        others = sorted(set(recommendation.environment) - allowed)
        if others:
            raise InvalidInputError(
                f"recommendation.environment sets {', '.join(others)}; a job may set only {', '.join(sorted(allowed))}"
            )
        if not _FINGERPRINT.fullmatch(recommendation.fingerprint) or len(recommendation.id) > _MAX_IDENTIFIER_LENGTH:
            raise InvalidInputError(
                "recommendation.fingerprint must have 64 hexadecimal digits, and its id at most 64 characters"
            )

    def _check_path(self, parent: str, read: PathRead) -> None:
        field, path, pattern = f"{parent}.{read.field}", read.path, read.pattern
        if "\0" in path or not path.startswith("/") or ".." in Path(path).parts:
            raise DataPathNotAllowedError(f"{field}: {path!r} must be an absolute path without `..`")
        try:
            with self.files.slot():
                self._roots.resolve(path if pattern != path else literal_prefix(pattern))
                for _ in expand_glob(pattern, self._roots, _MAX_ENTRIES):
                    pass
        except DataOutsideRootsError as error:
            raise DataPathNotAllowedError(f"{field}: {path!r}: {error}") from None
        except (OSError, RuntimeError) as error:  # a name is too long, links go in circles, or a folder is closed to us
            reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise InvalidInputError.listing([FieldFault(field=field, message=reason, value=path[:200])]) from None
