"""The pages' server: what is sent with them, who may see them, how one signs in, and what a cookie may do."""

import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import get_args

import anyio
import httpx
import pytest
from fastapi import FastAPI

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State
from batchwright.schemas.requests import Objective
from batchwright_service.api.events import streaming
from batchwright_service.auth.sessions import SESSION_SECONDS, csrf_token_of
from batchwright_service.bootstrap import System, app_of, build
from batchwright_service.dashboard.assets import Assets
from batchwright_service.dashboard.sign_in import local_path
from batchwright_service.domain.key_texts import make_key
from batchwright_service.fast_path import trusted_callers
from batchwright_service.settings import Settings
from tests.support.paths import OPENAPI
from tests.support.service.scripted import new_work

HOME = "http://127.0.0.1:8000"
COOKIE = "batchwright_session"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ID = "0" * 32
PAGES = [
    "/",
    "/tunings",
    "/tunings/new",
    f"/tunings/tun_{ID}",
    "/recommendations",
    f"/recommendations/compare?id=rec_{ID}&id=rec_{ID}",
    f"/recommendations/rec_{ID}",
    "/jobs",
    f"/jobs/job_{ID}",
    "/devices/host/cpu",
    "/keys",
    "/webhooks",
    f"/webhooks/whk_{ID}",
    "/audit",
]


class Browser:
    """Asks the application as a browser does: cookies are kept, redirects shown, pages accepted."""

    def __init__(self, app: FastAPI, address: str = "127.0.0.1", url: str = HOME) -> None:
        self._app = app
        self._address = address
        self._url = url
        self.cookies = httpx.Cookies()

    def ask(self, method: str, path: str, **given: object) -> httpx.Response:
        """One request, as a page of this service would send it."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=(self._address, 1), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self._url, cookies=self.cookies) as client:
                client.headers.update(HTML)
                response = await client.request(method, path, **given)  # type: ignore[arg-type]
                self.cookies = client.cookies
                return response

        return anyio.run(send)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """GET, with headers."""
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def sign_in(self, key: str, back: str = "") -> httpx.Response:
        """Send the form."""
        return self.ask("POST", "/sign-in", data={"key": key, "next": back})

    @property
    def csrf_token(self) -> str:
        """What the pages hold."""
        found = re.search('<meta name="csrf-token" content="([0-9a-f]*)">', self.get("/jobs").text)
        assert found is not None
        return found[1]


def served(folder: Path, database: Path, **given: object) -> tuple[System, FastAPI]:
    """A service without workers over a copy of an empty database."""
    folder.mkdir(exist_ok=True)
    shutil.copy(database, folder / "batchwright.db")
    settings = Settings(data_dir=folder, node_name="host", worker=False, **given)  # type: ignore[arg-type]
    system = build(settings)
    return system, app_of(system, settings)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[tuple[System, FastAPI]]:
    """A service that has a key."""
    system, app = served(tmp_path_factory.mktemp("locked"), migrated_file)
    system.store.keys.add(make_key("first", (Scope.ADMIN,))[0])
    yield system, app
    system.stop()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[FastAPI]:
    """A service without keys."""
    system, app = served(tmp_path_factory.mktemp("opened"), migrated_file)
    yield app
    system.stop()


@pytest.fixture
def browser(locked: tuple[System, FastAPI]) -> Browser:
    """A browser that nobody has signed in with."""
    return Browser(locked[1], address="203.0.113.7")


def new_key(system: System, *scopes: Scope, expires: float | None = None) -> str:
    """Store a key; its text."""
    new, text = make_key("test", scopes, expires)
    system.store.keys.add(new)
    return text


@pytest.fixture
def key(locked: tuple[System, FastAPI]) -> str:
    """A key with every scope."""
    return new_key(locked[0], Scope.ADMIN)


@pytest.fixture
def no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified is verified again at once."""
    monkeypatch.setattr(trusted_callers, "TRUST_SECONDS", -1.0)


def code_of(response: httpx.Response) -> str:
    """What the problem in a response is."""
    return Problem.model_validate_json(response.content).code


# --- pages ---


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_protected_and_compressed(opened: FastAPI, path: str) -> None:
    """Its policy allows nothing inline and nothing from elsewhere; no cache keeps it; it is gzip to who takes it."""
    response = Browser(opened).get(path)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.headers["content-security-policy"] == POLICY
    assert (response.headers["x-content-type-options"], response.headers["referrer-policy"]) == (
        "nosniff",
        "same-origin",
    )
    assert (response.headers["cache-control"], response.headers["content-encoding"]) == ("no-store", "gzip")
    plain = Browser(opened).get(path, Accept_Encoding="gzip;q=0, identity")
    assert "content-encoding" not in plain.headers
    assert plain.text == response.text
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*\ssrc=)|\son\w+=|//[a-z]+\.", response.text)


