#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The blocks of bench_prefetch --device cuda under PyTorch's FSDP2, measured the same way; a line of JSON a case, from rank 0.

    tests/bench/ranks.sh WORLD [--one-gpu] python3 tests/bench/fsdp2_blocks.py --tokens 131072,32768,64

The first values and the input are those of bench_prefetch, so that the losses can be compared. bf16 parameters and activations, fp32 reduction and AdamW (fused), the last block kept gathered. `comm` is the same collectives
alone, in FSDP2's form (send buffer apart), `comm_in_place` with the send buffer inside the receive buffer.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.up = nn.Linear(args.dim, 4 * args.dim, bias=not args.no_bias)
        self.down = nn.Linear(4 * args.dim, args.dim, bias=not args.no_bias)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x), approximate="tanh"))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--tokens", default="131072")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", default="both,comm,compute")
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--clip", action="store_true")
    return parser.parse_args()


def meet():
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def timed(fn, times=1):
    """Milliseconds of the host and of all, for each of `times` calls in a row."""
    meet()
    start = time.perf_counter()
    for _ in range(times):
        fn()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return (host - start) * 1e3 / times, (time.perf_counter() - start) * 1e3 / times


def put(line, name, values):
    if values:
        line[name] = round(statistics.median(values), 4)
        line[name + "_min"], line[name + "_max"] = round(min(values), 4), round(max(values), 4)


def noise(seed, begin, count, device):
    """block_noise of block_cuda.h: between -1 and 1, from seed and index alone."""
    low = 0xFFFFFFFF
    index = torch.arange(begin, begin + count, device=device)
    h = (index * 2654435761 & low) ^ ((index >> 32) * 40503 & low) ^ (seed * 0x9E3779B9 & low)
    h ^= h >> 13
    h = h * 0x85EBCA6B & low
    h ^= h >> 16
    h = h * 0xC2B2AE35 & low
    h ^= h >> 15
    return (h >> 8).float() * 2.0**-23 - 1.0


def set_first_values(model, args, device):
    with torch.no_grad():
        for layer, block in enumerate(model):
            at = 0
            for linear in (block.up, block.down):
                for parameter in linear.parameters():
                    index = torch.arange(at, at + parameter.numel(), device=device)
                    scale = torch.where(index < 4 * args.dim**2 + 4 * args.dim, args.dim**-0.5, 0.5 * args.dim**-0.5)
                    values = noise(layer + 1, at, parameter.numel(), device) * scale
                    parameter.copy_(values.view_as(parameter))
                    at += parameter.numel()


def make_input(args, tokens, rank, device):
    x = torch.empty(tokens, args.dim, device=device, dtype=torch.bfloat16)
    rows = 4096
    for row in range(0, tokens, rows):
        part = x[row:row + rows]
        part.copy_((noise(0x5EED0000 + rank, row * args.dim, part.numel(), device) * 1.7320508).view_as(part))
    return x


def make_model(args, device):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*[Block(args) for _ in range(args.layers)]).to(device)
    set_first_values(model, args, device)
    for i, block in enumerate(model):
        fully_shard(block, mp_policy=policy, reshard_after_forward=i + 1 < args.layers)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure_steps(args, line, model, optimizer, x):
    losses = []

    def step():
        loss = (model(x).float() ** 2).mean()
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[:] = [loss.detach()]

    line["losses"] = []
    for _ in range(3):
        timed(step)
        line["losses"].append(losses[0].item())
    torch.cuda.reset_peak_memory_stats()
    samples = [timed(step) for _ in range(args.steps)]
    put(line, "step_ms", [whole for _, whole in samples])
    put(line, "host_us", [host * 1e3 / args.layers for host, _ in samples])
    put(line, "stream_ms", [timed(step, 10)[1] for _ in range(args.rounds)])
    line["device_bytes"] = torch.cuda.max_memory_allocated()
    line["reserved_bytes"] = torch.cuda.max_memory_reserved()


def measure_comm(args, line, device, world, rank):
    shard = (8 * args.dim**2 + (0 if args.no_bias else 5 * args.dim) + world - 1) // world
    full = torch.empty(world * shard, device=device, dtype=torch.bfloat16)
    apart = torch.empty(shard, device=device, dtype=torch.bfloat16)
    gradient = torch.zeros(world * shard, device=device)
    reduced = torch.empty(shard, device=device)

    def collectives(mine):
        for _ in range(args.layers):
            dist.all_gather_into_tensor(full, mine)
        for layer in range(args.layers):
            if layer > 0:
                dist.all_gather_into_tensor(full, mine)
            dist.reduce_scatter_tensor(reduced, gradient)

    for name, mine in (("comm_ms", apart), ("comm_in_place_ms", full.narrow(0, rank * shard, shard))):
        put(line, name, [timed(lambda: collectives(mine))[1] for _ in range(args.steps)][1:])


def measure_compute(args, line, device, x):
    plain = nn.Sequential(*[Block(args) for _ in range(args.layers)]).to(device, torch.bfloat16)

    def compute():
        (plain(x).float() ** 2).mean().backward()
        plain.zero_grad(set_to_none=True)

    put(line, "compute_ms", [timed(compute)[1] for _ in range(args.steps + 1)][1:])


def main():
    args = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model, optimizer = make_model(args, device)
    for tokens in map(int, args.tokens.split(",")):
        line = {"way": "fsdp2", "compute": "plain", "world": world, "layers": args.layers, "dim": args.dim, "tokens": tokens,
                "comms": 1, "no_bias": args.no_bias, "clip": args.clip, "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        torch.cuda.empty_cache()
        x = make_input(args, tokens, rank, device)
        if "both" in args.what:
            measure_steps(args, line, model, optimizer, x)
        if "compute" in args.what:
            measure_compute(args, line, device, x)
        if "comm" in args.what.split(","):
            measure_comm(args, line, device, world, rank)
        del x
        if rank == 0:
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
