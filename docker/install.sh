#!/bin/sh
# install.sh FOLDER [cpu|cuda]: Talon and its server into a virtual environment.
# For a CPU torch comes from PyTorch's index of CPU builds, which are a tenth of the size, unless pip has been told where
# to look.
set -eu
folder=$1 device=${2:-cpu} index=
cd "$(dirname "$0")/.."
case $device in
  cpu) [ -n "${PIP_INDEX_URL:-}${PIP_FIND_LINKS:-}" ] || index="--extra-index-url https://download.pytorch.org/whl/cpu" ;;
  cuda) ;;
  *) echo "install.sh: $device: say cpu or cuda" >&2; exit 2 ;;
esac
python3 -m venv "$folder"
# shellcheck disable=SC2086 -- an option and its value
"$folder/bin/pip" install --no-cache-dir --quiet --constraint constraints.txt $index '.[serve,index,traces]'
"$folder/bin/talon" --version
