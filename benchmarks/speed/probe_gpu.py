"""Measures ceilings of an NVIDIA GPU and prints one JSON object: `python benchmarks/speed/probe_gpu.py [-o FILE]`.

The script needs torch, cuda-python and CuPy, but no other file of this repository. Most figures are medians of repeats
on random data, and some have the `best` repeat beside them. The ends of their names tell the units: _s for seconds,
_per_s for rates per second, _cycles for SM cycles.

read, copy     every SM streams through at least 8 times the L2; a copy counts bytes read plus bytes written
l2             every SM reads one buffer that fits in the L2 (shared) or its own slice of it (sliced), bypassing the L1
matmul         torch.matmul, bfloat16: FLOP/s, and bytes of weights per second, which are the limit with few rows
hand_off       time of a one-way signal between two SMs: one SM does red.release on a counter, which the other SM polls
               with ld.acquire. All other SMs are idle, or stream from memory
timer          resolution of %globaltimer, cycles to read %globaltimer or %clock64, the SM clock under load
remote_store   time in which a block stores a tile to another heap (buffer) and then a flag with st.release, and time of
               a hand-off between two heaps at system scope. The other heap is on the second GPU if there is one,
               otherwise on the same GPU
launch         time to launch an empty kernel and CUDA graphs of empty kernels, from Python through cuda-python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ u64 cycles() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ uint4 stream_load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 l2_load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Reads every `stride`-th of n vectors, beginning with vector `first`, so that all threads together read each vector
// once. The launch bounds of the kernels that call this function leave registers for eight loads in flight per thread.
__device__ u32 stream_all(const uint4* p, u64 n, u64 first, u64 stride) {
  u32 sum = 0;
  u64 i = first;
  for (; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = stream_load(p + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; k++) sum ^= fold(v[k]);
  }
  for (; i < n; i += stride) sum ^= fold(stream_load(p + i));
  return sum;
}

extern "C" __global__ void fill(u32* p, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (u64)blockDim.x) {
    u64 x = (i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    p[i] = (u32)((x ^ (x >> 27)) * 0x94D049BB133111EBull >> 32);
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) read_all(const uint4* p, u64 n, u32* sink) {
  u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  u32 sum = stream_all(p, n, first, gridDim.x * (u64)blockDim.x);
  if (sum == 0x9E3779B9) *sink = sum;  // practically never true, but it makes the compiler keep the loads
}

extern "C" __global__ void __launch_bounds__(1024, 1) copy_all(uint4* to, const uint4* from, u64 n) {
  u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x, stride = gridDim.x * (u64)blockDim.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = stream_load(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 4; k++) to[i + k * stride] = v[k];
  }
  for (; i < n; i += stride) to[i] = stream_load(from + i);
}

// There is one slice of the buffer per block. If `shared` is set, each block reads the slices of all blocks, beginning
// with its own slice; otherwise it reads only its own slice. It does so `passes` times. `slice` is the number of
// vectors in a slice, a multiple of 4 * blockDim.x.
extern "C" __global__ void __launch_bounds__(1024, 1)
    read_l2(const uint4* p, u64 slice, int passes, int shared, u32* sink) {
  const uint4* base = shared ? p : p + slice * blockIdx.x;
  u64 count = shared ? slice * gridDim.x : slice, start = shared ? slice * blockIdx.x : 0;
  u32 sum = 0;
  for (int pass = 0; pass < passes; pass++) {
    for (u64 done = 0; done < count; done += 4 * blockDim.x) {
      u64 at = start + done;
      if (at >= count) at -= count;
      uint4 v[4];
#pragma unroll
      for (int k = 0; k < 4; k++) v[k] = l2_load(base + at + k * blockDim.x + threadIdx.x);
#pragma unroll
      for (int k = 0; k < 4; k++) sum ^= fold(v[k]);
    }
  }
  if (sum == 0x9E3779B9) *sink = sum;
}

#define HAND_OFF(SCOPE)                                                                              \
  __device__ __forceinline__ u32 acquire_##SCOPE(const u32* p) {                                     \
    u32 v;                                                                                           \
    asm volatile("ld.acquire." #SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");        \
    return v;                                                                                        \
  }                                                                                                  \
  __device__ __forceinline__ void signal_##SCOPE(u32* p) {                                           \
    asm volatile("red.release." #SCOPE ".global.add.u32 [%0], 1;" ::"l"(p) : "memory");              \
  }                                                                                                  \
  __device__ __forceinline__ void release_##SCOPE(u32* p, u32 v) {                                   \
    asm volatile("st.release." #SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");          \
  }                                                                                                  \
  /* False when the partner stays silent for about a second. */                                      \
  __device__ bool wait_##SCOPE(const u32* p, u32 value) {                                            \
    for (u32 polls = 0; polls < 4000000; polls++)                                                    \
      if ((int)(acquire_##SCOPE(p) - value) >= 0) return true;                                       \
    return false;                                                                                    \
  }                                                                                                  \
  __device__ bool ping_pong_##SCOPE(u32* mine, u32* theirs, int rounds, bool first) {                \
    for (int r = 1; r <= rounds; r++) {                                                              \
      if (first) signal_##SCOPE(theirs);                                                             \
      if (!wait_##SCOPE(mine, r)) return false;                                                      \
      if (!first) signal_##SCOPE(theirs);                                                            \
    }                                                                                                \
    return true;                                                                                     \
  }
HAND_OFF(gpu)
HAND_OFF(sys)

// Runs one block per SM. Blocks 0 and `partner` exchange signals on counters[0] and counters[64]. If n is not 0, the
// other blocks stream from `load` until counters[128] is set. Writes to `out`: the nanoseconds of the exchange, the
// bytes streamed, 1 if a signal did not arrive, and the SMs of block 0 and of block `partner`.
extern "C" __global__ void __launch_bounds__(1024, 1)
    hand_off(u32* counters, int partner, int rounds, const uint4* load, u64 n, u32* sink, u64* out) {
  bool first = blockIdx.x == 0;
  if (first || blockIdx.x == partner) {
    if (threadIdx.x) return;
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    out[first ? 3 : 4] = sm;
    u64 start = now();
    bool ok = ping_pong_gpu(counters + (first ? 64 : 0), counters + (first ? 0 : 64), rounds, first);
    if (first) out[0] = now() - start;
    if (!ok) out[2] = 1;
    if (first) release_gpu(counters + 128, 1);
    return;
  }
  u64 chunk = 16ull * blockDim.x, chunks = n / chunk, at = blockIdx.x, bytes = 0;
  u32 sum = 0;
  for (u64 turn = 0; chunks && turn < (1ull << 22) && !acquire_gpu(counters + 128); turn++) {
    sum ^= stream_all(load + at % chunks * chunk, chunk, threadIdx.x, blockDim.x);
    at += gridDim.x;
    bytes += chunk * sizeof(uint4);
  }
  if (sum == 0x9E3779B9) *sink = sum;
  if (threadIdx.x == 0) atomicAdd(out + 1, bytes);
}

// Runs as one block per heap. The block waits for a counter in its own heap (`mine`) and signals a counter in the other
// heap (`theirs`). Writes to `out`: the nanoseconds of all rounds, and 1 if a signal did not arrive.
extern "C" __global__ void hand_off_heaps(u32* mine, u32* theirs, int rounds, int first, u64* out) {
  u64 start = now();
  bool ok = ping_pong_sys(mine, theirs, rounds, first);
  out[0] = now() - start;
  out[1] = !ok;
}

// Stores a tile of n vectors to `to`, then a flag, `repeats` times. Writes to `out` the sums over all repeats of three
// durations in cycles: of issuing the stores, of the release store of the flag, and of a fence after that.
extern "C" __global__ void store_tile(uint4* to, int n, u32* flag, int system, int repeats, u64* out) {
  u64 stores = 0, release = 0, drain = 0;
  for (int r = 0; r < repeats; r++) {
    __syncthreads();
    u64 t0 = cycles();
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = make_uint4(r, i, r ^ i, r + i);
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 t1 = cycles();
      if (system) release_sys(flag, r); else release_gpu(flag, r);
      u64 t2 = cycles();
      if (system) asm volatile("fence.acq_rel.sys;" ::: "memory"); else asm volatile("fence.acq_rel.gpu;" ::: "memory");
      u64 t3 = cycles();
      stores += t1 - t0, release += t2 - t1, drain += t3 - t2;
    }
  }
  if (threadIdx.x == 0) out[0] = stores, out[1] = release, out[2] = drain;
}

// Writes to out[0..n) the first n increments of the global timer, in nanoseconds. Then follow the cycles of 256 reads
// of clock64, the cycles of 256 reads of the global timer, the cycles and the nanoseconds of one long spin, and the sum
// of all values read, without which the compiler could drop the reads.
extern "C" __global__ void timers(u64* out, int n) {
  u64 last = now();
  for (int i = 0; i < n; i++) {
    u64 next = now();
    while (next == last) next = now();
    out[i] = next - last;
    last = next;
  }
  u64 sum = 0, t0 = cycles();
#pragma unroll 16
  for (int i = 0; i < 256; i++) sum += cycles();
  u64 t1 = cycles();
#pragma unroll 16
  for (int i = 0; i < 256; i++) sum += now();
  u64 t2 = cycles();
  out[n] = t1 - t0;
  out[n + 1] = t2 - t1;
  u64 ns = now(), c = cycles();
  while (now() - ns < 20000000);
  out[n + 2] = cycles() - c;
  out[n + 3] = now() - ns;
  out[n + 4] = sum;
}

extern "C" __global__ void empty() {}
"""

