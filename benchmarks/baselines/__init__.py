"""Other engines on the same questions: llama.cpp, OpenVINO, vLLM, each in a process of its own.

The folder imports `benchmarks.measure`, `benchmarks.inputs` and `benchmarks.report`.
"""
