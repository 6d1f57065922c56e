"""Puts the extension into a database: from the server's own extension directory, or with this package's files.

``CREATE EXTENSION`` reads the directory ``extension`` under the server's SHAREDIR. Where pg_queen is already there,
this is all that happens. Where it is not and the server runs on this machine, the files are copied first, if the rights
allow.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from .errors import InstallError, NotPermitted, translate

__all__ = ["Installed", "extension_files", "extension_version", "install", "install_files"]


@dataclass(frozen=True, slots=True)
class Installed:
    """What :func:`install` found or did. ``notes`` are sentences about what is still missing for timers to fire."""

    version: str
    created: bool
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def _directory() -> Path:
    """The extension's files: inside the package when installed from a wheel, in the checkout when installed with -e."""
    here = Path(__file__).resolve()
    for directory in (here.parent / "extension", here.parents[3] / "extension"):
        if (directory / "pg_queen.control").is_file():
            return directory
    raise InstallError(
        "this installation of the package carries no files of the extension",
        hint="Install the package from a wheel, or with pip install -e from a checkout.",
    )


def extension_version() -> str:
    """The version of the extension that this package carries, from its control file."""
    control = _directory() / "pg_queen.control"
    found = re.search(r"^\s*default_version\s*=\s*'([^']+)'", control.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise InstallError(f"{control} names no default_version")
    return found.group(1)


def extension_files() -> tuple[Path, ...]:
    """The control file and the scripts that go into the server's extension directory."""
    directory = _directory()
    script = directory / f"pg_queen--{extension_version()}.sql"
    if not script.is_file():
        raise InstallError(
            f"the extension's script {script.name} is not built",
            hint=f"Run: make -C {shlex.quote(str(directory.parent))} build",
        )
    return (directory / "pg_queen.control", *sorted(directory.glob("pg_queen--*.sql")))


def install_files(pg_config: str = "pg_config") -> tuple[Path, ...]:
    """Copy the extension's files into the directory that ``pg_config`` names; no database is needed.

    Returns the files written. Raises :class:`InstallError`.
    """
    try:
        answer = subprocess.run([pg_config, "--sharedir"], capture_output=True, text=True, check=True)  # noqa: S603
    except FileNotFoundError as error:
        raise InstallError(
            f'there is no program "{pg_config}"',
            hint="Name the pg_config of your server, for example --pg-config /usr/lib/postgresql/15/bin/pg_config.",
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f'"{pg_config} --sharedir" failed: {error}') from error
    return _copy(Path(answer.stdout.strip()) / "extension", pg_config)


def install(target: psycopg.Connection[Any] | str) -> Installed:
    """Create the extension in the database of ``target``, a connection or a connection string.

    Needs a superuser, because PL/Python is an untrusted language. On a connection of yours nothing is committed; with
    a connection string the work is committed. Raises :class:`InstallError` and :class:`NotPermitted`, whose hints hold
    the command to run. An extension that is already there is left as it is.
    """
    if isinstance(target, str):
        with psycopg.connect(target) as connection:
            return install(connection)
    with psycopg.Cursor(target, row_factory=tuple_row) as cursor:
        try:
            return _install(target, cursor)
        except psycopg.Error as error:
            named = translate(error)
            if named is None:
                raise
            raise named from error


def _install(connection: psycopg.Connection[Any], cursor: psycopg.Cursor[tuple[Any, ...]]) -> Installed:
    available, installed = _extension(cursor, "pg_queen")
    if installed is not None:
        return Installed(installed, False, (), (*_outdated(installed, available), *_cron_notes(cursor)))

    _require_superuser(cursor)
    major = connection.info.server_version // 10000
    if _extension(cursor, "plpython3u")[0] is None:
        raise InstallError(
            "the server has no PL/Python, which pg_queen is partly written in",
            hint=f"On the server run: apt-get install postgresql-plpython3-{major} python3-zstandard",
        )
    files: tuple[Path, ...] = ()
    if available is None:
        files = _supply_files(cursor)

    # The statements above opened the transaction of a connection without autocommit, so this is a savepoint there.
    with connection.transaction():
        cursor.execute("create extension if not exists plpython3u")
        _require_zstandard(connection, cursor)
        cursor.execute("create extension pg_queen cascade")
    available, installed = _extension(cursor, "pg_queen")
    if installed is None:
        raise InstallError("CREATE EXTENSION ran, but the extension is not there")
    return Installed(installed, True, files, (*_outdated(installed, available), *_cron_notes(cursor)))


def _extension(cursor: psycopg.Cursor[tuple[Any, ...]], name: str) -> tuple[str | None, str | None]:
    cursor.execute(
        "select default_version, installed_version from pg_catalog.pg_available_extensions where name = %s", [name]
    )
    row = cursor.fetchone()
    return (None, None) if row is None else (row[0], row[1])


def _require_superuser(cursor: psycopg.Cursor[tuple[Any, ...]]) -> None:
    cursor.execute("select r.rolsuper, r.rolname from pg_catalog.pg_roles r where r.rolname = current_user")
    row = cursor.fetchone()
    if row is not None and not row[0]:
        raise NotPermitted(
            f'role "{row[1]}" may not create pg_queen: its PL/Python functions need a superuser',
            hint="Connect as a superuser, for example with sudo -u postgres, or name one in the connection string.",
            sqlstate="42501",
        )


def _require_zstandard(connection: psycopg.Connection[Any], cursor: psycopg.Cursor[tuple[Any, ...]]) -> None:
    try:
        with connection.transaction():
            cursor.execute("do 'import zstandard' language plpython3u")
    except psycopg.Error as error:
        raise InstallError(
            f"the server's Python cannot import zstandard: {error.diag.message_primary or error}",
            hint="On the server run: apt-get install python3-zstandard (virtual environments do not reach it)",
            sqlstate=error.sqlstate,
        ) from error


def _supply_files(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Path, ...]:
    """Copy our files to where this server looks, when it runs on this machine."""
    cursor.execute(
        "select (select c.setting from pg_catalog.pg_config c where c.name = 'SHAREDIR'),"
        " (select c.setting from pg_catalog.pg_config c where c.name = 'BINDIR'),"
        " inet_server_addr() is null or inet_server_addr() = inet_client_addr()"
    )
    row = cursor.fetchone()
    sharedir, bindir, local = row if row is not None else (None, None, False)
    missing = "the server does not have the files of pg_queen in its extension directory"
    if sharedir is None or not local:
        raise InstallError(missing, hint="On the server's machine run: pg-queen install --files-only")
    pg_config = f"{bindir}/pg_config"
    directory = Path(sharedir) / "extension"
    if not directory.is_dir():
        raise InstallError(
            f"{missing} ({directory}, which is not on this machine)",
            hint="On the server's machine, or in its container, run: pg-queen install --files-only",
        )
    files = _copy(directory, pg_config)
    if _extension(cursor, "pg_queen")[0] is None:
        for file in files:
            file.unlink(missing_ok=True)
        raise InstallError(
            f"the server does not see files written to {directory}, so it runs elsewhere",
            hint="On the server's machine, or in its container, run: pg-queen install --files-only",
        )
    return files


def _copy(directory: Path, pg_config: str) -> tuple[Path, ...]:
    written: list[Path] = []
    sources = extension_files()
    try:
        for source in sources:
            # By rename, so that a CREATE EXTENSION beside this never reads half a script.
            handle, name = tempfile.mkstemp(dir=directory, prefix=f".{source.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(source.read_bytes())
                os.chmod(name, 0o644)
                os.replace(name, directory / source.name)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            written.append(directory / source.name)
    except OSError as error:
        command = shlex.join([sys.executable, "-m", "pg_queen", "install", "--files-only", "--pg-config", pg_config])
        raise InstallError(
            f"cannot write the extension's files to {directory}: {error.strerror or error}", hint=f"Run: sudo {command}"
        ) from error
    return tuple(written)


def _outdated(installed: str, available: str | None) -> tuple[str, ...]:
    if available is None or available == installed:
        return ()
    return (f"The server has version {available}; ALTER EXTENSION pg_queen UPDATE brings it into this database.",)


def _cron_notes(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[str, ...]:
    """What keeps pg_cron from driving the timers, as far as this role can see it."""
    cursor.execute(
        "select current_setting('server_version_num')::int / 10000, current_database(),"
        " current_setting('cron.database_name', true),"
        # Readable for superusers and pg_read_all_settings only, and an error for others.
        " case when pg_catalog.pg_has_role('pg_read_all_settings', 'member')"
        " then current_setting('shared_preload_libraries') end"
    )
    row = cursor.fetchone()
    if row is None:
        return ()
    major, database, cron_database, preloaded = row
    if _extension(cursor, "pg_cron")[0] is None:
        return (f"pg_cron is not on the server, so nothing fires the timers: apt-get install postgresql-{major}-cron.",)
    if preloaded is not None and "pg_cron" not in re.split(r"[\s,\"]+", preloaded):
        return (
            "pg_cron is not loaded, so nothing fires the timers: add pg_cron to shared_preload_libraries in"
            " postgresql.conf and restart the server.",
        )
    if cron_database is not None and cron_database != database:
        return (
            f'pg_cron keeps its jobs in database "{cron_database}" (cron.database_name); queen.start() says what to run'
            " there.",
        )
    if _extension(cursor, "pg_cron")[1] is None:
        return ("pg_cron is not created in this database: run create extension pg_cron before queen.start().",)
    return ()
