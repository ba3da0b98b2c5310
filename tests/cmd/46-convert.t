#!/bin/sh
# KV that is coded on its way, and KV in other blocks: what arrives is the same in every bit. Tiny models, no network.
cd "$(dirname "$0")/../.." || exit 1
PY=${PD_PY:-${PD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pd}/venv/bin/python3}
"$PY" -c 'import h5py, numpy' 2>/dev/null || { echo "1..0 # SKIP no Python with h5py (scripts/setup makes one)"; exit 0; }
B=${B:-build}
case $B in /*) ;; *) B=$PWD/$B ;; esac
HDF5_PLUGIN_PATH=$B/hdf5-plugin B=$B exec "$PY" tests/cmd/kv_forms.py
