"""Durable timers and a partitioned message log inside PostgreSQL: installs the extension and wraps its calls."""

from importlib.metadata import version as _version

from .client import Queen
from .errors import (
    CronUnusable,
    DecoderMissing,
    InstallError,
    InvalidArgument,
    KeyUnusable,
    LeaseLost,
    LimitExceeded,
    NotInstalled,
    NotPermitted,
    QueenError,
    SegmentDamaged,
    SwitchedOff,
    TenantDenied,
    TenantMissing,
)
from .install import Installed, install, install_files
from .types import (
    AckResult,
    Check,
    DeadLetter,
    Delay,
    DroppedQueue,
    Json,
    Message,
    PushResult,
    SegmentSlice,
    Sent,
    Status,
    Timer,
    TimerVerdict,
)

__all__ = [
    "AckResult",
    "Check",
    "CronUnusable",
    "DeadLetter",
    "DecoderMissing",
    "Delay",
    "DroppedQueue",
    "InstallError",
    "Installed",
    "InvalidArgument",
    "Json",
    "KeyUnusable",
    "LeaseLost",
    "LimitExceeded",
    "Message",
    "NotInstalled",
    "NotPermitted",
    "PushResult",
    "Queen",
    "QueenError",
    "SegmentDamaged",
    "SegmentSlice",
    "Sent",
    "Status",
    "SwitchedOff",
    "TenantDenied",
    "TenantMissing",
    "Timer",
    "TimerVerdict",
    "__version__",
    "install",
    "install_files",
]

__version__ = _version("pg_queen")
