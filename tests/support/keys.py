"""Key files for encryption, on the server and owned by its user."""

from __future__ import annotations

import base64
import hashlib
import uuid

from tests.support.database import Database

__all__ = ["KeyFile", "key"]


def key(name: str, seed: str | None = None) -> str:
    """A line of a key file; the key follows from the seed, which is the name unless given."""
    return f"{name} {base64.b64encode(hashlib.sha256((seed or name).encode()).digest()).decode()}"


class KeyFile:
    """A key file in the server's data directory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.path: str = f"{database.value('show data_directory')}/{uuid.uuid4()}.keys"

    def write(self, *lines: str, mode: int = 0o600) -> None:
        """Replace the file, as an editor or `mv` would."""
        content = "".join(f"{line}\n" for line in lines)
        self.run(
            "with open(path + '.new', 'w') as file:\n"
            f"    file.write({content!r})\n"
            f"os.chmod(path + '.new', {mode})\n"
            "os.replace(path + '.new', path)"
        )

    def remove(self) -> None:
        """Take it away."""
        self.run("os.unlink(path)")

    def use(self, *lines: str) -> KeyFile:
        """Write it and name it in the settings."""
        self.write(*lines)
        self._database.execute("select queen.configure('key_file', %s)", self.path)
        return self

    def run(self, code: str) -> None:
        """Python as the server's user; `path` is the file, `os` is there."""
        self._database.superuser.execute(f"do $do$\nimport os\npath = {self.path!r}\n{code}\n$do$ language plpython3u")
