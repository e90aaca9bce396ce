"""Ed25519 keys: made, read, and named by the SHA-256 of their public half."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_contracts.errors import InputError
from mismatch_audit.gate.strict import read_limited

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PASSPHRASE_VARIABLE = "AUDIT_KEY_PASSPHRASE"
MAX_KEY_BYTES = 16 << 10
MAX_TRUSTED = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class NewKey:
    """What ``new_key`` wrote. encrypted: with a passphrase."""

    private: Path
    public: Path
    keyid: str
    encrypted: bool


def key_id(public: Ed25519PublicKey) -> str:
    """SHA-256 (hex) of the key's DER SubjectPublicKeyInfo: the ``keyid`` of our signatures."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def new_key(folder: Path, name: str = "audit", passphrase: bytes | None = None) -> NewKey:
    """Write ``NAME.key`` (PKCS#8 PEM, mode 0600, encrypted under a passphrase) and ``NAME.pub``.

    Raises InputError for a name that is no plain file name, and when either file is there.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} cannot name a key",
            where="--name",
            fix="letters, digits, dots, dashes and underscores, at most 64",
        )
    key = Ed25519PrivateKey.generate()
    how: KeySerializationEncryption = (
        BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    )
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if public.exists():
            raise FileExistsError(17, "is there already", str(public))
        _write_new(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how), 0o600)
        _write_new(
            public,
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            0o644,
        )
    except FileExistsError as error:
        raise InputError(
            "there already, and a key is never overwritten",
            where=str(error.filename or folder),
            fix="give another --name or --out",
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot write it: {error.strerror or error}", where=str(folder)
        ) from error
    return NewKey(private, public, key_id(key.public_key()), bool(passphrase))


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """The mode is given at creation: there is no moment in which others can read a private key."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def load_private(path: Path, passphrase: bytes | None = None) -> Ed25519PrivateKey:
    """A private key. No message holds any of its bytes.

    Raises InputError when it cannot be read, others can read it, it is no Ed25519 key, or the
    passphrase is missing or wrong.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    where = str(path)
    raw = read_limited(path, MAX_KEY_BYTES, "a private key")
    if os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError("others can read this private key", where=where, fix=f"chmod 600 {path}")
    try:
        key = load_pem_private_key(raw, passphrase)
    except TypeError:
        need = (
            f"it is encrypted: set {PASSPHRASE_VARIABLE}"
            if passphrase is None
            else f"it is not encrypted, and {PASSPHRASE_VARIABLE} is set"
        )
        raise InputError(need, where=where) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(
            "not a private key, or the wrong passphrase",
            where=where,
            fix="audit key new --out DIR writes one",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError("not an Ed25519 key", where=where, fix="audit key new --out DIR")
    return key


def load_trusted(path: Path) -> dict[str, Ed25519PublicKey]:
    """Public keys by keyid: of a file, or of every ``*.pub`` in a folder (links are not followed
    out of it). Raises InputError when there is none, or one of them is no Ed25519 public key."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix == ".pub")
        home = path.resolve()
        for file in files:
            if not file.resolve().is_relative_to(home):
                raise InputError("a link that leads out of the folder of keys", where=str(file))
    else:
        files = [path]
    if not files:
        raise InputError("no public key (*.pub) here, so nobody is trusted", where=str(path))
    if len(files) > MAX_TRUSTED:
        raise InputError(f"more than {MAX_TRUSTED} keys", where=str(path))
    keys = [_public(file) for file in files]
    return {key_id(key): key for key in keys}


def _public(path: Path) -> Ed25519PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    raw = read_limited(path, MAX_KEY_BYTES, "a public key")
    if b"PRIVATE" in raw:
        raise InputError(
            "a private key among the trusted ones",
            where=str(path),
            fix="trust the .pub file, and keep this one where only the signer can read it",
        )
    try:
        key = load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError("not a public key in PEM", where=str(path)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError("not an Ed25519 key", where=str(path))
    return key
