#!/bin/sh
# Cells of recipes/compare_simprox_banking77_transformer.toml side by side on one GPU; docs/make_transformers.py --store
# takes their folders over.
#   benchmarks/banking77_transformer.sh DATA WEIGHTS OUT head:0 head:1 lora:0 ...      (what is trained : seed)
data=$1; weights=$2; out=$3; shift 3
for cell in "$@"; do
    train=${cell%%:*}; seed=${cell##*:}
    python -m consilience run recipes/simprox_banking77_transformer.toml data_dir="$data" model.weights="$weights" \
        model.train="$train" seed="$seed" engine.precision=bf16 evaluation.every=2 checkpoint.every=20 \
        --no-report --quiet --folder "$out/$train-$seed" > "$out/$train-$seed.log" 2>&1 &
done
wait
for cell in "$@"; do tail -n 2 "$out/${cell%%:*}-${cell##*:}.log"; tail -n 1 "$out/${cell%%:*}-${cell##*:}/metrics.jsonl"; done
