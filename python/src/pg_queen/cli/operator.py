"""install, start, stop, status, doctor."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..install import install as install_extension
from ..install import install_files
from .output import print_json, print_table, printable
from .session import REFUSED, AsJson, Url, connect, session

__all__ = ["doctor", "install", "start", "status", "stop"]


def install(
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Only copy the files to the server's extension directory.")
    ] = False,
    pg_config: Annotated[
        str, typer.Option("--pg-config", help="With --files-only: the pg_config of the server.")
    ] = "pg_config",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create the extension in a database, copying its files first where that is needed and allowed."""
    if files_only:
        files = install_files(pg_config)
        if as_json:
            print_json({"files": [str(file) for file in files]})
        else:
            print("\n".join(f"wrote {file}" for file in files))
        return
    with connect(url) as connection:
        done = install_extension(connection)
        database = connection.info.dbname
    if as_json:
        print_json(
            {
                "version": done.version,
                "created": done.created,
                "files": [str(f) for f in done.files],
                "notes": done.notes,
            }
        )
        return
    for file in done.files:
        print(f"wrote {file}")
    verb = "created" if done.created else "already there"
    print(f'pg_queen {done.version} {verb} in database "{database}"')
    for note in done.notes:
        print(f"note: {note}")


def start(
    workers: Annotated[int, typer.Option(help="Sweepers that fire timers side by side.")] = 2,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create the pg_cron jobs that fire the timers."""
    with session(url) as queen:
        jobs = queen.start(workers)
    if as_json:
        print_json({"jobs": jobs})
    else:
        print("started: " + ", ".join(jobs))


def stop(url: Url = None, as_json: AsJson = False) -> None:
    """Remove the pg_cron jobs; timers wait for the next start."""
    with session(url) as queen:
        jobs = queen.stop()
    if as_json:
        print_json({"removed": jobs})
    else:
        print(f"stopped: {jobs} jobs removed, timers wait for the next start")


def status(url: Url = None, as_json: AsJson = False) -> None:
    """Show the state of the extension in this database."""
    with session(url) as queen:
        state = queen.status()
    if as_json:
        print_json(state)
    else:
        print_table(
            ("what", "state"), [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
        )


def doctor(url: Url = None, as_json: AsJson = False) -> None:
    """Show what is wrong and the statement that mends it; ends with 1 when something is."""
    with session(url) as queen:
        checks = queen.doctor()
    if as_json:
        for check in checks:
            print_json(check)
    else:
        # A terminal gets colours and folded lines; what is piped keeps each statement on one line.
        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            mark = Text("ok   ", "green") if check.ok else Text("WRONG", "bold red")
            console.print(Text.assemble(mark, "  ", (f"{check.name:<12}", "bold"), printable(check.detail)))
            if check.hint:
                console.print(Text(" " * 19 + printable(check.hint), "yellow"))
    if not all(check.ok for check in checks):
        raise typer.Exit(REFUSED)
