// The Python interface of the kernels: takes tensors and returns contiguous results, with about a
// microsecond of overhead.
//
// Every function returns NotImplemented, without changing anything, if the kernel cannot be used:
// for tensor subclasses, gradients, tracing, transforms, unknown dtypes, and shapes that do not
// match. The caller then computes the norm in another way.
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#include "launch.h"
#include "python.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The CPU kernels for one instruction set; build.py defines CPU_* for those that were compiled.
#define DECLARE(name)                                                     \
  extern "C" int has_##name(Dtype);                                       \
  extern "C" void rows_##name(const Call*, int64_t, int64_t);             \
  extern "C" void backward_##name(const Backward*, int64_t, int64_t);     \
  extern "C" void widen_##name(float*, const void*, Dtype, int64_t);
struct Cpu {
  const char* name;
  int (*has)(Dtype);
  void (*rows)(const Call*, int64_t, int64_t);
  void (*backward)(const Backward*, int64_t, int64_t);
  void (*widen)(float*, const void*, Dtype, int64_t);
};
#ifdef CPU_avx512
DECLARE(avx512)
#endif
#ifdef CPU_avx2
DECLARE(avx2)
#endif
DECLARE(plain)

namespace {

const Cpu CPUS[] = {
#ifdef CPU_avx512
    {"avx512", has_avx512, rows_avx512, backward_avx512, widen_avx512},
#endif
#ifdef CPU_avx2
    {"avx2", has_avx2, rows_avx2, backward_avx2, widen_avx2},
#endif
    {"plain", has_plain, rows_plain, backward_plain, widen_plain},
};

bool runs(const Cpu& cpu) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(cpu.name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(cpu.name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return true;
}

// Objects that Python passes once; see native.py.
struct Torch {
  const DLPackExchangeAPI* dlpack;
  PyObject *tensor, *parameter;             // the two types of plain tensors
  PyObject *modes, *tracing;                // functions without arguments
  PyObject *forward_ad, *level;             // the dict of a module, and a name in it
  PyObject *empty_like, *contiguous, *increment_version, *autocast, *is_neg;
} torch;

// torch's C functions to create a tensor without calling Python; null if this torch lacks them.
struct Maker {
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
  int32_t (*data)(void*, void**);
  int32_t (*forget)(void*);
  PyObject* (*wrap)(void*);
  int32_t (*dtypes[DTYPES])();
} maker;
bool (*grad_enabled)() = nullptr;
const int MAX_DIMENSIONS = 16;

struct Names {
  PyObject *requires_grad, *training, *fold, *parameters, *weight, *bias, *eps, *shape;
  PyObject *weightless, *biasless;
} names;

typedef int (*ParallelFor)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);

// Functions of CUDA's driver.
struct Driver {
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*launch)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                unsigned bz, unsigned shared, void* stream, void** arguments, void** extra);
} driver;

// The kernels for a pair of dtypes on one GPU, in the context that torch uses there.
struct Cuda {
  void* context;
  void* kernels[KERNELS];  // null where they are not loaded
};
const int MAX_GPUS = 64;
Cuda cudas[MAX_GPUS][DTYPES][DTYPES] = {};
const Cpu* cpu = nullptr;
ParallelFor parallel_for = nullptr;
int64_t serial_below = 1 << 16;  // calls with fewer elements run on one thread

struct Slower {  // sizes for which torch's own norm was measured to be faster on the CPU
  int32_t dtype;
  int64_t min_rows, max_rows, min_d, max_d;
} slower[64];
int slower_count = 0;

bool is_slower(const Call& c) {
  for (int i = 0; i < slower_count; i++) {
    const Slower& p = slower[i];
    if (p.dtype == c.dtype && p.min_rows <= c.rows && c.rows <= p.max_rows && p.min_d <= c.d &&
        c.d <= p.max_d)
      return true;
  }
  return false;
}

// Norms for which the kernels were measured to be the fastest on a GPU.
struct Chosen {
  int64_t device, added, dtype, parameters, affine;  // affine: 1 for a weight + 2 for a bias
  int64_t d, min_rows, max_rows;
}* chosen = nullptr;
int64_t chosen_count = 0;

