"""pg-queen: in this process for most of it, as the installed script where a process of its own matters."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import Result

from tests.python.conftest import Cli, Command
from tests.support.database import Database

OK, REFUSED, BAD_ARGUMENT, DATABASE_ERROR, CANNOT_CONNECT, NOT_INSTALLED, NOT_PERMITTED = range(7)


def _error(result: Result, code: int, *parts: str) -> None:
    """A sentence and perhaps a hint on stderr, nothing on stdout, the documented exit code, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("pg-queen: ")
    assert lines[0][-1] in ".?!;"
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    for part in parts:
        assert part in result.stderr


def _lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == OK, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_timer_from_schedule_to_cancel(cli: Cli) -> None:
    done = cli("schedule", "mail", "k", '{"n": 1}', "--delay", "2 hours", "--partition", "p", "--txn", "t")
    assert done.exit_code == OK, done.output
    assert done.stdout.startswith('scheduled: timer "k" of queue "mail", due 20')
    (verdict,) = _lines(cli("schedule", "mail", "k", '{"n": 2}', "--delay", "90", "--json"))
    assert (verdict["ok"], verdict["status"]) == (True, "rescheduled")
    (verdict,) = _lines(cli("reschedule", "mail", "k", "--at", "2030-06-01T12:00:00+02:00", "--json"))
    assert datetime.fromisoformat(str(verdict["deliver_at"])) == datetime.fromisoformat("2030-06-01T10:00:00+00:00")
    (verdict,) = _lines(cli("reschedule", "mail", "k", "--at", "2030-06-01T12:00:00Z", "--json"))
    assert datetime.fromisoformat(str(verdict["deliver_at"])) == datetime.fromisoformat("2030-06-01T12:00:00+00:00")
    assert cli("cancel", "mail", "k").stdout.startswith('cancelled: timer "k" of queue "mail", message id ')


def test_refused_verdicts_end_with_1(db: Database, cli: Cli) -> None:
    _error(cli("cancel", "mail", "k"), REFUSED, "absent", '"k"', "delivered")
    _error(cli("reschedule", "mail", "k", "--delay", "1"), REFUSED, "absent")
    absent = cli("cancel", "mail", "k", "--json")
    assert (absent.exit_code, json.loads(absent.stdout)["status"]) == (REFUSED, "absent")

    cli("schedule", "mail", "k", "1", "--delay", "0")
    assert len(db.rows("select * from queen.log_timers_claim()")) == 1
    _error(cli("cancel", "mail", "k"), REFUSED, "too_late", '"k"')
    _error(cli("schedule", "mail", "k", "1", "--delay", "5"), REFUSED, "too_late")


def test_list_pages(cli: Cli, queen: object, db: Database) -> None:
    db.execute(
        "select queen.schedule_many('q', array(select 'k' || to_char(n, 'FM0000') from generate_series(1, 1203) n),"
        " array_fill(jsonb '1', array[1203]), delays => array_fill(interval '1 hour', array[1203]))"
    )
    assert len(_lines(cli("list", "q", "--json"))) == 100
    page = _lines(cli("list", "q", "--json", "--after", "k1000", "--max-rows", "3"))
    assert [timer["timer_key"] for timer in page] == ["k1001", "k1002", "k1003"]
    assert len(_lines(cli("list", "q", "--json", "--all"))) == 1203
    table = cli("list", "q", "--max-rows", "2")
    assert [line.split()[0] for line in table.stdout.splitlines()[2:]] == ["k0001", "k0002"]
    assert "--after" in table.stderr
    everything = cli("list", "q", "--all", "--max-rows", "500")
    assert everything.stdout.count("k0") + everything.stdout.count("k1") == 1203
    assert everything.stderr == ""
    assert cli("list", "nothing").exit_code == OK


def test_push_and_pop(cli: Cli) -> None:
    assert cli("push", "q", '{"n": 1}', "--txn", "t").stdout.startswith('queued: offset 1 of partition "Default"')
    assert cli("push", "q", '{"n": 1}', "--txn", "t").stdout.startswith("duplicate: offset 1 ")
    (placed,) = _lines(cli("push", "q", "plain", "--text", "--partition", "p", "--json"))
    assert (placed["status"], placed["partition"], placed["offset"]) == ("queued", "p", 1)

    seen = cli("pop", "q")
    assert '{"n": 1}' in seen.stdout
    assert '"plain"' in seen.stdout
    assert "--ack" in seen.stderr
    nothing = cli("pop", "q")
    assert (nothing.exit_code, nothing.stdout) == (OK, "")

    messages = _lines(cli("pop", "q", "--group", "other", "--ack", "--json"))
    assert sorted(str(m["payload"]) for m in messages) == ["plain", "{'n': 1}"]
    assert cli("pop", "q", "--group", "other").stdout == ""


