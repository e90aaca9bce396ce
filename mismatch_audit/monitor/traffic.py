"""The mirrored-traffic log: JSON lines, one object a served request, in rotated files.

The engine's side writes it (a router, a proxy, a plug-in), `audit ingest` and `audit watch` read
it. An unknown log-prob is null and never 0.0, which would claim certainty.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kernel_contracts.errors import InputError

__all__ = [
    "MAX_LINE",
    "SCHEMA_VERSION",
    "Line",
    "ReadCounts",
    "TrafficRow",
    "TrafficStage",
    "TrafficWriter",
    "lines_of",
    "parse_row",
    "read_traffic",
    "rotated_files",
    "utc_now",
]

SCHEMA_VERSION: Literal["mismatch-audit/traffic/v1"] = "mismatch-audit/traffic/v1"

MAX_LINE = 16 << 20
"""Bytes of one line, its newline included: 32,000 tokens with log-probs take about 1 MB."""

TrafficStage = Literal["shadow", "canary", "full"]

Id = Annotated[str, StringConstraints(min_length=1, max_length=512)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Logprob = Annotated[float, Field(le=0.5)]
"""Nats. Rounding may push a log-prob a little above 0; a value above 0.5 is something else."""


class TrafficRow(BaseModel):
    """One served request and the response that its client got."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip

    schema_version: Literal["mismatch-audit/traffic/v1"] = SCHEMA_VERSION
    request_id: Id
    """Unique; a repeated id is the same request and counts once."""
    time: str = Field(default_factory=lambda: utc_now())
    """When the response was finished: RFC 3339 in UTC."""
    stage: TrafficStage
    """How the request was served: shadow (the client got another build's answer), canary, full."""
    engine_build: Id
    """Which build of the engine answered, for example a container's digest."""
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    response_token_ids: tuple[TokenId, ...]
    engine_logprobs: tuple[Logprob | None, ...] | None
    """Of each response token, nats, of the distribution before temperature and truncation (raw).
    null: unknown, of one token or of all."""
    weights_version: int | str | None
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=-1)]
    """0 or -1: no truncation."""
    finish_reason: Annotated[str, StringConstraints(max_length=64)] | None
    n_cached_tokens: Annotated[int, Field(ge=0)] | None
    """Prompt tokens that came from a prefix cache."""
    metadata: dict[
        Annotated[str, StringConstraints(max_length=128)],
        Annotated[str, StringConstraints(max_length=256)] | int | float,
    ] = Field(default_factory=dict)
    """Flat; the slices of a contract may name its keys."""

    @model_validator(mode="after")
    def _consistent(self) -> TrafficRow:
        parsed = _utc(self.time)
        if parsed is None:
            raise PydanticCustomError("time", "time: not RFC 3339 in UTC: {t}", {"t": self.time})
        n, given = len(self.response_token_ids), self.engine_logprobs
        if given is not None and len(given) != n:
            raise PydanticCustomError(
                "lengths",
                "engine_logprobs: {a} values for {b} response tokens",
                {"a": len(given), "b": n},
            )
        return self

    @property
    def moment(self) -> datetime:
        """``time`` as a datetime in UTC."""
        return _utc(self.time) or datetime.min.replace(tzinfo=UTC)

    @property
    def whole_distribution(self) -> bool:
        """Drawn at temperature 1 without truncation: its tokens are samples of q."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k in (0, -1)


def utc_now() -> str:
    """RFC 3339, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _utc(text: str) -> datetime | None:
    """None unless a date and a time with an offset of zero."""
    if len(text) < 20 or text[10] not in "Tt":
        return None
    try:
        moment = datetime.fromisoformat(text.replace("z", "Z"))
    except ValueError:
        return None
    return moment if moment.utcoffset() == timedelta(0) else None


@dataclass(frozen=True, slots=True)
class Line:
    """number: from 1, counted from where the reading began.  start, end: byte offsets, the newline
    included.  data: None where the line is longer than allowed."""

    number: int
    start: int
    end: int
    data: bytes | None


