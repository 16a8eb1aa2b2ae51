"""Ed25519 signatures of a bundle's manifest, and the policy of a device that has a key.

The manifest holds the SHA-256 of every other file, so signing its bytes signs the bundle. `manifest.sig` is the raw 64
bytes of RFC 8032; keys are PEM (PKCS #8 and SubjectPublicKeyInfo), so that `openssl pkeyutl -verify -rawin` agrees.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from calib.files import read_at_most
from trtpipe.errors import InputError
from trtpipe.outputs import naming, write_new

#: Where a device keeps the public keys it trusts, unless this variable names another file.
KEY_VARIABLE = "TRTPIPE_PUBLIC_KEY"
DEVICE_KEYS = Path("/etc/trtpipe/trusted.pub")

#: Several keys may stand in one file; a longer one is no file of keys or certificates.
MOST_KEY_BYTES = 1 << 20

_PEM_BLOCK = re.compile(rb"-----BEGIN PUBLIC KEY-----(?:(?!-----BEGIN).)*?-----END PUBLIC KEY-----", re.DOTALL)
#: What is left of a key whose block is damaged, or of something else in PEM: a marker, whole or not, or the first bytes
#: of every Ed25519 key in Base64. Other text beside the blocks is a comment (RFC 7468).
_REMAINS = re.compile(rb"-----\s*(?:BEGIN|END)\b|\b(?:BEGIN|END)\b.*\bKEY\b|MCowBQYDK2Vw")


def generate_key(path: Path) -> Path:
    """Write a new private key to `path`, mode 0600, and its public key to `<path>.pub`; return the latter.

    Raises:
        InputError: either file exists already: a key is never overwritten.
    """
    public_path = path.with_name(path.name + ".pub")
    for taken in (path, public_path):
        if os.path.lexists(taken):
            raise InputError(f"{taken}: must not exist yet (it does). Choose another name; keys are never overwritten.")
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    written: list[Path] = []
    try:
        for target, mode, content in ((path, 0o600, private_pem(key)), (public_path, 0o644, public)):
            with naming(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_new(target, content, mode=mode)
                written.append(target)
    except OSError:  # half a pair is none, and would be refused to be overwritten
        for target in written:
            target.unlink(missing_ok=True)
        raise
    return public_path


def private_pem(key: PrivateKeyTypes) -> bytes:
    """A private key as it is kept: PEM, PKCS #8, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass(frozen=True)
class _Signer:
    """A private key that signs, in other processes too, and that no `repr` shows."""

    raw: bytes = field(repr=False)

    def __call__(self, data: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.raw).sign(data)


def signer(path: Path) -> Callable[[bytes], bytes]:
    """A function from a manifest's bytes to their signature by the private key in `path`, which is read now.

    Raises:
        InputError: unreadable, or no unencrypted Ed25519 key.
    """
    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: is not an unencrypted Ed25519 private key in PEM. Make one: trtpipe keygen.")
    return _Signer(key.private_bytes_raw())


def key_id(key: Ed25519PublicKey) -> str:
    """The first 16 hex digits of the SHA-256 of the raw public key: what messages call it."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def load_public_keys(path: Path) -> tuple[Ed25519PublicKey, ...]:
    """Every public key in the PEM file `path`, one or more.

    Raises:
        InputError: unreadable, no key in it, one that is damaged, or one that is not Ed25519.
    """
    data = _read(path)
    blocks = _PEM_BLOCK.findall(data)
    beside = _PEM_BLOCK.sub(lambda block: b"\n" * block[0].count(b"\n"), data)  # lines keep their numbers
    if blocks and (left := _REMAINS.search(beside)) is not None:
        raise InputError(
            f"{path}: must hold whole public keys alone (got {len(blocks)}, and a part of something else in line "
            f"{beside[: left.start()].count(10) + 1}). Repair that key, or take it out of the file."
        )
    keys = []
    for block in blocks:
        try:
            key = load_pem_public_key(block)
        except ValueError:
            raise InputError(
                f"{path}: holds a block that is no public key in PEM. Give the .pub file of trtpipe keygen."
            ) from None
        if not isinstance(key, Ed25519PublicKey):
            raise InputError(f"{path}: holds a public key that is not Ed25519. Give the .pub file of trtpipe keygen.")
        keys.append(key)
    if not keys:
        raise InputError(f"{path}: holds no public key in PEM. Give the .pub file of trtpipe keygen.")
    return tuple(keys)


def trusted_key(given: str | os.PathLike[str] | None) -> Path | None:
    """The file of trusted keys: that given, else this device's, $TRTPIPE_PUBLIC_KEY or /etc/trtpipe/trusted.pub if it
    exists."""
    if given is not None:
        return Path(given)
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return Path(named)
    return DEVICE_KEYS if os.path.lexists(DEVICE_KEYS) else None


def check_signature(where: Path, manifest: bytes, signature: bytes | None, key: Path | None) -> str:
    """One line about a bundle's signature, which is by a key in `key` if that is given.

    Args:
        where: the bundle, for messages.
        manifest: the bytes of its manifest.json.
        signature: the bytes of its manifest.sig, or None.
        key: file of trusted public keys, or None.

    Raises:
        InputError: a key is given and the bundle is unsigned or its signature is by none of them.
    """
    if key is None:
        return "signed, not checked: this device has no key" if signature else "unsigned"
    trusted = load_public_keys(key)
    names = ", ".join(key_id(k) for k in trusted)
    if signature is None:
        raise InputError(
            f"{where}: must be signed by a key in {key} (got no manifest.sig). "
            "Build it with --sign, or get it from its publisher."
        )
    for public in trusted:
        try:
            public.verify(signature, manifest)
        except InvalidSignature:
            continue
        return f"signed by key {key_id(public)}"
    raise InputError(
        f"{where}: must be signed by key {names} (its signature does not fit). Do not use it: it was changed, or comes "
        "from someone else."
    )


def checking(where: Path, key: Path | None) -> Callable[[bytes, bytes | None], bool]:
    """`check_signature` for the bundle `where` and `key`, as `read_bundle` calls it; verified is what a key was for."""

    def verified(manifest: bytes, signature: bytes | None) -> bool:
        check_signature(where, manifest, signature, key)
        return key is not None

    return verified


def _read(path: Path) -> bytes:
    try:
        return read_at_most(path, MOST_KEY_BYTES)
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: must be a readable key file (got: {got}). Give its path.") from None
