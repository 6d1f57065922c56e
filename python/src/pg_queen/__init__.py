"""Durable timers and a partitioned message log inside PostgreSQL: installs the extension and wraps its calls."""

from importlib.metadata import version as _version

from .client import Queen
from .errors import (
    CronUnusable,
    InstallError,
    InvalidArgument,
    NotInstalled,
    NotPermitted,
    QueenError,
    TenantDenied,
)
from .install import Installed, install, install_files
from .types import AckResult, Delay, Json, Message, PushResult, Sent, Status, Timer, TimerVerdict

__all__ = [
    "AckResult",
    "CronUnusable",
    "Delay",
    "InstallError",
    "Installed",
    "InvalidArgument",
    "Json",
    "Message",
    "NotInstalled",
    "NotPermitted",
    "PushResult",
    "Queen",
    "QueenError",
    "Sent",
    "Status",
    "TenantDenied",
    "Timer",
    "TimerVerdict",
    "__version__",
    "install",
    "install_files",
]

__version__ = _version("pg_queen")
