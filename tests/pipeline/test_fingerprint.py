import pytest
from jobs import GOOD, good_folder

from trtpipe.job.load import load_job
from trtpipe.pipeline.cache.environment import WITHOUT_EFFECT, fingerprint, portable_job
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu


def test_a_tensorrt_engine_is_of_its_gpu_and_others_are_not(monkeypatch):
    def on(*gpu):
        monkeypatch.setattr(driver, "probe", lambda: Driver("12.6", tuple(Gpu(0, n, c, 1) for n, c in gpu)))
        return {target: fingerprint("0" * 64, target) for target in ("tensorrt", "tensorrt_rtx", "onnxruntime")}

    orin, ada = on(("Orin", "8.7")), on(("RTX 4090", "8.9"))
    assert orin["tensorrt"] != ada["tensorrt"]
    assert orin["tensorrt"] == on(("Orin", "8.7"))["tensorrt"]
    assert {k: v for k, v in orin.items() if k != "tensorrt"} == {k: v for k, v in ada.items() if k != "tensorrt"}


#: A value of each key that says how a machine works and not what it makes.
OF_THE_MACHINE = {
    "build.log_level": "verbose", "build.timing_cache": "/var/timing", "build.calibration_cache": "/var/ranges",
    "calibration.workers": "2", "check.workers": "2", "worker": "[night]",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT - {"name"}))
def test_a_job_is_told_alike_whatever_the_machine(key, tmp_path):
    path = good_folder(tmp_path) / "job.yaml"
    path.write_text(GOOD.replace("build:\n  compute_capability: [8.6, 12.0]\n", "build: {target: tensorrt}\n"))
    overrides = () if key != "build.calibration_cache" else ("build.quantization=implicit",)
    plain = portable_job(load_job(path, overrides))
    changed = load_job(path, (*overrides, f"{key}={OF_THE_MACHINE[key]}"))
    assert portable_job(changed) == plain
    assert portable_job(load_job(path, (*overrides, "check.batch_size=3"))) != plain
    assert '"name": "digits"' in plain