def test_pop_ack_acknowledges_every_partition(db: Database, cli: Cli) -> None:
    for partition in ("a", "b", "c"):
        db.execute("select queen.push_many('q', array[jsonb '1', '2'], %s)", partition)
    assert len(_lines(cli("pop", "q", "--ack", "--json", "--lease", "1 hour"))) == 6
    assert db.rows("select committed from queen.log_consumers") == [(2,)] * 3
    assert db.value("select count(*) from queen.log_consumers where lease_id is not null") == 0


def test_pop_takes_what_is_asked_for(db: Database, cli: Cli) -> None:
    db.execute("select queen.push_many('q', array[jsonb '1', '2', '3'], 'a')")
    db.execute("select queen.push_many('q', array[jsonb '4'], 'b')")
    assert [m["payload"] for m in _lines(cli("pop", "q", "--max", "2", "--partition", "a", "--json"))] == [1, 2]
    _error(cli("pop", "q", "--lease", "0"), BAD_ARGUMENT, '"lease"')
    _error(cli("pop", "q", "--lease", "soon"), BAD_ARGUMENT, "interval")


def test_an_unknown_queue_is_a_sentence(cli: Cli) -> None:
    result = cli("pop", "no such queue")
    assert (result.exit_code, result.stdout) == (OK, "")
    assert result.stderr == (
        'No message: queue "no such queue" has nothing for group "default" now, or does not exist.\n'
    )
    assert cli("pop", "no such queue", "--json").stdout == ""


def test_seek_reads_again(cli: Cli) -> None:
    for number in range(3):
        cli("push", "q", str(number))
    assert len(_lines(cli("pop", "q", "--ack", "--json"))) == 3
    assert cli("seek", "q", "--to-offset", "2").stdout == 'moved: group "default" in 1 partition of queue "q"\n'
    assert [m["payload"] for m in _lines(cli("pop", "q", "--ack", "--json"))] == [1, 2]
    assert _lines(cli("seek", "q", "--to-time", "2020-01-01T00:00:00Z", "--partition", "Default", "--json")) == [
        {"moved": 1}
    ]
    assert len(_lines(cli("pop", "q", "--json"))) == 3
    assert _lines(cli("seek", "nothing", "--to-offset", "0", "--json")) == [{"moved": 0}]
    _error(cli("seek", "q"), BAD_ARGUMENT, "to_offset", "to_time")
    _error(cli("seek", "q", "--to-time", "soon"), BAD_ARGUMENT, '--to-time "soon"')


def test_dead_letters(db: Database, cli: Cli) -> None:
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}')")
    db.execute("select queen.push_many('q', array[jsonb '1', '2', '3', '4', '5'])")
    for _ in range(5):
        db.execute(
            "select queen.nack('q', 'g', 'Default', (select lease_id from queen.pop('q', 'g') limit 1), 'no \x1b')"
        )
    ids = [str(letter["id"]) for letter in _lines(cli("dlq", "list", "q", "--json"))]
    assert len(ids) == 5
    assert [letter["id"] for letter in _lines(cli("dlq", "list", "q", "--json", "--after", ids[2]))] == ids[3:]
    page = cli("dlq", "list", "q", "--max-rows", "2")
    assert [line.split()[0] for line in page.stdout.splitlines()[2:]] == ids[:2]
    assert "\x1b" not in page.stdout
    assert "--after" in page.stderr
    assert len(_lines(cli("dlq", "list", "q", "--max-rows", "2", "--all", "--json"))) == 5
    assert cli("dlq", "list", "nothing").exit_code == OK

    assert cli("dlq", "requeue", "q", ids[0]).stdout == "requeued: 1 dead letter\n"
    assert _lines(cli("dlq", "requeue", "q", ids[0], ids[1], "--json")) == [{"requeued": 1}]
    assert cli("dlq", "purge", "q", ids[2]).stdout == "purged: 1 dead letter\n"
    assert cli("dlq", "purge", "q", "--all").stdout == "purged: 2 dead letters\n"
    assert _lines(cli("dlq", "requeue", "q", "--all", "--json")) == [{"requeued": 0}]
    for command in ("requeue", "purge"):
        _error(cli("dlq", command, "q"), BAD_ARGUMENT, "--all")
        _error(cli("dlq", command, "q", ids[0], "--all"), BAD_ARGUMENT, "both")
        _error(cli("dlq", command, "q", "no uuid"), BAD_ARGUMENT, "ids")


