"""Benchmarks of the engine: workloads, measurements, results with the keys of vLLM."""
