"""Train a model sharded by FSDP2 over 2 processes, with bfloat16 weights and a fused AdamW step.

    torchrun --standalone --nproc-per-node 2 examples/fused_optimizer_fsdp.py [--quick]

`ipex.optimize` keeps the bits that bfloat16 cannot hold, `fully_shard` shards them with weights,
and `FusedStep` clips by the norm over all shards. The process group is of backend gloo, for CPUs.
Prints the loss, which falls, and what each process holds.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ipex_inductor as ipex
from ipex_inductor.optim import FusedStep


def make_model(width: int, layers: int) -> nn.Sequential:
    """Return a stack of blocks, equal in all processes."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks)


def main() -> None:
    """Shard the model, train it on data of this process's own, and print what rank 0 sees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="thin layers and few steps")
    width, layers, steps = (16, 2, 6) if parser.parse_args().quick else (256, 4, 40)
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

    model = make_model(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ipex.optimize(
        model.train(), optimizer=optimizer, dtype=torch.bfloat16, inplace=True
    )
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = FusedStep(optimizer, clip_norm=1.0)

    torch.manual_seed(1 + rank)
    x = torch.randn(32, width, dtype=torch.bfloat16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, -1)).float().square().mean()
        loss.backward()
        step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    weight = model[0][0].weight
    print(f"rank {rank}: {tuple(weight.to_local().shape)} of {tuple(weight.shape)}, {weight.dtype}")
    if rank == 0:
        print(f"gradient norm over all shards: {float(step.grad_norm):.4f}")
        print(f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
