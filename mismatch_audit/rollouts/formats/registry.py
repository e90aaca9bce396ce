"""Which reader fits a file or folder, and opening what the user named."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import Detection, Problem, Reader, ReadOptions, Source
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.tidy import natural

READERS: dict[str, str] = {
    "plain": "plain",
    "prime-rl": "prime_rl",
    "nemo-rl": "nemo_rl",
    "skyrl": "skyrl",
    "openrlhf": "openrlhf",
    "slime": "slime",
    "areal": "areal",
    "verl": "verl",
    "trl": "trl",
    "roll": "roll",
    "pipeline-rl": "pipeline_rl",
    "ms-swift": "ms_swift",
    "martingale": "martingale",
}
"""Format -> module of this package, imported when first needed."""

_SUFFIXES = (".jsonl", ".parquet", ".pt", ".pth", ".pkl", ".npz", ".db")
_COMPRESSED = (".gz", ".zst")
# A run folder holds checkpoints and wheels of logs as well; no dump is nested deeper than this.
_DEPTH = 4
_MAX_FILES = 20_000


def reader(name: str) -> Reader:
    """The reader of a format. Raises InputError for an unknown name, with the nearest one."""
    module = READERS.get(name)
    if module is None:
        near = difflib.get_close_matches(name, READERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"unknown format {name!r}", fix=f"{hint}known: {', '.join(READERS)}, auto")
    return cast(Reader, importlib.import_module(f"{__package__}.{module}"))


def detect(path: Path) -> list[Detection]:
    """Formats that fit one file, or a folder as a whole, the surest first."""
    found = []
    for name in READERS:
        try:
            detection = reader(name).detect(path)
        except InputError:
            detection = None
        if detection is not None:
            found.append(detection)
    return sorted(found, key=lambda detection: -detection.confidence)


def open_sources(
    paths: Iterable[Path], format: str = "auto", options: ReadOptions | None = None
) -> tuple[list[Source], list[Problem]]:
    """Sources of files and folders, and what could not be opened. A folder with several formats
    gives a source for each. Nothing is read beyond what detection needs.

    Raises InputError for an unknown format only; a path that fits none is a Problem.
    """
    options = options or ReadOptions()
    sources: list[Source] = []
    problems: list[Problem] = []
    if options.fields and format == "auto":
        format = "plain"  # columns renamed to ours
    if format != "auto":
        chosen = reader(format)
        opened = [(file, chosen) for path in paths for file in _whole_or_files(path, chosen)]
    else:
        opened = []
        for path in paths:
            with _collecting(path, problems):
                opened += _readers_of(path, problems)
    for path, chosen in opened:
        with _collecting(path, problems):
            _check_path(path)
            sources.append(chosen.read(path, options))
    return sources, problems


@contextmanager
def _collecting(path: Path, problems: list[Problem]) -> Iterator[None]:
    """What is raised about a path becomes a Problem."""
    try:
        yield
    except InputError as error:
        problems.append(Problem(str(path), error))
    except OSError as error:  # no permission, a name that is too long, a loop of links
        reason = error.strerror or str(error)
        problems.append(Problem(str(path), InputError(f"cannot read: {reason}", where=str(path))))


def _check_path(path: Path) -> None:
    if not path.exists():
        raise InputError("no such file or folder", where=str(path))
    if not path.is_dir() and not path.is_file():  # reading a pipe would wait for its writer
        raise InputError("is neither a file nor a folder", where=str(path))


def drain(source: Source, on_problem: Callable[[Problem], None]) -> Iterator[TokenBatch]:
    """All batches of a source; each damaged file is told to ``on_problem`` and the source's other
    files are still read."""
    batches = iter(source.batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except InputError as error:
            on_problem(Problem(str(source.path), error))
            continue
        yield batch


def explain(path: Path) -> str:
    """What was detected at a path and why, for people."""
    lines = [f"{path}:"]
    found = detect(path) if path.exists() else []
    lines += [f"  {one.format} ({one.confidence:.0%} sure): {one.why}" for one in found]
    if not found and path.is_dir():
        problems: list[Problem] = []
        lines += [f"  {where}: {one.FORMAT}" for where, one in _readers_of(path, problems)]
        lines += [f"  {problem.path}: {problem.error.what}" for problem in problems]
    if len(lines) == 1:
        lines.append(f"  none of the known formats ({', '.join(READERS)})")
    return "\n".join(lines)


def _readers_of(path: Path, problems: list[Problem]) -> list[tuple[Path, Reader]]:
    _check_path(path)
    if path.is_dir():
        found = _in_folder(path, 0, set(), problems)
        if not found and not problems:
            raise _unknown(path)
        return found
    return [(path, _surest(path))]


def _whole_or_files(path: Path, chosen: Reader) -> list[Path]:
    """A folder's data files where the reader knows no folders; else the path itself."""
    if hasattr(chosen, "files") or not path.is_dir():
        return [path]
    found = [file for file in sorted(path.rglob("*"), key=natural) if _is_data(file)]
    return [file for file in found if file.is_file()] or [path]


