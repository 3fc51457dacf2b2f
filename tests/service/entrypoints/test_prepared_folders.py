"""Folders and files that a service needs, as a container gives them: read-only, of another user, or with a key."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright_service.application.api_keys import KeyCases
from batchwright_service.entrypoints.serve import check_and_build
from batchwright_service.errors import ConfigurationError
from batchwright_service.folders import check_temporary_folder, make_private_folder
from batchwright_service.settings import Settings
from batchwright_service.store.store import Store, open_store
from tests.support.command import called

NOBODY = 65_534


def new_text() -> str:
    """A key's text, as `openssl rand -hex` makes it."""
    return f"bw_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


# --- folders ---


def test_the_data_folder_and_the_database_are_private(tmp_path: Path) -> None:
    """0700 and 0600, the write-ahead log included, whatever the umask is."""
    folder = tmp_path / "data"
    store = open_store(f"sqlite:///{folder / 'store.db'}")
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == dict.fromkeys(
            ("store.db", "store.db-wal", "store.db-shm"), "0o600"
        )
    finally:
        store.close()


@contextmanager
def as_another_user() -> Iterator[int]:
    """Run the block as a user who may write nothing of root's, if this one is root."""
    before = os.geteuid()
    user = before or NOBODY
    os.seteuid(user)
    try:
        yield user
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("existing", [True, False])
def test_a_data_folder_of_another_user_is_refused_by_name(existing: bool) -> None:  # noqa: FBT001 - a parameter
    """The folder, the user and the remedy are named, before SQLite says that it cannot open a file."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        wanted = Path(folder) if existing else Path(folder) / "data"
        with as_another_user() as user, pytest.raises(ConfigurationError) as refused:
            make_private_folder(wanted)
        Path(folder).chmod(0o755)
    assert f"the folder {wanted} cannot be {'written' if existing else 'created'} by user {user}" in str(refused.value)
    assert "BATCHWRIGHT_DATA_DIR" in str(refused.value)


def test_a_file_in_the_place_of_the_data_folder_is_refused(tmp_path: Path) -> None:
    """A mount of the wrong thing is named, with the system's reason."""
    (tmp_path / "data").touch()
    with pytest.raises(ConfigurationError, match=r"data cannot be created by user \d+ \(File exists\)"):
        make_private_folder(tmp_path / "data")


def test_a_root_without_a_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only root needs a volume at /tmp: the message says how, and there is no traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(ConfigurationError, match=r"mount one at /tmp \(`--tmpfs"):
        check_temporary_folder()
    done = called("work", "--device", "cpu")
    assert done.returncode == 2
    assert "mount one at /tmp" in " ".join(done.stderr.split())


# --- a key that was chosen beforehand ---


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of an API for other machines, with a file of a key."""
    (tmp_path / "key").write_text(new_text() + "\n")
    return Settings(
        data_dir=tmp_path / "data",
        host="0.0.0.0",  # noqa: S104 - refused while there is no key
        worker=False,
        admin_key_file=tmp_path / "key",
    )


def test_the_key_of_a_file_opens_a_new_service(settings: Settings) -> None:
    """A service beyond loopback starts with it; at the next start nothing changes, and a revoked key stays revoked."""
    system = check_and_build(settings)
    keys = system.store.keys
    try:
        (key,) = keys.list()
        assert (key.name, key.scopes) == ("admin key file", (Scope.ADMIN,))
        keys.revoke(key.id)
    finally:
        system.stop()
    again = check_and_build(settings)
    try:
        (same,) = again.store.keys.list()
        assert same.id == key.id
        assert same.revoked_at is not None
    finally:
        again.stop()


@pytest.mark.parametrize(
    "text", ["", "secret", "bw_12_34", new_text().upper()], ids=["empty", "other", "short", "capitals"]
)
def test_a_file_without_a_key_is_refused(store: Store, tmp_path: Path, text: str) -> None:
    """The format is named; the text, which may be a secret, is not shown."""
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits") as refused:
        KeyCases(store.keys).store_admin_key(file)
    assert not text or text not in str(refused.value)
    assert not store.keys.exist()


def test_a_key_with_the_id_of_another_is_refused(store: Store, tmp_path: Path) -> None:
    """Else the file would seem to work, and every request with its key would be refused."""
    file, first = tmp_path / "key", new_text()
    file.write_text(first)
    KeyCases(store.keys).store_admin_key(file)
    file.write_text(first[:20] + new_text()[20:])
    with pytest.raises(ConfigurationError, match="of another key"):
        KeyCases(store.keys).store_admin_key(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        KeyCases(store.keys).store_admin_key(tmp_path / "absent")
