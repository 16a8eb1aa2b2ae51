"""Who gets into a fleet: over the loopback anybody on this machine, from elsewhere who has a certificate."""

import asyncio
import datetime
import errno
import os
import shlex
import socket
import stat
import subprocess
import sys
import threading
import time

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from distributed import Client, Scheduler, Worker
from distributed.security import Security

from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.nightly.transport import ROLES, is_loopback, make_credentials, transport

FAR = "tcp://10.1.2.3:8786"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    make_credentials(folder)
    return folder


def test_each_part_gets_a_whole_folder_that_only_its_owner_reads(credentials):
    assert sorted(p.name for p in credentials.iterdir()) == sorted(ROLES)
    authorities = {(credentials / role / "ca.pem").read_bytes() for role in ROLES}
    (authority,) = (x509.load_pem_x509_certificate(data) for data in authorities)
    for role in ROLES:
        folder = credentials / role
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        certificate.verify_directly_issued_by(authority)
        key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
        assert certificate.public_key() == key.public_key()
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
        assert 800 < left.days < 830
    assert not list(credentials.rglob("ca.key*"))  # nobody can make another certificate with what is here


def test_keys_are_never_overwritten(credentials, capsys):
    before = {p: p.read_bytes() for p in credentials.rglob("*.pem")}
    assert main(["keygen", "--fleet", str(credentials)]) == 2
    assert f"{credentials}: must not exist yet (it does). Choose another folder; keys are" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in credentials.rglob("*.pem")} == before


