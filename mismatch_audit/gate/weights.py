"""Which weights are these? One digest for a checkpoint in any files, or read from its manifest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kernel_contracts.errors import InputError
from mismatch_audit.gate.strict import read_limited

POLICY_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files beside weights that change the policy: architecture, tokens, the engine's own sampling
defaults. A name that is absent counts as absent, so that adding one is a change."""

MAX_POLICY_BYTES = 128 << 20


@dataclass(frozen=True)
class WeightsIdentity:
    """tensors: digest of all of them. config: of the files above, None when they are not at hand.
    source: the path's last part, for people."""

    source: str
    tensors: str
    config: str | None


def identify(path: Path) -> WeightsIdentity:
    """Of a checkpoint (folder or weight file), by reading all of it; or of a manifest, as it says
    (its entries must add up to its digest). Raises InputError."""
    from mismatch_audit.weights.manifest import read_manifest

    if path.suffix == ".json" and not path.is_dir():
        manifest = read_manifest(path)
        if not manifest.tensors:
            raise InputError("a manifest of no tensor", where=str(path))
        # `audit export` writes manifest.json beside its checkpoint; another may lie anywhere.
        beside = config_digest(path.parent) if path.name == "manifest.json" else None
        return WeightsIdentity(path.name, manifest.digest, beside)

    from mismatch_audit.weights.digest import build_manifest
    from mismatch_audit.weights.sides import open_side

    manifest = build_manifest(open_side(path), "none")
    if not manifest.tensors:
        raise InputError("a checkpoint of no tensor", where=str(path))
    folder = path if path.is_dir() else path.parent
    return WeightsIdentity(path.name, manifest.digest, config_digest(folder))


def config_digest(folder: Path) -> str | None:
    """SHA-256 over the names and digests of the policy files in a folder; None without config.json.

    Raises InputError for one that is too large.
    """
    if not (folder / "config.json").is_file():
        return None
    whole = hashlib.sha256(b"mismatch-audit/policy-files/v1\n")
    for name in POLICY_FILES:
        file = folder / name
        if file.is_file():
            raw = read_limited(file, MAX_POLICY_BYTES, "a part of a checkpoint")
            whole.update(f"{name} {hashlib.sha256(raw).hexdigest()}\n".encode())
    return whole.hexdigest()
