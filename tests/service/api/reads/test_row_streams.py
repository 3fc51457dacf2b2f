"""Lists as CSV and JSON Lines: all rows that match, in the order of the list, safe in spreadsheets."""

import csv
import json
from io import StringIO
from typing import Any

import pytest

from batchwright_service.api.reads import row_streams
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running


def submitted(service: Running, **changes: Any) -> dict[str, Any]:
    """A tuning that has ended."""
    return ended(service.http, service.http.post("/v1/tunings", json=body(**changes)).headers["location"])


def table(service: Running, path: str, **params: Any) -> list[dict[str, str]]:
    """The rows of a CSV."""
    response = service.http.get(path, params={**params, "format": "csv"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(StringIO(response.text)))


def lines(service: Running, path: str, **params: Any) -> list[dict[str, Any]]:
    """The rows of JSON Lines."""
    response = service.http.get(path, params={**params, "format": "jsonl"})
    assert response.headers["content-type"] == "application/jsonl"
    return [json.loads(line) for line in response.text.splitlines()]


def test_all_rows_that_match_are_sent(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several pages, filtered and sorted; each row equals that of the list."""
    monkeypatch.setattr(row_streams, "_ROWS_AT_ONCE", 2)
    for size in range(5, 10):
        submitted(service, effective_batch_size=size, name=f"run {size}", labels={"team": "a" if size > 5 else "b"})
    for path in ("/v1/tunings", "/v1/recommendations"):
        wanted = {"label": "team=a", "sort": "name"}
        listed = service.http.get(path, params=wanted).json()["items"]
        assert [row["name"] for row in listed] == [f"run {size}" for size in range(6, 10)]
        assert lines(service, path, **wanted) == listed
        rows = table(service, path, **wanted)
        assert [row["name"] for row in rows] == [row["name"] for row in listed]
        assert [row["plan_micro_batch_size"] for row in rows] == ["6", "7", "8", "9"]
        assert {row["labels"] for row in rows} == {"team=a"}
        assert [row["created_at"] for row in rows] == [row["created_at"] for row in listed]
    assert table(service, "/v1/jobs") == lines(service, "/v1/jobs") == []


def test_a_list_continues_after_a_cursor(service: Running) -> None:
    """The rest of a list that was begun in pages; a wrong cursor is refused before anything is sent."""
    made = [submitted(service, effective_batch_size=size)["id"] for size in (5, 6, 7)]
    cursor = service.http.get("/v1/tunings?limit=1").json()["next_cursor"]
    assert [row["id"] for row in lines(service, "/v1/tunings", cursor=cursor)] == made[1::-1]
    problem_in(service.http.get("/v1/tunings", params={"format": "csv", "cursor": "wrong"}), 400, "invalid-cursor")
    problem_in(service.http.get("/v1/tunings", params={"format": "xlsx"}), 422, "invalid-request")


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)"])
def test_formulas_are_texts_in_csv(service: Running, name: str) -> None:
    """A spreadsheet runs none; numbers stay numbers, negative ones too, and JSON Lines has the name itself."""
    submitted(service, name=name, priority=-5)
    (row,) = table(service, "/v1/tunings")
    assert (row["name"], row["priority"]) == (f"'{name}", "-5")
    (line,) = lines(service, "/v1/tunings")
    assert (line["name"], line["priority"]) == (name, -5)


def test_commas_and_quotation_marks_stay_in_their_column(service: Running) -> None:
    """Values are quoted as RFC 4180 says; absent values are empty."""
    submitted(service, name='a, "b"')
    (row,) = table(service, "/v1/recommendations")
    assert (row["name"], row["project"], row["feasible"]) == ('a, "b"', "", "true")
