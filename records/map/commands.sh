# Every sweep of this study, in the order in which they were run; one that is finished is skipped. From the project's root.
flags="--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --val_tokens=131072 --log_interval=100 --jobs=2"
cell() { cell="--batch_size=$1 --max_iters=$2 --eval_interval=$(($2 / 10)) --warmup_iters=$3"; }
study() { python tools/sweep.py train_gpt.py $flags $cell "$@"; }
llama() { python tools/sweep.py train_llama.py --n_ffn=352 $flags $cell "$@"; }
study --batch_size=16 --max_iters=1600 --eval_interval=160 --optimizer=muon,muon-vs --adam_lr=0.0025,0.005,0.02,0.04 --learning_rate=0.005 --seed=101

cell 16 1600 20
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.01 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.005,0.01 --seed=101
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.007 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.007 --seed=1..8

cell 4 1600 80
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --adam_lr=0.005,0.02 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0025 --seed=101
study --optimizer=muon-vs --adam_lr=0.005,0.02 --learning_rate=0.0035 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0035 --seed=1..8

cell 64 400 20
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.01 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.007,0.014 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon --adam_lr=0.08 --learning_rate=0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.02 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.014 --seed=101
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.01,0.02 --seed=101
study --optimizer=muon-vs --adam_lr=0.08 --learning_rate=0.014 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.007 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.014 --seed=1..8

cell 16 400 20
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.01 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.007,0.014 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon --adam_lr=0.08 --learning_rate=0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.01 --seed=101
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.007,0.014 --seed=101
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.02 --seed=101
study --optimizer=muon-vs --adam_lr=0.08 --learning_rate=0.014 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.007 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.014 --seed=1..8

cell 64 100 20
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.01,0.014,0.02 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.028 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.04 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.028 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.02,0.04 --seed=101
study --optimizer=muon --adam_lr=0.08 --learning_rate=0.028 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.01,0.014,0.02 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.028 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.02 --seed=101
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.014,0.028 --seed=101
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.04 --seed=101
study --optimizer=muon-vs --adam_lr=0.08 --learning_rate=0.028 --seed=101
study --optimizer=muon --adam_lr=0.04 --learning_rate=0.028 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.04 --learning_rate=0.028 --seed=1..8

cell 4 6400 80
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0018,0.0025,0.0035 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.00125 --seed=101
study --optimizer=muon --adam_lr=0.005,0.02 --learning_rate=0.0018 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0018,0.0025,0.0035 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.00125 --seed=101
study --optimizer=muon-vs --adam_lr=0.005,0.02 --learning_rate=0.0018 --seed=101
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.00125,0.0025 --seed=101
study --optimizer=muon-vs --adam_lr=0.0025 --learning_rate=0.0018 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0018 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.0018 --seed=1..8

cell 64 1600 20
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.01 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.007 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.005,0.01 --seed=101
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.007 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.007 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.0018,0.0025,0.0035 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.005 --seed=1..8

