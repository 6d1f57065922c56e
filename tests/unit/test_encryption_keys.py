"""The key file: what it must be, who may name it, and what is said when it is not so."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.database import Connection, Database
from tests.support.keys import KeyFile, key
from tests.support.log import FRAMES

ON = "select queen.configure_queue('q', '{\"encrypt\": true}')"


def refused(connection: Connection, statement: str, *values: object) -> str:
    """The message of a QN011, which has a hint and tells no key."""
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, values)
    assert caught.value.sqlstate == "QN011", caught.value
    assert caught.value.diag.message_hint
    assert key("k1").split()[1] not in str(caught.value)
    return str(caught.value.diag.message_primary)


FILES: dict[str, tuple[list[str], str]] = {
    "empty": ([], "holds no key"),
    "only remarks": (["# later", ""], "holds no key"),
    "no id": ([key("k1").split()[1]], "line 1 of the key file is no key"),
    "short": ([key("k1"), "k2 c2hvcnQ="], "line 2 of the key file is no key"),
    "no base64": (["k1 " + "*" * 44], "line 1 of the key file is no key"),
    "hexadecimal": (["k1 " + "ab" * 32], "line 1 of the key file is no key"),
    "an id with a space": ([f"my {key('k1')}"], "line 1 of the key file is no key"),
    "a long id": ([key("k" * 65)], "line 1 of the key file is no key"),
    "an id twice": ([key("k1"), key("k2"), key("k1", "x")], 'line 3 of the key file has the id "k1" again'),
    "too long": ([key(f"k{i}") for i in range(1400)], "no file of up to 64 KiB"),
}


@pytest.mark.parametrize("file", FILES)
def test_what_is_in_it(db: Database, file: str) -> None:
    lines, says = FILES[file]
    keys = KeyFile(db)
    keys.write(*lines)
    assert says in refused(db.superuser, "select queen.configure('key_file', %s)", keys.path)
    assert db.value("select value from queen.settings where key = 'key_file'") == "none"
    keys.write(key("k1"))
    db.execute("select queen.configure('key_file', %s)", keys.path)
    keys.write(*lines)
    assert says in refused(db.superuser, ON)
    keys.write(key("k1"))
    db.execute(ON)


SPOILED = {
    "gone": ("os.unlink(path)", "cannot be read: No such file or directory"),
    "a directory": ("os.unlink(path); os.mkdir(path, 0o700)", "cannot be read: Is a directory"),
    "a pipe": ("os.unlink(path); os.mkfifo(path, 0o600)", "no file of up to 64 KiB"),
    "a device": ("os.unlink(path); os.symlink('/dev/zero', path)", "no file of up to 64 KiB"),
    "read by the group": ("os.chmod(path, 0o640)", "may be read by others"),
    "read by all": ("os.chmod(path, 0o604)", "may be read by others"),
    "not to be read": ("os.chmod(path, 0o000)", "cannot be read: Permission denied"),
    "somebody else's": ("os.unlink(path); os.symlink('/etc/hostname', path)", "may be read by others"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_whose_it_is(db: Database, how: str) -> None:
    keys = KeyFile(db).use(key("k1"))
    db.execute(ON)
    db.execute("select queen.push('q', '1')")
    code, says = SPOILED[how]
    keys.run(code)
    for statement in (ON, "select queen.push('q', '2')", "select queen.pop('q', \"partition\" => 'Default')"):
        assert says in refused(db.superuser, statement)
    keys.run("os.path.isdir(path) and os.rmdir(path)")
    keys.write(key("k1"))
    assert db.rows("select payload from queen.pop('q')") == [(1,)]


def test_only_the_owner_names_it(db: Database, admin: Connection) -> None:
    keys = KeyFile(db)
    keys.write(key("k1"))
    for value in (keys.path, "/etc/shadow", None, "none"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="owner of pg_queen") as caught:
            admin.execute("select queen.configure('key_file', %s)", [value])
        assert caught.value.diag.message_hint
    db.execute("select queen.configure('key_file', %s)", keys.path)
    assert admin.execute("select queen.configure_queue('q', '{\"encrypt\": true}')").fetchone()
    assert admin.execute("select value from queen.settings where key = 'key_file'").fetchone() == (keys.path,)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        admin.execute("insert into queen.config (key, value) values ('key_file', '/etc/shadow')")


@pytest.mark.parametrize("value", ["keys", "../keys", "", "/", "/tmp/a\nb", "/" + "x" * 1000, "NONE", "~/keys"])
def test_paths_that_are_none(db: Database, value: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="key_file") as caught:
        db.execute("select queen.configure('key_file', %s)", value)
    assert "absolute path" in str(caught.value.diag.message_hint)


def test_it_is_read_again_when_it_changes(db: Database) -> None:
    keys = KeyFile(db).use(key("k1"))
    db.execute(ON)
    db.execute("select queen.push('q', '1')")
    # In place and of the same length, as an editor may do it.
    keys.run(f"with open(path, 'w') as file: file.write({key('k2')!r})")
    db.execute("select queen.push('q', '2')")
    names = db.rows(
        "select encode(substr(u.payload, 3, 2), 'escape') from queen.log_segments s"
        f" cross join {FRAMES} order by s.base_offset"
    )
    assert names == [("k1",), ("k2",)]


LOADED = """do $do$
import sys
names = [name for name in sys.modules if name.split('.')[0] == 'cryptography']
if names:
    plpy.error(str(names))
$do$ language plpython3u"""


def test_a_session_in_clear_loads_no_cryptography(db: Database) -> None:
    KeyFile(db).use(key("k1"))
    fresh = db.connect()
    fresh.execute("select queen.push('q', '1')")
    fresh.execute("select queen.push_bytes('q', %s)", [bytes(100_000)])
    fresh.execute("select queen.schedule('q', 'k', '1', '0')")
    fresh.execute("select queen.fire_due()")
    assert len(fresh.execute("select * from queen.pop('q')").fetchall()) == 3
    fresh.execute("call queen.maintain()")
    fresh.execute(LOADED)
    db.execute(ON)
    fresh.execute("select queen.push('q', '1')")
    with pytest.raises(psycopg.Error, match="cryptography"):
        fresh.execute(LOADED)


def test_a_server_without_cryptography(db: Database) -> None:
    KeyFile(db).use(key("k1"))
    db.execute(ON)
    fresh = db.connect()
    fresh.execute("do $do$\nimport sys\nsys.modules['cryptography'] = None\n$do$ language plpython3u")
    with pytest.raises(psycopg.Error) as caught:
        fresh.execute("select queen.push('q', '1')")
    assert caught.value.sqlstate == "QN011"
    assert "apt-get install python3-cryptography" in str(caught.value.diag.message_hint)
    fresh.execute("select queen.push('clear', '1')")
    assert fresh.execute("select payload from queen.pop('clear')").fetchall() == [(1,)]
