"""Private PostgreSQL servers for the demo and the tests, standard library only.

A server here touches nothing of the machine's own: data, socket and log lie in a folder of its own, and it runs from a
view of the installed PostgreSQL in which the programs are copies and everything else is links. PostgreSQL finds its
shared files relative to its program, so the extension can be installed into that view: no root needed, the machine's
directories stay as they are, and two checkouts do not overwrite each other's pg_queen.

PostgreSQL refuses to run as root, so root starts everything here as the account `postgres`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

__all__ = ["Cluster", "ClusterError", "Programs", "extension_files", "pg_config", "state_directory"]

ROOT: Final = Path(__file__).resolve().parent.parent
SUPERUSER: Final = "postgres"

# The longest path a Unix socket may have is 107 bytes; of a state directory's path this much must stay free for
# /NAME/s/.s.PGSQL.NNNNN, with names of up to 20 characters.
_SOCKET_PATH_MAX: Final = 107
_SOCKET_SUFFIX: Final = 1 + 20 + len("/s/.s.PGSQL.65535")

# Whoever reaches a superuser of this server can run Python as the server's account. So the way in without a password is
# the socket, whose folder only that account and root can enter. The loopback address is open to every account of the
# machine; it asks for a password, and no role has one until somebody sets it.
_PG_HBA: Final = """\
local all all                trust
host  all all 127.0.0.1/32   scram-sha-256
"""


class ClusterError(Exception):
    """A program of PostgreSQL failed; the text says which and what it printed."""


def pg_config(option: str) -> Path:
    """A directory of the PostgreSQL in use, e.g. `--sharedir`. The environment variable PG_CONFIG chooses it."""
    major = os.environ.get("PG_MAJOR", "15")
    debian = f"/usr/lib/postgresql/{major}/bin/pg_config"
    program = os.environ.get("PG_CONFIG") or (debian if os.access(debian, os.X_OK) else "pg_config")
    try:
        return Path(subprocess.run([program, option], check=True, capture_output=True, text=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"{program} {option} failed ({error}); `make setup` installs PostgreSQL") from error


def server_account() -> pwd.struct_passwd:
    """The account that servers run as: the caller's, or `postgres` where the caller is root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        raise ClusterError("there is no account `postgres`; `make setup` installs PostgreSQL") from None


def clean_environment() -> dict[str, str]:
    """All that a server may inherit.

    PL/Python runs in the server: PYTHONPATH, PYTHONHOME, VIRTUAL_ENV, a PATH with another python3 in front or packages
    below HOME would give it modules of the person who started it, or none.
    """
    account = server_account()
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
    }
    if "TZ" in os.environ:
        environment["TZ"] = os.environ["TZ"]
    return environment


def run(command: Iterable[str | Path], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program as the server's account, in the clean environment."""
    arguments = [str(part) for part in command]
    account = server_account()
    as_other = os.geteuid() == 0
    done = subprocess.run(
        arguments,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        cwd="/",
        umask=0o077,
        user=account.pw_uid if as_other else None,
        group=account.pw_gid if as_other else None,
        extra_groups=os.getgrouplist(account.pw_name, account.pw_gid) if as_other else None,
    )
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout.strip()}")
    return done


def give(path: Path) -> None:
    """Hand a tree that root made to the server's account."""
    if os.geteuid() != 0:
        return
    account = server_account()
    for folder, _, files in os.walk(path):
        for name in (folder, *(os.path.join(folder, file) for file in files)):
            os.chown(name, account.pw_uid, account.pw_gid, follow_symlinks=False)


def _is_usable_state(path: Path) -> bool:
    """Whether `path` is a private folder of the server's account, made for this checkout."""
    try:
        status = path.lstat()
        mine = (path / "checkout").read_text(encoding="utf-8") == str(ROOT)
    except OSError:
        return False
    return mine and status.st_uid == server_account().pw_uid and status.st_mode & 0o170777 == 0o040700