def test_keygen_on_a_full_disk_names_the_folder(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write, which knows no name

    monkeypatch.setattr("trtpipe.nightly.transport._write_role", full)
    assert main(["keygen", "--fleet", str(tmp_path / "fleet")]) == 2
    assert f"{tmp_path}/fleet: no space left on the disk. Free some space" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fleet").exists()


def test_a_scheduler_as_keygen_says_it_listens_to_others_by_tls_alone(tmp_path, capsys):
    """Without a dashboard Dask still serves its tables and its workers' logs, on every address."""
    assert main(["keygen", "--fleet", str(tmp_path / "fleet")]) == 0
    (line,) = [said for said in capsys.readouterr().err.splitlines() if said.startswith("scheduler: dask scheduler ")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *shlex.split(line)[3:], "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not any(c.laddr.port == port for c in listening(process.pid)):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)  # its pages come before its address, or with it
        assert {c.laddr.port for c in listening(process.pid) if not is_loopback(f"tcp://{c.laddr.ip}:1")} == {port}
    finally:
        process.terminate()
        process.communicate(timeout=60)


def listening(pid):
    process = psutil.Process(pid)
    sockets = getattr(process, "net_connections", None) or process.connections
    return [c for c in sockets("inet") if c.status == psutil.CONN_LISTEN]


def test_keygen_says_what_to_start_where(tmp_path, capsys):
    assert main(["keygen", "--fleet", str(tmp_path / "fleet")]) == 0
    said = capsys.readouterr().err
    assert f"dask scheduler --protocol tls --tls-ca-file {tmp_path}/fleet/scheduler/ca.pem --tls-cert" in said
    assert f"trtpipe worker tls://SCHEDULER:8786 --tls {tmp_path}/fleet/worker" in said
    assert f"--scheduler tls://SCHEDULER:8786 --tls {tmp_path}/fleet/planner" in said


@pytest.mark.parametrize(
    ("address", "expected"),
    [("tcp://127.0.0.1:8786", True), ("tcp://127.9.9.9:1", True), ("tcp://[::1]:8786", True), ("localhost:8786", True),
     ("inproc://1.2.3.4/5", False), ("tls://127.0.0.1:1", True), (FAR, False), ("tcp://0.0.0.0:8786", False),
     ("tcp://[::]:8786", False), ("tcp://localhost.example.org:8786", False), ("tcp://127.0.0.1.example.org:1", False),
     ("host:8786", False), ("", False), ("tcp://:8786", False), ("ucx://10.0.0.1:1", False)],
)  # fmt: skip
def test_only_this_machine_is_the_loopback(address, expected):
    assert is_loopback(address) is expected


def test_another_machine_takes_certificates_or_a_word(credentials, tmp_path):
    reached = transport(FAR.replace("tcp", "tls"), credentials / "planner", insecure=False, where="--scheduler")
    assert reached.security.require_encryption
    assert reached.note == ""
    assert (
        transport("10.1.2.3:8786", credentials / "worker", insecure=False, where="x").address == "tls://10.1.2.3:8786"
    )
    near = transport("tcp://127.0.0.1:1", None, insecure=False, where="x")
    assert (near.security, near.note, near.host) == (None, "", "127.0.0.1")
    # what is not said Dask takes for tcp, and so do the messages
    assert transport("127.0.0.1:1", None, insecure=False, where="x").address == "tcp://127.0.0.1:1"
    assert transport("10.1.2.3:8786", None, insecure=True, where="x").address == "tcp://10.1.2.3:8786"
    told = transport(FAR, None, insecure=True, where="x")
    unsafe = "the fleet's connections are neither encrypted nor authenticated (--insecure)"
    assert (told.security, told.note, told.host) == (None, unsafe, None)
    (tmp_path / "half").mkdir()
    refused = [
        ((FAR, None, False), r"^--scheduler: a scheduler on another machine must be reached by TLS \(got tcp://10\.1\.2"
         r"\.3:8786 and no --tls\)\. Run `trtpipe keygen --fleet DIR` and give --tls; or --insecure, in a network"),
        (("tls://10.1.2.3:1", None, False), r"^--scheduler: tls://10\.1\.2\.3:1 needs a certificate\. Give --tls DIR"),
        (("tls://10.1.2.3:1", None, True), r"^--scheduler: tls://10\.1\.2\.3:1 needs a certificate\."),
        ((FAR, credentials / "planner", False), r"^--scheduler: must begin with tls:// where --tls is given \(got tcp"),
        ((FAR, credentials / "planner", True), r"^--insecure: must not be given with --tls\. Leave one out\."),
        (("tls://h:1", tmp_path / "half", False), r"^--tls: must be a folder with ca\.pem, cert\.pem and key\.pem "
         r"\(got .*half without ca\.pem\)\. Make one with `trtpipe keygen --fleet DIR`\."),
    ]  # fmt: skip
    for (address, folder, insecure), text in refused:
        with pytest.raises(InputError, match=text):
            transport(address, folder, insecure=insecure, where="--scheduler")


@pytest.mark.parametrize("command", [("nightly", "{job}", "--scheduler", FAR, "-o", "{out}", "--cache", "{out}/c"),
                                     ("worker", FAR, "--cache", "{out}/c")])  # fmt: skip
def test_both_commands_refuse_another_machine_without_certificates(command, tmp_path, capsys):
    (tmp_path / "job.yaml").touch()
    words = [w.format(job=tmp_path / "job.yaml", out=tmp_path) for w in command]
    assert main(words) == 2
    assert "a scheduler on another machine must be reached by TLS" in capsys.readouterr().err


NOT_ADDRESSES = (
    "", "host", "host:", "host:x", "tcp://h", "inproc://x", "inproc://127.0.0.1/1", "ucx://127.0.0.1:1", "ws://h:1",
    "http://h:1", "tcp://:1", "/dev/null:1", "tls://h:99999", "nonsense",
)  # fmt: skip


@pytest.mark.parametrize("address", NOT_ADDRESSES)
def test_what_is_no_address_is_said_to_be_none(address, credentials):
    for folder, insecure in ((None, False), (None, True), (credentials / "worker", False)):
        with pytest.raises(InputError) as error:
            transport(address, folder, insecure=insecure, where="ADDRESS")
        said = f"ADDRESS: must be the address of a Dask scheduler, like tls://host:8786 (got {address})."
        assert str(error.value) == said


def forged(folder, *, days=(-1, 1), authority_days=(-9, 9), key=None, authority=None):
    """A folder of credentials in which something is not as `make_credentials` makes it."""
    make_credentials(folder)
    role, now = folder / "worker", datetime.datetime.now(datetime.timezone.utc)
    own, issuer = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])

    def certificate(public, ends, ca):
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(public)
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now + datetime.timedelta(ends[0]))
        made = made.not_valid_after(now + datetime.timedelta(ends[1]))
        return made.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)

    pem = Encoding.PEM
    ca = certificate(issuer.public_key(), authority_days, True).sign(issuer, hashes.SHA256())
    (role / "ca.pem").write_bytes(ca.public_bytes(pem))
    leaf = certificate(own.public_key(), days, False).sign(authority or issuer, hashes.SHA256())
    (role / "cert.pem").write_bytes(leaf.public_bytes(pem))
    private = (key or own).private_bytes(pem, PrivateFormat.PKCS8, NoEncryption())
    (role / "key.pem").write_bytes(private)
    return role


def test_credentials_that_cannot_work_are_found_before_anyone_is_asked(tmp_path):
    other = ec.generate_private_key(ec.SECP256R1())
    cases = {
        "ended authority": ({"authority_days": (-9, -1)}, "ca.pem must be in force (it is from "),
        "later authority": ({"authority_days": (1, 9)}, "ca.pem must be in force (it is from "),
        "expired": ({"days": (-5, -1)}, "cert.pem must be in force (it is from "),
        "future": ({"days": (1, 5)}, "cert.pem must be in force (it is from "),
        "key": (
            {"key": other},
            "key.pem must be the key of cert.pem (it is another). Make new ones for the whole fleet",
        ),
        "authority": ({"authority": other}, "cert.pem must be by ca.pem (it is by another). Make new ones for the"),
        "good": ({}, ""),
    }
    for name, (how, said) in cases.items():
        folder = forged(tmp_path / name, **how)
        if not said:
            assert transport("tls://h:1", folder, insecure=False, where="x").security is not None
            continue
        with pytest.raises(InputError) as error:
            transport("tls://h:1", folder, insecure=False, where="x")
        assert said in str(error.value)
        assert str(error.value).startswith(f"--tls: {folder}")
    for file in ("ca.pem", "cert.pem", "key.pem"):
        folder = forged(tmp_path / f"damaged-{file}")
        (folder / file).write_text("garbage")
        with pytest.raises(InputError, match=r"must hold certificates and a key in PEM \(got: .*\)\. Make new ones"):
            transport("tls://h:1", folder, insecure=False, where="x")


