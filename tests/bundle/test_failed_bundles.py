"""What becomes of a bundle whose check failed: it is written and can be looked at, and nobody vouches for it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import nights
import pytest
import shipping

from trtpipe.bundle import signing
from trtpipe.bundle.format import read_bundle, set_signature
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.nightly.outcome import JobOutcome
from trtpipe.nightly.signing import sign_green
from trtpipe.runtime.session import load
from trtpipe.values import CheckReport, Metric

WHY = "its check failed when it was made: cosine 0.9 (limit 0.99); NaN in 2 of 4 samples"


def failed_check() -> CheckReport:
    check = shipping.manifest().check
    assert check is not None
    metrics = (Metric("cosine", "logits", 0.9, 0.99, False), Metric("max_abs", "logits", 0.1, 0.2, True))
    return dataclasses.replace(check, metrics=metrics, passed=False, problems=("NaN in 2 of 4 samples",))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    signing.generate_key(tmp_path / "key")
    return tmp_path / "key"


def files_of(bundle: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in bundle.iterdir()}


def test_it_is_not_signed(tmp_path: Path, key: Path) -> None:
    assert shipping.bundle(tmp_path / "bad", sign=signing.signer(key), check=failed_check()).signature is None
    assert not set_signature(tmp_path / "bad", signing.signer(key))
    assert read_bundle(tmp_path / "bad").signature is None
    assert shipping.bundle(tmp_path / "yet", sign=signing.signer(key), check=None).signature is not None


def test_verify_and_load_say_so(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    shipping.bundle(tmp_path / "bad", check=failed_check())
    assert main(["verify", str(tmp_path / "bad"), "--no-run"]) == 1
    assert f"FAILED: {WHY}\n" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "bad"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failure"] == WHY
    assert found["check"]["passed"]  # here and now: it is the record that speaks against it
    with load(tmp_path / "bad"):
        assert caplog.messages == [f"{tmp_path / 'bad'}: {WHY}"]
    caplog.clear()
    with load(shipping.bundle(tmp_path / "good").path):
        assert caplog.messages == []


def test_a_signature_is_given_replaced_and_taken(tmp_path: Path, key: Path) -> None:
    path = shipping.bundle(tmp_path / "c").path
    bare = files_of(path)
    assert set_signature(path, signing.signer(key))
    first = read_bundle(path, signing.checking(path, key.with_name("key.pub"))).signature
    assert files_of(path) == bare | {"manifest.sig": first}
    signing.generate_key(tmp_path / "other")
    assert set_signature(path, signing.signer(tmp_path / "other"))
    assert read_bundle(path, signing.checking(path, tmp_path / "other.pub")).signature != first
    assert not set_signature(path, None)
    assert files_of(path) == bare


def test_a_damaged_bundle_is_not_signed(tmp_path: Path, key: Path) -> None:
    path = shipping.bundle(tmp_path / "c").path
    graph = path / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match=r"model\.onnx"):
        set_signature(path, signing.signer(key))
    assert not (path / "manifest.sig").exists()


@pytest.mark.parametrize(("limit", "signed"), [("0.9", True), ("1.0", False)])
def test_build_signs_what_passed(limit: str, signed: bool, tmp_path: Path, key: Path, capsys: Any) -> None:
    nights.make_world(tmp_path / "jobs")
    job = nights.write_job(tmp_path / "jobs", "m", "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n")
    command = ["build", str(job), "-o", str(tmp_path / "out"), "--sign", str(key), "-q"]
    command += ["--set", f"check.limits={{cosine_min: {limit}, top1_agreement_min: 0.9}}"]
    assert main(command) == (0 if signed else 1)
    assert ("  not signed, as the check failed" in capsys.readouterr().out) is not signed
    assert (read_bundle(tmp_path / "out/m").signature is not None) is signed
    assert main([*command, "--json"]) == (0 if signed else 1)
    assert json.loads(capsys.readouterr().out)[0]["signed"] is signed


def test_a_night_signs_what_is_green_and_nothing_else(tmp_path: Path, key: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = nights.make_world(tmp_path / "jobs", 2)
    for k in range(2):
        nights.write_job(jobs, f"j{k}", weight=f"w{k}.safetensors")

    def night(*arguments: str, expect: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["nightly", "jobs", "-o", "out", "--cache", "cache", "--workers", "0", "--json", *arguments])
        assert code == expect
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def signed() -> list[str]:
        return [n for n in ("j0", "j1") if read_bundle(tmp_path / "out" / n).signature is not None]

    night()
    assert signed() == []
    report = night("--sign", "key")
    assert nights.outcomes(report) == {"j0": "reused", "j1": "reused"}
    assert "signed 2 bundles" in report["notes"]
    public = str(key.with_name("key.pub"))
    assert main(["verify", "out/j0", "--key", public]) == 0
    before = {n: (tmp_path / "out" / n).stat().st_ino for n in ("j0", "j1")}
    night("--sign", "key")
    assert before == {n: (tmp_path / "out" / n).stat().st_ino for n in ("j0", "j1")}  # nothing was written again

    nights.write_weights(jobs / "w1.safetensors", broken=True)  # passes its check, and is a regression
    report = night("--sign", "key", expect=1)
    assert report["headline"].startswith("REGRESSION j1")
    assert [n for n in report["notes"] if "signed" in n] == ["signed 1 bundles", "not signed, as not green: j1"]
    assert signed() == ["j0"]
    night("--sign", "key", "--accept", "j1")
    assert signed() == ["j0", "j1"]
    night("--sign", "key", "--set", "check.limits={cosine_min: 1.0, top1_agreement_min: 1.1}", expect=2)
    assert signed() == ["j0", "j1"]  # a job that cannot be read costs no bundle


def test_a_bundle_damaged_since_its_check_costs_the_night_that_job_alone(tmp_path: Path, key: Path) -> None:
    outcomes = {}
    for name in ("good", "torn", "gone"):
        path = shipping.bundle(tmp_path / name).path
        outcomes[name] = JobOutcome(name, f"{name}.yaml", "built", bundle=str(path))
    (tmp_path / "torn" / "model.onnx").write_bytes(b"torn")
    shutil.rmtree(tmp_path / "gone")
    notes = sign_green(outcomes, signing.signer(key))
    assert notes == ("signed 1 bundles", "not signed, as not green: torn, gone")
    assert read_bundle(tmp_path / "good").signature is not None
    for name in ("torn", "gone"):
        assert (outcomes[name].outcome, outcomes[name].exit_code) == ("error", 2)
        assert outcomes[name].error.startswith(f"not signed: {tmp_path / name}")


def test_repeat_and_sign_exclude_each_other(tmp_path: Path, key: Path, capsys: Any) -> None:
    assert main(["nightly", str(tmp_path), "--repeat", "2", "--sign", str(key)]) == 2
    assert "--sign must not be given with --repeat: nothing would use it." in capsys.readouterr().err
