// A stand-in for CUDA on the CPU: blocks one after the other, and a fiber for each thread.
//
// A thread runs until it waits for others. Which thread runs next is random, and unfair on purpose:
// one warp runs ahead while the others stand still. Shared memory holds what the block before left
// in it. What CUDA does not define ends the program with one line on standard error: a mask without
// the calling lane, different masks, a lane that is read but is not in the mask, threads that wait
// for one another for ever.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static

struct Index { unsigned x; };
extern Index blockIdx, threadIdx, blockDim, gridDim;

namespace cuda_on_cpu {  // see threads.cpp

const int LANES = 32;

// Waits for the lanes of the mask. Returns the value of the lane `source`.
uint64_t meet(const char* operation, uint32_t mask, uint64_t value, int source);

// Waits for all threads of the block.
void meet_block();

// Runs `body(argument)` in each thread of each block.
void run(unsigned blocks, unsigned threads, unsigned seed, void (*body)(void*), void* argument);

template <class Given>
void launch(unsigned blocks, unsigned threads, unsigned seed, void (*kernel)(Given), Given given) {
  struct Start { void (*kernel)(Given); Given given; } start = {kernel, given};
  run(blocks, threads, seed, [](void* s) { ((Start*)s)->kernel(((Start*)s)->given); }, &start);
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

// What the GPU has instructions for.
struct Half { uint16_t bits; };
inline void narrow(float v, Half& to) {
  const _Float16 f = (_Float16)v;
  memcpy(&to, &f, 2);
}
inline float widen(Half v) {
  _Float16 f;
  memcpy(&f, &v, 2);
  return (float)f;
}
