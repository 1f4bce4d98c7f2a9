#!/usr/bin/env bash
# The whole loop on a real model and real text, on a CPU. Run it with: make demo
# Everything it writes goes to runs/demo.
set -euo pipefail

out=${1:-runs/demo}
model=smollm2-135m
limits=(--max-num-seqs 4 --max-model-len 2560 --max-num-batched-tokens 1024 --seed 1)
prompts=(--dataset-name docs --num-prompts 4 --input-len 2048 --output-len 48 --ignore-eos --temperature 0.7 --top-k 50 --top-p 0.9)

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

mkdir -p "$out"
started=$(date +%s)
run aspire doctor
run aspire profile --model $model "${limits[@]}" --budget-minutes 1.5 --output "$out/samples.jsonl"
run aspire calibrate "$out/samples.jsonl" --output "$out/cost_model.json"
run aspire simulate --cost-model "$out/cost_model.json" --num-prompts 4 --input-len 2048 --output-len 48 --acceptance iid:0.75 \
    --output-dir "$out/simulate"
run aspire tune --cost-model "$out/cost_model.json" --num-prompts 4 --input-len 2048 --output-len 48 --acceptance iid:0.75 \
    --output "$out/policy.json"
run aspire generate --model $model "${limits[@]}" --policy "$out/policy.json" --cost-model "$out/cost_model.json" \
    --prompt "Why is the sky blue?" --max-tokens 48 --output-dir "$out/generate"
run aspire bench --model $model "${limits[@]}" "${prompts[@]}" --cost-model "$out/cost_model.json" \
    --policy autoregressive --policy fixed --policy "$out/policy.json" --output-dir "$out/bench"
run aspire report "$out"/bench/* --output "$out/report.html"
printf '\nThe demo took %d s. Open %s\n' "$(($(date +%s) - started))" "$out/report.html"
