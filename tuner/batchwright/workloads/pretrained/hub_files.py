"""Fetch files of a model on the Hugging Face hub into the hub's own cache. No torch.

The commit is part of the path in that cache, so a model is always read at one commit. `HF_HUB_OFFLINE`, `HF_ENDPOINT`,
`HF_HOME` and `HF_TOKEN` work as in `huggingface_hub`. Code beside the weights is not fetched.
"""

from collections.abc import Callable
from pathlib import Path

from batchwright.errors import FieldProblem, HubUnavailableError, SpecError
from batchwright.schemas.model.hub import HubModel
from batchwright.system.data_roots import DataRoots
from batchwright.system.host_failures import disk_failure_of

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt")
"""Configs, weights and tokenizers."""
_SERVER_ERRORS = 500
_PASSING_STATUSES = {408, 425, 429}
"""Statuses below 500 that tell to try again later."""
_LONGEST_ERROR = 500
"""Characters of an error that are quoted: the hub writes them."""
_SUBFOLDERS = "*/*"
"""Other formats of the same weights lie there."""


def fetch_config(model: HubModel, name: str) -> Path:
    """Fetch one file of a model.

    Args:
        model: the model; without a revision, its branch `main`.
        name: the file's name.

    Returns:
        The path in the cache. Its folder is named by the commit.

    Raises:
        HubUnavailableError: when the hub is not reached, fails, or breaks off.
        HostFailureError: when the disk of the cache is full or fails.
        SpecError: when the model or the file cannot be had.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - few specs need it, and it takes long to import

    return Path(_fetched(model, lambda: hf_hub_download(model.id, name, revision=model.revision)))


def fetch_model(model: HubModel, *, weights: bool = True) -> Path:
    """Fetch the config, the tokenizer and, unless they are not needed, the weights of a model.

    Returns:
        Their folder in the cache.

    Raises:
        HubUnavailableError: when the hub is not reached, fails, or breaks off.
        HostFailureError: when the disk of the cache is full or fails.
        SpecError: when the model cannot be had.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - few specs need it, and it takes long to import

    def fetch() -> str:
        return snapshot_download(
            model.id,
            revision=model.revision,
            allow_patterns=list(_FILES),
            ignore_patterns=[_SUBFOLDERS, *(() if weights else ("*.safetensors",))],
            max_workers=1,  # the C library keeps the stacks of ended threads, which a job's memory would count
        )

    return Path(_fetched(model, fetch))


def cached_model(model: HubModel) -> Path | None:
    """Return the folder in the cache of a model that was fetched; None if it is no longer there."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - few specs need it

    config = try_to_load_from_cache(model.id, "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None


def cache_roots(snapshot: Path) -> DataRoots:
    """Return the folder of the cache that holds a model's snapshots, and the contents that they link to."""
    return DataRoots([str(snapshot.parent.parent)])


def _fetched(model: HubModel, fetch: Callable[[], str]) -> str:
    from huggingface_hub import constants, errors  # noqa: PLC0415 - imported by now
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - as above

    disable_progress_bars()  # of files of a few bytes, and in a log
    kind = SpecError
    try:
        return fetch()
    except errors.GatedRepoError:
        reason = "asks for its terms to be accepted: do that on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "does not exist, or is private: correct the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {model.revision!r}"
    except errors.RemoteEntryNotFoundError:
        reason = "has no `config.json`: it is not a model of transformers"
    except errors.HFValidationError as error:
        reason = f"has no valid name: {error}"
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:  # it is not reached, or the disk is full
        if (failure := disk_failure_of(error)) is not None:
            raise failure from None
        if constants.HF_HUB_OFFLINE:
            reason = f"is not in the cache, and HF_HUB_OFFLINE is set: fetch it first with `hf download {model.id}`"
        else:
            response = getattr(error.__cause__ or error, "response", None)
            status = getattr(response, "status_code", None)
            if status is None or status >= _SERVER_ERRORS or status in _PASSING_STATUSES:
                kind = HubUnavailableError
            reason = f"could not be fetched from {constants.ENDPOINT}: {' '.join(str(error).split())[:_LONGEST_ERROR]}"
    raise hub_problem(model, reason, kind)


def hub_problem(model: HubModel, reason: str, kind: type[SpecError] = SpecError) -> SpecError:
    """Make the error for a model that cannot be had from the hub."""
    message = f"there is no folder {model.id!r}, and the model of that name on the hub {reason}"
    return kind([FieldProblem("model.pretrained", message)])
