#!/bin/sh
# Builds FlashInfer's MonoMoE for `padless bench decoding`: build.sh WHEEL [PEERS], of flashinfer_python-*.whl into
# PEERS/monomoe (.peers by default). Needs nvcc and no GPU; the flags are those of FlashInfer's own build.
set -eu
wheel=$1 peers=${2:-.peers} here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unzip -q "$wheel" 'flashinfer/data/csrc/fused_moe/monomoe/*' 'flashinfer/data/cutlass/include/*' -d "$work"
data=$work/flashinfer/data source=$work/flashinfer/data/csrc/fused_moe/monomoe
mkdir -p "$peers/monomoe"
nvcc -O3 -std=c++17 -use_fast_math -DNDEBUG --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a \
    -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -shared -Xcompiler -fPIC \
    -I"$here" -I"$source" -I"$source/src" -I"$data/cutlass/include" \
    -o "$peers/monomoe/monomoe.so" "$here/monomoe.cu" "$source/src/moe_tma.cu"
basename "$wheel" | cut -d- -f2 > "$peers/monomoe/version.txt"
