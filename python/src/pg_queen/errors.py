"""Exceptions of pg_queen, mapped from SQLSTATEs and never from message texts.

Every other database error (a deadlock, a serialization failure, a lost connection) passes through as psycopg raised it,
so that retry code written for psycopg keeps working.
"""

from __future__ import annotations

import re

import psycopg

__all__ = [
    "CronUnusable",
    "DecoderMissing",
    "InstallError",
    "InvalidArgument",
    "KeyUnusable",
    "LeaseLost",
    "LimitExceeded",
    "NotInstalled",
    "NotPermitted",
    "QueenError",
    "SegmentDamaged",
    "SwitchedOff",
    "TenantDenied",
    "TenantMissing",
    "translate",
]


class QueenError(Exception):
    """Base class. ``message`` is a sentence, ``hint`` says what to do or is None, ``sqlstate`` is PostgreSQL's code."""

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, hint, sqlstate)
        self.message = message
        self.hint = hint
        self.sqlstate = sqlstate

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nHINT: {self.hint}"


class InvalidArgument(QueenError, ValueError):
    """An argument was refused, here or by the server (22023 and the data exceptions of its input conversions)."""


class NotPermitted(QueenError):
    """The role may not call this function (42501); the hint names the role to grant."""


class NotInstalled(QueenError):
    """The database has no extension pg_queen (3F000), or an older one without this function (42883)."""


class CronUnusable(QueenError):
    """pg_cron is missing or cannot run jobs in this database (QN001)."""


class TenantDenied(QueenError):
    """The tenant is not open to this role (QN002)."""


class TenantMissing(QueenError):
    """The tenant was not created (QN004)."""


class SwitchedOff(QueenError):
    """Scheduling is switched off by an administrator (QN005)."""


class LimitExceeded(QueenError):
    """More than a limit of the tenant or of the queue allows (QN006); the hint names who can change it."""


class LeaseLost(QueenError):
    """An ack within ``queen.transaction`` met a lease that is not in force, and nothing of it was done (QN003)."""


class SegmentDamaged(QueenError):
    """A segment of the log cannot be read (QN010), said by the server or by the decoder of this package."""


class KeyUnusable(QueenError):
    """The key file cannot be used, or has not the key that a message was encrypted with (QN011)."""


class DecoderMissing(QueenError, ImportError):
    """The package ``zstandard``, which decodes segments, is not there; the hint says how to get it."""


class InstallError(QueenError):
    """The extension could not be installed; the hint has the command that supplies what is missing."""


_JSON_HINT = "JSON for PostgreSQL has no NaN or Infinity, no lone surrogates and no \\u0000."
_TIME_HINT = "An interval is written like '90 seconds', '24 hours' or '1 day 2 hours 30 minutes'."

# SQLSTATE -> class, and a hint for the errors that the server reports without one.
_BY_SQLSTATE: dict[str, tuple[type[QueenError], str | None]] = {
    "22023": (InvalidArgument, None),
    "22003": (InvalidArgument, "The number is too large for its argument."),
    "22007": (InvalidArgument, _TIME_HINT),
    "22008": (InvalidArgument, _TIME_HINT),
    "22015": (InvalidArgument, _TIME_HINT),
    "22021": (InvalidArgument, "Text must fit the encoding of the database and hold no NUL character."),
    "22P02": (InvalidArgument, _JSON_HINT),
    "22P05": (InvalidArgument, _JSON_HINT),
    "42501": (NotPermitted, None),
    "3F000": (NotInstalled, "Install it with `pg-queen install`, or run CREATE EXTENSION pg_queen CASCADE."),
    "42883": (NotInstalled, "The extension is older than this package: run ALTER EXTENSION pg_queen UPDATE."),
    "QN001": (CronUnusable, None),
    "QN002": (TenantDenied, None),
    "QN003": (LeaseLost, None),
    "QN004": (TenantMissing, None),
    "QN005": (SwitchedOff, None),
    "QN006": (LimitExceeded, None),
    "QN010": (SegmentDamaged, None),
    "QN011": (KeyUnusable, None),
}


def translate(error: psycopg.Error, *, role: str | None = None, user: str | None = None) -> QueenError | None:
    """The exception of this module for a psycopg error, or None when the error is not ours to name.

    ``role`` is the pg_queen role that may do what was refused and ``user`` who was refused, for the hint.
    """
    if error.sqlstate is None:
        # psycopg refuses some values itself, such as a NUL character in text.
        return InvalidArgument(str(error), sqlstate="22023") if isinstance(error, psycopg.DataError) else None
    if error.sqlstate not in _BY_SQLSTATE:
        return None
    kind, hint = _BY_SQLSTATE[error.sqlstate]
    if kind is NotPermitted and role is not None:
        hint = f"Ask an administrator to run: grant {role} to {_quoted(user or 'YOUR_ROLE')};"
    if kind is not NotInstalled:
        # PostgreSQL's own hint for a missing function is about casts.
        hint = error.diag.message_hint or hint
    message = error.diag.message_primary or str(error)
    if error.diag.message_detail:
        message = f"{message}: {error.diag.message_detail}"
    return kind(message, hint=hint, sqlstate=error.sqlstate)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'
