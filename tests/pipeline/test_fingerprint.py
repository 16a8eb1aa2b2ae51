from trtpipe.pipeline.cache.environment import fingerprint
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
