"""Installing the extension into real servers that have it, lack its files, or lack what it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pg_queen import InstallError, NotPermitted, install, install_files
from pg_queen.install import extension_files, extension_version

from tests.support.database import LOGIN_ROLES, Database
from tests.support.servers import Server, running_server


@pytest.fixture
def empty(db: Database) -> Iterator[Database]:
    """A database without the extension, on a server that has its files."""
    db.execute("drop extension pg_queen")
    db.execute("drop extension plpython3u")
    return db  # type: ignore[return-value]


@pytest.fixture(scope="module")
def bare_server(extension: None) -> Iterator[Server]:
    """A server whose extension directory has no pg_queen."""
    with running_server(files=[]) as server:
        yield server


@pytest.fixture(autouse=True)
def _without_files(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "bare_server" in request.fixturenames:
        directory = request.getfixturevalue("bare_server").cluster.programs.extension_directory
        for file in directory.glob("pg_queen*"):
            file.unlink()


def _installed(connection: psycopg.Connection[tuple[str, ...]]) -> bool:
    return bool(connection.execute("select from pg_extension where extname = 'pg_queen'").fetchall())


def test_installs_what_the_server_has(empty: Database) -> None:
    done = install(empty.superuser)
    assert (done.version, done.created, done.files) == (extension_version(), True, ())
    assert empty.value("select extversion from pg_extension where extname = 'pg_queen'") == done.version
    again = install(empty.superuser)
    assert (again.version, again.created, again.files) == (done.version, False, ())


def test_leaves_the_commit_to_the_owner_of_the_connection(empty: Database) -> None:
    connection = empty.connect(autocommit=False)
    assert install(connection).created
    assert not _installed(empty.superuser)
    connection.rollback()
    assert not _installed(connection)
    assert install(connection).created
    connection.commit()
    assert _installed(empty.superuser)


def test_commits_on_a_connection_of_its_own(empty: Database) -> None:
    assert install(empty.conninfo()).created
    assert _installed(empty.superuser)


def test_copies_the_files_to_a_local_server(bare_server: Server) -> None:
    directory = bare_server.cluster.programs.extension_directory
    with bare_server.connect() as connection, connection.transaction(force_rollback=True):
        done = install(connection)
        assert done.created
        assert set(done.files) == {directory / file.name for file in extension_files()}
        assert {file.name for file in directory.glob("*pg_queen*")} == {file.name for file in done.files}
        assert all(file.stat().st_mode & 0o444 == 0o444 for file in done.files)


def test_says_how_to_supply_the_files_when_they_cannot_be_written(
    bare_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with bare_server.connect() as connection, pytest.raises(InstallError, match="Permission denied") as error:
        install(connection)
    program = bare_server.cluster.programs.bindir / "pg_config"
    assert str(error.value.hint).startswith("Run: sudo ")
    assert str(error.value.hint).endswith(f"-m pg_queen install --files-only --pg-config {program}")


def test_says_that_the_server_runs_elsewhere(
    bare_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A server in a container: its directory has the same name here, and is another one.
    monkeypatch.setattr(sys.modules["pg_queen.install"], "_copy", lambda directory, _: (tmp_path / "stray",))
    (tmp_path / "stray").touch()
    with bare_server.connect() as connection, pytest.raises(InstallError, match="runs elsewhere") as error:
        install(connection)
    assert "--files-only" in str(error.value.hint)
    assert not (tmp_path / "stray").exists()


def test_files_only_asks_pg_config(tmp_path: Path) -> None:
    (tmp_path / "share" / "extension").mkdir(parents=True)
    program = tmp_path / "pg_config"
    program.write_text(f'#!/bin/sh\n[ "$1" = --sharedir ] && echo {tmp_path}/share\n')
    program.chmod(0o755)
    written = install_files(str(program))
    assert [file.read_bytes() for file in written] == [file.read_bytes() for file in extension_files()]
    assert {file.parent for file in written} == {tmp_path / "share" / "extension"}
    assert sorted(written) == sorted((tmp_path / "share" / "extension").iterdir())


def test_files_only_without_pg_config_or_directory(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="no program") as error:
        install_files(str(tmp_path / "pg_config"))
    assert "--pg-config" in str(error.value.hint)
    program = tmp_path / "pg_config"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(InstallError, match="failed"):
        install_files(str(program))
    program.write_text("#!/bin/sh\necho /nowhere\n")
    with pytest.raises(InstallError, match="cannot write"):
        install_files(str(program))


def test_a_server_without_plpython(bare_server: Server) -> None:
    control = bare_server.cluster.programs.extension_directory / "plpython3u.control"
    hidden = control.with_suffix(".hidden")
    control.rename(hidden)
    try:
        with bare_server.connect() as connection:
            major = connection.info.server_version // 10000
            with pytest.raises(InstallError, match="no PL/Python") as error:
                install(connection)
        assert f"postgresql-plpython3-{major}" in str(error.value.hint)
    finally:
        hidden.rename(control)


def test_a_server_without_zstandard(empty: Database) -> None:
    # Hidden in this one session: Python then says what it says on a server without the package.
    connection = empty.connect()
    connection.execute("create extension plpython3u")
    connection.execute("do $$import sys; sys.modules['zstandard'] = None$$ language plpython3u")
    with pytest.raises(InstallError, match="zstandard") as error:
        install(connection)
    assert "python3-zstandard" in str(error.value.hint)
    assert not _installed(connection)
    assert install(empty.superuser).created


def test_only_a_superuser_may(empty: Database) -> None:
    assert "ada_admin" in LOGIN_ROLES
    with pytest.raises(NotPermitted, match="ada_admin") as error:
        install(empty.connect("ada_admin"))
    assert error.value.sqlstate == "42501"


def test_notes_say_what_keeps_pg_cron_from_working(bare_server: Server, empty: Database) -> None:
    (note,) = install(empty.superuser).notes
    assert "cron.database_name" in note
    assert '"postgres"' in note

    with bare_server.connect() as connection, connection.transaction(force_rollback=True):
        (note,) = install(connection).notes
        assert "create extension pg_cron" in note
        connection.execute("create extension pg_cron")
        assert install(connection).notes == ()

    cluster = bare_server.cluster
    cluster.configure({"shared_preload_libraries": ""})
    cluster.restart()
    with bare_server.connect() as connection, connection.transaction(force_rollback=True):
        (note,) = install(connection).notes
        assert "shared_preload_libraries" in note
        control = cluster.programs.extension_directory / "pg_cron.control"
        control.rename(control.with_suffix(".hidden"))
        try:
            (note,) = install(connection).notes
        finally:
            control.with_suffix(".hidden").rename(control)
        assert "not on the server" in note
