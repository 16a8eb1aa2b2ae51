"""A real scheduler and real worker processes on this machine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import get_args

import nights
import pytest
from nights import fingerprints, night, outcomes

from trtpipe.cli.main import main
from trtpipe.errors import MissingError
from trtpipe.job.load import read_job
from trtpipe.nightly import fleet as fleet_module
from trtpipe.nightly.fleet import distinct_resources, needs
from trtpipe.nightly.fleet_worker import JobsOfWorker, announced
from trtpipe.nightly.task import BuildTask, FinishTask, task_from_plain, task_to_plain
from trtpipe.nightly.transport import transport
from trtpipe.pipeline import validate
from trtpipe.pipeline.cache.environment import Machine
from trtpipe.pipeline.cache.store import Cache
from trtpipe.routes.options import FRONTENDS
from trtpipe.runtime.device import Device
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver
from trtpipe.values import Target


def test_a_worker_announces_what_it_is():
    orin = Device("linux", "aarch64", {"tensorrt": "10.3.0"}, "8.7", "Orin", True)
    assert announced(orin, ("jetson-orin",), torch=False) == (
        "cpu", "aarch64", "jetson-orin", "gpu", "sm87", "jetson", "tensorrt", "tensorrt=10", "tensorrt=10.3",
        "tensorrt=10.3.0",
    )  # fmt: skip
    assert announced(Device("linux", "x86_64"), (), torch=True) == ("cpu", "x86_64", "torch")


def test_what_follows_from_the_rest_is_not_shown():
    words = frozenset({"cpu", "tensorrt", "tensorrt=10", "tensorrt=10.3", "tensorrt=10.3.0", "orin"})
    assert distinct_resources(words) == ("cpu", "orin", "tensorrt=10.3.0")


def test_what_a_job_needs(tmp_path):
    jobs = nights.make_world(tmp_path)
    job = read_job(nights.write_job(jobs, "a", "build: {target: tensorrt}\nworker: [sm87, tensorrt=10.3]\n"))
    assert needs(job) == {"torch", "tensorrt", "sm87", "tensorrt=10.3", "gpu"}
    job = read_job(jobs / "a.yaml", ["build.target=tensorrt_rtx"])
    assert "gpu" not in needs(job)
    job = read_job(jobs / "a.yaml", ["build.target=tensorrt_rtx", "check.require=engine"])
    assert "gpu" in needs(job)


@pytest.mark.parametrize("build", [
    *(f"target: {target}" for target in get_args(Target)),
    *(f"target: {t}, {of}" for t in FRONTENDS for of in ("route: torch_tensorrt", "refit: all", "strip_plan: true")),
    "target: tensorrt, route: torch2trt",
])  # fmt: skip
def test_a_worker_without_a_gpu_gets_no_job_that_validate_refuses_without_one(build, tmp_path, monkeypatch):
    """A night with a scheduler validates nothing itself."""
    monkeypatch.setattr(driver, "probe", lambda: Driver(problem="no library"))
    job = read_job(nights.write_job(nights.make_world(tmp_path), "a", f"build: {{{build}}}\n"))
    assert ("gpu" in needs(job)) == any(validate._gpu_absent(job))


@pytest.mark.parametrize(
    ("target", "versions", "release"),
    [
        ("tensorrt", {"tensorrt": "8.6.1"}, "8.6.1"), ("tensorrt", {"tensorrt-cu12-bindings": "10.3.0"}, "10.3.0"),
        ("tensorrt_rtx", {"tensorrt": "8.6.1", "tensorrt-rtx": "1.7.1.116"}, ""), ("onnxruntime", {}, ""),
    ],
)  # fmt: skip
def test_a_kit_is_written_for_the_tensorrt_of_the_worker_that_finishes_it(
    target, versions, release, tmp_path, monkeypatch
):
    """8.6 parses less than what is written for later ones; the planner's own TensorRT says nothing of it."""
    job = read_job(nights.write_job(nights.make_world(tmp_path), "a", f"build: {{target: {target}}}\n"))
    machine = Machine(versions, "3.11", "Linux aarch64", "s", "12.6", "Orin 8.7")
    announced_there = frozenset({"gpu", target, *job.worker})
    made = object.__new__(fleet_module.Fleet)
    made.members = (fleet_module.Member("tcp://a:1", "orin", announced_there, machine),)
    made._by_kit = {}
    monkeypatch.setattr(fleet_module.Fleet, "_here", replace(machine, versions={"tensorrt": "11.0.0"}))
    made.machine_for(job)
    written = []

    class Writing:
        def __init__(self, *_):
            pass

        def run(self, tasks, watcher, finished):
            written.extend(tasks)

    monkeypatch.setattr(fleet_module, "Local", Writing)
    made._make_kits([BuildTask("a", "a.yaml", "k", str(tmp_path), "cache", job=job)], {}, None, None)
    (kit,) = written
    assert kit.release == release
    assert task_from_plain(task_to_plain(kit)).release == release


