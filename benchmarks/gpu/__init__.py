"""`python -m benchmarks.gpu`: what only a GPU can show, step by step, a JSON line for each finding."""
