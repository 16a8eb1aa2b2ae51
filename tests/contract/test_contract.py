"""trtpipe on the real Python bindings of each supported TensorRT, in a process each.

The second half puts mistakes into a copy of the source and wants the contract to fail: a suite that passes whatever
the code does would prove nothing.
"""

from __future__ import annotations

import re
import shutil

import pytest
from releases import RELEASES, ROOT


@pytest.mark.parametrize("release", RELEASES)
def test_contract(contract, release):
    ran = contract(release)
    assert ran.returncode == 0, ran.stdout[-20000:] + ran.stderr[-2000:]
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", ran.stdout, re.MULTILINE)
    assert skipped
    assert [reason for reason in skipped if not re.search(r"\b(8\.6|10|11)\b", reason)] == []


#: What is done wrong: (release, file, what stands there, what is put there, the cases that have to fail).
MISTAKES = {
    "FP16 is set on 11.4": (
        "11.4.0.106",
        "trtpipe/trt/config.py",
        "    trt, wanted = flavour.module, asked(build)\n",
        "    trt, wanted = flavour.module, asked(build)\n    config.set_flag(trt.BuilderFlag.FP16)\n",
        "test_an_engine_comes_out_with_its_header_read",
    ),
    "the calibrator returns a generator on 10.16": (
        "10.16.1.11",
        "calib/trt_calibrator.py",
        '"get_batch": guarded(_Feed.get_batch),',
        '"get_batch": lambda self, names: (address for address in _Feed.get_batch(self._feed, names) or ()),',
        "test_every_batch_is_read_and_the_cache_is_written",
    ),
    "a network flag is hard-coded": (
        "11.4.0.106",
        "trtpipe/trt/network.py",
        "1 << int(flags.STRONGLY_TYPED)",
        "1 << 1",
        "test_the_network_is_strongly_typed_wherever_it_can_be",
    ),
    "a builder flag is hard-coded": (
        "10.3.0",
        "trtpipe/trt/config.py",
        "(config.set_flag if build.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)",
        "(config.set_flag if build.tf32 else config.clear_flag)(trt.BuilderFlag(7))",
        "test_precision_flags_only_where_nothing_is_strongly_typed",
    ),
    "weak typing is forgotten on 8.6": (
        "8.6.1",
        "trtpipe/trt/lowering.py",
        "config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)",
        "pass",
        "test_precision_flags_only_where_nothing_is_strongly_typed",
    ),
    "an interrupt leaves a callback": (
        "10.16.1.11",
        "trtpipe/trt/monitor.py",
        "        except BaseException as error:  # noqa: BLE001 - handed on by check()\n            self._keep(error)\n"
        "        return not self._stop",
        "        except ZeroDivisionError:\n            pass\n        return not self._stop",
        "test_an_interrupt_inside_a_callback_is_not_lost",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_contract_fails_when(contract, tmp_path, mistake):
    release, file, right, wrong, cases = MISTAKES[mistake]
    for package in ("trtpipe", "calib"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / file).read_text()
    assert text.count(right) == 1, f"{file} has changed: bring this mistake up to date"
    (tmp_path / file).write_text(text.replace(right, wrong))
    ran = contract(release, source=tmp_path, cases=cases)
    assert ran.returncode not in (0, 5), ran.stdout[-5000:]  # 5: no case of this name
