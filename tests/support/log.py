"""The log as it is stored."""

from __future__ import annotations

from typing import Final

__all__ = ["FRAMES"]

FRAMES: Final = (
    "queen._segment_unpack(s.blob, s.raw_bytes, s.base_offset, s.end_offset, s.base_offset, s.end_offset, 'here') u"
)
"""To be joined with queen.log_segments as ``s``: its messages as ``u``."""
