// Runs calls of cuda.cu for one pair of types (ROW, PARAMETER): reads them from standard input, and
// writes the results to standard output. Every buffer has its exact size, so that
// AddressSanitizer sees what is read or written beyond it.
//
// The argument is the number of the fault that is switched on, in sources that have faults.
static int fault = 0;

#include "cuda.cu"

#include <stdio.h>
#include <stdlib.h>

#include <initializer_list>

struct Case {  // as in cuda_cases.py; the contents of x, r, w and b follow, as far as there are any
  int64_t rows, d;
  double eps;
  int32_t layer, has_r, has_w, has_b;
  int32_t sum;     // 0: not kept, 1: in a buffer of its own, 2: in place of r
  int32_t over;    // the result overwrites x
  int32_t offset;  // bytes by which rows are off the alignment of CUDA's allocator
  uint32_t seed;
  int32_t chunks;  // 0, or of the gradients; then r is dy, and a is in the place of b
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

// A dtype of the same size: `launch.h` asks for no more.
Dtype of_size(size_t size) { return size == 8 ? F64 : size == 4 ? F32 : F16; }
Dtype row_dtype() { return of_size(sizeof(ROW)); }
Dtype parameter_dtype() { return of_size(sizeof(PARAMETER)); }

void run(const Case& one) {
  const size_t size = one.rows * one.d * sizeof(ROW), offset = one.offset;
  Call c = {};
  char* x = filled(size, offset);
  char* r = one.has_r ? filled(size, offset) : nullptr;
  char* w = one.has_w ? filled(one.d * sizeof(PARAMETER)) : nullptr;
  char* b = one.has_b ? filled(one.d * sizeof(PARAMETER)) : nullptr;
  char* y = one.over ? x : buffer(size, offset);
  char* s = one.sum == 0 ? y : one.sum == 1 ? buffer(size, offset) : r;
  c.x = x, c.r = r, c.y = y, c.s = s, c.w = w, c.b = b;
  c.rows = one.rows, c.d = one.d, c.eps = one.eps, c.layer = one.layer;
  c.dtype = row_dtype();
  c.w_dtype = c.b_dtype = parameter_dtype();
  void (*kernels[KERNELS])(Call) = {short_packs, short_single, long_kept, long_packs, long_single};
  const Launch l = launch_of(c);
  cuda_on_cpu::launch<Call>(l.blocks, l.threads, one.seed, kernels[l.kernel], c);
  fwrite(y, 1, size, stdout);
  if (one.sum) fwrite(s, 1, size, stdout);
  if (!one.over) free(y - offset);
  if (one.sum == 1) free(s - offset);
  free(x - offset);
  if (r) free(r - offset);
  free(w);
  free(b);
}

// The gradients: of x, then of weight and bias.
void run_backward(const Case& one) {
  typedef typename Computed<ROW>::type S;
  const size_t size = one.rows * one.d * sizeof(ROW), offset = one.offset;
  Backward c = {};
  char* x = filled(size, offset);
  char* dy = filled(size, offset);
  char* w = one.has_w ? filled(one.d * sizeof(PARAMETER)) : nullptr;
  char* a = one.has_b ? filled(size, offset) : nullptr;
  char* dx = buffer(size, offset);
  char* sums = buffer(2 * one.d * sizeof(S));
  char* partial = buffer(one.chunks * 2 * one.d * sizeof(S));
  char* scales = buffer(2 * one.rows * sizeof(S));
  c = {dy, x, w, a, dx, sums, partial, scales, one.rows, one.d, one.chunks, one.eps};
  c.dtype = row_dtype();
  c.w_dtype = parameter_dtype();
  c.layer = one.layer;
  void (*kernels[])(Backward) = {back_short_packs, back_short_single, back_long_packs,
                                 back_long_single, back_chunks,       back_sums};
  for (const Launch& l : {launch_of_rows(c), launch_of_chunks(c), launch_of_sums(c)})
    cuda_on_cpu::launch(l.blocks, l.threads, one.seed, kernels[l.kernel - BACK_SHORT_PACKS], c);
  fwrite(dx, 1, size, stdout);
  fwrite(sums, 1, 2 * one.d * sizeof(S), stdout);
  free(x - offset);
  free(dy - offset);
  free(dx - offset);
  if (a) free(a - offset);
  free(w);
  free(sums);
  free(partial);
  free(scales);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) fault = atoi(arguments[1]);
  Case one;
  while (fread(&one, sizeof one, 1, stdin) == 1) one.chunks ? run_backward(one) : run(one);
}
