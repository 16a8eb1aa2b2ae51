import pytest
from jobs import GOOD, INPUT, write

from trtpipe.cli.main import main
from trtpipe.job.data_rules import _fits
from trtpipe.job.rules import broken
from trtpipe.job.sections import Data, Input, ModelSource

TRANSFORM = "{resize: [32, 32], grayscale: true, normalize: {mean: [0.5], std: [0.5]}}"
FACTORY = "  factory: torch.nn:Identity\n  args: {}\n  weights: w.safetensors\n"

#: (what is changed in GOOD, the whole of what is printed; {dir} is the folder of the job file).
BROKEN = [
    # the file
    ([("name: digits", "name: digits\nname: other")],
     ["job.yaml:2: name: must be given once (got again, first on line 1). Remove one."]),
    ([("  int8_mode: true", "  int8_mode: true\n  int8_mode: false")],
     ["job.yaml:13: precision.int8_mode: must be given once (got again, first on line 12). Remove one."]),
    ([(GOOD, "")], ["job.yaml:1: must be a mapping (got nothing). Its keys are name, model, inputs, outputs, precision, "
                    "calibration, build, check, worker, matrix; `trtpipe init` writes one to start from."]),
    ([(GOOD, "- a\n- b\n")], ["job.yaml:1: must be a mapping (got ['a', 'b']). Its keys are name, model, inputs, outputs, "
                    "precision, calibration, build, check, worker, matrix; `trtpipe init` writes one to start from."]),
    ([("  args: {}", "  args: &a {}")], ["job.yaml:4: model.args: must not have an anchor (got &a). Write the value out."]),
    ([("  args: {}", "  args: *a")], ["job.yaml:4: model.args: must not be an alias (got *a). Write the value out."]),
    ([("  args: {}", "  args: {f: !!python/name:os.system x}")],
     ["job.yaml:4: model.args.f: must not have a tag (got tag:yaml.org,2002:python/name:os.system). Write the plain value."]),
    ([("  args: {}", "\targs: {}")],
     ["job.yaml:4: must be valid YAML (got while scanning a plain scalar found a tab character that violates indentation)."]),
    # keys
    ([("  factory:", "  factroy:")],
     ["job.yaml:3: model.factroy: must be one of the keys factory, args, weights, torchscript, quantized, program, onnx or baseline "
      "(got factroy). Did you mean factory?"]),
    ([("  int8_mode: true", "  int8: true")],
     ["job.yaml:12: precision.int8: must be one of the keys fp16_mode, bf16_mode, int8_mode, fp8_mode, nvfp4_mode, "
      "weights, formats, placement or keep (got int8). Did you mean int8_mode?"]),
    ([("check:\n", "chekc:\n")],
     ["job.yaml:1: check: must be given (got nothing).",
      "job.yaml:19: chekc: must be one of the keys name, model, inputs, outputs, precision, calibration, build, check, worker "
      "or matrix (got chekc). Did you mean check?"]),
    ([("  args: {}", "  args: {}\n  zzz: 1")],
     ["job.yaml:5: model.zzz: must be one of the keys factory, args, weights, torchscript, quantized, program, onnx or baseline (got zzz)."]),
    ([("cosine_min", "cosin_min")],
     ["job.yaml:21: check.limits.cosin_min: must be one of the keys cosine_min, cosine_worst_min, max_abs_max, relative_l2_max, "
      "sqnr_db_min, top1_agreement_min, accuracy_drop_max, speedup_over_fp16_min, confident or metrics (got cosin_min). Did you mean cosine_min?"]),
    ([("name: digits\n", "")], ["job.yaml:1: name: must be given (got nothing)."]),
    ([(INPUT, "{dtype: float32, N: {min: 1, opt: 8, max: 32}}")], ["job.yaml:7: inputs.image.shape: must be given (got nothing)."]),
    # types and words
    ([("name: digits", "name: ../digits")],
     ["job.yaml:1: name: must begin with a letter or digit and hold only letters, digits, '.', '_' and '-' (got '../digits')."]),
    ([("name: digits", "name: 5")], ["job.yaml:1: name: must be text (got 5)."]),
    ([("  int8_mode: true", "  int8_mode: yes")],
     ["job.yaml:12: precision.int8_mode: must be true or false (got 'yes'). Write true, without quotes."]),
    ([("  fp16_mode: true", "  fp16_mode: 1")], ["job.yaml:11: precision.fp16_mode: must be true or false (got 1)."]),
    ([("precision:\n  fp16_mode: true\n  int8_mode: true\n", "precision:\n")],
     ["job.yaml:10: precision: must be a mapping (got nothing)."]),
    ([("entropy_2", "entropy2")],
     ["job.yaml:16: calibration.algorithm: must be auto, entropy_2, entropy, minmax, percentile or mse (got 'entropy2'). "
      "Did you mean entropy_2?"]),
    ([("build:\n", "build:\n  target: tensorrt-rtx\n")],
     ["job.yaml:18: build.target: must be tensorrt, tensorrt_rtx or onnxruntime (got 'tensorrt-rtx'). "
      "Did you mean tensorrt_rtx?"]),
    ([("  logits: {dtype: float32}", "  logits: {dtype: uint8}")],
     ["job.yaml:9: outputs.logits.dtype: must be float32, float16, int32, int64 or bool (got 'uint8')."]),
    ([("  logits: {dtype: float32}", "  {}")],
     ["job.yaml:8: outputs: must have at least one entry (got an empty mapping)."]),
    ([("[8.6, 12.0]", "[8.6, sm_86, 12]")],
     ["job.yaml:18: build.compute_capability[1]: must be a compute capability like 8.6 (got 'sm_86').",
      "job.yaml:18: build.compute_capability[2]: must be a compute capability like 8.6 (got 12)."]),
    ([("[8.6, 12.0]", "[8.6, '8.6']")],
     ["job.yaml:18: build.compute_capability: must name each once (got ['8.6', '8.6'])."]),
    ([("  algorithm: entropy_2", "  corrections: [bias, bias]")],
     ["job.yaml:16: calibration.corrections: must name each step once (got ['bias', 'bias'])."]),
    ([("  algorithm: entropy_2", "  batch_size: 0\n  samples: 2.5")],
     ["job.yaml:16: calibration.batch_size: must be at least 1 (got 0).",
      "job.yaml:17: calibration.samples: must be a whole number (got 2.5)."]),
    ([("cosine_min: 0.99", "cosine_min: 99")], ["job.yaml:21: check.limits.cosine_min: must be at most 1 (got 99)."]),
    ([("cosine_min: 0.99", "cosine_min: .nan")],
     ["job.yaml:21: check.limits.cosine_min: must be a finite number (got nan)."]),
    ([("[32, 32], gray", "[32, 32, 32], gray")],
     ["job.yaml:15: calibration.transform.resize: must be a positive integer or [height, width] (got [32, 32, 32])."]),
    ([("opt: 8", 'opt: "8"')], ["job.yaml:7: inputs.image.N.opt: must be a whole number (got '8')."]),
    ([("min: 1", "min: 0")], ["job.yaml:7: inputs.image.N.min: must be at least 1 (got 0)."]),
    ([("[N, 1, 32, 32]", "[N, 1, -1, 32]")],
     ["job.yaml:7: inputs.image.shape[2]: must be a positive integer or the name of a dynamic dimension (got -1)."]),
    ([("[N, 1, 32, 32]", "[]")],
     ["job.yaml:7: inputs.image.shape: must have at least one entry (got an empty list)."]),
    # model
    ([("  factory: torch.nn:Identity\n  args: {}\n  weights: w.safetensors\n", "  baseline: trace\n")],
     ["job.yaml:2: model: must have exactly one of factory, program and onnx (got none)."]),
    ([("  args: {}", "  program: m.pt2")],
     ["job.yaml:2: model: must have exactly one of factory, program and onnx (got factory and program)."]),
    ([(FACTORY, "  torchscript: m.ts\n")],
     ["job.yaml:2: model: must have exactly one of factory, program and onnx (got torchscript alone). "
      "torch.export takes no TorchScript file. Write it as model.onnx, by torch.onnx.export of torch.jit.load, "
      "dynamo=False."]),
    ([(FACTORY, "  program: m.pt2\n  weights: w.safetensors\n  torchscript: m.ts\n  baseline: script\n")],
     ["job.yaml:4: model.weights: must be given only with factory (got weights with program). Remove weights.",
      "job.yaml:6: model.baseline: must not be given when torchscript is the baseline (got script with torchscript). "
      "Remove baseline."]),
    ([(FACTORY, "  program: m.ts\n")], ["job.yaml:3: model.program: must end in .pt2 (got '{dir}/m.ts')."]),
    ([("torch.nn:Identity", "torch.nn.Identity")],
     ["job.yaml:3: model.factory: must be package.module:callable (got 'torch.nn.Identity'). "
      "Did you mean torch.nn:Identity?"]),
    ([("  weights: w.safetensors", "  weights: w.pickle")],
     ["job.yaml:5: model.weights: must end in .safetensors or .pt or .pth (got '{dir}/w.pickle')."]),
    ([("torch.nn:Identity", "no_such_package.models:build")],
     ["job.yaml:3: model.factory: must name a module that can be found (got 'no_such_package.models'). "
      "Install it, or put it beside the job file."]),
    ([("torch.nn:Identity", "trtpipe.job.problems:did_you_meen")],
     ["job.yaml:3: model.factory: must name something that trtpipe.job.problems defines (got 'did_you_meen'). "
      "Did you mean did_you_mean?"]),
    ([("name: digits", f"name: {'x' * 129}")], ["job.yaml:1: name: must have at most 128 letters (got 129)."]),
    # inputs
    ([("max: 32", "max: 2147483648")],
     ["job.yaml:7: inputs.image.N.max: must be at most 2147483647 (got 2147483648)."]),
    ([("[N, 1, 32, 32]", "[N, 1, 32, 99999999999999999999]")],
     ["job.yaml:7: inputs.image.shape[3]: must be a positive integer or the name of a dynamic dimension "
      "(got 99999999999999999999)."]),
    ([("opt: 8", "opt: 64")], ["job.yaml:7: inputs.image.N: must have min <= opt <= max (got 1, 64, 32)."]),
    ([(", N: {min: 1, opt: 8, max: 32}", "")],
     ["job.yaml:7: inputs.image.shape: must have a range for N (got none). Add N: {min: 1, opt: 8, max: 32}."]),
    ([("[N, 1, 32, 32]", "[8, 1, 32, 32]")],
     ["job.yaml:7: inputs.image.N: must be a dimension named in shape (got shape [8, 1, 32, 32])."]),
    ([("[N, 1, 32, 32]", "[N, 1, N, 32]")],
     ["job.yaml:7: inputs.image.shape: must use the batch dimension once, first (got [N, 1, N, 32])."]),
    ([("[N, 1, 32, 32]", "[N, 3, 32, 32]")],
     ["job.yaml:7: inputs.image.shape: must have 1 channels for calibration.images (got [N, 3, 32, 32]). "
      "calibration.transform.grayscale gives 1 channel, without it there are 3."]),
    ([("[N, 1, 32, 32]", "[N, 32, 32, 1]")],
     ["job.yaml:7: inputs.image.shape: must have 1 channels for calibration.images (got [N, 32, 32, 1]). "
      "Images become [N, C, H, W]; calibration.transform.callable can return [H, W, C].",
      "job.yaml:7: inputs.image.shape: must end in 32, 32, the size calibration.transform gives (got [N, 32, 32, 1])."]),
    ([("[N, 1, 32, 32]", "[N, 1, 28, 28]")],
     ["job.yaml:7: inputs.image.shape: must end in 32, 32, the size calibration.transform gives (got [N, 1, 28, 28])."]),
    ([("dtype: float32, shape", "dtype: uint8, shape")],
     ["job.yaml:15: calibration.transform.normalize: must not be given when inputs.image is uint8 (got normalize). "
      "Move it to inputs.image.normalize, which the engine does itself."]),
    ([("dtype: float32, shape", "dtype: int64, shape")],
     ["job.yaml:7: inputs.image.dtype: must be float32, float16 or uint8 to take images (got int64)."]),
    ([(INPUT, INPUT + "\n  mask: {shape: [N, 4], N: {min: 1, opt: 8, max: 16}}")],
     ["job.yaml:8: inputs.mask.N: must have the same range as in inputs.image (got 1, 8, 16 and 1, 8, 32). "
      "Or use another name.",
      "job.yaml:15: calibration.images: must feed exactly one input (got image, mask). "
      "Use calibration.arrays or calibration.factory.",
      "job.yaml:21: check.images: must feed exactly one input (got image, mask). Use check.arrays or check.factory."]),
    ([("  logits: {dtype: float32}", "  image: {dtype: float32}")],
     ["job.yaml:9: outputs.image: must have a name that no input has (got 'image'). Name the input otherwise: where the "
      "model names its outputs itself (a dict), theirs are given. Of model.onnx, whose names are the file's, leave that "
      "output out: it is what goes in."]),
    ([("  image: {dtype", "  past.k: {dtype"), ("  logits: {dtype: float32}", "  past.k: {dtype: float32}")],
     ["job.yaml:9: outputs.past.k: must have a name that no input has (got 'past.k'). Name the input otherwise: where "
      "the model names its outputs itself (a dict), theirs are given. Of model.onnx, whose names are the file's, leave "
      "that output out: it is what goes in."]),
    # normalize
    ([("std: [0.5]", "std: [0.5, 0.5]")],
     ["job.yaml:15: calibration.transform.normalize: must have as many std as mean (got 1 mean, 2 std)."]),
    ([("mean: [0.5], std: [0.5]", "mean: [1, 2, 3], std: [1, 1, 1]")],
     ["job.yaml:15: calibration.transform.normalize: must have one mean and std, or 1 (one a channel) (got 3)."]),
    ([("std: [0.5]", "std: [0]")],
     ["job.yaml:15: calibration.transform.normalize.std[0]: must be greater than 0 (got 0.0)."]),
    # precision, calibration, check
    ([("  fp16_mode: true", "  fp16_mode: true\n  bf16_mode: true")],
     ["job.yaml:12: precision.bf16_mode: must not be set with fp16_mode (got both true). Choose one."]),
    ([("  fp16_mode: true", "  keep: {fp16: [head]}")],
     ["job.yaml:11: precision.keep.fp16: must be empty unless fp16_mode and int8_mode (or another "
      "number format) are on (got [head])."]),
    ([("  fp16_mode: true", "  placement: all")],
     ["job.yaml:11: precision.placement: must be auto unless one of int8_mode and fp8_mode and one of fp16_mode "
      "and bf16_mode are true (got all). It is about which operations take INT8 or FP8 rather than FP16 or BF16."]),
    ([("calibration:\n  images: calib\n  transform: " + TRANSFORM + "\n  algorithm: entropy_2\n", ""),
      ("[N, 1, 32, 32]", "[N, 3, 32, 32]")],
     ["job.yaml:1: calibration: must be given when precision.int8_mode is true (got none). "
      "Add calibration.images, or calibration.table."]),
    ([("  algorithm: entropy_2", "  percentile: 99.9")],
     ["job.yaml:16: calibration.percentile: must be given only with algorithm: percentile (got algorithm: auto)."]),
    ([("  algorithm: entropy_2", "  table: t.json")],
     ["job.yaml:13: calibration: must have exactly one of images, arrays, factory and table (got images and table)."]),
    ([("images: calib", "arrays: x.npy")],
     ["job.yaml:15: calibration.transform: must be given only with images (got transform with arrays). Remove transform."]),
    ([("images: calib", "table: t.json")],
     ["job.yaml:15: calibration.transform: must be given only with images (got transform with table). "
      "Give it as check.transform."]),
    ([("images: calib", "images: clib")],
     ["job.yaml:14: calibration.images: must be a folder that exists (got 'clib': nothing there). "
      "It is {dir}/clib, from the folder of the job file."]),
    *(([("  args: {}", f"  args: {args}")],
       [f"job.yaml:4: model.args: must hold numbers of JSON, in which jobs are sent and kept, and no {got} (got a "
        f"mapping of {args[1]})."])
      for args, got in (("{a: .inf}", "inf"), ("{a: [1, {b: .nan}]}", "nan"), ("{a: {b: -.inf}}", "-inf"))),
    ([("images: calib", "images: ~nobody-of-this-name/calib")],
     ["job.yaml:14: calibration.images: must be a folder that exists (got '~nobody-of-this-name/calib': nothing there). "
      "It is {dir}/~nobody-of-this-name/calib, from the folder of the job file."]),
    ([("images: val", "images: x.npy")],
     ["job.yaml:20: check.images: must be a folder that exists (got 'x.npy': not a folder). "
      "It is {dir}/x.npy, from the folder of the job file."]),
    ([("w.safetensors", "calib")],
     ["job.yaml:5: model.weights: must be a file that exists (got 'calib': not a file). "
      "It is {dir}/calib, from the folder of the job file.",
      "job.yaml:5: model.weights: must end in .safetensors or .pt or .pth (got '{dir}/calib')."]),
    ([("cosine_min: 0.99", "")],
     ["job.yaml:21: check.limits: must set at least one limit (got none). "
      "A check without a limit cannot fail; start with cosine_min: 0.99."]),
    ([("cosine_min: 0.99", "cosine_min: 0.99, speedup_over_fp16_min: 1.2")],
     ["job.yaml:21: check.limits.speedup_over_fp16_min: must be given only with check.require: engine "
      "(got require: graph). Speed is measured on the engine itself."]),
    ([("cosine_min: 0.99", "confident: true, cosine_min: 0.99")],
     ["job.yaml:21: check.limits.confident: must be given only with top1_agreement_min, accuracy_drop_max or limits of metrics "
      "(got neither). Other figures have no interval."]),
    ([("cosine_min: 0.99", "metrics: {m: {min: 1, max: 2}, n: {}}"), ("images: val", "images: val\n  metrics: {n: miou}")],
     ["job.yaml:22: check.limits.metrics.m: must be a metric of check.metrics, n (got m).",
      "job.yaml:22: check.limits.metrics.m: must set one of min and max (got min: 1, max: 2). "
      "One of them is what better figures are away from.",
      "job.yaml:22: check.limits.metrics.n: must set min, max or drop_max (got none)."]),
    ([("cosine_min: 0.99", "metrics: {m: {min: 1}}")],
     ["job.yaml:21: check.limits.metrics.m: must be a metric of check.metrics, none (got m). Add check.metrics.m."]),
    ([("images: val", "images: val\n  metrics: {accuracy: mae, a-b: mae, c: iou, d: net.f, e: {function: mae, better: lower}}")],
     ["job.yaml:21: check.metrics.accuracy: must have a name of letters, digits and _ other than accuracy (got 'accuracy').",
      "job.yaml:21: check.metrics.a-b: must have a name of letters, digits and _ other than accuracy (got 'a-b').",
      "job.yaml:21: check.metrics.c.function: must be top5, miou, coco_map, psnr, ssim, mae, cosine or package.module:callable "
      "(got 'iou').",
      "job.yaml:21: check.metrics.d.function: must be package.module:callable (got 'net.f'). Did you mean net:f?",
      "job.yaml:21: check.metrics.e.better: must be given only for a callable (got lower). It is known for mae: remove it."]),
    ([("images: val", "images: val\n  metrics: {a: {function: mae, args: {output: nope}}, b: {function: miou, args: {classes: 3}}}")],
     ["job.yaml:21: check.metrics.a.args.output: must be one of the job's outputs, logits (got 'nope')."]),
    ([("images: val", "images: val\n  labels: val.npy")],
     ["job.yaml:21: check.labels: must be a file or folder that exists (got 'val.npy': nothing there). "
      "It is {dir}/val.npy, from the folder of the job file.",
      "job.yaml:21: check.labels: must be no .npy with check.images (got '{dir}/val.npy'). "
      "Images have no order: give a folder of masks, a .json of COCO or a .csv."]),
    ([("  images: val\n", "  factory: a:b\n  labels: calib\n"), ("transform", "transform")],
     ["job.yaml:21: check.labels: must be given only with check.images, unless it is a .npy (got no images). "
      "It names class folders or images."]),
    ([("  images: val\n", "")],
     ["job.yaml:19: check: must have exactly one of images, arrays and factory (got none)."]),
    # build
    ([("  compute_capability: [8.6, 12.0]", "  route: torch2trt\n  target: tensorrt_rtx")],
     ["job.yaml:19: build.target: must be tensorrt for route torch2trt (got tensorrt_rtx)."]),
    ([("  compute_capability: [8.6, 12.0]", "  route: torch2trt\n  target: tensorrt"),
      ("  fp16_mode: true\n", ""), ("int8_mode: true", "bf16_mode: true")],
     ["job.yaml:11: precision.bf16_mode: must be false for route torch2trt (got true). It has FP16 and INT8 alone."]),
    ([("  compute_capability: [8.6, 12.0]", "  route: torch_tensorrt\n  target: onnxruntime")],
     ["job.yaml:19: build.target: must be tensorrt or tensorrt_rtx for route torch_tensorrt (got onnxruntime)."]),
    ([("build:\n  compute_capability: [8.6, 12.0]", "build:\n  target: onnxruntime"),
      ("images: val", "images: val\n  require: engine")],
     ["job.yaml:21: check.require: must be graph for target onnxruntime (got engine). "
      "No GPU executes an ONNX file: remove check.require."]),
    ([("build:\n", "build:\n  target: tensorrt\n  memory_pools: {dla_managed_sram: 1000, dla_local_dram: 3000000}\n"),
      ("  compute_capability: [8.6, 12.0]\n", "")],
     ["job.yaml:19: build.memory_pools.dla_managed_sram: must be a power of 2, 4096 or more (got 1000).",
      "job.yaml:19: build.memory_pools.dla_local_dram: must be a power of 2, 4096 or more (got 3000000)."]),
    ([("build:\n", "build:\n  tensor_formats: {image: []}\n")],
     ["job.yaml:18: build.tensor_formats.image: must name a format or more (got []). Leave it out for any."]),
    ([("build:\n", "build:\n  tensor_formats: {imag: [hwc], logits: [linear]}\n")],
     ["job.yaml:18: build.tensor_formats.imag: must be image, logits (got imag)."]),
    ([("build:\n", "build:\n  tensor_formats: {image: [hwc, hwc8], logits: [linear]}\n")],
     ["job.yaml:18: build.tensor_formats.image: must be a format that float32 may have here: linear, chw32, hwc, dhwc (got hwc8). Or give "
      "the binding another dtype."]),
    ([("shape: [N, 1, 32, 32]", "shape: [N, 32, 32]"),
      ("build:\n", "build:\n  tensor_formats: {image: [chw32, dhwc, hwc8], logits: [dhwc]}\n")],
     ["job.yaml:7: inputs.image.shape: must be [N, 1, height, width] for calibration.images (got [N, 32, 32]).",
      "job.yaml:18: build.tensor_formats.image: must be a format of float32 with 3 dimensions: linear, chw32, hwc (got "
      "dhwc). It needs more of them.",
      "job.yaml:18: build.tensor_formats.image: must be a format that float32 may have here: linear, chw32, hwc, dhwc (got hwc8). Or give "
      "the binding another dtype."]),
    ([("build:\n", "build:\n  plugins: [w.safetensors, libs/libtwice.so, 7]\n")],
     ["job.yaml:18: build.plugins[1]: must be a file that exists (got 'libs/libtwice.so': nothing there). It is "
      "{dir}/libs/libtwice.so, from the folder of the job file.",
      "job.yaml:18: build.plugins[2]: must be text (got 7)."]),
    ([("build:\n", "build:\n  plugins: [w.safetensors, w.safetensors]\n"), ("factory: torch.nn:Identity", "onnx: a.onnx"),
      ("  args: {}\n  weights: w.safetensors\n", "")],
     ["job.yaml:3: model.onnx: must be a file that exists (got 'a.onnx': nothing there). It is {dir}/a.onnx, from the "
      "folder of the job file.",
      "job.yaml:16: build.plugins: must not be given with model.onnx (got both). Nothing says what an operator of "
      "another domain computes: give the network as model.factory.",
      "job.yaml:16: build.plugins: must be shared libraries, like libtwice.so (got 'w.safetensors'). Letters, digits, "
      "dots, dashes and underscores: the bundle keeps it under this name.",
      "job.yaml:16: build.plugins: must have names of their own, which do not differ in case alone (got [w.safetensors, "
      "w.safetensors])."]),
    ([(TRANSFORM, "{grayscale: true, interpolation: nearest}")],
     ["job.yaml:15: calibration.transform.interpolation: must be given only with resize (got no resize). "
      "It steers resize alone."]),
    ([("build:\n", "build:\n  target: onnxruntime\n")],
     ["job.yaml:19: build.compute_capability: must be left out for target onnxruntime (got ['8.6', '12.0']). "
      "It steers TensorRT."]),
    ([("  fp16_mode: true", "  bf16_mode: true"), ("build:\n  compute_capability: [8.6, 12.0]", "build:\n  target: onnxruntime")],
     ["job.yaml:11: precision.bf16_mode: must be false for target onnxruntime (got true). Its operators take no BF16. "
      "Use fp16_mode or int8_mode."]),
    ([("build:\n", "build:\n  use_onnx: true\n")],
     ["job.yaml:18: build.use_onnx: must be given only for route torch2trt (got onnx). Route onnx is the way through ONNX "
      "for every target."]),
    ([(FACTORY, "  program: w.safetensors\n"), ("build:\n", "build:\n  route: torch2trt\n  target: tensorrt\n")],
     ["job.yaml:3: model.program: must end in .pt2 (got '{dir}/w.safetensors').",
      "job.yaml:3: model.program: must not be given for route torch2trt (got '{dir}/w.safetensors'). torch2trt converts an "
      "eager module: use model.factory."]),
    ([("  fp16_mode: true\n  int8_mode: true", "  keep: {fp32: [head]}"),
      ("calibration:\n  images: calib\n  transform: " + TRANSFORM + "\n  algorithm: entropy_2\n", ""),
      ("[N, 1, 32, 32]", "[N, 3, 32, 32]")],
     ["job.yaml:11: precision.keep.fp32: must be empty when everything is FP32 (got [head])."]),
    ([("shape: [N, 1, 32, 32], N: {min: 1, opt: 8, max: 32}", "shape: [dtype, 1, 32, 32]")],
     ["job.yaml:7: inputs.image.shape: must name dimensions other than its own keys (got dtype). Rename it, for example N."]),
    ([("[N, 1, 32, 32]", "[N, 1024]")],
     ["job.yaml:7: inputs.image.shape: must be [N, 1, height, width] for calibration.images (got [N, 1024])."]),
    ([("  transform: " + TRANSFORM, "  transform: {callable: a:b, grayscale: true}")],
     ["job.yaml:15: calibration.transform.callable: must stand alone (got it with grayscale). It does the whole transform."]),
    ([("images: calib", "table: t.json"), ("  algorithm: entropy_2", "  samples: 8"),
      ("  transform: " + TRANSFORM + "\n", ""), ("[N, 1, 32, 32]", "[N, 3, 32, 32]")],
     ["job.yaml:15: calibration.samples: must be left out with calibration.table (got 8 with table). No sample is read."]),
    ([("build:\n", "build:\n  quantization: implicit\n"), ("images: val", "images: val\n  sensitivity: true")],
     ["job.yaml:22: check.sensitivity: must be false without explicit quantization (got build.quantization: implicit). It "
      "measures what Q/DQ cost module by module: remove check.sensitivity, or quantize explicitly."]),
    ([("  fp16_mode: true\n  int8_mode: true", "  fp16_mode: true"),
      ("calibration:\n  images: calib\n  transform: " + TRANSFORM + "\n  algorithm: entropy_2\n", ""),
      ("[N, 1, 32, 32]", "[N, 3, 32, 32]"), ("images: val", "images: val\n  sensitivity: true")],
     ["job.yaml:16: check.sensitivity: must be false without explicit quantization (got no number format that "
      "quantizes). It measures what Q/DQ cost module by module: remove check.sensitivity, or quantize explicitly."]),
    ([("build:\n", "build:\n  quantization: implicit\n"), ("images: val", "images: val\n  on_fail: tune")],
     ["job.yaml:22: check.on_fail: must be error without explicit quantization (got build.quantization: implicit). It "
      "measures what Q/DQ cost module by module: remove check.on_fail, or quantize explicitly."]),
    ([("  int8_mode: true\n", ""), ("calibration:\n  images: calib\n  transform: " + TRANSFORM + "\n  algorithm: entropy_2\n", ""),
      ("[N, 1, 32, 32]", "[N, 3, 32, 32]"), ("images: val", "images: val\n  on_fail: tune")],
     ["job.yaml:16: check.on_fail: must be error without explicit quantization (got no number format that "
      "quantizes). It measures what Q/DQ cost module by module: remove check.on_fail, or quantize explicitly."]),
]  # fmt: skip


