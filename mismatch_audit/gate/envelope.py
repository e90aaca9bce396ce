"""A DSSE envelope (Dead Simple Signing Envelope, v1) with one Ed25519 signature.

The signature covers PAE(type, payload) = "DSSEv1" SP len(type) SP type SP len(payload) SP payload,
so that neither can be moved to another. Primitives come from ``cryptography``; the envelope is ours
because a gate must be stricter than a library that reads every DSSE there is: exactly one
signature, one payload type, no spare base64 bits, nothing outside the signature's reach. Others
read ours (tests verify it with securesystemslib).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatch_audit.gate.strict import Malformed, canonical, parse

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES = 4 << 20
_KEYS = {"payload", "payloadType", "signatures"}


class NotAnEnvelope(Malformed):
    """Not even the shape of an envelope."""


@dataclass(frozen=True)
class Envelope:
    """Bytes and who claims to have signed them; nothing is verified yet."""

    payload: bytes
    keyid: str
    signature: bytes

    def verify(self, trusted: Mapping[str, Ed25519PublicKey]) -> None:
        """Raises Malformed(``unknown_key``) or Malformed(``bad_signature``)."""
        from cryptography.exceptions import InvalidSignature

        key = trusted.get(self.keyid)
        if key is None:
            raise Malformed("unknown_key", f"signed by {self.keyid[:16]}..., which is not trusted")
        try:
            key.verify(self.signature, pae(self.payload))
        except InvalidSignature:
            raise Malformed("bad_signature", "the signature is not of this statement") from None


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Pre-authentication encoding: what is signed."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, key: Ed25519PrivateKey) -> bytes:
    """The envelope's file."""
    from mismatch_audit.gate.keys import key_id

    signature = {"keyid": key_id(key.public_key()), "sig": _b64(key.sign(pae(payload)))}
    document = {
        "payload": _b64(payload),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [signature],
    }
    return canonical(document) + b"\n"


def unseal(raw: bytes) -> Envelope:
    """An envelope that ``seal`` wrote, byte for byte; its signature is not verified here.

    Raises NotAnEnvelope, or Malformed for what looks like one and is not as written.
    """
    try:
        document = parse(raw)
    except Malformed as error:
        if error.code == "not_json":
            raise NotAnEnvelope("not_a_blessing", error.what) from None
        raise
    if not isinstance(document, dict) or not document.keys() >= _KEYS:
        raise NotAnEnvelope("not_a_blessing", "no DSSE envelope: no payload with its signatures")
    if document["payloadType"] != PAYLOAD_TYPE:
        raise Malformed("payload_type", f"the payload is not of type {PAYLOAD_TYPE}")
    signatures = document["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise Malformed("signature_count", "a blessing has exactly one signature")
    one = signatures[0]
    if not isinstance(one, dict) or not all(isinstance(one.get(k), str) for k in ("keyid", "sig")):
        raise Malformed("bad_signature", "the signature has no keyid or no value")
    envelope = Envelope(_bytes(document["payload"]), one["keyid"], _bytes(one["sig"]))
    if canonical(document) + b"\n" != raw or document.keys() != _KEYS or len(one) != 2:
        raise Malformed("not_canonical", "the envelope is spelt in another way than it was written")
    return envelope


def _b64(data: bytes) -> str:
    return base64.standard_b64encode(data).decode("ascii")


def _bytes(text: Any) -> bytes:
    """Base64 in its one spelling (the spare bits of the last character are zero)."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        data = None
    if data is None or _b64(data) != text:
        raise Malformed("not_canonical", "a value is not base64 as it was written")
    return data
