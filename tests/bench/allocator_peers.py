# SPDX-License-Identifier: MIT
"""Other allocators' cost on the host, for the cases of `bench_allocator --peers`, beside libfsdp's.

    python3 allocator_peers.py OURS.json [--pairs N] [--json]

PyTorch's caching allocator through its C++ interface, cudaMallocAsync with a pool that keeps everything, and CUDA's own
events. The loops are in C++, on one thread; the best of five rounds counts, after one to warm up, as in bench_allocator.
OURS.json has the lines of `bench_allocator --device cuda --peers --json`.
"""
import argparse
import json

import torch
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace {

constexpr int ROUNDS = 5;

// Best round's nanoseconds for one of n; the device is idle before each.
template <typename Round>
double best_ns(int64_t n, const Round &round)
{
    double best = 1e30;
    round(n / 10 + 1);
    for (int i = 0; i < ROUNDS; i++) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto start = std::chrono::steady_clock::now();
        round(n);
        const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
        best = std::min(best, took.count() / static_cast<double>(n));
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return best;
}

struct stream {
    cudaStream_t native = nullptr;
    stream() { C10_CUDA_CHECK(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking)); }
    ~stream() { cudaStreamDestroy(native); }
};

struct event {
    cudaEvent_t native = nullptr;
    event() { C10_CUDA_CHECK(cudaEventCreateWithFlags(&native, cudaEventDisableTiming)); }
    ~event() { cudaEventDestroy(native); }
};

// 256 live blocks, 32 of large ones; one goes and one of a slightly other size comes.
template <typename Take, typename Give>
double ring_ns(int64_t bytes, int64_t n, const Take &take, const Give &give)
{
    std::vector<void *> block(bytes < (1 << 24) ? 256 : 32);
    return best_ns(n, [&](int64_t count) {
        const int64_t n_live = static_cast<int64_t>(block.size());
        for (void *&b : block) b = take(bytes);
        for (int64_t i = 0; i < count; i++) {
            void *&b = block[static_cast<size_t>(i * 7919 % n_live)];
            give(b);
            b = take(bytes + i % 5 * 4096);
        }
        for (void *b : block) give(b);
    });
}

}  // namespace

double torch_pair(int64_t bytes, int64_t n)
{
    auto *allocator = c10::cuda::CUDACachingAllocator::get();
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) allocator->raw_deallocate(allocator->raw_alloc(bytes));
    });
}

double torch_record_stream(int64_t bytes, int64_t n)
{
    auto *allocator = c10::cuda::CUDACachingAllocator::get();
    const auto other = c10::cuda::getStreamFromPool(false, 0);
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto block = allocator->allocate(bytes);
            c10::cuda::CUDACachingAllocator::recordStream(block, other);
        }
    });
}

double torch_ring(int64_t bytes, int64_t n)
{
    auto *allocator = c10::cuda::CUDACachingAllocator::get();
    return ring_ns(bytes, n, [&](int64_t size) { return allocator->raw_alloc(size); },
                   [&](void *block) { allocator->raw_deallocate(block); });
}

static void keep_everything()
{
    cudaMemPool_t pool;
    uint64_t most = UINT64_MAX;
    C10_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    C10_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most));
}

double async_pair(int64_t bytes, int64_t n)
{
    stream s;
    keep_everything();
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            void *block;
            C10_CUDA_CHECK(cudaMallocAsync(&block, static_cast<size_t>(bytes), s.native));
            C10_CUDA_CHECK(cudaFreeAsync(block, s.native));
        }
    });
}

// What takes recordStream's place there: the block is freed on its own stream once that waits for the other one.
double async_record_stream(int64_t bytes, int64_t n)
{
    stream s, other;
    event e;
    keep_everything();
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            void *block;
            C10_CUDA_CHECK(cudaMallocAsync(&block, static_cast<size_t>(bytes), s.native));
            C10_CUDA_CHECK(cudaEventRecord(e.native, other.native));
            C10_CUDA_CHECK(cudaStreamWaitEvent(s.native, e.native, 0));
            C10_CUDA_CHECK(cudaFreeAsync(block, s.native));
        }
    });
}

double async_ring(int64_t bytes, int64_t n)
{
    stream s;
    keep_everything();
    return ring_ns(
        bytes, n,
        [&](int64_t size) {
            void *block;
            C10_CUDA_CHECK(cudaMallocAsync(&block, static_cast<size_t>(size), s.native));
            return block;
        },
        [&](void *block) { C10_CUDA_CHECK(cudaFreeAsync(block, s.native)); });
}

double cuda_event_wait(int64_t n)
{
    stream s, other;
    event e;
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            C10_CUDA_CHECK(cudaEventRecord(e.native, s.native));
            C10_CUDA_CHECK(cudaStreamWaitEvent(other.native, e.native, 0));
        }
    });
}

double cuda_event_query(int64_t n)
{
    stream s;
    event e;
    C10_CUDA_CHECK(cudaEventRecord(e.native, s.native));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return best_ns(n, [&](int64_t count) {
        for (int64_t i = 0; i < count; i++) C10_CUDA_CHECK(cudaEventQuery(e.native));
    });
}
"""

NAMES = ["torch_pair", "torch_record_stream", "torch_ring", "async_pair", "async_record_stream", "async_ring",
         "cuda_event_wait", "cuda_event_query"]
SIZES = [4096, 1 << 20, 64 << 20]


def measure(pairs):
    """{(whose, case, bytes): ns}"""
    loops = load_inline("fsdp_allocator_peers", SOURCE, functions=NAMES, with_cuda=True, verbose=False)
    torch.cuda.init()
    torch.empty(1, device="cuda")
    ns = {}
    for size in SIZES:
        for case in ("pair", "record_stream", "ring"):
            n = pairs // 10 if case == "record_stream" else pairs
            for whose in ("torch", "async"):
                ns[whose, case, size] = getattr(loops, f"{whose}_{case}")(size, n)
        torch.cuda.empty_cache()
    ns["cuda", "event_wait", 0] = loops.cuda_event_wait(pairs)
    ns["cuda", "event_query", 0] = loops.cuda_event_query(pairs)
    return ns


def read_ours(path):
    """{(case, bytes): ns}"""
    ours = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ours[row["case"], row["bytes"]] = row["ns"]
    return ours


def print_table(ours, theirs):
    def cell(ns, mine):
        return f"{ns:9.1f} ({ns / mine:5.2f}x)" if ns is not None and mine else " " * 18

    print(f"{'ns on the host, each':32s} {'libfsdp':>9s}   {'PyTorch':>9s}          {'MallocAsync':>11s}        {'CUDA':>9s}")
    for case, size in sorted(ours, key=lambda key: (key[1] == 0, key[1])):
        mine = ours[case, size]
        cells = [cell(theirs.get((whose, case, size)), mine) for whose in ("torch", "async", "cuda")]
        title = case if size == 0 else f"{case}, {size >> 20} MiB" if size >= 1 << 20 else f"{case}, {size >> 10} KiB"
        print(f"{title:32s} {mine:9.1f}   " + "  ".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ours")
    parser.add_argument("--pairs", type=int, default=200000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ours, theirs = read_ours(args.ours), measure(args.pairs)
    if args.json:
        for (whose, case, size), ns in theirs.items():
            print(json.dumps({"whose": whose, "case": case, "bytes": size, "ns": round(ns, 1)}))
    else:
        print_table(ours, theirs)


if __name__ == "__main__":
    main()
