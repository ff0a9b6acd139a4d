// The threads of a block: fibers that wait for one another, and go on in an order that a seed
// decides. This is the same for all kernels, so it is compiled once.
#include <sanitizer/common_interface_defs.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <random>
#include <vector>

#include "cuda_runtime.h"

Index blockIdx, threadIdx, blockDim, gridDim;

namespace cuda_on_cpu {
namespace {

const size_t STACK = 1 << 17;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "cuda_on_cpu: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  _Exit(3);
}

// Where a fiber goes on. Unlike `swapcontext`, such a jump calls no function of the system.
struct Place { void* words[5]; };

struct Fiber {
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool begun = false;
  Place place;
  void* fake_stack;  // of AddressSanitizer
};

// Lanes of a warp that have come to a shuffle or to __syncwarp, and wait for the others.
struct Meeting {
  uint32_t mask, here;
  const char* operation;
  uint64_t values[LANES], results[LANES];
  int sources[LANES];
};

std::vector<Fiber> fibers;    // one for each thread; each runs a thread of block after block
std::vector<Meeting> meetings;
std::vector<uint32_t> ready;  // for each warp, the lanes that do not wait
unsigned at_barrier;          // threads that wait in __syncthreads
unsigned running;             // threads that have not ended
Place scheduler;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_size;
void (*body)(void*);
void* argument;
std::mt19937 order;

[[noreturn]] __attribute__((noinline)) void jump(Place& to) { __builtin_longjmp(to.words, 1); }

// Goes on with the scheduler, until it goes on with this thread.
__attribute__((noinline)) void suspend() {
  Fiber& me = fibers[threadIdx.x];
  __sanitizer_start_switch_fiber(&me.fake_stack, scheduler_stack, scheduler_size);
  if (!__builtin_setjmp(me.place.words)) jump(scheduler);
  __sanitizer_finish_switch_fiber(fibers[threadIdx.x].fake_stack, nullptr, nullptr);
}

void wait() {
  ready[threadIdx.x / LANES] &= ~(1u << threadIdx.x % LANES);
  suspend();
}

void enter() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
  for (;;) {
    body(argument);
    running--;
    wait();  // until the next block
  }
}

[[noreturn]] void begin(Fiber& fiber) {
  fiber.begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = STACK;
  makecontext(&context, enter, 0);
  setcontext(&context);
  abort();
}

__attribute__((noinline)) void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(), STACK);
  if (!__builtin_setjmp(scheduler.words)) {
    if (!fiber.begun) begin(fiber);
    jump(fiber.place);
  }
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

// One of the lanes `from`: the one with `before` others before it.
int lane_of(uint32_t from, unsigned before) {
  while (before--) from &= from - 1;
  return __builtin_ctz(from);
}

// A thread that is ready: of the warp `favoured`, as long as it has one.
unsigned next(unsigned favoured) {
  if (const unsigned count = __builtin_popcount(ready[favoured]))
    return favoured * LANES + lane_of(ready[favoured], order() % count);
  unsigned count = 0, warp = 0;
  for (uint32_t lanes : ready) count += __builtin_popcount(lanes);
  if (!count) fail("all threads wait for one another");
  unsigned before = order() % count;
  while (before >= (count = __builtin_popcount(ready[warp]))) before -= count, warp++;
  return warp * LANES + lane_of(ready[warp], before);
}

void run_block() {
  const unsigned warps = blockDim.x / LANES;
  meetings.assign(warps, Meeting());
  ready.assign(warps, ~0u);
  at_barrier = 0;
  running = blockDim.x;
  unsigned favoured = 0, turns = 0;
  while (running) {
    if (!turns--) {
      favoured = order() % warps;
      turns = 1u << (order() % 12);
    }
    resume(next(favoured));
  }
}

}  // namespace

uint64_t meet(const char* operation, uint32_t mask, uint64_t value, int source) {
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
    for (int i = 0; i < LANES; i++)
      if (mask >> i & 1) warp.results[i] = warp.values[warp.sources[i]];
    warp.here = 0;
    ready[threadIdx.x / LANES] |= mask;
    suspend();  // even the last one may be overtaken
  } else {
    wait();
  }
  return warp.results[lane];
}

void meet_block() {
  if (++at_barrier < blockDim.x) return wait();
  at_barrier = 0;
  ready.assign(ready.size(), ~0u);
  suspend();
}

void run(unsigned blocks, unsigned threads, unsigned seed, void (*kernel)(void*), void* given) {
  order.seed(seed);
  body = kernel;
  argument = given;
  blockDim.x = threads;
  gridDim.x = blocks;
  if (fibers.size() < threads) fibers.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}

}  // namespace cuda_on_cpu