// The dtype of weight and bias; without them, that of x.
Dtype parameters_of(const Call& c) { return c.w ? c.w_dtype : c.b ? c.b_dtype : c.dtype; }

bool is_chosen(const Call& c, int32_t device) {
  for (int64_t i = 0; i < chosen_count; i++) {
    const Chosen& p = chosen[i];
    if (p.device == device && p.d == c.d && p.dtype == c.dtype && p.added == (c.r != nullptr) &&
        p.affine == (c.w != nullptr) + 2 * (c.b != nullptr) && p.parameters == parameters_of(c) &&
        p.min_rows <= c.rows && c.rows <= p.max_rows)
      return true;
  }
  return false;
}

PyObject* declines() {
  if (PyErr_Occurred()) PyErr_Clear();
  Py_IncRef(&_Py_NotImplementedStruct);
  return &_Py_NotImplementedStruct;
}

bool plain_tensor(const PyObject* t) {
  return t->type == torch.tensor || t->type == torch.parameter;
}

// Calls a function without arguments. Returns whether its result is true, or -1 for an error.
int asks(PyObject* function) {
  PyObject* answer = PyObject_CallNoArgs(function);
  if (!answer) return -1;
  int yes = answer == &_Py_NoneStruct ? 0 : PyObject_IsTrue(answer);
  Py_DecRef(answer);
  return yes;
}

int requires_grad(PyObject* t) {
  if (t == &_Py_NoneStruct) return 0;
  PyObject* answer = PyObject_GetAttr(t, names.requires_grad);
  if (!answer) return -1;
  int yes = PyObject_IsTrue(answer);
  Py_DecRef(answer);
  return yes;
}

// Whether a mode, a trace, or forward or backward differentiation is active, which would miss a
// kernel.
bool watched(PyObject* const* tensors, int n) {
  if (asks(torch.modes) != 0 || asks(torch.tracing) != 0) return true;
  PyObject* level = PyDict_GetItemWithError(torch.forward_ad, torch.level);
  if (!level || PyLong_AsLongLong(level) >= 0) return true;
  for (int i = 0; grad_enabled() && i < n; i++)
    if (requires_grad(tensors[i]) != 0) return true;
  return false;
}

int64_t size(const DLTensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.ndim; i++) n *= t.shape[i];
  return n;
}

// A reference that is released at the end of the call.
struct Held {
  PyObject* p = nullptr;
  ~Held() { if (p) Py_DecRef(p); }
  PyObject* give() { PyObject* q = p; p = nullptr; return q; }
};

PyObject* call1(PyObject* function, PyObject* argument) {
  return PyObject_Vectorcall(function, &argument, 1, nullptr);
}

// Describes the memory of a tensor. DLPack's function ignores a lazy negation, which is checked
// here, and returns no address for tensors without memory (zero tensors, functional tensors).
bool view(PyObject* t, DLTensor* out, Dtype* dtype) {
  if (torch.dlpack->tensor_from_python(t, out)) return false;
  if (!out->data && size(*out)) return false;
  Held negated;
  negated.p = call1(torch.is_neg, t);
  if (!negated.p || PyObject_IsTrue(negated.p)) return false;
  out->data = (char*)out->data + out->byte_offset;
  if (out->lanes != 1) return false;
  if (out->code == DL_FLOAT && out->bits == 32) *dtype = F32;
  else if (out->code == DL_FLOAT && out->bits == 16) *dtype = F16;
  else if (out->code == DL_BFLOAT && out->bits == 16) *dtype = BF16;
  else if (out->code == DL_FLOAT && out->bits == 64) *dtype = F64;
  else return false;
  return true;
}

bool contiguous(const DLTensor& t) {
  int64_t step = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    if (t.shape[i] != 1 && t.strides && t.strides[i] != step) return false;
    step *= t.shape[i];
  }
  return true;
}

bool alike(const DLTensor& a, const DLTensor& b) {
  return a.ndim == b.ndim && a.device_type == b.device_type && a.device_id == b.device_id &&
         !memcmp(a.shape, b.shape, sizeof(int64_t) * a.ndim);
}

// Whether two buffers of a size share some of their memory, and not all of it.
bool overlap(const void* a, const void* b, int64_t bytes) {
  const int64_t apart = (intptr_t)a - (intptr_t)b;
  return apart && apart < bytes && -apart < bytes;
}

