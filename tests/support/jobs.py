"""Texts of job files."""

GOOD = """\
name: digits
model:
  factory: torch.nn:Identity
  args: {}
  weights: w.safetensors
inputs:
  image: {dtype: float32, shape: [N, 1, 32, 32], N: {min: 1, opt: 8, max: 32}}
outputs:
  logits: {dtype: float32}
precision:
  fp16_mode: true
  int8_mode: true
calibration:
  images: calib
  transform: {resize: [32, 32], grayscale: true, normalize: {mean: [0.5], std: [0.5]}}
  algorithm: entropy_2
build:
  compute_capability: [8.6, 12.0]
check:
  images: val
  limits: {cosine_min: 0.99}
"""
