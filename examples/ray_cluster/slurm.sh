#!/bin/bash
# A run of consilience on a Ray cluster that Slurm starts: sbatch slurm.sh CONFIG.toml [key=value ...]
# One raylet per node; every core serves one worker. The run is continued if it was begun before (sbatch --requeue).
#SBATCH --job-name=consilience
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
# GPUs: add `#SBATCH --gpus-per-task=1`, and pass engine.num_gpus=1 engine.workers=2 behind the config

set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG.toml [key=value ...]}
shift
cores=${SLURM_CPUS_PER_TASK:?run this with sbatch}
port=${RAY_PORT:-6379}
runs=${RUNS:-runs}
name=${SLURM_JOB_NAME:-consilience}-${SLURM_JOB_ID:?run this with sbatch}

mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?run this with sbatch}")
step=(srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$cores") # all cores of the node that --nodelist names
first=(--nodelist="${nodes[0]}")

# shellcheck disable=SC2317 # called by the trap
stop() { # the steps that hold raylets; Slurm ends what is left with the job
    local steps
    steps=$(jobs -p)
    # shellcheck disable=SC2086 # one word per step
    [ -z "$steps" ] || kill $steps 2>/dev/null || true
    wait || true
}
trap stop EXIT

address=$("${step[@]}" "${first[@]}" hostname --ip-address)
address=${address%% *}
gpus=()
if [ -n "${SLURM_GPUS_PER_TASK:-}" ]; then gpus=(--num-gpus="${SLURM_GPUS_PER_TASK##*:}"); fi # h200:2 is 2

"${step[@]}" "${first[@]}" ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cores" "${gpus[@]}" \
    --include-dashboard=false --disable-usage-stats --block &
for _ in {1..60}; do
    if "${step[@]}" "${first[@]}" ray health-check --address="$address:$port" >/dev/null 2>&1; then break; fi
    sleep 1
done
for node in "${nodes[@]:1}"; do
    "${step[@]}" --nodelist="$node" ray start --address="$address:$port" --num-cpus="$cores" "${gpus[@]}" \
        --disable-usage-stats --block &
done

if [ -e "$runs/$name/run.json" ]; then
    "${step[@]}" "${first[@]}" consilience resume "$runs/$name" engine.address="$address:$port" "$@"
else
    # machines may come later than the driver: it begins with the head's workers, and the others join between rounds
    "${step[@]}" "${first[@]}" consilience run "$config" engine=ray engine.address="$address:$port" \
        engine.workers="$((cores * ${#nodes[@]}))" engine.min_workers="$cores" runs="$runs" name="$name" "$@"
fi