// Tells autograd that a tensor was written in place.
bool written(PyObject* t) {
  Held one, done;
  one.p = PyTuple_New(1);
  if (!one.p) return false;
  Py_IncRef(t);
  PyTuple_SetItem(one.p, 0, t);
  done.p = call1(torch.increment_version, one.p);
  return done.p;
}

// As view, but of a contiguous copy (owned by `copy`) if the tensor is not contiguous.
bool contiguous_view(PyObject* t, Held& copy, DLTensor* out, Dtype* dtype) {
  if (!view(t, out, dtype)) return false;
  if (contiguous(*out)) return true;
  copy.p = call1(torch.contiguous, t);
  return copy.p && view(copy.p, out, dtype);
}

struct Scratch {  // a buffer; each thread has its own
  void* data = nullptr;
  int64_t bytes = 0;
  ~Scratch() { free(data); }
  bool grow(int64_t n) {  // returns whether it grew; the old content is then lost
    if (n <= bytes) return false;
    free(data);
    data = malloc(n);
    bytes = data ? n : 0;
    return data;
  }
};
thread_local Scratch converted[2], floats[2], neutral[2][DTYPES];

// A parameter in the dtype that the kernels need: F32, F64 or BF16. If it is missing, ones or
// zeros.
const void* parameter(const void* p, Dtype dtype, Dtype want, int64_t d, bool is_bias) {
  if (p && dtype == want) return p;
  if (!p) {
    Scratch& room = neutral[is_bias][want];
    if (room.grow(d * 8))  // filled when it grows
      for (int64_t i = 0; i < d; i++) {
        if (want == F64) ((double*)room.data)[i] = !is_bias;
        else if (want == F32) ((float*)room.data)[i] = !is_bias;
        else ((uint16_t*)room.data)[i] = is_bias ? 0 : 0x3f80;
      }
    return room.data;
  }
  if (dtype != F32) {
    Scratch& room = floats[is_bias];
    room.grow(d * 4);
    if (!room.data) return nullptr;
    cpu->widen((float*)room.data, p, dtype, d);
    p = room.data;
  }
  if (want == F32) return p;
  Scratch& room = converted[is_bias];
  room.grow(d * 8);
  for (int64_t i = 0; room.data && i < d; i++) ((double*)room.data)[i] = ((const float*)p)[i];
  return room.data;
}

bool run_cpu(Call& c) {
  if (!cpu || !cpu->has(c.dtype)) return false;
  const struct { const void* p; Dtype dtype; } given[] = {{c.w, c.w_dtype}, {c.b, c.b_dtype}};
  for (auto& one : given)
    if (one.p && (!cpu->has(one.dtype) || (one.dtype == F64 && c.dtype != F64))) return false;
  const bool as_they_are = c.dtype == BF16 && c.w_dtype == BF16 && c.b_dtype == BF16;
  const Dtype want = as_they_are ? BF16 : c.dtype == F64 ? F64 : F32;
  if (c.w || c.b || c.layer) {
    c.w = parameter(c.w, c.w_dtype, want, c.d, false);
    c.b = parameter(c.b, c.b_dtype, want, c.d, true);
    if (!c.w || !c.b) return false;
  }
  c.w_dtype = c.b_dtype = want;
  if (c.rows * c.d < serial_below || c.rows == 1 || !parallel_for) {
    cpu->rows(&c, 0, c.rows);
    return true;
  }
  void* state = PyEval_SaveThread();
  int64_t grain = serial_below / 2 / c.d;
  auto some = [](int64_t begin, int64_t end, void* call) { cpu->rows((const Call*)call, begin, end); };
  int failed = parallel_for(0, c.rows, grain < 1 ? 1 : grain, some, &c);
  PyEval_RestoreThread(state);
  return !failed;
}

// The kernels for a pair of dtypes on a GPU, or null.
const Cuda* kernels_on(int32_t device, Dtype dtype, Dtype parameters) {
  if (device < 0 || device >= MAX_GPUS) return nullptr;
  const Cuda* found = &cudas[device][dtype][parameters];
  return found->context ? found : nullptr;
}

