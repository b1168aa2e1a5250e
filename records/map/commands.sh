# Every run of this study; one that is finished is skipped. From the project's root.
model="--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --val_tokens=131072 --qkv_split=1"
rest="--log_interval=100 --jobs=2"
cell() { cell="--batch_size=$1 --max_iters=$2 --eval_interval=$(($2 / 10)) --warmup_iters=$3"; }
# optimizer, adam_lr, learning_rate, seed, another flag
runs() { python tools/sweep.py $script $model $cell $rest --optimizer=$1 $5 --adam_lr=$2 --learning_rate=$3 --seed=$4; }

script=train_gpt.py
cell 4 1600 80
runs muon 0.005,0.02 0.005 101
runs muon 0.01 0.0035,0.005,0.007 101
runs muon 0.01 0.005 1..8
runs muon-vs 0.005,0.02 0.0035 101
runs muon-vs 0.01 0.0025,0.0035,0.005,0.007 101
runs muon-vs 0.01 0.0035 1..8

for start in "4 6400 80" "16 6400 20"; do
    cell $start
    runs muon 0.005,0.02 0.0018 101
    runs muon 0.01 0.00125,0.0018,0.0025,0.0035 101
    runs muon 0.01 0.0018 1..8
    runs muon-vs 0.0025,0.02 0.0018 101
    runs muon-vs 0.005 0.00125,0.0018,0.0025 101
    runs muon-vs 0.01 0.00125,0.0018,0.0025,0.0035 101
    runs muon-vs 0.005 0.0018 1..8
done

cell 4 25600 80
runs muon 0.00125 0.00022 101
runs muon 0.0025 0.00016,0.00022,0.0003,0.00045 101
runs muon 0.005 0.00016,0.00022,0.0003,0.00045,0.000625,0.0009 101
runs muon 0.01 0.00022,0.00045,0.000625,0.0009,0.00125,0.0018 101
runs muon 0.02 0.000625 101
runs muon 0.005 0.00022 1..8
runs muon-vs 0.00125,0.005 0.0003 101
runs muon-vs 0.0025 0.00022,0.0003,0.00045 101
runs muon-vs 0.0025 0.0003 1..8
runs muon-vs 0.005 0.0003 1..4

for start in "16 400 20" "64 400 20"; do
    cell $start
    runs muon 0.01 0.01 101
    runs muon 0.02 0.007,0.01,0.014 101
    runs muon 0.04 0.005,0.007,0.01,0.014 101
    runs muon 0.08 0.007 101
    runs muon 0.04 0.007 1..8
    runs muon-vs 0.04 0.014 1..8
done

cell 16 400 20
runs muon-vs 0.01 0.01 101
runs muon-vs 0.02 0.007,0.01,0.014 101
runs muon-vs 0.04 0.007,0.01,0.014,0.02 101
runs muon-vs 0.08 0.014 101

cell 16 1600 20
runs muon 0.0025,0.005,0.01,0.04 0.005 101
runs muon 0.02 0.0035,0.005,0.007 101
runs muon 0.02 0.005 1..8
runs muon-vs 0.0025 0.005 101
runs muon-vs 0.005,0.04 0.005,0.007 101
runs muon-vs 0.01 0.005,0.007,0.01 101
runs muon-vs 0.02 0.0035,0.005,0.007,0.01 101
runs muon-vs 0.01 0.007 1..8
runs muon-nsr 0.005,0.04 0.007 101 --gamma=10
runs muon-nsr 0.01 0.0035,0.005,0.007,0.01 101 --gamma=10
runs muon-nsr 0.02 0.005,0.007,0.01 101 --gamma=10
runs muon-nsr 0.02 0.007 1..8 --gamma=10
runs adamw 0.005,0.04 0.0025 101
runs adamw 0.01 0.00125,0.0025,0.005,0.01 101
runs adamw 0.02 0.00125,0.0025,0.005 101
runs adamw 0.02 0.0025 1..8
runs adamuon 0.005,0.02 0.005 101
runs adamuon 0.01 0.0025,0.005,0.01 101
runs adamuon 0.01 0.005 1..8
runs normuon 0.01,0.04 0.005 101
runs normuon 0.02 0.0025,0.005,0.01 101
runs normuon 0.02 0.005 1..8
runs muon2 0.01,0.04 0.005 101
runs muon2 0.02 0.0025,0.005,0.01 101
runs muon2 0.02 0.005 1..8
runs muon-nsr-post 0.01,0.04 0.005 101 --gamma=10
runs muon-nsr-post 0.02 0.0025,0.005,0.01 101 --gamma=10
runs muon-nsr-post 0.02 0.005 1..8 --gamma=10
runs muon-nsr 0.005,0.02 0.007 101 --gamma=1000
runs muon-nsr 0.01 0.0035,0.005,0.007,0.01 101 --gamma=1000
runs muon-nsr 0.01 0.007 1..8 --gamma=1000
runs muon 0.02 0.0035,0.005,0.007 101 --ns_steps=3
runs muon 0.02 0.005 1..8 --ns_steps=3
runs muon-vs 0.01 0.005,0.007,0.01 101 --ns_steps=3
runs muon-vs 0.01 0.007 1..8 --ns_steps=3
runs muon 0.02 0.0035,0.005,0.007 101 --ns_steps=4
runs muon 0.02 0.005 1..8 --ns_steps=4
runs muon-vs 0.01 0.0035,0.005,0.007,0.01 101 --ns_steps=4
runs muon-vs 0.01 0.005 1..8 --ns_steps=4
runs muon 0.02 0.0035,0.005,0.007,0.01,0.014 101 --ns_steps=2
runs muon 0.02 0.01 1..8 --ns_steps=2
runs muon-vs 0.01 0.0035,0.005,0.007,0.01 101 --ns_steps=2
runs muon-vs 0.01 0.005 1..8 --ns_steps=2
runs muon-nsr 0.01 0.005,0.007,0.01 101 --gamma=1
runs muon-nsr 0.01 0.007 1..4 --gamma=1
runs muon-nsr 0.01 0.0035,0.005,0.007,0.01 101 --gamma=100
runs muon-nsr 0.01 0.005 1..4 --gamma=100
runs muon-nsr 0.01 0.0035,0.005,0.007,0.01 101 --gamma=10000
runs muon-nsr 0.01 0.005 1..4 --gamma=10000

