#!/usr/bin/env bash
# All that needs a GPU, on a machine with one, offline, within 8 minutes: build, correctness, figures, sanitizer.
#   bash benchmarks/gpu_check.sh [RESULTS.json]
# Needs what an ordinary CUDA and PyTorch image holds: python with torch for CUDA, a C++20 compiler, pybind11 (2.13 will
# do); with recent pybind11 and scikit-build-core, and cmake and ninja, it builds as pip does. Exit code: 0 all right, 1 something is wrong, 2 something is missing.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(realpath -m "${1:-gpu_check.json}")
python=${PYTHON:-python3}
start=$SECONDS

missing=$("$python" - <<'PYTHON'
import importlib.util
import shutil

missing = [name for name in ("torch", "pybind11") if importlib.util.find_spec(name) is None]
missing += [f"{name} (a program)" for name in ("c++",) if shutil.which(name) is None]
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

# With the build tools that pyproject.toml asks for; older ones, as many images have, are passed by.
recent=$("$python" - <<'PYTHON'
import importlib.metadata


def numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])


print(int(numbers("pybind11") >= (3, 1) and numbers("scikit-build-core") >= (1, 0)))
PYTHON
) || recent=0
build() {
  if [[ $recent == 1 ]]; then
    timeout 200 "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$installed" .
    return
  fi
  echo "pybind11 or scikit-build-core is older than pyproject.toml asks for: a plain compiler call instead"
  cp -r pypipe "$installed" &&
    timeout 250 c++ -std=c++20 -O2 -shared -fPIC -fvisibility=hidden '-DPYPIPE_VERSION="0.1.0"' -I csrc \
      $("$python" -m pybind11 --includes) csrc/*/*.cpp csrc/link/*/*.cpp -o \
      "$installed/pypipe/_core$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')" \
      -ldl -lpthread &&
    mkdir -p "$installed/pypipe-0.1.0.dist-info" &&
    printf 'Metadata-Version: 2.1\nName: pypipe\nVersion: 0.1.0\n' >"$installed/pypipe-0.1.0.dist-info/METADATA"
}
if ! build; then
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
