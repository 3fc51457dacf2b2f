"""Cursors that no list has made: a page or a refusal on both databases, never an error of the service."""

import base64
import json

import pytest

from batchwright.client.documents.states import WorkKind
from batchwright_service.application import views
from batchwright_service.errors import InvalidCursorError
from batchwright_service.store.models import RecommendationFilter, Search, WorkFilter
from batchwright_service.store.store import Store
from tests.support.factories import recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, ended

SORTS = ("ended", "name", "model", "device", "effective_batch_size", "peak", "samples_per_second", "priority", "probes")
OF_WORK_ALONE = {"ended", "priority", "probes"}


def odd_cursors(sort: str, prefix: str) -> list[str]:
    """Cursors that no list has made."""
    numbers = [0, -1, 1.5, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1e18, 1e300, -1e300]
    texts = ["", "x", "\0", "a\0b", "\ud800", "é", "\uffff", "%", "'", "\\", "\n", "x" * 900, "1", "nan", "\u202e"]
    others = [None, True, False, float("nan"), float("inf"), [], {}, [1], {"a": 1}]
    values = [json.dumps([sort, value]) for value in [*numbers, *texts, *others]]
    values += [json.dumps(wrong) for wrong in ([sort], [sort, 1, 1], sort, 1, None, {sort: 1}, [None, 1], [[sort], 1])]
    values += ["", "[", "[" * 400, '["', "\ud800"]
    ends = [base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode().rstrip("=") for text in values]
    names = [f"{prefix}{'0' * 32}", f"{prefix}{'f' * 32}", f"{prefix}{'g' * 32}", f"x{'0' * 32}", "", prefix]
    return [f"{names[0]}.{end}" for end in ends] + [f"{name}.{ends[0]}" for name in names] + [names[0] + ".\0", "."]


@pytest.mark.parametrize("sort", SORTS)
def test_no_cursor_is_an_error_of_the_service(store: Store, new_id: NewId, sort: str) -> None:
    """Whatever a caller writes into it, in both directions of each order."""
    ended(store, new_work(new_id("tun")), recommendation(id=new_id("rec")))
    refused = 0
    for prefix in ("tun",) if sort in OF_WORK_ALONE else ("tun", "rec"):
        for number, cursor in enumerate(odd_cursors(sort, prefix[0])):
            try:
                before, search = views.position_after(cursor, prefix, Search(sort=sort, descending=number % 2 == 0))
            except InvalidCursorError:
                refused += 1
                continue
            if prefix == "tun":
                store.work.newest(WorkKind.TUNING, 2, before, WorkFilter(search=search))
            else:
                store.recommendations.newest(RecommendationFilter(search=search), 2, before)
    assert refused > 20