// Blocks are counted with 31 bits, and the elements of a row with an int.
bool is_too_large(int64_t rows, int64_t d) { return rows > 0x7fffffff || d > 0x40000000; }

// The kernels for a call on a GPU, or null. Weight and bias have to have one dtype.
const Cuda* cuda_for(const Call& c, int32_t device) {
  if ((c.w && c.b && c.w_dtype != c.b_dtype) || is_too_large(c.rows, c.d)) return nullptr;
  return kernels_on(device, c.dtype, parameters_of(c));
}

// Starts kernels one after the other on the stream, in the context of their GPU, which need not be
// the current one. All of them take the same argument.
bool start(std::initializer_list<Launch> launches, const Cuda& cuda, void* stream, void* argument) {
  void *arguments[] = {argument}, *popped = nullptr;
  if (driver.push(cuda.context)) return false;
  int failed = 0;
  for (const Launch& l : launches)
    if (!failed)
      failed = driver.launch(cuda.kernels[l.kernel], l.blocks, 1, 1, l.threads, 1, 1, 0, stream,
                             arguments, nullptr);
  driver.pop(&popped);
  return !failed;
}

bool run_cuda(Call& c, const Cuda& cuda, void* stream) {
  c.w_dtype = parameters_of(c);
  return start({launch_of(c)}, cuda, stream, &c);
}

// Creates a contiguous tensor like x (`like` in Python), and returns the address of its elements.
bool make(const DLTensor& x, Dtype dtype, PyObject* like, Held& to, void** data) {
  if (maker.wrap && x.device_type == DL_CPU && x.ndim <= MAX_DIMENSIONS) {
    int64_t strides[MAX_DIMENSIONS], step = 1;
    for (int i = x.ndim - 1; i >= 0; i--) {
      strides[i] = step;
      if (x.shape[i] > 1) step *= x.shape[i];
    }
    void* made = nullptr;
    if (!maker.empty_strided(x.ndim, x.shape, strides, maker.dtypes[dtype](), 0, 0, &made)) {
      if (!maker.data(made, data)) to.p = maker.wrap(made);
      maker.forget(made);
    }
    return to.p;
  }
  DLTensor y;
  to.p = call1(torch.empty_like, like);
  if (!to.p || !view(to.p, &y, &dtype)) return false;
  *data = y.data;
  return true;
}

// ADD_OVER and SUM_OVER are ADD_ and SUM with a result that overwrites x.
enum Form { NORM, ADD, ADD_, SUM, ADD_OVER, SUM_OVER };