def test_a_worker_of_another_fleet_ends_and_says_why(credentials, tmp_path, capsys, monkeypatch):
    """Real Dask: a Worker by itself would try for ever. One without TLS is told of it too."""
    make_credentials(tmp_path / "others")
    security = transport("tls://127.0.0.1:1", credentials / "scheduler", insecure=False, where="x").security
    listens, ends = threading.Event(), threading.Event()
    address = []

    def run():
        async def live():
            async with Scheduler(
                host="127.0.0.1", port=0, protocol="tls", security=security, dashboard=False,
                dashboard_address="127.0.0.1:0",
            ) as scheduler:  # fmt: skip
                address.append(scheduler.address)
                listens.set()
                while not ends.is_set():
                    await asyncio.sleep(0.05)

        asyncio.run(live())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listens.wait(60)
        cache = ["--cache", str(tmp_path / "cache")]
        assert main(["worker", address[0], "--tls", str(tmp_path / "others" / "worker"), *cache]) == 3
        said = capsys.readouterr().err
        assert f"ADDRESS: no Dask scheduler answers ({address[0]}: " in said
        assert "One side does not take the other's certificate: the folders of the scheduler" in said
        assert main(["worker", address[0].replace("tls", "tcp"), *cache]) == 3
        said = capsys.readouterr().err
        assert "Where the scheduler uses TLS, give its tls:// address and --tls." in said
    finally:
        ends.set()
        thread.join(60)


def test_certificates_are_for_a_scheduler(tmp_path, capsys):
    assert main(["nightly", str(tmp_path), "--insecure"]) == 2
    assert "--tls and --insecure must be given with --scheduler." in capsys.readouterr().err


def test_a_scheduler_lets_in_who_has_a_certificate_of_its_authority_and_nobody_else(credentials, tmp_path):
    """Real Dask: clients and workers with the fleet's certificates, with another fleet's, with none, without TLS."""
    make_credentials(tmp_path / "others")

    def of(folder, role):
        return transport("tls://127.0.0.1:1", folder / role, insecure=False, where="x").security

    ca = str(credentials / "worker" / "ca.pem")
    strangers = {
        "another authority": of(tmp_path / "others", "planner"),
        "no certificate": Security(require_encryption=True, tls_ca_file=ca),
        "no TLS": None,
    }

    async def live():
        refused = {}
        async with Scheduler(
            host="127.0.0.1", port=0, protocol="tls", security=of(credentials, "scheduler"), dashboard=False,
            dashboard_address="127.0.0.1:0",
        ) as scheduler:  # fmt: skip
            assert scheduler.address.startswith("tls://")
            async with Worker(
                scheduler.address, security=of(credentials, "worker"), nthreads=1, dashboard_address="127.0.0.1:0"
            ) as worker:
                assert worker.address.startswith("tls://")
                places = {"scheduler": scheduler.address, "worker": worker.address}
                async with Client(scheduler.address, security=of(credentials, "planner"), asynchronous=True) as client:
                    assert await client.submit(sum, [1, 2]) == 3
                for name, security in strangers.items():
                    for place, address in places.items():
                        target = address if security is not None else address.replace("tls://", "tcp://")
                        refused[name, place] = await said_no(target, security)
        return refused

    refused = asyncio.run(live())
    assert refused == {(name, place): True for name in strangers for place in ("scheduler", "worker")}


async def said_no(address, security):
    """Whether nothing can be asked there."""
    from distributed.core import rpc

    arguments = {} if security is None else security.get_connection_args("client")
    try:
        async with rpc(address, timeout=2, connection_args=arguments) as there:
            await asyncio.wait_for(there.identity(), 4)
    except (OSError, TypeError, ValueError, asyncio.TimeoutError):
        return True
    return False


def test_a_plain_connection_to_a_worker_on_the_loopback_comes_from_this_machine_alone(monkeypatch, tmp_path):
    """Without certificates a worker listens on the loopback, whatever other addresses its machine has."""
    from trtpipe.nightly import fleet_worker

    made = []

    class Caught(Exception):
        pass

    def worker(*args, **kwargs):
        made.append((args, kwargs))
        raise Caught

    monkeypatch.setattr("distributed.Worker", worker)
    monkeypatch.setattr(fleet_worker, "CONNECT_S", 0.1)  # somebody is there, and says nothing
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Caught):
            fleet_worker.serve(address, cache=tmp_path)
    ((given, options),) = made
    assert given == (address,)
    assert options["host"] == "127.0.0.1"
    assert options["dashboard_address"] == "127.0.0.1:0"
