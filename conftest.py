"""Under `pytest -n N` each worker takes its share of the cores, and Inductor does not ask the compiler in each of many
processes what the CPU can do. Ranks are forked by a server that has imported torch once."""
import multiprocessing
import os

import pytest

multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "pytest"])

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
for name in "WORLD_SIZE", "RANK", "LOCAL_RANK":  # of a cluster's job
    os.environ.pop(name, None)

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Every test in a folder of its own, on one thread: small matrices wait longer for a second than it saves."""
    import torch  # not above, as it reads OMP_NUM_THREADS
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