def test_a_scheduler_that_is_not_there_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trtpipe.nightly.fleet.CONNECT_S", 1.0)
    nights.write_job(nights.make_world(tmp_path), "a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--scheduler", address]
        assert main(["nightly", str(tmp_path / "a.yaml"), *arguments]) == 3
    assert f"--scheduler: no Dask scheduler answers ({address}: " in capsys.readouterr().err


def test_a_scheduler_without_workers_is_said(monkeypatch):
    """Workers of Dask that know nothing of trtpipe do not answer."""
    closed = []
    client = types.SimpleNamespace(run=lambda *_, **__: {"tcp://a:1": None}, close=lambda: closed.append(True))
    monkeypatch.setattr("distributed.Client", lambda *_, **__: client)
    with pytest.raises(MissingError) as caught:
        fleet_module.Fleet("tcp://127.0.0.1:8786", Cache(Path("cache")))
    assert str(caught.value) == (
        "--scheduler: tcp://127.0.0.1:8786 has no worker of trtpipe. Run on each machine: trtpipe worker "
        "tcp://127.0.0.1:8786"
    )
    assert closed == [True]


class Fleet:
    """A scheduler and workers as processes of their own, with certificates in `credentials` by TLS."""

    def __init__(self, folder, credentials=None):
        self.folder, self.processes, self.credentials = folder, {}, credentials
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"{'tls' if credentials else 'tcp'}://127.0.0.1:{port}"
        command = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
        if credentials is not None:
            files = {"ca-file": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
            command += ["--protocol", "tls", *(f"--tls-{n}={credentials / 'scheduler' / f}" for n, f in files.items())]
        self._start("scheduler", command)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            assert time.monotonic() < deadline, self.log("scheduler")
            time.sleep(0.1)

    def worker(self, name, *tags, path=None):
        options = [option for tag in tags for option in ("--tag", tag)]
        cache = ["--cache", str(self.folder / f"cache-{name}"), "--threads", "1"]
        self._start(name, ["-m", "trtpipe", "worker", *self.told("worker"), "--name", name, *options, *cache], path)

    def told(self, role):
        """The address, and the certificates of a role where there are any, as arguments."""
        return [self.address, *(["--tls", str(self.credentials / role)] if self.credentials else [])]

    def wait(self, count):
        from distributed import Client

        planner = None if self.credentials is None else self.credentials / "planner"
        way = transport(self.address, planner, insecure=False, where="--scheduler")
        with Client(self.address, timeout=60, security=way.security) as client:
            client.wait_for_workers(count, timeout=120)

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def building(self, name):
        """Names of the jobs that a worker's process has begun."""
        log = self.folder / f"cache-{name}" / f"{name}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.removeprefix("== ") for line in lines if line.startswith("== ")]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def close(self):
        for process in reversed(
            list(self.processes.values())
        ):  # a worker whose scheduler is gone looks for it for 30 s
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name, arguments, path=None):
        environment = nights.environment()
        if path is not None:
            environment["PYTHONPATH"] += os.pathsep + str(path)
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, env=environment, cwd=self.folder
            )


def test_a_worker_that_is_stopped_while_its_scheduler_ends_does_too(guarded_fleet):
    """As when a machine shuts down: Dask's own close, once interrupted, waited for itself for ever."""
    for i in range(3):
        guarded_fleet.worker(f"w{i}")
    guarded_fleet.wait(3)
    guarded_fleet.processes["scheduler"].send_signal(signal.SIGTERM)
    for i in range(3):
        time.sleep(0.05)
        guarded_fleet.processes[f"w{i}"].send_signal(signal.SIGTERM)
    ended = [guarded_fleet.processes[f"w{i}"].wait(60) for i in range(3)]
    assert set(ended) <= {0, 130}, [guarded_fleet.log(f"w{i}") for i in range(3)]


@pytest.fixture
def fleet(tmp_path):
    found = Fleet(tmp_path)
    yield found
    found.close()


@pytest.fixture
def guarded_fleet(tmp_path):
    """As docs/nightly.md starts one for several machines."""
    assert main(["keygen", "--fleet", str(tmp_path / "certificates")]) == 0
    found = Fleet(tmp_path, tmp_path / "certificates")
    yield found
    found.close()