def test_pages_are_not_in_the_document() -> None:
    """The API's document, which another test compares with the service, tells of the API alone."""
    paths = set(json.loads(OPENAPI.read_text())["paths"])
    assert {path for path in paths if not path.startswith("/v1/")} == {
        "/livez",
        "/readyz",
        "/readyz/database",
        "/metrics",
    }


def test_a_callers_text_is_escaped(opened: FastAPI) -> None:
    """Paths and queries reach the page escaped."""
    for path in ("/tunings/%22%3E%3Cscript%3Ealert(1)%3C", "/recommendations/compare?id=%22%3E%3Cscript%3E"):
        text = Browser(opened).get(path).text
        assert "&lt;script&gt;" in text
        assert '"><script>' not in text


@pytest.mark.parametrize("path", ["/tunings", "/recommendations", "/jobs", "/audit"])
def test_a_list_offers_the_values_of_the_api(opened: FastAPI, path: str) -> None:
    """Its filters choose among what the documents allow."""
    (given,) = re.findall(r'data-choices="([^"]+)"', Browser(opened).get(path).text)

    choices = json.loads(unescape(given))
    assert choices["objectives"] == list(get_args(Objective))
    assert set(choices["states"]) == set(State)


def test_an_unknown_address_is_a_page_for_browsers_and_a_problem_for_programs(opened: FastAPI) -> None:
    """Both get 404 with the requested path; the API itself responds to everyone with documents."""
    page = Browser(opened).get("/wrong-page")
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "/wrong-page" in page.text
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["x-request-id"]
    assert code_of(Browser(opened).get("/wrong-page", Accept="*/*")) == "not-found"
    assert code_of(Browser(opened).get("/v1/jobs/none")) == "not-found"


def test_an_error_page_answers_head(opened: FastAPI) -> None:
    """HEAD is answered as GET is, for people too, though the problem in it has no body to make a page from."""
    response = Browser(opened).ask("HEAD", "/wrong-page")
    assert (response.status_code, response.headers["content-type"]) == (404, "text/html; charset=utf-8")