// args: x, then residual unless the form is NORM, then weight, bias, eps.
PyObject* norm(Form form, bool layer, bool guarded, PyObject* const* args, ptrdiff_t n) {
  const int tensors = form == NORM ? 1 : 2;
  const bool over = form == ADD_OVER || form == SUM_OVER, in_place = form == ADD_ || form == ADD_OVER;
  if (n != tensors + 3) {
    PyErr_SetString(PyExc_TypeError, "a norm takes x, residual if it adds one, weight, bias, eps");
    return nullptr;
  }
  PyObject *weight = args[tensors], *bias = args[tensors + 1], *none = &_Py_NoneStruct;
  if (guarded) {
    for (int i = 0; i < tensors + 2; i++)
      if (!plain_tensor(args[i]) && (i < tensors || args[i] != none)) return declines();
    if (watched(args, tensors + 2)) return declines();
  }
  Call c = {};
  DLTensor x, r, w, b;
  Dtype dtype;
  Held x_copy, r_copy, w_copy, b_copy, result, total;
  if (!contiguous_view(args[0], x_copy, &x, &c.dtype) || x.ndim < 1) return declines();
  if (over && x_copy.p) return declines();
  const bool on_cpu = x.device_type == DL_CPU;
  if (!on_cpu && x.device_type != DL_CUDA) return declines();
  if (guarded && !on_cpu && c.dtype != F32 && asks(torch.autocast) != 0) return declines();
  c.d = x.shape[x.ndim - 1];
  if (c.d < 1) return declines();
  c.rows = size(x) / c.d;
  if (guarded && on_cpu && is_slower(c)) return declines();
  c.x = x.data;
  c.layer = layer;
  c.eps = PyFloat_AsDouble(args[n - 1]);
  if (c.eps == -1 && PyErr_Occurred()) return declines();
  c.w_dtype = c.b_dtype = c.dtype;
  if (weight != none) {
    if (!contiguous_view(weight, w_copy, &w, &c.w_dtype) || w.ndim != 1 || w.shape[0] != c.d ||
        w.device_type != x.device_type || w.device_id != x.device_id)
      return declines();
    c.w = w.data;
  }
  if (bias != none) {
    if (!contiguous_view(bias, b_copy, &b, &c.b_dtype) || b.ndim != 1 || b.shape[0] != c.d ||
        b.device_type != x.device_type || b.device_id != x.device_id)
      return declines();
    c.b = b.data;
  }
  if (form != NORM) {
    if (!view(args[1], &r, &dtype) || dtype != c.dtype || !alike(x, r)) return declines();
    if (!contiguous(r)) {
      if (in_place || !contiguous_view(args[1], r_copy, &r, &dtype)) return declines();
    }
    c.r = r.data;
    if (in_place && overlap(c.x, c.r, c.rows * c.d * size_of(c.dtype))) return declines();
  }
  const Cuda* cuda = nullptr;
  void* stream = nullptr;
  if (!on_cpu) {
    cuda = cuda_for(c, x.device_id);
    if (guarded && !is_chosen(c, x.device_id)) return declines();
    if (!cuda || torch.dlpack->current_stream(DL_CUDA, x.device_id, &stream)) return declines();
  }
  PyObject* like = x_copy.p ? x_copy.p : args[0];
  if (over) {
    Py_IncRef(args[0]);
    result.p = args[0];
    c.y = x.data;
  } else if (!make(x, c.dtype, like, result, &c.y)) {
    return declines();
  }
  c.s = in_place ? r.data : c.y;
  if (form == ADD && !make(x, c.dtype, like, total, &c.s)) return declines();
  if (c.rows && !(on_cpu ? run_cpu(c) : run_cuda(c, *cuda, stream))) return declines();
  if (form == ADD_ && guarded) {
    if (!written(args[1])) return nullptr;
  }
  if (form != ADD) return result.give();
  PyObject* pair = PyTuple_New(2);
  if (!pair) return nullptr;
  PyTuple_SetItem(pair, 0, result.give());
  PyTuple_SetItem(pair, 1, total.give());
  return pair;
}

bool run_backward_cpu(Backward& c) {
  if (!cpu || !cpu->has(c.dtype)) return false;
  const Dtype want = c.dtype == F64 ? F64 : F32;
  if (c.w && (!cpu->has(c.w_dtype) || (c.w_dtype == F64 && c.dtype != F64))) return false;
  if (c.w && !(c.w = parameter(c.w, c.w_dtype, want, c.d, false))) return false;
  auto some = [](int64_t begin, int64_t end, void* call) {
    cpu->backward((const Backward*)call, begin, end);
  };
  if (c.rows * c.d < serial_below || !parallel_for) {
    some(0, c.chunks, &c);
  } else {
    void* state = PyEval_SaveThread();
    const int failed = parallel_for(0, c.chunks, 1, some, &c);
    PyEval_RestoreThread(state);
    if (failed) return false;
  }
  auto add_up = [&](auto* sums, const auto* partial) {
    for (int64_t i = 0; i < 2 * c.d; i++) {
      double sum = 0;
      for (int64_t chunk = 0; chunk < c.chunks; chunk++) sum += partial[2 * c.d * chunk + i];
      sums[i] = sum;
    }
  };
  if (want == F64) add_up((double*)c.sums, (const double*)c.partial);
  else add_up((float*)c.sums, (const float*)c.partial);
  return true;
}