@pytest.mark.parametrize("payload", ['{"a": 1.00000000000000000001}', "[1, null, true]", "null", '"\\u00e9"', "1e30"])
def test_json_keeps_its_digits(db: Database, cli: Cli, payload: str) -> None:
    cli("push", "q", payload)
    result = cli("pop", "q", "--json")
    stored = db.value("select %s::jsonb::text", payload)
    assert f'"payload": {stored}, ' in result.stdout
    assert json.loads(result.stdout)["payload_bytes"] is None


def test_payloads_from_files_and_standard_input(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"\x00\xffraw")
    assert cli("push", "q", "--file", str(file), "--bytes").exit_code == OK
    assert cli("push", "q", "--file", "-", input='{"from": "stdin"}').exit_code == OK
    assert cli("schedule", "q", "k", "--file", "-", "--text", "--delay", "1", input="two\nlines").exit_code == OK
    first, second = _lines(cli("pop", "q", "--json"))
    assert (first["payload"], first["payload_bytes"]) == (None, "\\x00ff726177")
    assert second["payload"] == {"from": "stdin"}
    _error(cli("push", "q", "--file", str(file)), BAD_ARGUMENT, "UTF-8", "--bytes")
    _error(cli("push", "q", "--file", str(tmp_path / "none")), BAD_ARGUMENT, "cannot read", "No such file")
    _error(cli("push", "q"), BAD_ARGUMENT, "--file")
    _error(cli("push", "q", "1", "--file", str(file)), BAD_ARGUMENT, "--file")
    _error(cli("push", "q", "1", "--bytes", "--text"), BAD_ARGUMENT, "--text")


@pytest.mark.parametrize(
    ("payload", "part"),
    [
        ("{", "not JSON"),
        ("hello", "not JSON"),
        ("", "not JSON"),
        ("NaN", "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('"\\ud800"', "surrogate"),
        ('"\\u0000"', "u0000"),
        ('"' + "x" * 1_048_576 + '"', "1048578 bytes"),
    ],
)
def test_a_bad_payload_is_a_sentence(cli: Cli, payload: str, part: str) -> None:
    _error(cli("schedule", "q", "k", payload, "--delay", "1"), BAD_ARGUMENT, part, "hint: ")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["schedule", "q", "k", "1"], "delay"),
        (["schedule", "q", "k", "1", "--delay", "1", "--at", "2030-01-01"], "delay"),
        (["schedule", "q", "k", "1", "--delay", "banana"], "interval"),
        (["schedule", "q", "k", "1", "--delay", "1e9 years"], "interval"),
        (["schedule", "q", "k", "1", "--delay", "infinity"], "infinity"),
        (["schedule", "q", "k", "1", "--delay", "900 years"], "delay"),
        (["schedule", "q", "k", "1", "--at", "tomorrow"], "--at"),
        (["schedule", "q", "k", "1", "--at", "9999-12-31T23:59:59-12:00"], ""),
        (["schedule", "", "k", "1", "--delay", "1"], "queue"),
        (["schedule", "q", "k" * 513, "1", "--delay", "1"], "timer_key"),
        (["schedule", "q", "k\u001b[31m", "1", "--delay", "1"], "timer_key"),
        (["schedule", "q", "\udcff", "1", "--delay", "1"], "encoded"),
        (["list", "q", "--max-rows", "0"], "max_rows"),
        (["pop", "q", "--max", "0"], "max_messages"),
        (["pop", "q", "--group", "__timer__"], "consumer_group"),
    ],
)
def test_a_bad_argument_is_a_sentence(cli: Cli, arguments: list[str], part: str) -> None:
    _error(cli(*arguments), BAD_ARGUMENT, part)


def test_bad_usage_ends_with_2(command: Command) -> None:
    for arguments in (["pop"], ["pop", "q", "--max", "many"], ["nonsense"], ["pop", "q", "--nonsense"]):
        done = command(*arguments)
        assert done.returncode == BAD_ARGUMENT
        assert b"Error: " in done.stderr
        assert b"Traceback" not in done.stderr