cell 64 100 20
runs muon 0.01,0.08 0.028 101
runs muon 0.02 0.01,0.014,0.02,0.028,0.04 101
runs muon 0.04 0.02,0.028,0.04 101
runs muon 0.04 0.028 1..8
runs muon-vs 0.01 0.02 101
runs muon-vs 0.02 0.01,0.014,0.02,0.028 101
runs muon-vs 0.04 0.014,0.02,0.028,0.04 101
runs muon-vs 0.08 0.028 101
runs muon-vs 0.04 0.028 1..8

cell 64 400 20
runs muon-vs 0.01,0.08 0.014 101
runs muon-vs 0.02 0.007,0.01,0.014,0.02 101
runs muon-vs 0.04 0.01,0.014,0.02 101

cell 64 1600 20
runs muon 0.005,0.04 0.007 101
runs muon 0.01 0.005,0.007,0.01 101
runs muon 0.02 0.0035,0.005,0.007,0.01 101
runs muon 0.01 0.007 1..8
runs muon-vs 0.01,0.04 0.005 101
runs muon-vs 0.02 0.0018,0.0025,0.0035,0.005,0.007 101
runs muon-vs 0.02 0.005 1..8
runs muon-nsr 0.02 0.0035,0.005,0.007 101 --gamma=10
runs muon-nsr 0.02 0.005 1..8 --gamma=10
runs muon-nsr 0.02 0.0035,0.005,0.007 101 --gamma=1000
runs muon-nsr 0.02 0.005 1..4 --gamma=1000
runs muon-nsr 0.02 0.0025,0.0035,0.005,0.007 101 --gamma=1
runs muon-nsr 0.02 0.0035 1..4 --gamma=1
runs muon-nsr 0.02 0.0018,0.0025,0.0035,0.005,0.007 101 --gamma=100
runs muon-nsr 0.02 0.0025 1..4 --gamma=100
runs muon2 0.005,0.02 0.0035 101
runs muon2 0.01 0.0025,0.0035,0.005,0.007 101
runs muon2 0.01 0.0035 1..8
runs muon 0.01 0.0025,0.0035,0.005,0.007,0.01 101 --weight_decay=0
runs muon 0.01 0.0035 1..8 --weight_decay=0
runs muon-vs 0.02 0.0035,0.005,0.007 101 --weight_decay=0
runs muon-vs 0.02 0.005 1..8 --weight_decay=0

script="train_llama.py --n_ffn=352"
cell 16 1600 20
runs muon 0.01,0.04 0.007 101
runs muon 0.02 0.0035,0.005,0.007,0.01 101
runs muon 0.02 0.007 1..8
runs muon-vs 0.005,0.02 0.0035 101
runs muon-vs 0.01 0.0025,0.0035,0.005,0.007,0.01 101
runs muon-vs 0.01 0.0035 1..8

model="--n_layer=4 --n_embd=256 --n_head=4 --block_size=256 --val_tokens=262144 --qkv_split=1"
script=train_gpt.py
cell 16 600 20
runs muon 0.01,0.04 0.005 101
runs muon 0.02 0.0035,0.005,0.007,0.01,0.014 101
runs muon 0.02 0.005 1..8
runs muon-vs 0.005 0.005 101
runs muon-vs 0.01 0.0025,0.0035,0.005,0.007 101
runs muon-vs 0.02 0.0025,0.0035,0.005,0.007,0.01,0.014 101
runs muon-vs 0.04 0.0035 101
runs muon-vs 0.01 0.005 1..8
