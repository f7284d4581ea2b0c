"""Weights that collectives of torch.distributed write, which count no version."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.usefixtures("instructions_known")

# With gloo one process becomes two once all is imported, which takes longer than what is tested. A
# process that forks cannot use a GPU.
RANKS = textwrap.dedent(
    """
    import os, sys, torch, torch.distributed as dist
    import torch._inductor.compile_fx
    from torch import nn
    from ipex_inductor.passes.weights import weight_snapshot

    weight_snapshot.UNPAID = 1000  # or weights that change so often are read as they are

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(600, 600))  # too large to be compared whole
            self.scale = nn.Parameter(torch.randn(600))

        def forward(self, x):
            return (x.unsqueeze(-1) * (self.w * self.scale)).sum(1)

    store, backend, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    other = os.fork() if size == 2 and backend == "gloo" else None
    rank = 1 if other == 0 else int(sys.argv[4])
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size)
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    model = Scaled().eval().requires_grad_(False).to(device)
    x = torch.randn(2, 600, device=device)
    fn = torch.compile(model, backend="ipex", options={"strict": True})

    def one(p):  # one element alone, which no sample shows at once
        part = p.view(-1)[7:8]
        dist.broadcast(part + 1 if rank == 0 else part, 0)

    def received(p):
        dist.recv(p.view(-1)[3:5], 0) if rank else dist.send(p.view(-1)[3:5] + 1, 1)

    WRITES = {
        "broadcast": lambda p: dist.broadcast(p, 0),
        "broadcast of data": lambda p: dist.broadcast(p.data, 0),
        "broadcast of one element": one,
        "all_reduce": lambda p: dist.all_reduce(p),
        "asynchronous": lambda p: dist.all_reduce(p, async_op=True).wait(),
        "reduce": lambda p: dist.reduce(p, 1),
        "received": received,
        "scattered": lambda p: dist.scatter(p, [p + 1, p + 2] if rank == 0 else None, 0),
        "gathered": lambda p: dist.all_gather([p, torch.empty_like(p)], p + 1),
        "coalesced": lambda p: dist._broadcast_coalesced(dist.group.WORLD, [p], 1 << 20, 0),
        "DDP": lambda p: nn.parallel.DistributedDataParallel(model.requires_grad_()),
    }
    ALONE = {  # what a rank without others is written by
        "all_reduce": lambda p: dist.all_reduce(p, dist._make_nccl_premul_sum(2.0)),
        "reduce_scatter": lambda p: dist.reduce_scatter(p, [p + 1]),
        "reduce_scatter_tensor": lambda p: dist.reduce_scatter_tensor(p, p + 1),
        "scattered": lambda p: dist.scatter(p, [p + 1], 0),
        "gathered": lambda p: dist.all_gather([p], p + 1),
        "gathered into one": lambda p: dist.all_gather_into_tensor(p, p + 1),
        "exchanged": lambda p: dist.all_to_all_single(p, p + 1),
        "asynchronous": lambda p: dist.all_gather_into_tensor(p, p + 1, async_op=True).wait(),
        "sent to itself": lambda p: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, p + 1, 0), dist.P2POp(dist.irecv, p, 0)]
            )
        ],
    }
    with torch.no_grad():
        for name, write in (WRITES if size == 2 else ALONE).items():
            for p in model.parameters():
                p.normal_()
            for _ in range(2):
                torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-3)
            before = model(x)
            model.requires_grad_(False)
            write(model.w)
            model.requires_grad_(False)
            assert rank < size - 1 or not torch.equal(before, model(x)), name + " shows nothing"
            # Sums of 600 terms of order one, in another order.
            for _ in range(2):
                torch.testing.assert_close(fn(x), model(x), rtol=1e-4, atol=1e-3, msg=name)
    assert not other or os.waitpid(other, 0)[1] == 0
    print("all right")
    """
)


def run_ranks(folder, backend, size=2):
    """Run one rank or two; raise `AssertionError` if one fails."""
    env = {**os.environ, "IPEX_HOME": str(folder / "home")}
    if backend == "gloo":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", RANKS, str(folder / "store"), backend, str(size)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    count = size if backend == "nccl" else 1
    processes = [
        subprocess.Popen([*command, str(rank)], env=env, **streams) for rank in range(count)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:  # a rank waits for ever for one that failed
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, texts
    assert "".join(texts).count("all right") == size


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no collectives")
def test_results_follow_what_collectives_write(instructions_known, tmp_path):
    run_ranks(tmp_path, "gloo")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_results_follow_what_nccl_writes(tmp_path):
    run_ranks(tmp_path, "nccl")


@pytest.mark.gpu
def test_results_follow_what_nccl_writes_on_one_gpu(tmp_path):
    run_ranks(tmp_path, "nccl", 1)