cell 16 1600 20
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.01 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.01 --learning_rate=0.01 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.005,0.02 --learning_rate=0.007 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.02 --learning_rate=0.005,0.01 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.04 --learning_rate=0.007 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.02 --learning_rate=0.007 --seed=1..8
study --optimizer=adamw --adam_lr=0.01 --learning_rate=0.0025,0.005,0.01 --seed=101
study --optimizer=adamw --adam_lr=0.01 --learning_rate=0.00125 --seed=101
study --optimizer=adamw --adam_lr=0.005,0.02 --learning_rate=0.0025 --seed=101
study --optimizer=adamw --adam_lr=0.02 --learning_rate=0.00125,0.005 --seed=101
study --optimizer=adamw --adam_lr=0.04 --learning_rate=0.0025 --seed=101
study --optimizer=adamw --adam_lr=0.02 --learning_rate=0.0025 --seed=1..8
study --optimizer=adamuon --adam_lr=0.01 --learning_rate=0.0025,0.005,0.01 --seed=101
study --optimizer=adamuon --adam_lr=0.005,0.02 --learning_rate=0.005 --seed=101
study --optimizer=adamuon --adam_lr=0.01 --learning_rate=0.005 --seed=1..8
study --optimizer=normuon --adam_lr=0.02 --learning_rate=0.0025,0.005,0.01 --seed=101
study --optimizer=normuon --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=normuon --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon2 --adam_lr=0.02 --learning_rate=0.0025,0.005,0.01 --seed=101
study --optimizer=muon2 --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon2 --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-nsr-post --gamma=10 --adam_lr=0.02 --learning_rate=0.0025,0.005,0.01 --seed=101
study --optimizer=muon-nsr-post --gamma=10 --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon-nsr-post --gamma=10 --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.01 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.01 --learning_rate=0.01 --seed=101
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.005,0.02 --learning_rate=0.007 --seed=101
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.01 --learning_rate=0.007 --seed=1..8
study --optimizer=muon --ns_steps=3 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --ns_steps=3 --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-vs --ns_steps=3 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-vs --ns_steps=3 --adam_lr=0.01 --learning_rate=0.007 --seed=1..8
study --optimizer=muon --ns_steps=4 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --ns_steps=4 --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-vs --ns_steps=4 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-vs --ns_steps=4 --adam_lr=0.01 --learning_rate=0.0035 --seed=101
study --optimizer=muon-vs --ns_steps=4 --adam_lr=0.01 --learning_rate=0.005 --seed=1..8
study --optimizer=muon --ns_steps=2 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon --ns_steps=2 --adam_lr=0.02 --learning_rate=0.01 --seed=101
study --optimizer=muon --ns_steps=2 --adam_lr=0.02 --learning_rate=0.014 --seed=101
study --optimizer=muon --ns_steps=2 --adam_lr=0.02 --learning_rate=0.01 --seed=1..8
study --optimizer=muon-vs --ns_steps=2 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-vs --ns_steps=2 --adam_lr=0.01 --learning_rate=0.0035 --seed=101
study --optimizer=muon-vs --ns_steps=2 --adam_lr=0.01 --learning_rate=0.005 --seed=1..8

cell 16 6400 20
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0018,0.0025,0.0035 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.00125 --seed=101
study --optimizer=muon --adam_lr=0.005,0.02 --learning_rate=0.0018 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0018 --seed=1..4
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0018,0.0025,0.0035 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.00125 --seed=101
study --optimizer=muon-vs --adam_lr=0.005,0.02 --learning_rate=0.0018 --seed=101
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.00125,0.0025 --seed=101
study --optimizer=muon-vs --adam_lr=0.0025 --learning_rate=0.0018 --seed=101
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.0018 --seed=1..4

cell 4 25600 80
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0009,0.00125,0.0018 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.000625 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.00045 --seed=101
study --optimizer=muon --adam_lr=0.005,0.02 --learning_rate=0.000625 --seed=101
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.00045,0.0009 --seed=101
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.0003 --seed=101
study --optimizer=muon --adam_lr=0.0025 --learning_rate=0.00022,0.0003,0.00045 --seed=101
study --optimizer=muon --adam_lr=0.0025 --learning_rate=0.00016 --seed=101
study --optimizer=muon-vs --adam_lr=0.0025 --learning_rate=0.00022,0.0003,0.00045 --seed=101
study --optimizer=muon --adam_lr=0.00125,0.005 --learning_rate=0.00022 --seed=101
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.00016 --seed=101
study --optimizer=muon-vs --adam_lr=0.00125,0.005 --learning_rate=0.0003 --seed=101
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.00022 --seed=101
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.00022 --seed=1..4
study --optimizer=muon-vs --adam_lr=0.0025 --learning_rate=0.0003 --seed=1..4

