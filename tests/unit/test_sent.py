"""Was it sent? queen.sent answers from the index of txns, within the window, and reads no segment."""

from __future__ import annotations

from datetime import timedelta

from tests.support.clock import Clock
from tests.support.database import Connection, Database

SENT = 'select "partition", "offset" from queen.sent(\'q\', %s)'


def test_by_the_index_and_not_from_segments(db: Database, producer: Connection) -> None:
    db.execute(
        "select queen.push_many('q', array_agg(to_jsonb(i)), 'p', array_agg('t' || i)) from generate_series(1, 5000) i"
    )
    db.execute("analyze queen.log_txns")
    counted = (
        "select relname, pg_stat_get_xact_numscans(oid), pg_stat_get_xact_blocks_fetched(oid) from pg_class"
        " where relname = any ('{log_txns,log_txns_hash_idx,log_txns_pkey,log_segments,log_segments_pkey}')"
    )
    connection = db.superuser
    with connection.transaction():
        before = {name: rest for name, *rest in connection.execute(counted)}
        assert connection.execute(SENT, ["t4321"]).fetchall() == [("p", 4321)]
        assert connection.execute(SENT, ["t5001"]).fetchall() == []
        after = {name: rest for name, *rest in connection.execute(counted)}
    used = {name: [new - old for new, old in zip(after[name], before[name], strict=True)] for name in after}
    assert used["log_txns_hash_idx"][0] == 2
    assert used["log_txns_hash_idx"][1] + used["log_txns"][1] <= 10
    for name in ("log_segments", "log_segments_pkey", "log_txns_pkey"):
        # The planner may look at the root of an index.
        assert used[name][0] == 0, name
        assert used[name][1] <= 2, name
    # Nor would it matter what is in them.
    db.execute("update queen.log_segments set blob = 'damaged'")
    assert producer.execute(SENT, ["t7"]).fetchall() == [("p", 7)]


def test_within_the_window_to_the_microsecond(db: Database, producer: Connection, clock: Clock) -> None:
    db.execute("select queen.configure_queue('q', '{\"txn_window\": \"1 hour\"}')")
    clock.stop()
    db.execute("select queen.push('q', '1', 'p', 't')")
    db.execute("select queen.schedule('q', 'k', '1', '0', partition => 'p', txn => 'of a timer')")
    assert producer.execute(SENT, ["of a timer"]).fetchall() == []
    assert db.value("select queen.fire_due()") == 1
    clock.advance(timedelta(hours=1))
    assert producer.execute(SENT, ["t"]).fetchall() == [("p", 1)]
    assert producer.execute(SENT, ["of a timer"]).fetchall() == [("p", 2)]
    clock.advance(timedelta(microseconds=1))
    # Before maintenance has come by, and after.
    for _ in range(2):
        assert producer.execute(SENT, ["t"]).fetchall() == []
        assert producer.execute(SENT, ["of a timer"]).fetchall() == []
        db.execute("call queen.maintain()")
    assert db.value("select count(*) from queen.log_txns") == 0


def test_the_first_of_several_and_of_this_queue(db: Database, producer: Connection, clock: Clock) -> None:
    db.execute("select queen.configure_queue('q', '{\"txn_window\": \"1 hour\"}')")
    clock.stop()
    db.execute("select queen.push('other', '1', 'x', 't')")
    assert producer.execute(SENT, ["t"]).fetchall() == []
    db.execute("select queen.push('q', '1', 'p', 't')")
    clock.advance(timedelta(minutes=40))
    # A fire does not look, so a txn can be there twice; the first one answers as long as it is remembered.
    db.execute("select queen.schedule('q', 'k', '1', '0', partition => 'r', txn => 't')")
    assert db.value("select queen.fire_due()") == 1
    assert producer.execute(SENT, ["t"]).fetchall() == [("p", 1)]
    clock.advance(timedelta(minutes=30))
    assert producer.execute(SENT, ["t"]).fetchall() == [("r", 1)]


def test_what_retention_took_was_sent_all_the_same(db: Database, producer: Connection, clock: Clock) -> None:
    db.execute('select queen.configure_queue(\'q\', \'{"retention": "1 minute", "txn_window": "1 day"}\')')
    clock.stop()
    db.execute("select queen.push('q', '1', 'p', 't')")
    clock.advance(timedelta(hours=1))
    db.execute("call queen.maintain()")
    assert db.value("select count(*) from queen.log_segments") == 0
    assert producer.execute(SENT, ["t"]).fetchall() == [("p", 1)]
    assert db.value("select status from queen.push('q', '1', 'p', 't')") == "duplicate"
