"""Encryption at rest: an encrypted queue's messages are stored under AES-256-GCM, with keys from outside."""

from __future__ import annotations

import hashlib
import os
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from settled.queue.errors import Conflict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VARIABLE = "SETTLED_ENCRYPTION_KEY"
SEALED = 4
_head = struct.Struct("<BBI4s12s")  # version, 0, how many messages, which key, nonce
_MAGIC = b"\x04settled\x00"


@lru_cache(maxsize=4)
def _keys(text: str) -> dict[bytes, AESGCM]:
    found = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        try:
            raw = bytes.fromhex(each)
        except ValueError:
            raw = b""
        if len(raw) != 32:
            raise Conflict(f"{VARIABLE}: must be 64 hex digits, or several keys with commas between them")
        found[hashlib.sha256(raw).digest()[:4]] = _cipher(raw)
    return found


def _cipher(raw: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        hint = "pip install 'settled[encryption]'"
        raise Conflict(f"{VARIABLE} is set, and encryption needs the package cryptography: {hint}") from None
    return AESGCM(raw)


def keys() -> dict[bytes, AESGCM]:
    """The keys by their fingerprints: the first one seals, all of them open.

    Without a key in the environment nothing of the extra `encryption` is imported.
    """
    return _keys(os.environ.get(VARIABLE, ""))


def check(queue: str) -> None:
    """Refuse to work on an encrypted queue without a key."""
    if not keys():
        raise Conflict(f"queue {queue!r} is encrypted: set {VARIABLE} to 64 hex digits where it is used")


def seal(body: bytes, n: int) -> bytes:
    """A segment's body, sealed; how many messages it has can still be seen."""
    name, key = next(iter(keys().items()))
    nonce = os.urandom(12)
    head = _head.pack(SEALED, 0, n, name, nonce)
    return head + key.encrypt(nonce, body, head)


def unseal(raw: bytes) -> bytes:
    """The body as it was sealed."""
    head = raw[: _head.size]
    _, _, _, name, nonce = _head.unpack(head)
    key = keys().get(name)
    if key is None:
        raise Conflict(f"a message was encrypted under key {name.hex()}, which is not in {VARIABLE}")
    from cryptography.exceptions import InvalidTag

    try:
        return key.decrypt(nonce, raw[_head.size :], head)
    except InvalidTag:
        raise Conflict(f"a message under key {name.hex()} was changed in the database") from None


def seal_value(value: bytes) -> bytes:
    """A payload or headers that are stored by themselves, sealed; nothing stays nothing."""
    return _MAGIC + seal(value, 0) if value else value


def open_value(value: bytes) -> bytes:
    """What `seal_value` was given; what never was sealed comes back as it is. Conflict without its key."""
    if not value.startswith(_MAGIC):
        return value
    try:
        return unseal(value[len(_MAGIC) :])
    except struct.error:
        return value


def unseal_value(value: bytes) -> bytes:
    """What `seal_value` was given; what cannot be opened, or never was sealed, comes back as it is."""
    try:
        return open_value(value)
    except Conflict:
        return value
