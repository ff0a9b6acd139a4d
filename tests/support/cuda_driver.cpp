// A stand-in for CUDA's driver with two GPUs: it notes what is called, in which context.
#include <stdint.h>
#include <string.h>

struct Launch {
  void *function, *context, *stream;
  unsigned blocks, threads;
};

namespace {
void* stack[16];  // contexts
int depth = 0, launches = 0, refused = 0;
Launch last;
char functions[2][16];  // for each context, of one module
}  // namespace

extern "C" {
int cuDeviceGet(int* device, int index) { return *device = index, index > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = functions[device], 0; }
int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = stack[--depth], 0; }
int cuModuleLoadData(void** module, const void* image) {
  *module = stack[depth - 1];  // a module belongs to the context in which it is loaded
  return strcmp((const char*)image, "a cubin") ? 200 : 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const char* names[] = {
      "short_packs", "short_single", "long_kept", "long_packs", "long_single", "back_short_packs",
      "back_short_single", "back_long_packs", "back_long_single", "back_chunks", "back_sums"};
  for (int i = 0; i < 11; i++)
    if (!strcmp(name, names[i])) return *function = (char*)module + i, 0;
  return 500;
}
int cuGetErrorName(int number, const char** name) {
  return *name = number == 200 ? "CUDA_ERROR_INVALID_IMAGE" : nullptr, 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned,
                   unsigned, void* stream, void**, void**) {
  last = {function, depth ? stack[depth - 1] : nullptr, stream, gx, bx};
  launches++;
  return refused;
}

void refuse(int error) { refused = error; }
int current_depth() { return depth; }
int count() { return launches; }
const Launch* last_launch() { return &last; }
}