// args: dy, x, weight, what is added to dx, dx, and three tensors of the dtype that is computed in:
// sums (2, d), partial (chunks, 2, d), and scales (2, rows), which the CPU does not use. weight,
// the addend and scales may be None. Writes into the last four, and returns None. Nothing is
// checked but what would be read or written in the wrong way.
template <bool layer> PyObject* backward(PyObject*, PyObject* const* args, ptrdiff_t n) {
  enum { DY, X, WEIGHT, ADDED, DX, SUMS, PARTIAL, SCALES, EPS };
  if (n != EPS + 1) return declines();
  DLTensor t[EPS];
  Dtype dtypes[EPS];
  PyObject* none = &_Py_NoneStruct;
  for (int i = 0; i < EPS; i++) {
    t[i].data = nullptr;
    if (args[i] == none) {
      if (i != WEIGHT && i != ADDED && i != SCALES) return declines();
      continue;
    }
    if (!view(args[i], &t[i], &dtypes[i]) || !contiguous(t[i])) return declines();
    if (t[i].device_type != t[DY].device_type || t[i].device_id != t[DY].device_id) return declines();
  }
  const Dtype wide = dtypes[X] == F64 ? F64 : F32;
  for (int i : {DY, ADDED, DX})
    if (t[i].data && (dtypes[i] != dtypes[X] || !alike(t[i], t[X]))) return declines();
  if (t[X].ndim < 1 || t[PARTIAL].ndim != 3) return declines();
  Backward c = {t[DY].data, t[X].data, t[WEIGHT].data, t[ADDED].data, t[DX].data, t[SUMS].data,
                t[PARTIAL].data, t[SCALES].data};
  c.d = t[X].shape[t[X].ndim - 1];
  if (c.d < 1) return declines();
  c.rows = size(t[X]) / c.d;
  c.chunks = t[PARTIAL].shape[0];
  c.eps = PyFloat_AsDouble(args[EPS]);
  if ((c.eps == -1 && PyErr_Occurred()) || c.rows < 1 || c.chunks < 1) return declines();
  c.dtype = dtypes[X];
  c.w_dtype = c.w ? dtypes[WEIGHT] : c.dtype;
  c.layer = layer;
  if (size(t[SUMS]) != 2 * c.d || size(t[PARTIAL]) != 2 * c.d * c.chunks) return declines();
  if ((c.w && size(t[WEIGHT]) != c.d) || dtypes[SUMS] != wide || dtypes[PARTIAL] != wide)
    return declines();
  if (t[DY].device_type == DL_CPU) {
    if (!run_backward_cpu(c)) return declines();
  } else {
    const Cuda* cuda = kernels_on(t[DY].device_id, c.dtype, c.w_dtype);
    void* stream = nullptr;
    if (t[DY].device_type != DL_CUDA || !cuda || is_too_large(c.rows, c.d)) return declines();
    if (!c.scales || size(t[SCALES]) != 2 * c.rows || dtypes[SCALES] != wide) return declines();
    if (torch.dlpack->current_stream(DL_CUDA, t[DY].device_id, &stream)) return declines();
    if (!start({launch_of_rows(c), launch_of_chunks(c), launch_of_sums(c)}, *cuda, stream, &c))
      return declines();
  }
  Py_IncRef(none);
  return none;
}

template <Form form, bool layer, bool guarded>
PyObject* function(PyObject*, PyObject* const* args, ptrdiff_t n) {
  return norm(form, layer, guarded, args, n);
}

// Whether an attribute in a module's dict is true; `if_missing` without such an attribute.
bool is_set(PyObject* attributes, PyObject* name, bool if_missing) {
  PyObject* value = PyDict_GetItemWithError(attributes, name);
  return value ? PyObject_IsTrue(value) != 0 : if_missing;
}

// Whether a parameter has no effect, as an attribute of the module says, and needs no gradient.
bool is_neutral(PyObject* attributes, PyObject* name, PyObject* parameter) {
  return is_set(attributes, name, false) && !(grad_enabled() && requires_grad(parameter) != 0);
}

