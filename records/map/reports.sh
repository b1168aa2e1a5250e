# The reports in this folder, from the project's root; of their figures git has the map alone, in 24 colours.
cd records
report() { python ../tools/report.py logs.tar.xz "$@"; }
report --tuned_on=101 --tables --out map/report --only=/map/                    # the map, and tables of all cells
report --tuned_on=101 --tables --out map/behind --only=gpt-batch64-updates1600 --baseline="muon lr=0.007 adam_lr=0.01 weight_decay=0.1"
