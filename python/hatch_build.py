"""Build hook: the version comes from the extension's control file, the extension's files go into the wheel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def extension_directory() -> Path:
    """extension/ beside this file in an unpacked sdist, one level up in a checkout."""
    for directory in (ROOT / "extension", ROOT.parent / "extension"):
        if (directory / "pg_queen.control").is_file():
            return directory
    raise FileNotFoundError(f"pg_queen.control is neither in {ROOT / 'extension'} nor in {ROOT.parent / 'extension'}")


def version() -> str:
    """default_version of the control file."""
    control = extension_directory() / "pg_queen.control"
    found = re.search(r"^\s*default_version\s*=\s*'([^']+)'", control.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{control} names no default_version")
    return found.group(1)


class ExtensionFiles(BuildHookInterface):
    """Adds the control file and the scripts; refuses to build a wheel that could not install the extension."""

    def initialize(self, version_of_build: str, build_data: dict[str, Any]) -> None:
        """Editable installs read the checkout's files in place and need nothing here."""
        if version_of_build == "editable":
            return
        directory = extension_directory()
        script = directory / f"pg_queen--{version()}.sql"
        if not script.is_file():
            raise FileNotFoundError(f"{script} is not built; run `make build` at the top of the checkout first")
        target = "extension" if self.target_name == "sdist" else "pg_queen/extension"
        for file in (directory / "pg_queen.control", *sorted(directory.glob("pg_queen--*.sql"))):
            build_data["force_include"][str(file)] = f"{target}/{file.name}"
