"""How the parts of a fleet reach each other: TLS with certificates on both sides, or the loopback."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trtpipe.errors import InputError

if TYPE_CHECKING:
    from distributed.security import Security

#: The folders that `make_credentials` writes, one for each part of a fleet.
ROLES = ("scheduler", "worker", "planner")
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
#: How long certificates hold.
VALID_DAYS = 825
INSECURE = "the fleet's connections are neither encrypted nor authenticated (--insecure)"


@dataclass(frozen=True)
class Transport:
    """An address as Dask takes it, what it authenticates with (None: nothing), and a note for the report."""

    address: str
    security: Security | None
    note: str = ""

    @property
    def host(self) -> str | None:
        """Where a worker listens: without certificates on the loopback alone, unless that is not where it is."""
        return "127.0.0.1" if self.security is None and is_loopback(self.address) else None


def transport(address: str, credentials: Path | None, *, insecure: bool, where: str) -> Transport:
    """How to reach the scheduler at `address`.

    Args:
        address: like tls://host:8786; without a scheme TLS is meant where there are credentials.
        credentials: a folder with ca.pem, cert.pem and key.pem, of `make_credentials`.
        insecure: go without them to another machine.
        where: names the address in messages.

    Raises:
        InputError: the scheduler is on another machine and there are no credentials, or they are not whole.
    """
    if credentials is not None:
        if insecure:
            raise InputError("--insecure: must not be given with --tls. Leave one out.")
        if address.startswith("tcp://"):
            raise InputError(f"{where}: must begin with tls:// where --tls is given (got {address}).")
        return Transport(address if "://" in address else f"tls://{address}", _security(credentials))
    if address.startswith("tls://"):
        raise InputError(
            f"{where}: {address} needs a certificate. Give --tls DIR with a folder of `trtpipe keygen --fleet`."
        )
    if is_loopback(address):
        return Transport(address, None)
    if not insecure:
        raise InputError(
            f"{where}: a scheduler on another machine must be reached by TLS (got {address} and no --tls). "
            "Run `trtpipe keygen --fleet DIR` and give --tls; or --insecure, in a network where everyone may run code "
            "on the fleet's machines."
        )
    return Transport(address, None, INSECURE)


def is_loopback(address: str) -> bool:
    """Whether only this machine can be at an address of Dask's; of names only `localhost` is."""
    host = urlsplit(address if "://" in address else f"tcp://{address}").hostname or ""
    if address.startswith("inproc://") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _security(folder: Path) -> Security:
    from distributed.security import Security

    for name in (AUTHORITY, CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise InputError(
                f"--tls: must be a folder with {AUTHORITY}, {CERTIFICATE} and {KEY} (got {folder} without {name}). "
                "Make one with `trtpipe keygen --fleet DIR`."
            )
    certificate, key = str(folder / CERTIFICATE), str(folder / KEY)
    roles = {f"tls_{role}_{what}": path for role in ("scheduler", "worker", "client")
             for what, path in (("cert", certificate), ("key", key))}  # fmt: skip
    return Security(require_encryption=True, tls_ca_file=str(folder / AUTHORITY), **roles)


def make_credentials(folder: Path) -> datetime.datetime:
    """A new authority and a certificate by it for each of `ROLES`, each in a folder of its own that is complete.

    The authority's key is not kept: who wants another certificate makes all of them anew.

    Args:
        folder: it is made; private keys in it are for their owner alone.

    Returns:
        When the certificates end, UTC.

    Raises:
        InputError: the folder exists already: a key is never overwritten.
    """
    if os.path.lexists(folder):
        raise InputError(f"{folder}: must not exist yet (it does). Choose another folder; keys are never overwritten.")
    now = datetime.datetime.now(datetime.timezone.utc)
    until = now + datetime.timedelta(days=VALID_DAYS)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trtpipe fleet")])
    authority = (
        _certificate(name, name, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, mode=0o700)
    try:
        for role in ROLES:
            _write_role(folder / role, role, name, key, authority, now, until)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return until


def _write_role(
    folder: Path,
    role: str,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    now: datetime.datetime,
    until: datetime.datetime,
) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"trtpipe fleet {role}")])
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # workers listen and connect
    certificate = (
        _certificate(subject, issuer, own.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700)
    private = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = serialization.Encoding.PEM
    _write(folder / KEY, private, 0o600)
    _write(folder / CERTIFICATE, certificate.public_bytes(pem), 0o644)
    _write(folder / AUTHORITY, authority.public_bytes(pem), 0o644)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of devices lag
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