cell 64 1600 20
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.02 --learning_rate=0.005 --seed=1..4
study --optimizer=muon-nsr --gamma=1000 --adam_lr=0.02 --learning_rate=0.005 --seed=1..4
study --optimizer=muon-nsr --gamma=1 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-nsr --gamma=1 --adam_lr=0.02 --learning_rate=0.0025 --seed=101
study --optimizer=muon-nsr --gamma=1 --adam_lr=0.02 --learning_rate=0.0035 --seed=1..4
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.02 --learning_rate=0.0025 --seed=101
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.02 --learning_rate=0.0018 --seed=101
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.02 --learning_rate=0.0025 --seed=1..4
study --optimizer=muon2 --adam_lr=0.01 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon2 --adam_lr=0.01 --learning_rate=0.0025 --seed=101
study --optimizer=muon --weight_decay=0 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon2 --adam_lr=0.005,0.02 --learning_rate=0.0035 --seed=101
study --optimizer=muon2 --adam_lr=0.01 --learning_rate=0.0035 --seed=1..4
study --optimizer=muon --weight_decay=0 --adam_lr=0.01 --learning_rate=0.0035 --seed=101
study --optimizer=muon --weight_decay=0 --adam_lr=0.01 --learning_rate=0.0025 --seed=101
study --optimizer=muon --weight_decay=0 --adam_lr=0.01 --learning_rate=0.0035 --seed=1..4
study --optimizer=muon-vs --weight_decay=0 --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
study --optimizer=muon-vs --weight_decay=0 --adam_lr=0.02 --learning_rate=0.007 --seed=101

cell 16 600 20; cell="--n_layer=4 --n_embd=256 --n_head=4 --block_size=256 --val_tokens=262144 $cell"
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101

cell 64 1600 20
study --optimizer=muon-vs --weight_decay=0 --adam_lr=0.02 --learning_rate=0.005 --seed=1..4

cell 16 600 20; cell="--n_layer=4 --n_embd=256 --n_head=4 --block_size=256 --val_tokens=262144 $cell"
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.007,0.01,0.014 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.005 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.0035 --seed=101
study --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.0035 --seed=101
study --optimizer=muon --adam_lr=0.02 --learning_rate=0.005 --seed=1..8
study --optimizer=muon-vs --adam_lr=0.02 --learning_rate=0.0025 --seed=101
study --optimizer=muon-vs --adam_lr=0.01,0.04 --learning_rate=0.0035 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0025,0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.007 --seed=101
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.005 --seed=101
study --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.005 --seed=1..8

cell 16 1600 20
study --optimizer=muon-nsr --gamma=1 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-nsr --gamma=1 --adam_lr=0.01 --learning_rate=0.007 --seed=1..4
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.01 --learning_rate=0.0035 --seed=101
study --optimizer=muon-nsr --gamma=100 --adam_lr=0.01 --learning_rate=0.005 --seed=1..4
study --optimizer=muon-nsr --gamma=10000 --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
study --optimizer=muon-nsr --gamma=10000 --adam_lr=0.01 --learning_rate=0.0035 --seed=101
study --optimizer=muon-nsr --gamma=10000 --adam_lr=0.01 --learning_rate=0.005 --seed=1..4
llama --optimizer=muon --adam_lr=0.02 --learning_rate=0.0035,0.005,0.007 --seed=101
llama --optimizer=muon --adam_lr=0.02 --learning_rate=0.01 --seed=101
llama --optimizer=muon --adam_lr=0.01,0.04 --learning_rate=0.007 --seed=101
llama --optimizer=muon --adam_lr=0.02 --learning_rate=0.007 --seed=1..8
llama --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.005,0.007,0.01 --seed=101
llama --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0035 --seed=101
llama --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0025 --seed=101
llama --optimizer=muon-vs --adam_lr=0.005,0.02 --learning_rate=0.0035 --seed=101
llama --optimizer=muon-vs --adam_lr=0.01 --learning_rate=0.0035 --seed=1..8

cell 64 1600 20
study --optimizer=muon2 --adam_lr=0.01 --learning_rate=0.0035 --seed=5..8
study --optimizer=muon-nsr --gamma=10 --adam_lr=0.02 --learning_rate=0.005 --seed=5..8
study --optimizer=muon-vs --weight_decay=0 --adam_lr=0.02 --learning_rate=0.005 --seed=5..8
study --optimizer=muon --weight_decay=0 --adam_lr=0.01 --learning_rate=0.0035 --seed=5..8

cell 4 25600 80
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.0003 --seed=1..4

cell 16 6400 20
study --optimizer=muon --adam_lr=0.01 --learning_rate=0.0018 --seed=5..8
study --optimizer=muon-vs --adam_lr=0.005 --learning_rate=0.0018 --seed=5..8

cell 4 25600 80
study --optimizer=muon --adam_lr=0.005 --learning_rate=0.00022 --seed=5..8
study --optimizer=muon-vs --adam_lr=0.0025 --learning_rate=0.0003 --seed=5..8
