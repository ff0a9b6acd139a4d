// Runs calls of cuda.cu for one pair of types (ROW, PARAMETER): reads them from standard input, and
// writes the results to standard output. Every buffer has its exact size, so that
// AddressSanitizer sees what is read or written beyond it.
//
// The argument is the number of the fault that is switched on, in sources that have faults.
static int fault = 0;

#include "cuda.cu"

#include <stdio.h>
#include <stdlib.h>

struct Case {  // as in test_cuda_on_cpu.py; the contents of x, weight and bias follow
  int64_t rows, d;
  double eps;
  int32_t parts;    // of `rms_norm_packs`
  int32_t packs;    // whether rows are read in packs
  int32_t threads;  // of a block
  int32_t offset;   // bytes by which rows are off the alignment of CUDA's allocator
  int32_t over;     // the result overwrites x
  uint32_t seed;
};

struct Call {
  const ROW* x;
  ROW* y;
  const PARAMETER *weight, *bias;
  int d;
  double eps;
  int parts;
};

namespace {

void fetch(void* to, size_t bytes) {
  if (fread(to, 1, bytes, stdin) != bytes) {
    fputs("the input ends too early\n", stderr);
    _Exit(4);
  }
}

char* buffer(size_t bytes, size_t offset = 0) {
  void* found = nullptr;
  if (posix_memalign(&found, 256, bytes + offset)) _Exit(4);
  return (char*)found + offset;
}

char* filled(size_t bytes, size_t offset = 0) {
  char* found = buffer(bytes, offset);
  fetch(found, bytes);
  return found;
}

template <void (*kernel)(const ROW*, ROW*, const PARAMETER*, const PARAMETER*, int, double, int)>
void start(Call c) {
  kernel(c.x, c.y, c.weight, c.bias, c.d, c.eps, c.parts);
}

void run(const Case& one) {
  const size_t size = one.rows * one.d * sizeof(ROW), offset = one.offset;
  char* x = filled(size, offset);
  char* weight = one.parts & WEIGHT ? filled(one.d * sizeof(PARAMETER)) : nullptr;
  char* bias = one.parts & BIAS ? filled(one.d * sizeof(PARAMETER)) : nullptr;
  char* y = one.over ? x : buffer(size, offset);
  const Call c = {(ROW*)x, (ROW*)y, (PARAMETER*)weight, (PARAMETER*)bias, (int)one.d, one.eps, one.parts};
  cuda_on_cpu::launch<Call>(one.rows, one.threads, one.seed,
                            one.packs ? start<rms_norm_packs> : start<rms_norm_single>, c);
  fwrite(y, 1, size, stdout);
  if (!one.over) free(y - offset);
  free(x - offset);
  free(weight);
  free(bias);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) fault = atoi(arguments[1]);
  Case one;
  while (fread(&one, sizeof one, 1, stdin) == 1) run(one);
}
