#!/usr/bin/env bash
# Every run of this folder, about an hour on 2 cores: from the repository's root, bash records/small/run.sh search, then seeds gamma
# ns_steps bf16. The logs kept are in logs.tar.xz; bash records/small/run.sh reports makes this folder's reports of them again.
set -euo pipefail
size="--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --max_iters=200 --warmup_iters=10 --adam_lr=0.005 --val_tokens=65536
      --eval_interval=40 --sample_tokens=0 --keep_checkpoints=1 --device=cpu --checkpoint_dir=/tmp/small"
sweep() { python tools/sweep.py "$@" $size --jobs="${JOBS:-2}" < /dev/null; }
report() { python tools/report.py "${@:2}" --out "records/small/$1"; }  # README shows gpt/gpt-demo-loss-steps.png; no other PNG is kept
all=adamw,muon,adamuon,normuon,muon2,muon-nsr,muon-vs
for what; do case $what in
search)  # the same five learning rates for everyone, a seed that is not reported; adamw's best was the lowest, so it got two more
  for script in gpt llama; do
    sweep train_$script.py --optimizer=$all,muon-nsr-post --learning_rate=0.0025,0.005,0.01,0.02,0.04 --seed=101 \
        --log_dir=logs/small/$script-search
    sweep train_$script.py --optimizer=adamw --learning_rate=0.000625,0.00125 --seed=101 --log_dir=logs/small/$script-search
  done;;
seeds)   # each at the learning rate that was best in the search
  while read -r script optimizer lr; do
    sweep train_$script.py --optimizer=$optimizer --learning_rate=$lr --seed=1..8 --log_dir=logs/small/$script
  done < records/small/chosen.txt;;
gamma)   # γ = 1000 is among the seeds
  lr=$(awk '$1 == "gpt" && $2 == "muon-nsr" {print $3}' records/small/chosen.txt)
  sweep train_gpt.py --optimizer=muon-nsr --learning_rate=$lr --gamma=1,10,100,10000 --seed=1..4 \
      --log_dir=logs/small/gpt-gamma;;
ns_steps)  # K = 5 is among the seeds
  for optimizer in muon muon-vs; do
    lr=$(awk -v o=$optimizer '$1 == "gpt" && $2 == o {print $3}' records/small/chosen.txt)
    sweep train_gpt.py --optimizer=$optimizer --learning_rate=$lr --ns_steps=3,4 --seed=1..4 \
        --log_dir=logs/small/gpt-ns_steps
  done;;
bf16)    # parameters and state in bf16, rounded to nearest or stochastically; fp32 is among the seeds
  lr=$(awk '$1 == "llama" && $2 == "muon-vs" {print $3}' records/small/chosen.txt)
  sweep train_llama.py --optimizer=muon-vs --learning_rate=$lr --param_dtype=bfloat16 --stochastic_rounding=false,true \
      --seed=1..4 --log_dir=logs/small/llama-bf16;;
reports)
  logs=$(mktemp -d) && tar xJf records/small/logs.tar.xz -C "$logs"
  for name in gpt llama gpt-search llama-search; do report $name "$logs/$name"; done
  muon=("$logs"/gpt/gpt-muon-????????-seed[1-4].txt) nsr=("$logs"/gpt/gpt-muon-nsr-????????-seed[1-4].txt)
  vs=("$logs"/gpt/gpt-muon-vs-????????-seed[1-4].txt)
  report gamma "$logs/gpt-gamma" "${muon[@]}" "${nsr[@]}" "${vs[@]}"
  report ns_steps "$logs/gpt-ns_steps" "${muon[@]}" "${vs[@]}" --baseline "muon ns_steps=5"
  report bf16 "$logs/llama-bf16" "$logs"/llama/llama-muon-vs-????????-seed[1-4].txt --baseline "muon-vs";;
esac; done
