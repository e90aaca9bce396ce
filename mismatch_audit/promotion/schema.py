"""Tables of the promotion store and their migrations.

A table of applied versions and a list of functions is all that six tables need: one file, run under
the writer's lock when a store is opened, the same on SQLite and PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from kernel_contracts.errors import InputError
from mismatch_audit.monitor.traffic import utc_now

metadata = sa.MetaData()

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

migrations = sa.Table(
    "promotion_migrations",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("applied", sa.String(40), nullable=False),
)

subjects = sa.Table(
    "promotion_subjects",
    metadata,
    sa.Column("id", _Id, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(64), nullable=False, unique=True),
    sa.Column("contract_name", sa.String(80), nullable=False),
    sa.Column("contract_digest", sa.String(64), nullable=False),
    sa.Column("contract", sa.Text, nullable=False),
    sa.Column("engine_build", sa.String(512), nullable=False),
    sa.Column("weights", sa.String(128), nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
)
"""What is promoted: an engine build with its weights, under a contract (kept whole, as JSON)."""

decisions = sa.Table(
    "promotion_decisions",
    metadata,
    sa.Column("subject_id", _Id, sa.ForeignKey(subjects.c.id), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("time", sa.String(40), nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("from_stage", sa.String(16)),
    sa.Column("to_stage", sa.String(16), nullable=False),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
)
"""The history. seq: 1, 2, 3, ... without a gap. The last one says where the subject stands."""

units = sa.Table(
    "promotion_units",
    metadata,
    sa.Column("subject_id", _Id, sa.ForeignKey(subjects.c.id), primary_key=True),
    sa.Column("visit", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("unit", sa.String(64), nullable=False),
    sa.Column("n_requests", sa.Integer, nullable=False),
    sa.Column("n_tokens", sa.Integer, nullable=False),
    sa.Column("first_time", sa.String(40), nullable=False),
    sa.Column("last_time", sa.String(40), nullable=False),
    sa.Column("observations", sa.Text, nullable=False),
    sa.UniqueConstraint("subject_id", "visit", "unit"),
)
"""One row a judged prompt, in the order in which the tests saw them. visit: the seq of the decision
that entered the stage, so that a stage entered again starts with no evidence."""

requests = sa.Table(
    "promotion_requests",
    metadata,
    sa.Column("subject_id", _Id, sa.ForeignKey(subjects.c.id), primary_key=True),
    sa.Column("request_id", sa.String(64), primary_key=True),
    sa.Column("visit", sa.Integer, nullable=False),
    sa.Column("unit_seq", sa.Integer),
    sa.Column("outcome", sa.String(80), nullable=False),
    sa.Index("promotion_requests_by_visit", "subject_id", "visit"),
)
"""Which requests have been counted, or why not; hashed ids."""

tests = sa.Table(
    "promotion_tests",
    metadata,
    sa.Column("subject_id", _Id, sa.ForeignKey(subjects.c.id), primary_key=True),
    sa.Column("visit", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("clause", sa.String(80), primary_key=True),
    sa.Column("slice", sa.String(2000), primary_key=True),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("n", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)
"""State of each sequential test. place: order of appearance of the clause's slices."""


def _first(connection: sa.Connection) -> None:
    metadata.create_all(connection)


MIGRATIONS: tuple[tuple[str, Callable[[sa.Connection], None]], ...] = (("first tables", _first),)
"""Version 1, 2, ...: applied in order, never edited once released."""


def migrate(connection: sa.Connection) -> int:
    """Bring a store to this program's version; gives how many migrations were applied.

    The caller holds the writer's lock. Raises InputError for a store of a later program.
    """
    applied = 0
    if sa.inspect(connection).has_table(migrations.name):
        newest = connection.scalar(sa.select(sa.func.max(migrations.c.version)))
        applied = int(newest or 0)
    if applied > len(MIGRATIONS):
        raise InputError(
            f"the store has version {applied}; this program knows {len(MIGRATIONS)}",
            fix="use the mismatch-audit that made it, or a later one",
        )
    for version, (name, change) in enumerate(MIGRATIONS[applied:], start=applied + 1):
        change(connection)
        connection.execute(
            sa.insert(migrations).values(version=version, name=name, applied=utc_now())
        )
    return len(MIGRATIONS) - applied