def test_a_failure_is_a_page_that_names_its_request(opened: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of the request finds the line in the log; the page shows nothing internal."""

    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("s3cr3t")

    monkeypatch.setattr(opened.state.context.authenticators.api_keys, "is_open", fail)
    response = Browser(opened).get("/sign-in")
    assert (response.status_code, response.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert response.headers["x-request-id"] in response.text
    assert "s3cr3t" not in response.text


# --- files ---


def test_static_files_are_immutable_at_their_own_address(opened: FastAPI) -> None:
    """The address changes with what is in any of them; another version's address answers, and is asked again."""
    path = Assets().url("main.js")
    response = Browser(opened).get(path, Accept="*/*")
    assert response.headers["content-type"] == "text/javascript; charset=utf-8"
    assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert (response.headers["content-encoding"], response.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert response.headers["content-security-policy"] == POLICY
    old = Browser(opened).get("/static/0123456789abcdef/main.js", Accept="*/*")
    assert (old.headers["cache-control"], old.content) == ("no-cache", response.content)
    known = Browser(opened).get(path, Accept="*/*", If_None_Match=response.headers["etag"])
    assert (known.status_code, known.content) == (304, b"")


def test_the_address_of_files_changes_with_any_of_them(tmp_path: Path) -> None:
    """A module's address tells of those that it imports too."""
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "b.js").write_text("2")
    before = Assets(tmp_path).url("a.js")
    assert Assets(tmp_path).url("a.js") == before
    (tmp_path / "b.js").write_text("3")
    assert Assets(tmp_path).url("a.js") != before
    with pytest.raises(KeyError, match=r"c\.js"):
        Assets(tmp_path).url("c.js")


def test_plotly_is_served_from_its_package(opened: FastAPI) -> None:
    """Its own address has its version; it is compressed."""
    path = Assets().url("plotly.min.js")
    response = Browser(opened).get(path, Accept="*/*")
    assert response.headers["cache-control"].endswith("immutable")
    assert int(response.headers["content-length"]) < len(response.content) / 3
    assert response.content[:200].startswith(b"/**\n* plotly.js v")


@pytest.mark.parametrize("name", ["nothing.js", "../assets.py", "%2e%2e%2fassets.py", ".gitkeep", "..%2f..%2fkeys.py"])
def test_no_other_file_is_served(opened: FastAPI, name: str) -> None:
    """Only the files that are there by name."""
    assert Browser(opened).get(f"/static/x/{name}", Accept="*/*").status_code == 404


# --- who sees pages ---


@pytest.mark.parametrize("path", [*PAGES, "/wrong-page"])
def test_unauthenticated_browsers_are_redirected_to_the_sign_in_page(browser: Browser, path: str) -> None:
    """A browser is redirected there and back; a program gets 401."""
    response = browser.get(path)
    assert response.status_code == 303
    form = browser.get(response.headers["location"])
    assert form.status_code == 200
    assert f'name="next" value="{path.replace("&", "&amp;")}"' in form.text
    assert code_of(browser.get(path, Accept="*/*")) == "not-authenticated"


def test_without_keys_local_callers_see_the_pages(opened: FastAPI) -> None:
    """Local callers need not sign in, and the page says so; a proxied request is not local."""
    assert "open on this machine" in Browser(opened).get("/").text
    assert "API keys" in Browser(opened).get("/sign-in?next=/jobs").text
    assert Browser(opened, address="203.0.113.7").get("/").status_code == 303


def test_an_old_cookie_is_ignored_while_no_key_is_needed(opened: FastAPI) -> None:
    """A session of another database counts as none."""
    visitor = Browser(opened)
    visitor.cookies.set(COOKIE, "0" * 64)
    assert visitor.get("/").status_code == 200
    assert visitor.get("/v1/jobs").status_code == 200


# --- signing in and out ---


def test_a_key_signs_in_and_the_session_signs_out(browser: Browser, key: str) -> None:
    """Back to the page that was asked for; the pages name the key; after signing out the cookie is worth nothing."""
    signed_in = browser.sign_in(f" {key}\n", "/jobs?state=FAILED")
    assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/jobs?state=FAILED")
    assert key.split("_")[1] in browser.get("/").text
    assert browser.get("/v1/jobs").status_code == 200
    kept = browser.cookies[COOKIE]
    signed_out = browser.ask("POST", "/sign-out", data={"csrf_token": browser.csrf_token})
    assert (signed_out.status_code, signed_out.headers["location"]) == (303, "/sign-in")
    assert COOKIE not in browser.cookies
    browser.cookies.set(COOKIE, kept)
    assert code_of(browser.get("/v1/jobs")) == "not-authenticated"
    assert browser.get("/").status_code == 303


def test_the_cookie_is_hidden_from_scripts_and_other_sites(locked: tuple[System, FastAPI], key: str) -> None:
    """No script sees it, no other site sends it, it ends, and over TLS it goes nowhere else."""
    plain = Browser(locked[1]).sign_in(key).headers["set-cookie"]
    parts = {part.strip().lower() for part in plain.split(";")[1:]}
    assert parts == {"httponly", "samesite=strict", "path=/", f"max-age={SESSION_SECONDS}"}
    assert re.match(f"{COOKIE}=[0-9a-f]{{64}};", plain)
    tls = Browser(locked[1], url=HOME.replace("http:", "https:")).sign_in(key).headers["set-cookie"]
    assert "; Secure" in tls
    origin = {"Host": "ops.example", "Origin": "https://ops.example"}
    hidden = Browser(app_of(locked[0], Settings(allowed_hosts=("ops.example",))), url="http://ops.example")
    behind = hidden.ask("POST", "/sign-in", data={"key": key}, headers=origin)
    assert "; Secure" in behind.headers["set-cookie"], "the proxy does not say that it speaks TLS, the browser does"


def test_a_link_of_another_site_reaches_its_page_with_a_session(browser: Browser, key: str) -> None:
    """Browsers send no strict cookie along it: the answer leads to a page of this site, to which the cookie is sent."""
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    first = browser.get("/jobs?state=FAILED&model=%22%3E", **followed)
    assert (first.status_code, first.headers["cache-control"]) == (200, "no-store")
    found = re.search(r'content="0; url=([^"]*)"', first.text)
    assert found is not None
    address = unescape(found[1])
    assert "API key" in browser.get(address).text, "who is not signed in gets the form"
    browser.sign_in(key)
    assert browser.get(address).headers["location"] == "/jobs?state=FAILED&model=%22%3E"


def test_responses_to_a_cookie_are_private(browser: Browser, key: str) -> None:
    """A shared cache may store a response to a request without `Authorization`, unless the headers forbid it."""
    browser.sign_in(key)
    for path in ("/v1/tunings", "/v1/devices", "/v1/summary", "/v1/keys"):
        assert browser.get(path).headers["cache-control"] == "private, no-cache"


def test_each_session_has_a_token_of_its_own(browser: Browser, key: str) -> None:
    """Signing in again makes another and ends the one before."""
    browser.sign_in(key)
    first = browser.cookies[COOKIE]
    browser.sign_in(key)
    assert browser.cookies[COOKIE] != first
    browser.cookies.set(COOKIE, first)
    assert browser.get("/v1/jobs").status_code == 401


@pytest.mark.parametrize("spoil", [lambda key: key[:-1] + "x", lambda _: "", lambda _: "<b>", lambda _: "k" * 5000])
def test_a_wrong_key_gets_the_form_again(browser: Browser, key: str, spoil: object) -> None:
    """401 with what is wrong, where it was; the key is not shown, and no cookie set."""
    wrong = spoil(key)  # type: ignore[operator]
    response = browser.sign_in(wrong, "/jobs")
    assert (response.status_code, response.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "This API key is unknown" in response.text
    assert 'name="next" value="/jobs"' in response.text
    assert len(wrong) < 4 or wrong not in response.text
    assert "set-cookie" not in response.headers


def test_an_ended_key_is_named_as_the_cause(browser: Browser, locked: tuple[System, FastAPI]) -> None:
    """The form says whether the key was revoked or has expired."""
    revoked, expired = new_key(locked[0], Scope.ADMIN), new_key(locked[0], Scope.ADMIN, expires=-1.0)
    locked[0].store.keys.revoke(revoked.split("_")[1])
    assert "was revoked" in browser.sign_in(revoked).text
    assert "expired" in browser.sign_in(expired).text


@pytest.mark.parametrize(
    "elsewhere",
    [
        "http://evil.example",
        "//evil.example",
        "/\\evil.example",
        "\\/evil.example",
        "/\t/evil.example",
        "/a\nSet-Cookie: x=y",
        "javascript:alert(1)",
        "evil",
        "/" + "a" * 3000,
        "/sign-out",
        "",
    ],
)
def test_no_redirect_leaves_the_service(browser: Browser, key: str, elsewhere: str) -> None:
    """After signing in one goes on to a page of this service, or to the overview."""
    assert local_path(elsewhere) == "/"
    assert browser.sign_in(key, elsewhere).headers["location"] == "/"


def test_the_return_path_may_have_any_characters(browser: Browser, key: str) -> None:
    """They are quoted, as a header must be."""
    assert browser.sign_in(key, "/jobs?model=größe").headers["location"] == "/jobs?model=gr%C3%B6%C3%9Fe"


# --- what a session may do ---


def test_a_session_has_the_scopes_of_its_key(browser: Browser, locked: tuple[System, FastAPI]) -> None:
    """The scopes are the key's; the pages show which."""
    browser.sign_in(new_key(locked[0], Scope.JOBS_READ))
    assert browser.get("/v1/jobs").status_code == 200
    refused = browser.get("/v1/tunings")
    assert (refused.status_code, code_of(refused)) == (403, "scope-missing")
    assert browser.get("/tunings").status_code == 200


def test_a_key_takes_precedence_over_a_cookie(browser: Browser, key: str, locked: tuple[System, FastAPI]) -> None:
    """Who sends a key is that key's caller, whatever cookie comes along, and needs no token of a page."""
    browser.sign_in(key)
    weak = f"Bearer {new_key(locked[0], Scope.JOBS_READ)}"
    assert browser.get("/v1/tunings", Authorization=weak).status_code == 403
    assert browser.get("/v1/jobs", Authorization="Bearer wrong").status_code == 401
    strong = {"Authorization": f"Bearer {key}"}
    assert browser.ask("POST", f"/v1/jobs/job_{ID}/cancel", headers=strong).status_code == 404


def test_a_session_is_no_key(browser: Browser, key: str) -> None:
    """Its token is good in the cookie alone, also while it is trusted."""
    browser.sign_in(key)
    assert browser.get("/v1/jobs").status_code == 200
    token = browser.cookies[COOKIE]
    browser.cookies.clear()
    assert browser.get("/v1/jobs", Authorization=f"Bearer {token}").status_code == 401
    browser.cookies.set(COOKIE, key)
    assert browser.get("/v1/jobs").status_code == 401


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_cookie_alone_changes_nothing(browser: Browser, key: str, method: str) -> None:
    """What changes something shows the page's token: none, another session's or a longer one is refused."""
    path = f"/v1/jobs/job_{ID}/cancel" if method == "POST" else f"/v1/jobs/job_{ID}"
    browser.sign_in(key)
    good = browser.csrf_token
    assert good == csrf_token_of(browser.cookies[COOKIE])
    for wrong in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": csrf_token_of("0" * 64)}, {"X-CSRF-Token": good + "0"}):
        response = browser.ask(method, path, headers=wrong)
        assert (response.status_code, code_of(response)) == (403, "csrf-token-missing")
    assert browser.ask(method, path, headers={"X-CSRF-Token": good}).status_code == 404
    foreign = {"X-CSRF-Token": good, "Origin": "http://evil.example"}
    assert code_of(browser.ask(method, path, headers=foreign)) == "foreign-origin"


def test_signing_out_needs_the_csrf_token(browser: Browser, key: str) -> None:
    """Another site can end nobody's session; the browser is shown a page that says what to do."""
    browser.sign_in(key)
    for fields in ({}, {"csrf_token": "0" * 64}, {f"f{number}": "1" for number in range(20)}):
        response = browser.ask("POST", "/sign-out", data=fields)
        assert (response.status_code, response.headers["content-type"]) == (403, "text/html; charset=utf-8")
        assert "reload the page" in response.text
    assert browser.get("/v1/jobs").status_code == 200


def test_only_the_two_form_routes_accept_forms(browser: Browser, key: str) -> None:
    """The API takes JSON alone, and the forms nothing else."""
    browser.sign_in(key)
    token = {"X-CSRF-Token": browser.csrf_token}
    form = browser.ask("POST", "/v1/tunings", headers=token, data={"spec": "x"})
    assert (form.status_code, code_of(form)) == (415, "unsupported-media-type")
    for path in ("/sign-in", "/sign-out"):
        assert browser.ask("POST", path, json={"key": key}).status_code == 415


def test_another_site_cannot_sign_in(browser: Browser, key: str) -> None:
    """Not even with a key of its own."""
    response = browser.ask("POST", "/sign-in", data={"key": key}, headers={"Origin": "http://evil.example"})
    assert response.status_code == 403
    assert COOKIE not in browser.cookies


def test_a_session_ends_with_its_key(browser: Browser, locked: tuple[System, FastAPI], no_trust: None) -> None:
    """Revoked, it is refused at the next look into the store; the form says nothing of what was."""
    del no_trust
    ending = new_key(locked[0], Scope.ADMIN)
    browser.sign_in(ending)
    assert browser.get("/v1/jobs").status_code == 200
    locked[0].store.keys.revoke(ending.split("_")[1])
    assert "revoked" in Problem.model_validate_json(browser.get("/v1/jobs").content).detail
    assert browser.get("/jobs").headers["location"] == "/sign-in?next=/jobs"


def test_a_session_is_cached_for_a_moment_only(
    browser: Browser, locked: tuple[System, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within it no read of the store is needed."""
    browser.sign_in(new_key(locked[0], Scope.ADMIN))
    assert browser.get("/v1/jobs").status_code == 200
    looked: list[str] = []
    monkeypatch.setattr(locked[0].store.sessions, "find", looked.append)
    assert browser.get("/v1/jobs").status_code == 200
    assert looked == []


def test_a_stream_of_events_takes_the_cookie(
    browser: Browser, locked: tuple[System, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is followed as with a key, and ends when the key does."""
    monkeypatch.setattr(trusted_callers, "TRUST_SECONDS", 0.01)
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_SECONDS", 0.05)
    ending = new_key(locked[0], Scope.ADMIN)
    work = new_work("tun_" + "7" * 32, key_id=ending.split("_")[1])
    locked[0].store.submissions.add(work)
    browser.sign_in(ending)
    timer = threading.Timer(0.2, locked[0].store.keys.revoke, [ending.split("_")[1]])
    timer.start()
    response = browser.get(f"/v1/tunings/{work.id}/events", Accept="text/event-stream")
    timer.join()
    assert (response.status_code, response.text.count("event: state")) == (200, 1)
    assert browser.get(f"/v1/tunings/{work.id}/events", Accept="text/event-stream").status_code == 401


def test_neither_keys_nor_tokens_are_written_anywhere(
    browser: Browser, key: str, locked: tuple[System, FastAPI], caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the logs at their most talkative, not in the database, not in the pages."""
    caplog.set_level(logging.DEBUG)
    browser.sign_in(key)
    token = browser.cookies[COOKIE]
    pages = browser.get("/").text + browser.get("/v1/jobs").text
    browser.ask("POST", "/sign-out", data={"csrf_token": "wrong"})
    folder = Path(str(locked[0].store.engine.url.database)).parent
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for secret in (token, key.split("_")[2]):
        assert secret not in pages + caplog.text
        assert secret.encode() not in stored
