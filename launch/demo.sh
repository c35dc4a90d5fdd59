#!/usr/bin/env bash
# Trains a small DiT on four CPU processes and samples from it; results in runs/demo/. Run it as `make demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1

# A former demo run is kept under the next free number.
if [[ -e runs/demo ]]; then
  n=1
  while [[ -e "runs/demo.$n" ]]; do n=$((n + 1)); done
  mv runs/demo "runs/demo.$n"
  echo "==> kept the former run as runs/demo.$n"
fi

echo "==> training on 4 processes"
torchrun --standalone --nproc_per_node 4 -m dbsp_megatron.train --config launch/demo.yaml

echo "==> sampling on 4 processes"
torchrun --standalone --nproc_per_node 4 -m dbsp_megatron.infer --checkpoint runs/demo \
  --sp.ulysses_degree 2 --sp.ring_degree 2 --sample.steps 20

echo "==> results:"
find runs/demo -maxdepth 2 | sort