// args: a module like nn.LayerNorm, its input, the fold that the module has to belong to (otherwise
// its input may have a mean), and whether to skip parameters without effect. Declines if the module
// belongs to another fold, in training mode, and if its parameters are not plain tensors.
PyObject* module_rms_norm(PyObject*, PyObject* const* args, ptrdiff_t n) {
  Held attributes;
  attributes.p = n == 4 ? PyObject_GenericGetDict(args[0], nullptr) : nullptr;
  PyObject* own = attributes.p;
  if (!own || PyDict_GetItemWithError(own, names.fold) != args[2] ||
      is_set(own, names.training, true))
    return declines();
  PyObject* parameters = PyDict_GetItemWithError(own, names.parameters);
  PyObject* eps = PyDict_GetItemWithError(own, names.eps);
  if (!parameters || !eps) return declines();
  PyObject* weight = PyDict_GetItemWithError(parameters, names.weight);
  PyObject* bias = PyDict_GetItemWithError(parameters, names.bias);
  if (!weight || !bias) return declines();
  const int skip = PyObject_IsTrue(args[3]);
  if (skip && is_neutral(own, names.weightless, weight)) weight = &_Py_NoneStruct;
  if (skip && is_neutral(own, names.biasless, bias)) bias = &_Py_NoneStruct;
  if (weight == &_Py_NoneStruct) {
    PyObject* shape = PyDict_GetItemWithError(own, names.shape);
    if (!shape || PyTuple_Size(shape) != 1) return declines();
  }
  PyObject* given[] = {args[1], weight, bias, eps};
  return norm(NORM, false, true, given, 4);
}

// args: three lists of equal length of dictionaries, names and values; two of dictionaries and
// sizes; two of objects and types. Returns whether each dictionary has the value under the name
// (None also stands for a missing name), each dictionary has the size, and each object has the
// type. This is not about tensors; it is in C++ because it runs before every call of a model.
PyObject* same(PyObject*, PyObject* const* args, ptrdiff_t n) {
  if (n != 7) return declines();
  ptrdiff_t lengths[7];
  for (int i = 0; i < 7; i++) lengths[i] = PyList_Size(args[i]);
  if (lengths[0] < 0 || lengths[1] != lengths[0] || lengths[2] != lengths[0] || lengths[3] < 0 ||
      lengths[4] != lengths[3] || lengths[5] < 0 || lengths[6] != lengths[5])
    return declines();
  for (ptrdiff_t i = 0; i < lengths[0]; i++) {
    PyObject* value = PyDict_GetItemWithError(PyList_GetItem(args[0], i), PyList_GetItem(args[1], i));
    if ((value ? value : &_Py_NoneStruct) != PyList_GetItem(args[2], i))
      return PyErr_Occurred() ? declines() : PyBool_FromLong(0);
  }
  for (ptrdiff_t i = 0; i < lengths[3]; i++)
    if (PyDict_Size(PyList_GetItem(args[3], i)) != PyLong_AsLongLong(PyList_GetItem(args[4], i)))
      return PyErr_Occurred() ? declines() : PyBool_FromLong(0);
  for (ptrdiff_t i = 0; i < lengths[5]; i++)
    if (PyList_GetItem(args[5], i)->type != PyList_GetItem(args[6], i)) return PyBool_FromLong(0);
  return PyBool_FromLong(1);
}

#define BOTH(text, form, layer)                                         \
  {text, function<form, layer, true>, METH_FASTCALL, nullptr},          \
  {text "!", function<form, layer, false>, METH_FASTCALL, nullptr}
PyMethodDef FUNCTIONS[] = {
    BOTH("rms_norm", NORM, false),      BOTH("layer_norm", NORM, true),
    BOTH("add_rms_norm", ADD, false),   BOTH("add_layer_norm", ADD, true),
    BOTH("add_rms_norm_", ADD_, false), BOTH("add_layer_norm_", ADD_, true),
    BOTH("sum_rms_norm", SUM, false),   BOTH("sum_layer_norm", SUM, true),
    {"add_rms_norm_over", function<ADD_OVER, false, true>, METH_FASTCALL, nullptr},
    {"add_layer_norm_over", function<ADD_OVER, true, true>, METH_FASTCALL, nullptr},
    {"sum_rms_norm_over", function<SUM_OVER, false, true>, METH_FASTCALL, nullptr},
    {"sum_layer_norm_over", function<SUM_OVER, true, true>, METH_FASTCALL, nullptr},
    {"rms_norm_backward!", backward<false>, METH_FASTCALL, nullptr},
    {"layer_norm_backward!", backward<true>, METH_FASTCALL, nullptr},
    {"module_rms_norm", module_rms_norm, METH_FASTCALL, nullptr},
    {"same", same, METH_FASTCALL, nullptr},
};
const int COUNT = sizeof(FUNCTIONS) / sizeof(FUNCTIONS[0]);

}  // namespace

