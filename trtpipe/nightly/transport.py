"""How the parts of a fleet reach each other: TLS with certificates on both sides, or the loopback."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from calib.files import read_at_most
from trtpipe.bundle.signing import MOST_KEY_BYTES, private_pem
from trtpipe.errors import InputError, MissingError, first_line
from trtpipe.outputs import naming, write_new

if TYPE_CHECKING:
    from distributed.security import Security

#: The folders that `make_credentials` writes, one for each part of a fleet.
ROLES = ("scheduler", "worker", "planner")
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
#: How Dask's scheduler is started whose pages, plain HTTP without a login, only its own machine can see.
WITHOUT_PAGES = ("--no-dashboard", "--dashboard-address", "127.0.0.1:0")
#: How long certificates hold.
VALID_DAYS = 825
#: How long a scheduler has to answer the first time.
CONNECT_S = 10.0
#: In what Dask and OpenSSL say when a certificate is refused, or when the other side is no TLS.
_TLS_WORDS = ("certificate", "CERTIFICATE", "SSL", "TLS", "security settings", "UNKNOWN_CA")
_OBJECT = re.compile(r"\bin <[^<>]*>: ")
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
        InputError: the address is none, the scheduler is on another machine and there are no credentials, they are not
            whole, or `insecure` or an address of tcp:// contradicts them.
    """
    _require_address(address, where)
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
    plain = address if "://" in address else f"tcp://{address}"  # as Dask takes it
    if is_loopback(address):
        return Transport(plain, None)
    if not insecure:
        raise InputError(
            f"{where}: a scheduler on another machine must be reached by TLS (got {address} and no --tls). "
            "Run `trtpipe keygen --fleet DIR` and give --tls; or --insecure, in a network where everyone may run code "
            "on the fleet's machines."
        )
    return Transport(plain, None, INSECURE)


def _require_address(address: str, where: str) -> None:
    try:
        parts = urlsplit(address if "://" in address else f"tls://{address}")
        good = parts.scheme in ("tcp", "tls") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise InputError(f"{where}: must be the address of a Dask scheduler, like tls://host:8786 (got {address}).")


def is_refusal(address: str, error: BaseException) -> bool:
    """Whether there is somebody at `address` with whom no connection can be made: of TLS and no TLS, or of another
    authority."""
    if address.startswith("tcp://"):
        return "reset by peer" in _said(error)
    return any(word in _said(error) for word in _TLS_WORDS)


def unreachable(address: str, error: BaseException, where: str) -> MissingError:
    """That there is no scheduler at `address`, or one that is no partner."""
    if not is_refusal(address, error):
        step = "Run: dask scheduler"
    elif address.startswith("tcp://"):
        step = "Where the scheduler uses TLS, give its tls:// address and --tls."
    else:
        step = (
            "One side does not take the other's certificate: the folders of the scheduler, the workers and the planner "
            "must be of one `trtpipe keygen --fleet`, and the clocks right."
        )
    return MissingError(f"{where}: no Dask scheduler answers ({address}: {_said(error)}). {step}")


def _said(error: BaseException) -> str:
    """The first line of the error and, where Dask only says that time is over, of what made it try again.

    Dask also names its connector or connection: `in <distributed.comm.tcp.TLSConnector object at 0x7f>: `.
    """
    texts = [_OBJECT.sub("", first_line(e)) for e in (error, error.__cause__) if e is not None and str(e)]
    return ": ".join(dict.fromkeys(texts)) or type(error).__name__


def is_loopback(address: str) -> bool:
    """Whether only this machine can be at an address of Dask's; of names only `localhost` is."""
    host = urlsplit(address if "://" in address else f"tcp://{address}").hostname or ""
    if host == "localhost":
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
    _require_usable(folder)
    certificate, key = str(folder / CERTIFICATE), str(folder / KEY)
    roles = {f"tls_{role}_{what}": path for role in ("scheduler", "worker", "client")
             for what, path in (("cert", certificate), ("key", key))}  # fmt: skip
    return Security(require_encryption=True, tls_ca_file=str(folder / AUTHORITY), **roles)


def _require_usable(folder: Path) -> None:
    """Find out before anyone is asked whether both certificates are in force, the own one is of its authority
    and fits its key.

    Raises:
        InputError: they are not; OpenSSL would say of the first two only that the connection ended.
    """
    again = "Make new ones for the whole fleet with `trtpipe keygen --fleet DIR`."
    try:
        authority, own = (
            x509.load_pem_x509_certificate(read_at_most(folder / name, MOST_KEY_BYTES))
            for name in (AUTHORITY, CERTIFICATE)
        )
        private = serialization.load_pem_private_key(read_at_most(folder / KEY, MOST_KEY_BYTES), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"--tls: {folder} must hold certificates and a key in PEM (got: {error}). {again}") from None
    now = datetime.datetime.now(datetime.timezone.utc)
    for name, one in ((AUTHORITY, authority), (CERTIFICATE, own)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            span = f"from {one.not_valid_before_utc:%Y-%m-%d} to {one.not_valid_after_utc:%Y-%m-%d}"
            raise InputError(f"--tls: {folder / name} must be in force (it is {span}). {again}")
    plain = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*plain) != own.public_key().public_bytes(*plain):
        raise InputError(f"--tls: {folder / KEY} must be the key of {CERTIFICATE} (it is another). {again}")
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(f"--tls: {folder / CERTIFICATE} must be by {AUTHORITY} (it is by another). {again}") from None


def make_credentials(folder: Path) -> datetime.datetime:
    """A new authority and a certificate by it for each of `ROLES`, each in a folder of its own that is complete.

    The authority's key is not kept: who wants another certificate makes all of them anew.

    Args:
        folder: it is made; private keys in it are for their owner alone.

    Returns:
        When the certificates end, UTC.

    Raises:
        InputError: the folder exists already: a key is never overwritten.
        OSError: it cannot be written; its filename is `folder`.
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
    with naming(folder):
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
    pem = serialization.Encoding.PEM
    write_new(folder / KEY, private_pem(own), mode=0o600)
    write_new(folder / CERTIFICATE, certificate.public_bytes(pem), mode=0o644)
    write_new(folder / AUTHORITY, authority.public_bytes(pem), mode=0o644)


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