def test_a_job_that_takes_its_workers_down_is_given_up(fleet, tmp_path):
    """By trtpipe, which counts its starts, or by Dask, which counts the workers that died with it."""
    from distributed import KilledWorker

    fleet.worker("a", "orin")
    fleet.wait(1)
    found = fleet_module.Fleet(fleet.address, Cache(tmp_path / "cache"))
    ended = []
    sent = found._send(FinishTask("j", "j.yaml", "k", "out", "cache"), frozenset({"orin"}))
    sent.starts = list("abcde")
    found._look({"j": sent}, lambda task, raw: ended.append((task.attempts, raw["error"], raw["exit_code"])))
    died = types.SimpleNamespace(
        status="error", exception=lambda: KilledWorker("j", types.SimpleNamespace(address="tcp://a:1"), 3)
    )
    sent.future = died
    found._take(sent, lambda task, raw: ended.append((task.attempts, raw["error"], raw["exit_code"])))
    found.close()
    lost = tuple(f"worker {n} was lost while it built this" for n in "abcd")
    assert ended == [
        (lost, "j: it took its workers down (4 lost: a, b, c, d).", 4),
        (tuple(f"worker {n} died" for n in "abcde"), "j: every worker that started this job died (a, b, c, d, e).", 4),
    ]


def test_a_stop_that_comes_as_a_job_ends_does_not_stop_its_next_run(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    worker = JobsOfWorker("w", (), tmp_path, 1)
    task = FinishTask("j", "j.yaml", "k", "out", "cache")
    monkeypatch.setattr(worker, "_watched", lambda task, say: worker.stop(["k"]) or {"outcome": "error"})
    for _ in range(2):
        monkeypatch.setattr("trtpipe.nightly.fleet_worker.place", lambda *_, **__: None)
        assert worker.run(task, {}, lambda kind, value: None)["outcome"] == {"outcome": "error"}
        assert worker._stopped == set()
    worker.stop(["k"])  # while nothing runs
    assert worker._stopped == set()
    worker.close()


def test_a_fleet_without_tls_is_said_in_every_report(fleet, tmp_path, monkeypatch, capsys):
    nights.write_job(nights.make_world(tmp_path / "jobs"), "a", "build: {target: onnxruntime}\nworker: [thor]\n")
    fleet.worker("a", "orin")
    fleet.wait(1)
    monkeypatch.setattr("trtpipe.nightly.transport.is_loopback", lambda host: False)
    out = tmp_path / "out"
    asked = ["nightly", str(tmp_path / "jobs"), "-o", str(out), "--cache", str(tmp_path / "cache")]
    assert main([*asked, "--scheduler", fleet.address, "--insecure"]) == 3  # no worker fits the job
    capsys.readouterr()
    for name in ("nightly.txt", "nightly.json", "nightly.html"):
        assert "--insecure" in (out / name).read_text(), name


def test_a_worker_that_was_lost_is_not_named_among_those_that_are_there(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "LOST_S", 0.0)
    fleet.worker("a", "orin")
    fleet.worker("b", "thor")
    fleet.wait(2)
    found = fleet_module.Fleet(fleet.address, Cache(tmp_path / "cache"))
    fleet.kill("a")
    sent = found._send(FinishTask("j", "j.yaml", "k", "out", "cache"), frozenset({"orin"}))
    ended = []
    deadline = time.monotonic() + 120
    while not ended:
        assert time.monotonic() < deadline
        found._look({"j": sent}, lambda task, raw: ended.append(raw))
        time.sleep(0.05)
    found.close()
    assert ended[0]["error"].startswith("j: a worker must announce orin (got b: cpu, ")
    assert " orin" not in ended[0]["error"].partition("(got ")[2]


def test_jobs_land_where_they_match_and_a_killed_workers_job_is_built_elsewhere(guarded_fleet, tmp_path):
    """Three workers, over TLS; one of the two that announce `orin` is killed with -9 while it builds."""
    fleet = guarded_fleet
    jobs = nights.make_world(tmp_path / "jobs", 5)
    for k in range(3):
        nights.write_job(jobs, f"orin{k}", "build: {target: onnxruntime}\nworker: [orin]\n", f"w{k}.safetensors")
    for k in (3, 4):
        nights.write_job(jobs, f"thor{k}", "build: {target: tensorrt_rtx}\nworker: [thor]\n", f"w{k}.safetensors")
    nights.write_job(jobs, "xavier", "build: {target: onnxruntime}\nworker: [xavier]\n")
    fleet.worker("a", "orin")
    fleet.worker("b", "thor")
    fleet.worker("c", "orin")
    fleet.wait(3)
    command = ("nightly", "jobs", "-o", "out", "--cache", "cache", "--json")
    process = nights.start(*command, "--scheduler", *fleet.told("planner"), cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not fleet.building("a"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fleet.kill("a")
    out, err = process.communicate()
    assert process.returncode == 3, err  # xavier
    report = json.loads(out)
    names = {"orin0", "orin1", "orin2", "thor3", "thor4"}
    assert outcomes(report) == dict.fromkeys(names, "built") | {"xavier": "error"}
    by_name = {o["name"]: o for o in report["outcomes"]}
    assert {by_name[n]["where"] for n in ("orin0", "orin1", "orin2")} == {"c"}
    assert {by_name[n]["where"] for n in ("thor3", "thor4")} == {"b"}
    lost = [n for n in names if by_name[n]["attempts"]]
    assert lost == fleet.building("a")[:1]
    assert by_name[lost[0]]["attempts"] == ["worker a was lost while it built this"]
    error = by_name["xavier"]["error"]
    assert error.startswith("xavier: a worker must announce onnxruntime, torch, xavier (got a: cpu, onnxruntime=1.")
    for name in names:
        nights.check_bundle(tmp_path / f"out/{name}")

    # Alone, the same jobs give the same bundles; and what a worker built counts as built for the next night here.
    (jobs / "xavier.yaml").unlink()
    for name in names:
        path = jobs / f"{name}.yaml"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("worker")))
    assert set(outcomes(night(tmp_path)).values()) == {"reused"}
    (tmp_path / "alone").mkdir()
    os.symlink(jobs, tmp_path / "alone/jobs")
    alone = night(tmp_path / "alone", "--workers", "1", jobs=("jobs/orin0.yaml", "jobs/thor3.yaml"))
    assert fingerprints(alone) == {n: by_name[n]["fingerprint"] for n in ("orin0", "thor3")}
    for name in ("orin0", "thor3"):
        one, other = (nights.check_bundle(tmp_path / w / name).manifest.files for w in ("out", "alone/out"))
        for file in ("model.onnx", "golden.safetensors"):  # TensorRT-RTX's engines differ from build to build
            assert one[file] == other[file]


@pytest.mark.acceptance
def test_interrupted_the_fleet_stops_too(fleet, tmp_path):
    jobs = nights.make_world(tmp_path / "jobs", 1)
    (jobs / "net.py").write_text("import time\n" + nights.NET.replace("def net():", "def net():\n    time.sleep(600)"))
    nights.write_job(jobs, "slow")
    fleet.worker("a")
    fleet.wait(1)
    process = nights.start(
        "nightly", "jobs", "-o", "out", "--cache", "cache", "--scheduler", fleet.address, cwd=tmp_path
    )
    while not fleet.building("a"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("INTERRUPTED with 1 of 1 jobs to do")
    (jobs / "net.py").write_text(nights.NET)
    assert outcomes(night(tmp_path, "--scheduler", fleet.address)) == {"slow": "built"}  # the worker is free again


NO_TORCH = """
import importlib.metadata as metadata, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchao", "torchvision", "onnx", "onnxscript"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
version = metadata.version

def without(name):
    if name.startswith(("torch", "onnx")) and name != "onnxruntime":
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = without
"""


def test_a_worker_without_torch_finishes_kits(fleet, tmp_path):
    """The worker's interpreter cannot import torch or ONNX, and the job's files are gone when it begins."""
    jobs = nights.make_world(tmp_path / "jobs", 1)
    nights.write_job(jobs, "edge", "build: {target: tensorrt_rtx}\nworker: [jetson-orin]\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/sitecustomize.py").write_text(NO_TORCH)
    fleet.worker("orin", "jetson-orin", path=tmp_path / "bare")
    fleet.wait(1)
    report = night(tmp_path, "--scheduler", fleet.address)
    assert outcomes(report) == {"edge": "built"}
    (edge,) = report["outcomes"]
    assert (edge["where"], edge["reasons"]) == ("orin", ["first build"])
    assert set(edge["seconds"]) == {"verify", "compile", "check", "bundle"}
    assert " torch" not in report["workers"][0]
    manifest = nights.check_bundle(tmp_path / "out/edge").manifest
    assert manifest.engine.target == "tensorrt_rtx"
    again = night(tmp_path, "--scheduler", fleet.address)
    assert outcomes(again) == {"edge": "reused"}
    assert again["outcomes"][0]["reasons"] == []
