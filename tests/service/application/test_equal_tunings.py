"""A tuning that is answered from the recommendation of an equal one."""

import pytest

from batchwright.schemas.dataset.data_spec import SyntheticData, TextData
from batchwright.schemas.recommendation import DataReading
from batchwright.schemas.requests import Named
from batchwright_service.application.rules.equal_tunings import answer_from
from tests.support.factories import CPU, gpt_spec, recommendation, tuning_request

ONE, OTHER = TextData(kind="text", paths=("one.txt",)), TextData(kind="text", paths=("other.txt",))
READ = DataReading(read=3, total=3, seconds=0.1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ONE, "all 3 samples"),
        (OTHER, "nothing: an equal tuning with other data answers this one"),
        (SyntheticData(kind="synthetic", samples=3), None),
    ],
)
def test_an_answer_claims_no_reading_of_other_data(data: TextData | SyntheticData, words: str | None) -> None:
    """Data takes no part in what fits, so that the answer serves; what was read is that of the first request."""
    first = tuning_request(gpt_spec().model_copy(update={"data": ONE}))
    found = recommendation().model_copy(update={"request": first})
    found = found.model_copy(update={"evidence": found.evidence.model_copy(update={"data": READ})})
    asked = tuning_request(gpt_spec().model_copy(update={"data": data}), probe_timeout_seconds=77.0)
    answer = answer_from(found, asked, CPU, Named(), "rec_2")
    assert (answer.evidence.data and answer.evidence.data.in_words) == words


def test_a_whole_tuning_answers_a_quick_one_as_it_is() -> None:
    """No copy is stored for it."""
    found = recommendation()
    asked = found.request.model_copy(update={"quick": True})
    assert answer_from(found, asked, CPU, Named(), "rec_2") is found