def _in_folder(
    folder: Path, depth: int, claimed: set[Path], problems: list[Problem]
) -> list[tuple[Path, Reader]]:
    """Folder-wide formats first; then each file that none of them claims, then subfolders."""
    found: list[tuple[Path, Reader]] = []
    for name in READERS:
        one = reader(name)
        files = getattr(one, "files", None)
        mine = set(files(folder)) if files else set()
        if not mine or mine & claimed or one.detect(folder) is None:
            continue
        found.append((folder, one))
        claimed |= mine
    for entry in sorted(folder.iterdir(), key=natural):
        if entry.is_dir() and not entry.is_symlink() and depth < _DEPTH:
            found += _in_folder(entry, depth + 1, claimed, problems)
        elif entry.is_file() and entry not in claimed and _is_data(entry):
            claimed.add(entry)
            if len(claimed) > _MAX_FILES:
                raise InputError(
                    f"holds more than {_MAX_FILES} files",
                    where=str(folder),
                    fix="name the dump's own folder, or its files",
                )
            try:
                found.append((entry, _surest(entry)))
            except InputError as error:
                if damaged(entry):
                    problems.append(Problem(str(entry), error))
    return found


def _surest(path: Path) -> Reader:
    found = detect(path)
    if not found:
        raise _unknown(path)
    if len(found) > 1 and found[0].confidence == found[1].confidence:
        raise InputError(
            f"could be {found[0].format} ({found[0].why}) or {found[1].format} ({found[1].why})",
            where=str(path),
            fix=f"say which: --format {found[0].format}",
        )
    return reader(found[0].format)


def _unknown(path: Path) -> InputError:
    kind = "holds no rollouts in a known format" if path.is_dir() else "is in no known format"
    if path.is_file() and (reason := damaged(path)):
        kind = f"is in no known format: {reason}"
    return InputError(
        kind,
        where=str(path),
        fix=f"name the format with --format (known: {', '.join(READERS)}), or rename columns to "
        "ours with --field",
    )


def _is_data(path: Path) -> bool:
    name = path.name.lower()
    for end in _COMPRESSED:
        name = name.removesuffix(end)
    return name.endswith(_SUFFIXES)


def damaged(path: Path) -> str:
    """Why a file is not what its name says; empty where it is (or nothing can be said)."""
    size = path.stat().st_size
    if size == 0:
        return "the file is empty"
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(-min(4, size), 2)
        tail = file.read()
    if path.suffix == ".parquet" and (head != b"PAR1" or tail != b"PAR1"):
        return "not a whole Parquet file (its end is missing)"
    if path.suffix in (".pt", ".pth") and head[:2] == b"PK":
        import zipfile

        return "" if zipfile.is_zipfile(path) else "not a whole torch file (its end is missing)"
    if ".jsonl" in path.suffixes and first_object(path) is None:
        return "its first line is no JSON object"
    return ""
