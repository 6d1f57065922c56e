"""Points in time as arguments."""

from __future__ import annotations

from datetime import datetime

from ..errors import InvalidArgument

__all__ = ["moment"]


def moment(option: str, text: str | None) -> datetime | None:
    """ISO 8601 as an aware datetime; without an offset it is local time."""
    if text is None:
        return None
    try:
        # Python 3.10 does not read the Z of ISO 8601.
        value = datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in "Zz" else text)
        return value.astimezone()
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(
            f'{option} "{text}" is no time',
            hint="Write it like 2026-12-24T18:00:00+01:00; without an offset it is local time.",
        ) from error
