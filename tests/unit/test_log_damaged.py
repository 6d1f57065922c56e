"""A damaged segment stops nobody but those who ask for it."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.database import Connection, Database

SPOIL = "update queen.log_segments set blob = overlay(blob placing '\\xdeadbeef' from 20) where {}"


@pytest.fixture
def spoiled(db: Database) -> Database:
    """Partitions a, b and c with three messages each, one a segment; the second of b is damaged."""
    for part in ("a", "b", "c"):
        for number in (1, 2, 3):
            db.execute("select queen.push('q', to_jsonb(repeat('text ', 20) || %s::text), %s)", number, part)
    b = db.value("select id from queen.log_partitions where name = 'b'")
    db.execute(SPOIL.format(f"partition_id = {b} and end_offset = 2"))
    return db


def test_by_name_it_is_an_error_that_says_where(spoiled: Database, consumer: Connection) -> None:
    for call in ("pop('q', 'g', partition => 'b')", "pop('q', 'g', 1, partition => 'b', auto_ack => true)"):
        if "auto_ack" in call:
            assert consumer.execute(f'select "offset" from queen.{call}').fetchall() == [(1,)]
        with pytest.raises(psycopg.Error) as caught:
            consumer.execute(f"select * from queen.{call}")
        assert caught.value.sqlstate == "QN010"
        message = str(caught.value.diag.message_primary)
        assert 'partition "b" of queue "q"' in message
        assert "offset 2" in message
        assert "queen.seek" in str(caught.value.diag.message_hint)
    # What raised has taken nothing: no lease, no attempt.
    assert spoiled.rows("select committed, attempts, lease_id from queen.log_consumers") == [(1, 0, None)]


def test_any_partition_passes_it_over_with_a_warning(spoiled: Database, consumer: Connection) -> None:
    notices: list[str] = []
    consumer.add_notice_handler(lambda notice: notices.append(f"{notice.severity} {notice.message_primary}"))
    rows = consumer.execute("select \"partition\", \"offset\" from queen.pop('q', 'g')").fetchall()
    assert sorted(rows) == [(part, offset) for part in ("a", "c") for offset in (1, 2, 3)]
    assert len(notices) == 1
    assert notices[0].startswith('WARNING segment at offset 2 of partition "b" of queue "q" is damaged')
    # The others of the group go on meanwhile.
    spoiled.execute("select queen.push('q', '4', 'c')")
    assert spoiled.value("select last_error from queen.log_consumers where last_error is not null").startswith(
        "segment"
    )


def test_other_groups_and_what_lies_behind(spoiled: Database, consumer: Connection) -> None:
    assert consumer.execute("select queen.seek('q', 'g', 3, partition => 'b')").fetchone() == (1,)
    rows = consumer.execute("select \"offset\" from queen.pop('q', 'g', partition => 'b')").fetchall()
    assert rows == [(3,)]
    rows = consumer.execute("select \"offset\" from queen.pop('q', 'other', 1, partition => 'b')").fetchall()
    assert rows == [(1,)]


def test_mended_it_is_delivered(spoiled: Database, consumer: Connection) -> None:
    good = spoiled.value("select queen._segment_pack(queen._frame(gen_random_uuid(), null, 'x', null, false, '2'), 1)")
    spoiled.execute(
        "update queen.log_segments set blob = %s, raw_bytes = 4 + 21 + 1 + 1 where get_byte(blob, 19) = 222", good
    )
    rows = consumer.execute("select \"offset\", payload from queen.pop('q', 'g', partition => 'b')").fetchall()
    assert [offset for offset, _ in rows] == [1, 2, 3]
    assert rows[1][1] == 2


def test_an_exhausted_head_becomes_a_letter(spoiled: Database, consumer: Connection) -> None:
    """Handed out undecoded, refused to the limit: the group goes on, and the letter says why it is empty."""
    spoiled.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}')")
    assert consumer.execute("select queen.seek('q', 'g', 2, partition => 'b')").fetchone() == (1,)
    (lease,) = consumer.execute(
        "select lease_id from queen.pop_segments('q', 'g', 1, partition => 'b')"
    ).fetchone() or (None,)
    nack = consumer.execute("select status, committed from queen.nack('q', 'g', 'b', %s, 'cannot read')", [lease])
    assert nack.fetchone() == ("nacked", 2)
    assert consumer.execute("select \"offset\" from queen.pop('q', 'g', partition => 'b')").fetchall() == [(3,)]
    letters = consumer.execute("select \"offset\", payload, payload_bytes, error from queen.dlq_list('q')").fetchall()
    assert [letter[:3] for letter in letters] == [(2, None, b"")]
    assert "damaged" in letters[0][3]
    # There is nothing to send again.
    assert consumer.execute("select queen.dlq_requeue('q')").fetchone() == (0,)
    assert consumer.execute("select queen.dlq_purge('q')").fetchone() == (1,)
