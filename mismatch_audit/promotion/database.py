"""One writer at a time, on SQLite (the default) or PostgreSQL, through SQLAlchemy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from kernel_contracts.errors import InputError
from mismatch_audit.promotion.schema import migrate

BUSY_SECONDS = 60
LOCK_KEY = 0x6D69736D  # "mism": PostgreSQL's advisory lock of the migrations


class Database:
    """An opened store. url: ``sqlite:///FILE``, a plain file name, or ``postgresql://...``.

    create: False raises InputError for a file that is not there.  Raises InputError for a URL that
    cannot be read, a missing driver, a server that does not answer.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.engine, self.shown = _engine(url, create)
        self.sqlite = self.engine.dialect.name == "sqlite"
        with self.writing() as connection:
            if not self.sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
            migrate(connection)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that sees the latest state and is either whole or not there.

        On SQLite it holds the file's write lock from its start (BEGIN IMMEDIATE); on PostgreSQL the
        caller locks its subject's row.
        """
        with self._told(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A consistent view; nothing is written."""
        with self._told(), self.engine.connect() as connection:
            if self.sqlite:
                connection = connection.execution_options(reads=True)
            else:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection
            connection.rollback()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            raise InputError(
                f"the store does not answer: {_first_line(error)}",
                where=self.shown,
                fix="check the URL and that the server runs; on SQLite, that the disk is local "
                "and no writer hangs",
            ) from None
        except DBAPIError as error:
            raise InputError(f"the store refused: {_first_line(error)}", where=self.shown) from None

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else "no reason given"


def _engine(url: str, create: bool) -> tuple[sa.Engine, str]:
    text = url if "://" in url else f"sqlite:///{url}"
    for short in ("postgresql://", "postgres://"):
        if text.startswith(short):
            text = "postgresql+psycopg://" + text.removeprefix(short)
    fix = "give sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    try:
        parsed = sa.make_url(text)
        shown = parsed.render_as_string(hide_password=True)
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise InputError(
                f"{parsed.get_backend_name()} stores are not supported", where=shown, fix=fix
            )
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(parsed, create), shown
        engine = sa.create_engine(
            parsed, pool_pre_ping=True, connect_args={"connect_timeout": 10}, pool_size=2
        )
    except ArgumentError:
        raise InputError("not a store URL", where="--store", fix=fix) from None
    except NoSuchModuleError:
        raise InputError("no such database driver", where="--store", fix=fix) from None
    except ModuleNotFoundError as error:
        raise InputError(
            f"the driver {error.name} is not installed",
            where=shown,
            fix=f"pip install {error.name}",
        ) from None
    return engine, shown


def _sqlite(url: sa.URL, create: bool) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise InputError("a store needs a file", where="--store", fix="sqlite:///promotion.db")
    path = Path(url.database)
    if not path.exists():
        if not create:
            raise InputError(
                "no store here",
                where=str(path),
                fix="audit promote advance --store ... --contract FILE --build BUILD --report RUN",
            )
        if not path.parent.is_dir():
            raise InputError("no such folder", where=str(path.parent))
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself: see _on_begin
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    for attempt in range(100):
        try:  # the change to WAL does not wait for a lock by itself
            cursor.execute("PRAGMA journal_mode = WAL")
            break
        except Exception as error:
            if "locked" not in str(error) or attempt == 99:
                raise
            time.sleep(0.05)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _on_begin(connection: sa.Connection) -> None:
    """A writer takes the lock at once: one that reads first and writes later can meet another's
    commit in between, and SQLite then refuses it instead of letting it wait."""
    reads = connection.get_execution_options().get("reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
