#!/bin/sh
# benchmarks/gpu_bundle.sh OUT.tar: what python -m benchmarks.gpu needs on a GPU machine without a network: the tree
# without its weights and results, and wheels of what an image may lack that has torch, Triton, numpy, numba and pip
# (Python 3.12 on x86-64, or PYTHON). numba brings llvmlite, which alone is as large as an archive may be.
# There: tar xf OUT.tar && python3 -m pip install -q --no-index --no-deps --upgrade --target site .whl/*.whl
# && PYTHONPATH=site python3 -m benchmarks.gpu
set -eu
test $# = 1 || { echo "gpu_bundle.sh: name the archive: benchmarks/gpu_bundle.sh OUT.tar" >&2; exit 2; }
out=$(realpath "$1")
cd "$(dirname "$0")/.."
wheels="pyzmq msgspec pydantic pydantic_core annotated-types typing-inspection typing_extensions gguf transformers filelock
    typer annotated-doc click shellingham rich markdown-it-py mdurl pygments pyyaml anyio idna
    huggingface_hub hf-xet httpx2 httpcore2 h11 truststore tokenizers safetensors regex tqdm packaging fsspec psutil"
most_mb=60

rm -rf .whl
mkdir .whl
for name in $wheels; do
    # the version that the project is tested with; names may be written with - or _
    pinned=$(grep -i "^$(echo "$name" | tr _- '..')==" constraints.txt)
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON:-3.12}" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_26_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d .whl "$pinned"
done
{ git ls-files -z -- . ':!models' ':!benchmarks/results' ':!docs'; find .whl -name '*.whl' -print0; } |
    tar --null --files-from=- --create --file="$out"
size_mb=$(($(wc -c <"$out") / 1000000))
echo "$out: $size_mb MB"
test "$size_mb" -le "$most_mb" || { echo "gpu_bundle.sh: more than $most_mb MB" >&2; exit 1; }
