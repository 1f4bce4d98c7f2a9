#!/usr/bin/env bash
# The whole loop on a real model and real text, on a CPU. Run it with: make demo
# Everything it writes goes to runs/demo, which is made anew.
set -euo pipefail

out=${1:-runs/demo}
engine=(--model smollm2-135m --max-num-seqs 2 --max-model-len 3200 --max-num-batched-tokens 256 --num-speculative-tokens 6 --seed 1)
prompts=(--dataset-name docs --num-prompts 2 --input-len 3072 --output-len 64 --ignore-eos --temperature 0.7 --top-k 50 --top-p 0.9)
work=(--cost-model "$out/cost_model.json" --num-prompts 2 --input-len 3072 --output-len 64 --acceptance iid:0.8
      --max-num-seqs 2 --max-model-len 3200 --max-num-batched-tokens 256 --seed 1)

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

started=$(date +%s)
rm -rf "$out"
mkdir -p "$out"

# What can this machine do?
run aspire doctor
# Time real steps, fit what a step costs.
run aspire profile "${engine[@]}" --levels 2 --repeats 3 --budget-minutes 2 --output "$out/samples.jsonl"
run aspire calibrate "$out/samples.jsonl" --output "$out/cost_model.json" --figure "$out/cost_model.svg"
# What would each policy do? Which is best?
run aspire simulate "${work[@]}" --policy autoregressive --policy fixed:g=3 --policy aspire --policy oracle --output-dir "$out/simulate"
run aspire tune "${work[@]}" --num-speculative-tokens 6 --trials 30 --output "$out/policy.json"
# Generate under the tuned policy, then measure it beside plain decoding on long real text.
run aspire generate "${engine[@]}" --policy "$out/policy.json" --cost-model "$out/cost_model.json" \
    --prompt "Why is the sky blue?" --max-tokens 40 --output "$out/outputs.jsonl" --output-dir "$out/generate"
run aspire bench "${engine[@]}" "${prompts[@]}" --cost-model "$out/cost_model.json" \
    --policy autoregressive --policy fixed:g=3 --policy "$out/policy.json" --output-dir "$out/bench"
# Was the prediction right?
run aspire validate "$out"/bench/0* --output "$out/validate.json"
run aspire report "$out/bench" --output "$out/report.html" --figures "$out/figures"

printf '\nThe loop took %d s. The page to read: %s\n' "$(($(date +%s) - started))" "$out/report.html"