Json = dict[str, Any]
DEVICE = "cuda"  # torch's
MATMULS = [(8192, 8192, 8192), (2048, 57344, 8192), (2048, 8192, 28672), (2048, 4096, 4096), (512, 28672, 4096)]
MATMULS += [(m, 8192, 8192) for m in (1, 16, 128)]
LEAST_BYTES = 2 << 30  # minimum size of the buffer that the probes stream through
_ONE_PER_SM = 120 * 1024  # bytes of shared memory per block, enough that an SM has room for only one block


class Probe:
    """The GPU in use, its compiled kernels and a big random buffer."""

    def __init__(self) -> None:
        import cupy
        import torch

        self.cupy, self.torch = cupy, torch
        self.properties = torch.cuda.get_device_properties(0)
        self.sms: int = self.properties.multi_processor_count
        self.l2_bytes: int = self.properties.L2_cache_size
        self.module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
        self.sink = cupy.zeros(1, dtype=cupy.uint32)
        self.bytes = max(LEAST_BYTES, 8 * self.l2_bytes) // 4096 * 4096
        self.buffer = self.random(self.bytes)

    def kernel(self, name: str) -> Any:
        return self.module.get_function(name)

    def random(self, size: int) -> Any:
        """Return `size` random bytes in the GPU's memory."""
        out = self.cupy.empty(size // 4, dtype=self.cupy.uint32)
        self.kernel("fill")((self.sms * 8,), (256,), (out, self.cupy.uint64(out.size)))
        return out

    def seconds(self, work: Callable[[], None], repeats: int = 15, warmup: int = 3) -> list[float]:
        """Return the device time of each of `repeats` calls of `work`, in seconds."""
        events = [(self.cupy.cuda.Event(), self.cupy.cuda.Event()) for _ in range(repeats)]
        for _ in range(warmup):
            work()
        for start, end in events:
            start.record()
            work()
            end.record()
        events[-1][1].synchronize()
        return [self.cupy.cuda.get_elapsed_time(start, end) / 1e3 for start, end in events]

    def rate(self, amount: float, work: Callable[[], None]) -> Json:
        times = self.seconds(work)
        return {"per_s": amount / statistics.median(times), "best_per_s": amount / min(times)}

    def fastest(self, amount: float, launch: Callable[[int, int], Callable[[], None]]) -> Json:
        """Measure the rate with grids of several shapes. Return the rate and shape of the fastest grid, and the best
        rate with one block per SM.

        `launch(blocks, threads)` returns the function to time. A call of that function does `amount` of work.
        """
        found = []
        for per_sm, threads in ((1, 256), (1, 1024), (2, 512), (2, 1024), (4, 256), (4, 512), (8, 256)):
            work = launch(self.sms * per_sm, threads)
            found.append(self.rate(amount, work) | {"blocks_per_sm": per_sm, "threads": threads})
        best: Json = max(found, key=lambda f: float(f["per_s"]))
        one: Json = max((f for f in found if f["blocks_per_sm"] == 1), key=lambda f: float(f["per_s"]))
        return best | {"one_block_per_sm_per_s": one["per_s"]}


def device(p: Probe) -> Json:
    from cuda.bindings import driver, runtime

    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        smi: Json = dict(zip(fields.split(","), (v.strip() for v in answer.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        smi = {}
    return {
        "name": p.properties.name,
        "compute_capability": [p.properties.major, p.properties.minor],
        "gpus": p.torch.cuda.device_count(),
        "sms": p.sms,
        "memory_bytes": p.properties.total_memory,
        "l2_bytes": p.l2_bytes,
        "nvidia_smi": smi,  # the clocks before the probes, in MHz, and the power limit, in W
        "cuda_driver": _check(driver.cuDriverGetVersion()),
        "cuda_runtime": _check(runtime.cudaRuntimeGetVersion()),
        "torch": p.torch.__version__,
        "cupy": p.cupy.__version__,
    }


def read(p: Probe) -> Json:
    kernel, n = p.kernel("read_all"), p.cupy.uint64(p.bytes // 16)

    def launch(blocks: int, threads: int) -> Callable[[], None]:
        return lambda: kernel((blocks,), (threads,), (p.buffer, n, p.sink))

    return {"bytes": p.bytes} | p.fastest(p.bytes, launch)


def copy(p: Probe) -> Json:
    kernel, half = p.kernel("copy_all"), p.bytes // 2
    source, target = p.buffer[: half // 4], p.buffer[half // 4 :]
    n = p.cupy.uint64(half // 16)
    runtime = p.cupy.cuda.runtime

    def launch(blocks: int, threads: int) -> Callable[[], None]:
        return lambda: kernel((blocks,), (threads,), (target, source, n))

    def engine() -> None:
        stream = p.cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, half, runtime.memcpyDeviceToDevice, stream)

    return {"bytes": p.bytes} | p.fastest(p.bytes, launch) | {"memcpy": p.rate(p.bytes, engine)}


def l2(p: Probe) -> Json:
    """Measure the read bandwidth of the L2 cache.

    The buffer takes only about a quarter of the L2: if the L2 has two partitions, each may hold a copy of the buffer,
    and the rest is for other data.
    """
    kernel, out = p.kernel("read_l2"), {}
    for name, shared, passes in (("shared", 1, 4), ("sliced", 0, 400)):
        found = []
        for per_sm, threads in ((1, 512), (1, 1024), (2, 512), (4, 256)):
            blocks, unit = p.sms * per_sm, 4 * threads
            slice_ = max(1, round(p.l2_bytes / 4 / 16 / blocks / unit)) * unit
            amount = 16.0 * slice_ * passes * blocks * (blocks if shared else 1)
            arguments = (p.buffer, p.cupy.uint64(slice_), p.cupy.int32(passes), p.cupy.int32(shared), p.sink)
            rate = p.rate(amount, partial(kernel, (blocks,), (threads,), arguments))
            found.append(rate | {"bytes": 16 * slice_ * blocks, "blocks_per_sm": per_sm, "threads": threads})
        out[name] = max(found, key=lambda f: float(f["per_s"]))
    return out


def matmul(p: Probe) -> list[Json]:
    """Measure products of x [m, k] and the transpose of w [n, k], as in the projections of a Llama model.

    Successive calls use different matrices w in turn, so that no matrix is still in the L2 at its next use.
    """
    torch, out = p.torch, []
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for m, n, k in MATMULS:
        x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        copies = max(1, -(-4 * p.l2_bytes // (2 * n * k)))
        w = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16, generator=generator) for _ in range(copies)]
        y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
        turn = 0

        def work(x: Any = x, w: Any = w, y: Any = y) -> None:
            nonlocal turn
            torch.matmul(x, w[turn % len(w)].T, out=y)
            turn += 1

        # CuPy's events time torch's work, because both use the default stream.
        times = p.seconds(work, repeats=30, warmup=10)
        median = statistics.median(times)
        out.append(
            {
                "m": m,
                "n": n,
                "k": k,
                "median_s": median,
                "flops_per_s": 2.0 * m * n * k / median,
                "best_flops_per_s": 2.0 * m * n * k / min(times),
                "weight_bytes_per_s": 2.0 * n * k / median,
            }
        )
        del x, w, y
    return out


def hand_off(p: Probe) -> Json:
    cupy, kernel, rounds = p.cupy, p.kernel("hand_off"), 10000
    kernel.max_dynamic_shared_size_bytes = _ONE_PER_SM
    out: Json = {}
    for name, size in (("idle", 0), ("under_memory_load", p.bytes)):
        one_way, streamed = [], []
        for partner in sorted({1, 2, p.sms - 1, *range(8, p.sms, 16)}):
            counters, result = cupy.zeros(192, dtype=cupy.uint32), cupy.zeros(5, dtype=cupy.uint64)
            load, vectors = p.buffer, cupy.uint64(size // 16)
            arguments = (counters, cupy.int32(partner), cupy.int32(rounds), load, vectors, p.sink, result)
            kernel((p.sms,), (1024,), arguments, shared_mem=_ONE_PER_SM)
            ns, loaded, failed, first, second = (int(v) for v in result.get())
            if failed:
                raise RuntimeError(f"the blocks on SMs {first} and {second} did not see each other's signals")
            one_way.append(ns / 1e9 / rounds / 2)
            streamed.append(loaded / (ns / 1e9))
        out[name] = {"median_s": statistics.median(one_way), "min_s": min(one_way), "max_s": max(one_way)}
        if size:
            out[name]["load_bytes_per_s"] = statistics.median(streamed)
    return out


def timer(p: Probe) -> Json:
    n = 1000
    out = p.cupy.zeros(n + 5, dtype=p.cupy.uint64)
    p.kernel("timers")((1,), (1,), (out, p.cupy.int32(n)))
    values = [int(v) for v in out.get()]
    steps, (clock, wide, spin_cycles, spin_ns) = values[:n], values[n : n + 4]
    return {
        "globaltimer_step_s": {
            "median": statistics.median(steps) / 1e9,
            "min": min(steps) / 1e9,
            "max": max(steps) / 1e9,
        },
        "clock64_read_cycles": clock / 256,
        "globaltimer_read_cycles": wide / 256,
        "sm_clock_hz": spin_cycles / (spin_ns / 1e9),
    }


def remote_store(p: Probe) -> Json:
    cupy, repeats, rounds = p.cupy, 1000, 5000
    peer = 1 if p.torch.cuda.device_count() > 1 else 0
    if peer:
        for a, b in ((0, 1), (1, 0)):
            with cupy.cuda.Device(a):
                if not cupy.cuda.runtime.deviceCanAccessPeer(a, b):
                    raise RuntimeError(f"GPU {a} cannot store to GPU {b}: it has no peer access")
                cupy.cuda.runtime.deviceEnablePeerAccess(b)
    with cupy.cuda.Device(peer):
        far = cupy.zeros((1 << 20) // 4, dtype=cupy.uint32)
        far_counter, far_result = far[-64:], cupy.zeros(2, dtype=cupy.uint64)
        far_kernel = cupy.RawModule(code=SOURCE, options=("--std=c++17",)).get_function("hand_off_heaps")
        far_stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
    tiles = []
    for scope in ("gpu", "sys"):
        if peer and scope == "gpu":
            continue
        for size in (0, 128, 4096, 32768, 65536):
            result = cupy.zeros(3, dtype=cupy.uint64)
            where = (far, cupy.int32(size // 16), far_counter, cupy.int32(scope == "sys"))
            p.kernel("store_tile")((1,), (128,), (*where, cupy.int32(repeats), result))
            stores, release, drain = (float(v) / repeats for v in result.get())
            tiles.append(
                {
                    "scope": scope,
                    "tile_bytes": size,
                    "stores_cycles": stores,
                    "release_cycles": release,
                    "fence_after_cycles": drain,
                }
            )
    near_counter, near_result = cupy.zeros(64, dtype=cupy.uint32), cupy.zeros(2, dtype=cupy.uint64)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Device(peer):
        far_counter[:] = 0
        cupy.cuda.get_current_stream().synchronize()
    near_stream = cupy.cuda.Stream(non_blocking=True)
    count = cupy.int32(rounds)
    with cupy.cuda.Device(peer), far_stream:
        far_kernel((1,), (1,), (far_counter, near_counter, count, cupy.int32(0), far_result))
    with near_stream:
        near = p.kernel("hand_off_heaps")
        near((1,), (1,), (near_counter, far_counter, count, cupy.int32(1), near_result))
    near_stream.synchronize()
    far_stream.synchronize()
    ns, failed = (int(v) for v in near_result.get())
    if failed or int(far_result.get()[1]):
        raise RuntimeError("the block on GPU 0 and the block on its peer did not see each other's signals")
    out: Json = {"peer_gpu": peer, "tiles": tiles, "hand_off_sys_s": ns / 1e9 / rounds / 2}
    if peer:
        size = p.bytes // 4
        with cupy.cuda.Device(peer):
            target = cupy.empty(size // 4, dtype=cupy.uint32)
        n, kernel = cupy.uint64(size // 16), p.kernel("copy_all")
        out["store_bytes"] = p.rate(size, lambda: kernel((p.sms * 4,), (512,), (target, p.buffer, n)))
    return out


def launch(p: Probe) -> Json:
    from cuda.bindings import driver

    kernel = p.kernel("empty").kernel.ptr
    stream = p.cupy.cuda.Stream(non_blocking=True)

    def one() -> None:
        _check(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream.ptr, 0, 0))

    def graph(nodes: int) -> Any:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _check(driver.cuStreamBeginCapture(stream.ptr, mode))
        for _ in range(nodes):
            one()
        return _check(driver.cuGraphInstantiate(_check(driver.cuStreamEndCapture(stream.ptr)), 0))

    def timed(work: Callable[[], None], calls: int) -> Json:
        """Return the time per call of `work` in seconds, measured in three ways.

        Two are means over `calls` successive calls: submit_s is the host time to submit a call, and back_to_back_s also
        includes the wait until all calls have run. submit_and_wait_s is the median host time to submit a single call
        and wait for its end.
        """
        work()
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        submitted = time.perf_counter()
        stream.synchronize()
        ended = time.perf_counter()
        alone = []
        for _ in range(200):
            begin = time.perf_counter()
            work()
            stream.synchronize()
            alone.append(time.perf_counter() - begin)
        return {
            "submit_s": (submitted - start) / calls,
            "back_to_back_s": (ended - start) / calls,
            "submit_and_wait_s": statistics.median(alone),
        }

    def replay(nodes: int) -> Callable[[], None]:
        executable = graph(nodes)
        return lambda: _check(driver.cuGraphLaunch(executable, stream.ptr))

    many = timed(replay(1000), 20)
    return {
        "kernel": timed(one, 500),
        "graph_of_1": timed(replay(1), 500),
        "graph_of_1000": many,
        "graph_node_s": many["back_to_back_s"] / 1000,
    }


def _check(answer: tuple[Any, ...]) -> Any:
    """Return the value in the answer of a cuda-python call. Raises RuntimeError if the answer is an error."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error!r}")
    return values[0] if values else None


_PROBES: tuple[Callable[[Probe], Any], ...] = (device, timer, read, copy, l2, matmul, hand_off, remote_store, launch)


def missing() -> str | None:
    """Return in a few words what this machine lacks, or None if it lacks nothing."""
    try:
        import cupy
        import torch
        from cuda.bindings import driver  # noqa: F401
    except ImportError as e:
        return f"{e.name or e} cannot be imported: pip install torch cuda-python cupy-cuda13x"
    try:
        found = torch.cuda.is_available() and cupy.cuda.runtime.getDeviceCount() > 0
    except Exception as e:
        return f"the CUDA driver does not work: {e}"
    return None if found else "no NVIDIA GPU was found, or its driver does not suit this torch"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure this machine's GPU and print one JSON object.")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON to FILE")
    arguments = parser.parse_args()
    lack = missing()
    if lack:
        print(f"probe_gpu: {' '.join(lack.split())}", file=sys.stderr)
        return 1
    try:
        probe = Probe()
    except Exception as e:
        print(f"probe_gpu: cannot start: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    result, failed = {}, []
    for measure in _PROBES:
        name = measure.__name__
        start = time.perf_counter()
        try:
            result[name] = measure(probe)
            probe.torch.cuda.synchronize()
        except Exception as e:  # go on, because the other figures are useful without this one
            result[name] = {"error": f"{type(e).__name__}: {e}"}
            failed.append(name)
        print(f"probe_gpu: {name} {time.perf_counter() - start:.1f} s", file=sys.stderr)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        try:
            arguments.output.write_text(text + "\n")
        except OSError as e:
            print(f"probe_gpu: cannot write {arguments.output}: {e.strerror}", file=sys.stderr)
            return 1
    if failed:
        print(f"probe_gpu: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