def lines_of(path: Path, *, offset: int = 0, max_line: int = MAX_LINE) -> Iterator[Line]:
    """The finished lines of a file from a byte offset on, in bounded memory.

    A last line without its newline is still being written: it is not given, and a reader that
    comes back to its offset gets it whole. Raises InputError when the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            start, number = offset, 0
            while block := stream.readline(max_line):
                number += 1
                data: bytes | None = block
                while not block.endswith(b"\n"):
                    block = stream.readline(max_line)
                    if not block:
                        return
                    data = None
                yield Line(number, start, start := stream.tell(), data)
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror or error}", where=str(path)) from error


def parse_row(data: bytes | None, where: str) -> TrafficRow:
    """One line -> a row. data: None for a line over the limit.  where: file and line.

    Raises InputError naming the first field that is wrong.
    """
    if data is None:
        raise InputError(f"longer than {MAX_LINE} bytes", where=where, fix=_FIX)
    try:
        row = TrafficRow.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{field}: {first['msg']}" if field else first["msg"], where=where, fix=_FIX
        ) from None
    for name in ("schema_version", "time"):  # defaults are for writers
        if name not in row.model_fields_set:
            raise InputError(f"{name}: Field required", where=where, fix=_FIX)
    return row


_FIX = "mend or remove the line, or skip bad lines with --skip-bad (they are counted)"


@dataclass
class ReadCounts:
    """What a reader met. first_bad: the message about the first bad line, empty without one."""

    rows: int = 0
    blank: int = 0
    bad: int = 0
    first_bad: str = ""


def read_traffic(
    path: Path, *, skip_bad: bool = False, counts: ReadCounts | None = None
) -> Iterator[TrafficRow]:
    """The rows of one file, streaming.

    skip_bad: leave out lines that are no rows, counted in ``counts``, instead of raising
    InputError with file and line. Blank lines are counted too.
    """
    met = ReadCounts() if counts is None else counts
    for line in lines_of(path):
        if line.data is not None and not line.data.strip():
            met.blank += 1
            continue
        try:
            row = parse_row(line.data, f"{path}:{line.number}")
        except InputError as error:
            if not skip_bad:
                raise
            met.bad += 1
            met.first_bad = met.first_bad or str(error)
            continue
        met.rows += 1
        yield row


def rotated_files(path: Path) -> list[Path]:
    """The rotated files of a log, oldest first, then the log itself when it is there."""
    prefix = path.name + "."
    aged = [
        (int(other.name.removeprefix(prefix)), other)
        for other in path.parent.glob(f"{_glob_escape(path.name)}.*")
        if other.name.removeprefix(prefix).isdecimal()
    ]
    return [p for _, p in sorted(aged)] + ([path] if path.exists() else [])


def _glob_escape(name: str) -> str:
    import glob

    return glob.escape(name)


class TrafficWriter:
    """Appends rows; several processes may write to one log.

    Each line is one ``write`` under a lock, so lines never mix. A file that would grow beyond
    max_bytes is renamed to ``NAME.000001``, ``NAME.000002``, ... and never renamed again, which a
    follower can rely on.  keep: rotated files to keep, None for all.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = 256 << 20, keep: int | None = None
    ) -> None:
        self.path, self.max_bytes, self.keep = Path(path), max_bytes, keep
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(
                self.path.with_name(self.path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o640
            )
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", where=str(path)) from error
        self._file = -1

    def write(self, row: TrafficRow) -> None:
        """Append one row. Raises InputError when it is too long or the disk is full; the log then
        ends with the row before it."""
        line = row.model_dump_json().encode() + b"\n"
        if len(line) > MAX_LINE:
            raise InputError(f"the row takes {len(line)} bytes, over {MAX_LINE}", where="traffic")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._append(line)
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", where=str(self.path)) from error
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _append(self, line: bytes) -> None:
        size = self._open_current()
        if size and size + len(line) > self.max_bytes:
            self._rotate()
            size = self._open_current()
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, size)
            raise OSError(28, "no space left on the device")

    def _open_current(self) -> int:
        """Open the log unless the open file is still it (another process may have rotated it), and
        cut off a line that a killed writer left unfinished. Gives the size."""
        if self._file < 0 or not _is_same(self._file, self.path):
            self._close_file()
            self._file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o640)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            size = _end_of_last_line(self._file, size)
            os.ftruncate(self._file, size)
        return size

    def _rotate(self) -> None:
        aged = [p for p in rotated_files(self.path) if p != self.path]
        last = int(aged[-1].name.rpartition(".")[2]) if aged else 0
        self.path.rename(self.path.with_name(f"{self.path.name}.{last + 1:06d}"))
        self._close_file()
        if self.keep is not None:
            for old in aged[: max(0, len(aged) + 1 - self.keep)]:
                old.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        """Close the log; further writes are errors."""
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> TrafficWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _end_of_last_line(file: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
