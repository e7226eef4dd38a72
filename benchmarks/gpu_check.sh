#!/usr/bin/env bash
# All that needs a GPU, on a machine with one, offline, within 8 minutes: build, correctness, sanitizer, figures.
#   bash benchmarks/gpu_check.sh [RESULTS.json]
# Needs what an ordinary CUDA and PyTorch image holds: python with torch for CUDA, a C++20 compiler, cmake, ninja,
# pybind11, scikit-build-core. Exit code: 0 all right, 1 something is wrong, 2 something is missing.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(realpath -m "${1:-gpu_check.json}")
python=${PYTHON:-python3}
start=$SECONDS

missing=$("$python" - <<'PYTHON'
import importlib.util
import shutil

missing = [name for name in ("torch", "pybind11", "scikit_build_core") if importlib.util.find_spec(name) is None]
missing += [f"{name} (a program)" for name in ("cmake", "ninja", "c++") if shutil.which(name) is None]
if "torch" not in missing:
    import torch

    if not torch.cuda.is_available():
        missing.append(f"a GPU that torch {torch.__version__} can use")
print(", ".join(missing))
PYTHON
) || missing="a python3 that runs ($python)"
if [[ -n $missing ]]; then
  echo "gpu_check: missing: $missing. Nothing was built or run." >&2
  exit 2
fi

echo "build"
# Into a folder of its own: many images' Python is their system's, and takes no packages from pip.
installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
if ! timeout 200 "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$installed" .; then
  echo "gpu_check: the build failed" >&2
  exit 1
fi
echo "built after $((SECONDS - start)) s"

# What the build left of the eight minutes. gpu.py ends by itself; the timeout is for the case that it does not.
left=$((460 - (SECONDS - start)))
PYTHONPATH=$installed timeout $((left + 10)) "$python" benchmarks/gpu.py --json "$results" --seconds "$left"
code=$?
echo "gpu_check: ended after $((SECONDS - start)) s with code $code; results: $results"
exit "$code"
