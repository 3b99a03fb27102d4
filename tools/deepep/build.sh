#!/bin/sh
# Builds DeepEP's first version for `padless bench ep`: build.sh CHECKOUT PYTHON [PEERS], of a checkout at v1.2.1 into
# PEERS/DeepEP (.peers by default). PYTHON has the version and the torch of the machine that will measure. Needs nvcc of
# that torch's CUDA and no GPU. Without NVSHMEM, so within a host alone; the flags are those of DeepEP's setup.py, but no
# file refers to another one's device code, so there is no device link.
set -eu
checkout=$1 python=$2 peers=${3:-.peers}
eval "$("$python" - <<'PYTHON'
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

folder = Path(torch.__file__).parent
found = [*include_paths(), sysconfig.get_path("include"), *map(str, folder.parent.glob("nvidia/*/include"))]
print("includes='" + " ".join(f"-isystem {path}" for path in found) + "'")
print(f"libraries={folder / 'lib'} suffix={sysconfig.get_config_var('EXT_SUFFIX')}")
print(f"torch={torch.__version__}")
PYTHON
)"
cuda=$(dirname "$(dirname "$(command -v nvcc)")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for file in runtime layout intranode; do
    nvcc -std=c++17 -O3 -Xcompiler -fPIC -gencode arch=compute_90,code=sm_90 --expt-relaxed-constexpr \
        --ptxas-options=--register-usage-level=10 -DDISABLE_NVSHMEM -DDISABLE_AGGRESSIVE_PTX_INSTRS \
        -I"$checkout/csrc" -c "$checkout/csrc/kernels/$file.cu" -o "$work/$file.o"
done
# shellcheck disable=SC2086 # includes is a list
g++ -std=c++17 -O2 -fPIC -w -DDISABLE_NVSHMEM -DDISABLE_AGGRESSIVE_PTX_INSTRS -DTORCH_API_INCLUDE_EXTENSION_H \
    -DTORCH_EXTENSION_NAME=deep_ep_cpp -I"$checkout/csrc" -isystem "$cuda/include" -isystem "$cuda/include/cccl" $includes \
    -c "$checkout/csrc/deep_ep.cpp" -o "$work/deep_ep.o"
mkdir -p "$peers/DeepEP"
g++ -shared "$work"/*.o -o "$peers/DeepEP/deep_ep_cpp$suffix" -L"$cuda/lib64" -lcudart -L"$libraries" \
    -Wl,--no-as-needed -lc10 -lc10_cuda -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python
cp -r "$checkout/deep_ep" "$peers/DeepEP/"
echo "$peers/DeepEP: v1.2.1 for torch $torch"
