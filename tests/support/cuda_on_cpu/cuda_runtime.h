// A stand-in for CUDA on the CPU: blocks one after the other, and a fiber for each thread.
//
// A thread runs until it waits for others. Which thread runs next is random, and unfair on purpose:
// one warp runs ahead while the others stand still. Shared memory holds what the block before left
// in it. What CUDA does not define ends the program with one line on standard error: a mask without
// the calling lane, different masks, a lane that is read but is not in the mask, threads that wait
// for one another for ever.
#pragma once
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static

struct Index { unsigned x; };
inline Index blockIdx, threadIdx, blockDim, gridDim;

namespace cuda_on_cpu {

const int LANES = 32;
const size_t STACK = 1 << 17;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda_on_cpu: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  _Exit(3);
}

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  void* fake_stack;  // of AddressSanitizer
  enum { READY, WAITING, DONE } state;
};

// Lanes of a warp that have come to a shuffle or to __syncwarp, and wait for the others.
struct Meeting {
  uint32_t mask, here;
  const char* operation;
  uint64_t values[LANES], results[LANES];
  int sources[LANES];
};

inline std::vector<Fiber> fibers;
inline std::vector<Meeting> meetings;
inline unsigned at_barrier;  // threads that wait in __syncthreads
inline ucontext_t scheduler;
inline void* scheduler_fake_stack;
inline const void* scheduler_stack;
inline size_t scheduler_size;
inline std::function<void()> body;
inline std::mt19937 order;

inline void suspend(bool done) {
  Fiber& me = fibers[threadIdx.x];
  __sanitizer_start_switch_fiber(done ? nullptr : &me.fake_stack, scheduler_stack, scheduler_size);
  swapcontext(&me.context, &scheduler);
  __sanitizer_finish_switch_fiber(me.fake_stack, &scheduler_stack, &scheduler_size);
}

inline void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.data(), fiber.stack.size());
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

inline void enter() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
  body();
  fibers[threadIdx.x].state = Fiber::DONE;
  suspend(true);
}

// Waits for the lanes of the mask. Returns the value of the lane `source`.
inline uint64_t meet(const char* operation, uint32_t mask, uint64_t value, int source) {
  const int lane = threadIdx.x % LANES;
  Meeting& warp = meetings[threadIdx.x / LANES];
  if (!(mask >> lane & 1)) fail("the mask is without the calling lane");
  if (!(mask >> source & 1)) fail("a lane is read that is not in the mask");
  if (warp.here && (warp.mask != mask || strcmp(warp.operation, operation)))
    fail("the lanes of a warp wait for different things");
  warp.mask = mask;
  warp.operation = operation;
  warp.here |= 1u << lane;
  warp.values[lane] = value;
  warp.sources[lane] = source;
  if (warp.here == mask) {
    const unsigned first = threadIdx.x - lane;
    for (int i = 0; i < LANES; i++)
      if (mask >> i & 1) {
        warp.results[i] = warp.values[warp.sources[i]];
        fibers[first + i].state = Fiber::READY;
      }
    warp.here = 0;
  } else {
    fibers[threadIdx.x].state = Fiber::WAITING;
  }
  suspend(false);  // even the last one may be overtaken
  return warp.results[lane];
}

inline void meet_block() {
  if (++at_barrier == blockDim.x) {
    at_barrier = 0;
    for (Fiber& fiber : fibers) fiber.state = Fiber::READY;
  } else {
    fibers[threadIdx.x].state = Fiber::WAITING;
  }
  suspend(false);
}

inline void run_block() {
  const unsigned warps = blockDim.x / LANES;
  meetings.assign(warps, Meeting());
  at_barrier = 0;
  for (Fiber& fiber : fibers) {
    fiber.state = Fiber::READY;
    fiber.stack.resize(STACK);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  unsigned favoured = 0, turns = 0;
  for (;;) {
    std::vector<unsigned> ready, ahead;
    bool all_done = true;
    if (!turns--) {
      favoured = order() % warps;
      turns = 1u << (order() % 12);
    }
    for (unsigned i = 0; i < fibers.size(); i++) {
      all_done &= fibers[i].state == Fiber::DONE;
      if (fibers[i].state != Fiber::READY) continue;
      ready.push_back(i);
      if (i / LANES == favoured) ahead.push_back(i);
    }
    if (all_done) return;
    if (ready.empty()) fail("all threads wait for one another");
    const std::vector<unsigned>& from = ahead.empty() ? ready : ahead;
    resume(from[order() % from.size()]);
  }
}

template <class F> void launch(unsigned blocks, unsigned threads, unsigned seed, F kernel) {
  order.seed(seed);
  body = kernel;
  blockDim.x = threads;
  gridDim.x = blocks;
  fibers.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet_block(); }

inline void __syncwarp(uint32_t mask = 0xffffffffu) {
  cuda_on_cpu::meet("__syncwarp", mask, 0, threadIdx.x % cuda_on_cpu::LANES);
}

template <class S> S __shfl_xor_sync(uint32_t mask, S value, int step) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  const int source = (threadIdx.x % cuda_on_cpu::LANES) ^ step;
  bits = cuda_on_cpu::meet("__shfl_xor_sync", mask, bits, source);
  memcpy(&value, &bits, sizeof value);
  return value;
}