// The functions below are called through ctypes, with the GIL held.

// The Python function with index i, or null after the last. A function whose name ends in "!" does
// not check its arguments.
EXPORT PyObject* enjoyln_function(int i) {
  return i < COUNT ? PyCFunction_NewEx(&FUNCTIONS[i], nullptr, nullptr) : nullptr;
}
EXPORT const char* enjoyln_name(int i) { return i < COUNT ? FUNCTIONS[i].name : nullptr; }

// Takes the DLPack capsule and the 11 other objects of `Torch`, in order, and torch's function that
// tells whether gradients are enabled. Returns 0 if the version of DLPack is unknown.
EXPORT int enjoyln_start(PyObject* given, void* grad) {
  PyObject* objects[12];
  for (int i = 0; i < 12; i++) {
    objects[i] = PyTuple_GetItem(given, i);
    if (!objects[i]) return 0;
    Py_IncRef(objects[i]);
  }
  torch.dlpack = (const DLPackExchangeAPI*)PyCapsule_GetPointer(objects[0], "dlpack_exchange_api");
  if (!torch.dlpack || torch.dlpack->major != 1 || !torch.dlpack->tensor_from_python) return 0;
  memcpy(&torch.tensor, objects + 1, sizeof(PyObject*) * 11);
  grad_enabled = (bool (*)())grad;
  const char* texts[] = {"requires_grad", "training", "_enjoyln_fold", "_parameters",
                         "weight",        "bias",     "eps",           "normalized_shape",
                         "weightless",    "biasless"};
  for (int i = 0; i < 10; i++) ((PyObject**)&names)[i] = PyUnicode_InternFromString(texts[i]);
  return 1;
}

// Selects the kernels called `name`, or the best for this processor if it is empty. Returns the
// name of the selected kernels, or null.
EXPORT const char* enjoyln_cpu(const char* name) {
  for (const Cpu& found : CPUS)
    if (runs(found) && (!*name || !strcmp(name, found.name))) {
      cpu = &found;
      return found.name;
    }
  return nullptr;
}

// Takes the addresses for `Maker`, in order.
EXPORT void enjoyln_maker(void* const* functions) { memcpy(&maker, functions, sizeof maker); }

EXPORT void enjoyln_parallel(void* function, int64_t elements) {
  parallel_for = (ParallelFor)function;
  serial_below = elements;
}

// Takes the addresses for `Driver`, in order.
EXPORT void enjoyln_driver(void* const* functions) { memcpy(&driver, functions, sizeof driver); }

// Takes the kernels for a GPU and a pair of dtypes, in the order of `Kernel`; null takes them away.
// Returns 0 for a GPU that has no place here.
EXPORT int enjoyln_cuda(int32_t device, Dtype dtype, Dtype parameters, void* context,
                        void* const* kernels) {
  if (device < 0 || device >= MAX_GPUS) return 0;
  Cuda& cuda = cudas[device][dtype][parameters];
  cuda.context = nullptr;  // declines until all of them are there
  if (kernels) memcpy(cuda.kernels, kernels, sizeof cuda.kernels);
  cuda.context = kernels ? context : nullptr;
  return 1;
}

// Runs a call on a stream of a GPU, if the kernels were chosen for it. Returns 0 if it has started.
EXPORT int enjoyln_launch(const Call* call, int32_t device, void* stream) {
  Call c = *call;
  const Cuda* cuda = cuda_for(c, device);
  return !cuda || !is_chosen(c, device) || !run_cuda(c, *cuda, stream);
}

// Declines rows of d elements on the CPU; all bounds are included.
EXPORT void enjoyln_decline(int dtype, int64_t min_rows, int64_t max_rows, int64_t min_d,
                            int64_t max_d) {
  if (slower_count < 64) slower[slower_count++] = {dtype, min_rows, max_rows, min_d, max_d};
}

// Uses the kernels on GPUs for these norms, and for no others.
EXPORT void enjoyln_choose(const Chosen* given, int64_t count) {
  free(chosen);
  chosen = (Chosen*)malloc(count * sizeof(Chosen) + 1);
  chosen_count = chosen ? count : 0;
  if (chosen) memcpy(chosen, given, count * sizeof(Chosen));
}