def _make_state(path: Path) -> bool:
    """Prepare a candidate folder; False when the server's account cannot reach it or its sockets would be too deep."""
    if len(os.fsencode(path)) + _SOCKET_SUFFIX > _SOCKET_PATH_MAX:
        return False
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    (path / "checkout").write_text(str(ROOT), encoding="utf-8")
    # A program too, because servers run from copies in here and a file system may forbid that.
    probe = path / "probe"
    shutil.copy("/bin/true", probe)
    probe.chmod(0o700)
    give(path)
    try:
        return run([probe], check=False).returncode == 0
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def state_directory() -> Path:
    """The folder for this checkout's servers: .local/state, or one under /var/tmp where the server's account cannot
    reach that (a checkout below /root, say) or a socket's path would be too long. .local/state-directory records it."""
    local = ROOT / ".local"
    local.mkdir(mode=0o755, exist_ok=True)
    record = local / "state-directory"
    # The suite's workers come here at the same moment: the second must not remove what the first tries out.
    with (local / "state-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            recorded = Path(record.read_text(encoding="utf-8"))
            if _is_usable_state(recorded):
                return recorded
        state = local / "state"
        if not _make_state(state):
            shutil.rmtree(state, ignore_errors=True)
            state = Path(tempfile.mkdtemp(prefix="pg_queen-", dir="/var/tmp"))
            if not _make_state(state):
                raise ClusterError(f"account {server_account().pw_name} can run nothing in {local} nor in {state}")
        record.write_text(str(state), encoding="utf-8")
        return state


def extension_files() -> list[Path]:
    """The control file, the script of its version, which `make build` must have written, and the upgrade steps."""
    directory = ROOT / "extension"
    control = directory / "pg_queen.control"
    version = re.search(r"^default_version = '(.*)'", control.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    script = directory / f"pg_queen--{version.group(1)}.sql"
    if not script.is_file():
        raise ClusterError(f"there is no {script}; run `make build`")
    return [control, script, *sorted(directory.glob("pg_queen--*--*.sql"))]


class Programs:
    """A view of the installed PostgreSQL with a directory for extensions that is ours to write."""

    def __init__(self, path: Path) -> None:
        """Open the view at `path`, or make it. An existing one is made anew when PostgreSQL was upgraded."""
        self.path = path
        bindir, sharedir, pkglibdir = (pg_config(f"--{name}") for name in ("bindir", "sharedir", "pkglibdir"))
        common = Path(os.path.commonpath([bindir, sharedir, pkglibdir]))
        self.bindir = path / bindir.relative_to(common)
        self.extension_directory = path / sharedir.relative_to(common) / "extension"
        programs = [bindir / name for name in ("postgres", "initdb", "pg_ctl")]
        fingerprint = hashlib.sha256(
            repr([(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in programs]).encode()
        ).hexdigest()
        stamp = path / "stamp"
        if stamp.is_file() and stamp.read_text(encoding="ascii") == fingerprint:
            return
        shutil.rmtree(path, ignore_errors=True)
        self.bindir.mkdir(parents=True)
        for program in programs:
            shutil.copy(program, self.bindir)
        library = path / pkglibdir.relative_to(common)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.symlink_to(pkglibdir)
        self.extension_directory.mkdir(parents=True)
        for entry in sharedir.iterdir():
            if entry.name != "extension":
                (self.extension_directory.parent / entry.name).symlink_to(entry)
        self.install([])
        stamp.write_text(fingerprint, encoding="ascii")

    @property
    def major(self) -> int:
        """The major version of PostgreSQL."""
        version = re.search(r"\(PostgreSQL\) (\d+)", run([self.bindir / "postgres", "--version"]).stdout)
        assert version is not None
        return int(version.group(1))

    def install(self, files: Iterable[Path] | None = None) -> None:
        """Install pg_queen from `files`, this checkout's by default, beside links to the machine's other extensions."""
        for old in self.extension_directory.iterdir():
            old.unlink()
        for entry in (pg_config("--sharedir") / "extension").iterdir():
            if not entry.name.startswith("pg_queen"):
                (self.extension_directory / entry.name).symlink_to(entry)
        for file in extension_files() if files is None else files:
            shutil.copy(file, self.extension_directory)
        give(self.path)


class Cluster:
    """One server with its folder: pg (programs), data, s (socket), log."""

    def __init__(self, path: Path) -> None:
        """Open the cluster at `path`; `create` makes one that is not there."""
        self.path = path
        self.data = path / "data"
        self.socket_directory = path / "s"
        self.log = path / "log"
        self.programs = Programs(path / "pg")
        self._guard: subprocess.Popen[bytes] | None = None

    def exists(self) -> bool:
        """Whether the cluster was created, whole, and by this major version."""
        try:
            made_by = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        except OSError:
            return False
        return made_by == str(self.programs.major) and (self.path / "settings.json").is_file()

    def create(self, settings: Mapping[str, str], *, initdb: Iterable[str] = ()) -> None:
        """Initialise the cluster with `settings` for postgresql.conf and further arguments for initdb."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.socket_directory.mkdir(mode=0o700, exist_ok=True)
        give(self.path)
        run(
            [
                self.programs.bindir / "initdb",
                f"--pgdata={self.data}",
                f"--username={SUPERUSER}",
                "--encoding=UTF8",
                "--locale=C.UTF-8",
                "--auth=trust",
                "--no-sync",
                *initdb,
            ]
        )
        (self.data / "pg_hba.conf").write_text(_PG_HBA, encoding="ascii")
        self._write_settings({**settings, "port": str(free_port())})

    @property
    def settings(self) -> dict[str, str]:
        """The settings given to create and configure, and the port."""
        settings: dict[str, str] = json.loads((self.path / "settings.json").read_text(encoding="utf-8"))
        return settings

    def configure(self, settings: Mapping[str, str]) -> None:
        """Change settings of postgresql.conf; they come into force at the next start."""
        self._write_settings({**self.settings, **settings})

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        ours = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.socket_directory),
            "cron.host": str(self.socket_directory),
        }
        lines = [f"{key} = '{value.replace(chr(39), chr(39) * 2)}'\n" for key, value in {**ours, **settings}.items()]
        (self.data / "pg_queen.conf").write_text("".join(lines), encoding="utf-8")
        main = self.data / "postgresql.conf"
        include = "include 'pg_queen.conf'\n"
        if include not in main.read_text(encoding="utf-8"):
            with main.open("a", encoding="utf-8") as file:
                file.write(include)
        (self.path / "settings.json").write_text(json.dumps(dict(settings)), encoding="utf-8")
        give(self.path)

    @property
    def host(self) -> str:
        """What libpq takes as host: the folder of the socket."""
        return str(self.socket_directory)

    @property
    def port(self) -> int:
        """The port, for the loopback address and in the socket's name."""
        return int(self.settings["port"])

    def conninfo(self, dbname: str, user: str = SUPERUSER) -> str:
        """A connection string for the socket."""
        return f"host='{self.host}' port={self.port} dbname='{dbname}' user='{user}'"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, None when the server is down."""
        if run([self.programs.bindir / "pg_ctl", "status", "-D", self.data], check=False).returncode != 0:
            return None
        return int((self.data / "postmaster.pid").read_text(encoding="ascii").splitlines()[0])

    def start(self) -> None:
        """Start the server and wait until it answers. Does nothing when it runs."""
        if self.pid is not None:
            return
        # A free port can be taken by another program before the server binds it; then another one is tried.
        for last_try in (False, False, True):
            if not port_is_free(self.port):
                self._write_settings({**self.settings, "port": str(free_port())})
            done = run(
                [self.programs.bindir / "pg_ctl", "start", "-w", "-s", "-t", "60", "-D", self.data, "-l", self.log],
                check=False,
            )
            if done.returncode == 0:
                return
            if last_try or port_is_free(self.port):
                self.stop("immediate")
                raise ClusterError(f"the server in {self.path} did not start:\n{done.stdout}{self.log_tail()}")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: `fast` ends sessions cleanly, `immediate` is a crash. Does nothing when it is down."""
        if (self.data / "postmaster.pid").exists():
            done = run(
                [self.programs.bindir / "pg_ctl", "stop", "-w", "-s", "-t", "60", "-m", mode, "-D", self.data],
                check=False,
            )
            if done.returncode != 0 and self.pid is not None:
                raise ClusterError(f"the server in {self.path} did not stop:\n{done.stdout}{self.log_tail()}")

    def restart(self, mode: str = "fast") -> None:
        """Stop and start; with mode `immediate` the start is a crash recovery."""
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        """Have the server read its configuration again."""
        run([self.programs.bindir / "pg_ctl", "reload", "-s", "-D", self.data])

    def log_tail(self, lines: int = 30) -> str:
        """The end of the server's log."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def tie_to_this_process(self) -> None:
        """From now on the server ends and its folder goes when this process ends, even if it is killed.

        A small shell of a session of its own reads from a pipe that only this process holds.
        """
        account = server_account()
        as_other = os.geteuid() == 0
        script = 'read -r _; [ ! -e "$2/postmaster.pid" ] || "$1" stop -s -w -m immediate -D "$2"; rm -rf "$3"'
        arguments = [str(self.programs.bindir / "pg_ctl"), str(self.data), str(self.path)]
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(),
            cwd="/",
            start_new_session=True,
            user=account.pw_uid if as_other else None,
            group=account.pw_gid if as_other else None,
            extra_groups=os.getgrouplist(account.pw_name, account.pw_gid) if as_other else None,
        )

    def remove(self) -> None:
        """Stop the server and delete its folder."""
        if self.data.exists():
            self.stop("immediate")
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(timeout=60)
            self._guard = None
        shutil.rmtree(self.path, ignore_errors=True)


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Whether a server could bind `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _down() -> None:
    path = state_directory() / "demo"
    if not path.exists():
        print("There is no demo cluster.")
        return
    cluster = Cluster(path)
    was_up = cluster.exists() and cluster.pid is not None
    cluster.stop()
    print("The demo's server is stopped." if was_up else "The demo's server was not running.")


def _remove() -> None:
    if not (ROOT / ".local" / "state-directory").exists():
        return
    state = state_directory()
    if (state / "demo").exists():
        Cluster(state / "demo").remove()
    shutil.rmtree(state, ignore_errors=True)


def main() -> int:
    """Commands of the Makefile."""
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("command", choices=["down", "remove"], help="stop the demo's server; delete all clusters")
    arguments = parser.parse_args()
    try:
        {"down": _down, "remove": _remove}[arguments.command]()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
