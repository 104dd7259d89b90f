"""Kernels of DSA under decode context parallelism: arrays in, arrays out.

Every op is a public function with `implementation=None | "xla" | "mosaic_gpu" | "triton"`, and has
an exact float32 twin in `reference`. Nothing here knows a model config, a mesh or a module class;
import the op's module directly.
"""