def test_no_connection_is_a_sentence(cli: Cli, command: Command) -> None:
    _error(cli("status", url="host=127.0.0.1 port=1"), CANNOT_CONNECT, "refused", "--url")
    _error(cli("status", url="host=/nowhere"), CANNOT_CONNECT, "No such file")
    _error(cli("status", url="nonsense"), BAD_ARGUMENT, "--url")
    _error(cli("status", url="host=127.0.0.1 prot=1"), BAD_ARGUMENT, "prot")
    done = command("status", PGDATABASE="no such database")
    assert done.returncode == CANNOT_CONNECT
    assert b'database "no such database" does not exist' in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_missing_extension_is_a_sentence(db: Database, cli: Cli) -> None:
    db.execute("drop extension pg_queen")
    _error(cli("status"), NOT_INSTALLED, "pg-queen install")
    _error(cli("schedule", "q", "k", "1", "--delay", "1"), NOT_INSTALLED, "pg-queen install")


def test_a_missing_permission_names_the_role(cli: Cli) -> None:
    _error(cli("pop", "q", user="nobody_role"), NOT_PERMITTED, "grant queen_consumer to nobody_role;")
    _error(cli("schedule", "q", "k", "1", "--delay", "1", user="rita_reader"), NOT_PERMITTED, "grant queen_producer")
    _error(cli("start", user="alice_producer"), NOT_PERMITTED, "grant queen_admin")


def test_other_database_errors_end_with_3(db: Database, cli: Cli) -> None:
    with db.superuser.transaction():
        db.execute("lock table queen.log_timers")
        blocked = cli("cancel", "q", "k", url=db.conninfo("ada_admin") + " options='-c lock_timeout=10ms'")
    _error(blocked, DATABASE_ERROR, "lock timeout")


def test_start_without_pg_cron_here_says_what_is_missing(db: Database, cli: Cli) -> None:
    _error(cli("start"), DATABASE_ERROR, "pg_cron", "hint: ")


def test_doctor(db: Database, cli: Cli) -> None:
    """Ends with 1 when something is wrong, with each statement on a line of its own that can be copied."""
    done = cli("doctor")
    assert done.exit_code == REFUSED
    assert done.stderr == ""
    assert any(line.split()[:2] == ["WRONG", "workers"] for line in done.stdout.splitlines())
    assert any(line.split()[:2] == ["ok", "python"] for line in done.stdout.splitlines())
    assert any(line.strip().startswith("select queen.start()") for line in done.stdout.splitlines())
    lines = [json.loads(line) for line in cli("doctor", "--json").stdout.splitlines()]
    assert [line["name"] for line in lines if not line["ok"]] == ["pg_cron", "workers"]
    assert all((line["hint"] is None) == line["ok"] for line in lines)
    _error(cli("doctor", user="alice_producer"), NOT_PERMITTED, "permission denied")


def test_start_status_stop(cron_db: Database, cli: Cli) -> None:
    url = cron_db.conninfo("ada_admin")
    started = cli("start", "--workers", "3", url=url)
    assert (started.exit_code, started.stdout) == (
        OK,
        "started: pg_queen worker 0, pg_queen worker 1, pg_queen worker 2, pg_queen boot, pg_queen maintenance\n",
    )
    (state,) = _lines(cli("status", "--json", url=url))
    assert isinstance(state["jobs"], int)
    assert state["jobs"] >= 3
    table = cli("status", url=url)
    assert "workers_alive" in table.stdout
    assert cli("stop", url=url).stdout.startswith("stopped: 5 jobs removed")
    assert _lines(cli("stop", "--json", url=url)) == [{"removed": 0}]
    assert _lines(cli("status", "--json", url=url))[0]["jobs"] == 0


def test_install_and_install_again(db: Database, cli: Cli) -> None:
    again = cli("install", user="postgres")
    assert again.exit_code == OK, again.output
    assert f'already there in database "{db.name}"' in again.stdout
    db.execute("drop extension pg_queen")
    (done,) = _lines(cli("install", "--json", user="postgres"))
    assert (done["created"], done["files"]) == (True, [])
    assert db.value("select queen.push('q', '1') is not null")
    db.execute("drop extension pg_queen")
    _error(cli("install"), NOT_PERMITTED, "superuser")