def test_the_job_that_every_case_breaks_is_good(folder, capsys):
    assert main(["validate", str(write(folder))]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("edits", "expected"), BROKEN, ids=[e[1][0].partition(" (got")[0][:70] for e in BROKEN])
def test_broken_job(edits, expected, folder, capsys, monkeypatch):
    write(folder, *edits)
    monkeypatch.chdir(folder)
    assert main(["validate", "job.yaml"]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [line.replace("{dir}", str(folder)) for line in expected]
    assert printed.out == ""


def test_the_table_is_as_long_as_was_asked_for():
    assert len(BROKEN) >= 40
    assert len({str(e[1]) for e in BROKEN}) == len(BROKEN)


def test_names_of_inputs_with_dots_are_paths():
    one = Input(shape=(1, 2))
    inputs = {"image": one, "image.part": one, "a..b": one, "pair.0": one, "pair.1": one}
    found = [(p.path, p.must, p.got, p.hint) for p in broken({"model": ModelSource(factory="a:b"), "inputs": inputs})]
    assert found == [
        (("inputs", "image.part"), "not be a part of inputs.image, a tensor", "'image.part'", "Rename one of them."),
        (("inputs", "a..b"), "have a name on each side of a dot", "'a..b'", ""),
    ]
    assert not list(broken({"model": ModelSource(onnx="a.onnx"), "inputs": inputs}))  # whose names are its own


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((2, "N", 8), "Put it first, and transpose in the model's forward."),
        ((2, 8), "Each sample has a row of every input: give it that dimension too. What is one for the whole batch (a table, a "
         "scale) becomes a constant of the model, or is given to each sample and taken as x[0]."),
    ],
)  # fmt: skip
def test_an_input_whose_batch_is_not_first_is_told_where_to_put_it(shape, hint):
    sizes = {"N": {"min": 1, "opt": 2, "max": 4}}
    inputs = {"x": Input(shape=("N", 8), **sizes), "h": Input(shape=shape, **(sizes if "N" in shape else {}))}
    (found,) = broken({"model": ModelSource(factory="a:b"), "inputs": inputs})
    assert (found.path, found.must) == (("inputs", "h", "shape"), "begin with the batch dimension of inputs.x, N")
    assert found.hint == hint


def test_a_npy_feeds_one_input() -> None:
    inputs = {name: Input(shape=(8, 3)) for name in ("image", "mask")}
    (found,) = _fits("check", Data(arrays="x.npy"), None, inputs)
    assert (found.path, found.must, found.got) == (
        ("check", "arrays"),
        "be .npz or .safetensors for more than one input",
        "inputs image, mask",
    )
