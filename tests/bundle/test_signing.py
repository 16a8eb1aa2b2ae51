"""Signatures: made with cryptography, checked by OpenSSL too, and every flipped byte of a signed bundle is refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import shipping

from trtpipe.bundle import signing
from trtpipe.errors import InputError
from trtpipe.runtime import compatibility as verify


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "key", signing.generate_key(tmp_path / "key")


def test_keys_are_their_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    public = signing.generate_key(tmp_path / "deep" / "key")
    private = tmp_path / "deep" / "key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert public == tmp_path / "deep" / "key.pub"
    before = private.read_bytes()
    with pytest.raises(
        InputError, match=r"key: must not exist yet \(it does\). Choose another name; keys are never over"
    ):
        signing.generate_key(private)
    private.unlink()
    with pytest.raises(InputError, match=r"key.pub: must not exist yet"):
        signing.generate_key(private)
    assert b"PRIVATE" in before
    assert b"PRIVATE" not in public.read_bytes()


@pytest.mark.parametrize("step", ["open", "fdopen"])
def test_when_the_public_key_cannot_be_written_the_private_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(os, step)
    calls: list[object] = []

    def full(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/key\.pub'"):
        signing.generate_key(tmp_path / "key")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert signing.generate_key(tmp_path / "key").exists()


def test_a_signed_bundle(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    shipping.bundle(tmp_path / "c", sign=signing.signer(private))
    bundle, line = verify.admit(tmp_path / "c", public)
    assert line == f"signed by key {signing.key_id(signing.load_public_keys(public)[0])}"
    assert bundle.signature is not None
    assert len(bundle.signature) == 64
    assert verify.admit(tmp_path / "c", None)[1] == "signed, not checked: this device has no key"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program here")
def test_openssl_agrees(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    path = shipping.bundle(tmp_path / "c", sign=signing.signer(private)).path
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(public)]
    command += ["-in", str(path / "manifest.json"), "-sigfile", str(path / "manifest.sig")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_a_device_may_trust_several_keys(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    other = signing.generate_key(tmp_path / "other")
    both = tmp_path / "trusted.pub"
    both.write_bytes(b"# comments are no keys\n" + other.read_bytes() + keys[1].read_bytes())
    shipping.bundle(tmp_path / "c", sign=signing.signer(keys[0]))
    assert verify.admit(tmp_path / "c", both)[1].startswith("signed by key ")
    with pytest.raises(InputError, match=r"must be signed by key [0-9a-f]{16} \(its signature does not fit\)"):
        verify.admit(tmp_path / "c", other)


def test_unsigned_is_refused_where_there_is_a_key(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    shipping.bundle(tmp_path / "c")
    assert verify.admit(tmp_path / "c", None)[1] == "unsigned"
    with pytest.raises(
        InputError, match=r"c: must be signed by a key in .*key.pub \(got no manifest.sig\). Build it with"
    ):
        verify.admit(tmp_path / "c", keys[1])


def test_a_bundle_re_made_by_someone_else_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """Whole, consistent, with the old signature: only the signature tells."""
    signed = shipping.bundle(tmp_path / "c", sign=signing.signer(keys[0]))
    shipping.bundle(tmp_path / "c", notes=("tampered",), sign=lambda data: signed.signature or b"")
    with pytest.raises(InputError, match="its signature does not fit"):
        verify.admit(tmp_path / "c", keys[1])


def test_the_signature_comes_before_anything_is_parsed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """A manifest that is no JSON, golden data that are none: a stranger's bundle is refused for being a stranger's."""
    path = shipping.bundle(tmp_path / "c").path
    (path / "manifest.json").write_bytes(b"{ no JSON")
    with pytest.raises(InputError, match="must be signed by a key in"):
        verify.admit(path, keys[1])
    (path / "manifest.sig").write_bytes(bytes(64))
    with pytest.raises(InputError, match="its signature does not fit"):
        verify.admit(path, keys[1])
    with pytest.raises(InputError, match="must be JSON"):
        verify.admit(path, None)


def test_configured_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(signing.KEY_VARIABLE, "/some/key.pub")
    assert signing.trusted_key(None) == Path("/some/key.pub")
    monkeypatch.delenv(signing.KEY_VARIABLE)
    monkeypatch.setattr(signing, "DEVICE_KEYS", tmp_path / "trusted.pub")
    assert signing.trusted_key(None) is None
    (tmp_path / "trusted.pub").touch()
    assert signing.trusted_key("given.pub") == Path("given.pub")
    assert signing.trusted_key(None) == tmp_path / "trusted.pub"
    with pytest.raises(InputError, match=r"trusted.pub: holds no public key in PEM"):
        signing.load_public_keys(tmp_path / "trusted.pub")


def test_other_keys_are_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    elliptic = ec.generate_private_key(ec.SECP256R1())
    pem = elliptic.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (tmp_path / "ec").write_bytes(pem)
    public = elliptic.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "ec.pub").write_bytes(public)
    (tmp_path / "junk.pub").write_bytes(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    for name in ("ec", "key.pub"):
        with pytest.raises(InputError, match=r"is not an unencrypted Ed25519 private key in PEM"):
            signing.signer(tmp_path / name)
    for name, held in (
        ("ec.pub", "a public key that is not Ed25519"),
        ("junk.pub", "a block that is no public key in PEM"),
    ):
        with pytest.raises(InputError, match=f"holds {held}. Give the .pub file of trtpipe keygen."):
            signing.load_public_keys(tmp_path / name)
    with pytest.raises(InputError, match=r"gone: must be a readable key file \(got: No such file or directory\)"):
        signing.signer(tmp_path / "gone")
    assert "PRIVATE" not in repr(signing.signer(tmp_path / "key"))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "damage",
    [
        lambda pem: pem.replace(b"-----BEGIN PUBLIC KEY-----", b"----BEGIN PUBLIC KEY-----"),
        lambda pem: pem.replace(b"BEGIN PUBLIC", b"BEGIN PUBLC"),
        lambda pem: pem.replace(b"-----END PUBLIC KEY-----\n", b""),
        lambda pem: pem.replace(b"-----BEGIN PUBLIC KEY-----\n", b""),
        lambda pem: pem.splitlines(True)[1],
        lambda pem: pem[:-20],
        lambda pem: pem[15:],
        lambda pem: pem.replace(b"PUBLIC KEY", b"CERTIFICATE"),
    ],
)
def test_no_key_of_several_is_dropped(which: int, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    pems = []
    for name in ("one", "two", "three"):
        pems.append(signing.generate_key(tmp_path / name).read_bytes())
    several = tmp_path / "several.pub"
    several.write_bytes(b"# The team's keys, to the end of June: then a new key\n" + b"\n-- the next --\n".join(pems))
    assert len(signing.load_public_keys(several)) == 3
    pems[which] = damage(pems[which])
    several.write_bytes(b"# The team's keys\n" + b"\n-- the next --\n".join(pems))
    with pytest.raises(InputError) as caught:
        signing.load_public_keys(several)
    line = 2 + 5 * which
    got = re.search(
        r"several.pub: must hold whole public keys alone \(got 2, and a part of something else in line (\d+)\)\. "
        r"Repair that key, or take it out of the file\.$",
        str(caught.value),
    )
    assert got is not None
    assert line <= int(got[1]) <= line + 2


def test_every_flipped_byte_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """2,000 single-byte flips drawn over all files of a signed bundle, each byte of the small ones among them."""
    signed = shipping.bundle(tmp_path / "c", sign=signing.signer(keys[0]), extra={"report.html": b"<p>fine</p>"})
    contents = {p: p.read_bytes() for p in sorted(signed.path.iterdir())}
    assert {p.name for p in contents} >= {"manifest.json", "manifest.sig", "model.onnx", "golden.safetensors"}
    random = np.random.default_rng(0)
    small = [(p, i) for p, d in contents.items() if len(d) < 100 for i in range(len(d))]
    others = [(p, i) for p, d in contents.items() if len(d) >= 100 for i in range(len(d))]
    drawn = small + [others[i] for i in random.permutation(len(others))[: 2000 - len(small)]]
    assert {p for p, _ in drawn} == set(contents)
    assert len(set(drawn)) == 2000
    for path, at in drawn:
        damaged = bytearray(contents[path])
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            verify.admit(signed.path, keys[1])
        path.write_bytes(contents[path])
    verify.admit(signed.path, keys[1])