def test_times_are_local_with_their_offset(command: Command, db: Database) -> None:
    when = "2030-06-01T12:00:00"
    done = command("schedule", "q", "k", "1", "--at", when, TZ="Asia/Kolkata")
    assert done.returncode == OK, done.stderr
    assert b"due 2030-06-01 12:00:00.000+05:30" in done.stdout
    assert db.value("select deliver_at = '2030-06-01 06:30Z' from queen.log_timers")
    listed = command("list", "q", "--json", TZ="America/New_York")
    assert json.loads(listed.stdout)["deliver_at"] == "2030-06-01T02:30:00-04:00"


def test_the_connection_comes_from_a_service_too(command: Command, db: Database, tmp_path: Path) -> None:
    services = tmp_path / "services"
    services.write_text(
        f"[app]\nhost={db.cluster.host}\nport={db.cluster.port}\ndbname={db.name}\nuser=alice_producer\n"
    )
    nowhere = {"PGHOST": "/nowhere", "PGPORT": "1", "PGDATABASE": "x", "PGUSER": "x", "PGSERVICEFILE": str(services)}
    assert command("push", "q", "1", PGSERVICE="app", **nowhere).returncode == OK
    assert command("push", "q", "1", "--url", "service=app", **nowhere).returncode == OK
    assert db.value("select last_offset from queen.log_partitions") == 2


def test_a_payload_cannot_write_to_the_terminal(db: Database, command: Command) -> None:
    db.execute("select queen.push('q', to_jsonb('\u009b31m \x7f [bold]x[/bold]'::text))")
    done = command("pop", "q")
    assert b"[bold]x[/bold]" in done.stdout
    text = done.stdout.decode()
    assert "\\x9b31m \\x7f" in text
    assert not any(ord(character) < 32 and character != "\n" for character in text)


def test_names_of_every_kind(cli: Cli) -> None:
    for name in (
        "Größe",
        "a b",
        'it\'s "quoted"',
        "dots.and/slashes",
        "SELECT",
        "مرحبا",
        "🚀",
        "-dash",
        "%s %(x)s",
        "[x]",
    ):
        (verdict,) = _lines(cli("schedule", "--delay", "0", "--json", "--", name, name, '"x"'))
        assert (verdict["queue"], verdict["timer_key"]) == (name, name)
        assert [timer["timer_key"] for timer in _lines(cli("list", "--json", "--", name))] == [name]
        assert name in cli("list", "--", name).stdout
        assert cli("cancel", "--", name, name).exit_code == OK


def test_messages_are_not_acknowledged_when_the_output_goes_nowhere(db: Database, command: Command) -> None:
    db.execute("select queen.push('q', '1')")
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(writer, "wb") as broken:
        done = command("pop", "q", "--ack", "--json", "--group", "full", stdout=full)
        assert (done.returncode, done.stderr) == (
            74,
            b"pg-queen: cannot write the output: No space left on device.\n",
        )
        done = command("pop", "q", "--ack", "--group", "broken", stdout=broken)
        assert (done.returncode, done.stderr) == (141, b"")
    assert db.rows("select committed from queen.log_consumers") == [(0,), (0,)]


def test_a_lease_that_ran_out_is_said(db: Database, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    db.execute("select queen.push('q', '1')")
    monkeypatch.setattr("pg_queen.cli.log._print_messages", lambda *_: time.sleep(0.05))
    _error(cli("pop", "q", "--ack", "--lease", "1 millisecond"), REFUSED, "lease_lost", "--lease")


def test_status_without_timers(cli: Cli) -> None:
    (state,) = _lines(cli("status", "--json", user="rita_reader"))
    assert (state["due"], state["next_due_at"], state["oldest_lateness"]) == (0, None, 0.0)
    cli("schedule", "q", "k", "1", "--delay", "-90")
    (state,) = _lines(cli("status", "--json"))
    assert isinstance(state["oldest_lateness"], float)
    assert timedelta(seconds=90) <= timedelta(seconds=state["oldest_lateness"]) < timedelta(seconds=150)
    assert "oldest_lateness" in cli("status").stdout


def test_help_names_exit_codes_and_every_command(command: Command) -> None:
    done = command("--help")
    text = " ".join(done.stdout.decode().split())
    assert "Exit codes: 0 done; 1 refused" in text
    for name in ("install", "start", "stop", "status", "schedule", "reschedule", "cancel", "list", "push", "pop"):
        helped = command(name, "--help")
        assert helped.returncode == OK
        assert b"--json" in helped.stdout
        assert b"--url" in helped.stdout
