// Declarations from CPython's stable ABI (unchanged since 3.10) and from DLPack 1.x. They are
// repeated here so that one library works with all Python versions and no headers have to be
// installed.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
struct PyObject {
  ptrdiff_t references;
  PyObject* type;
};
extern PyObject _Py_NoneStruct, _Py_NotImplementedStruct;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PyObject* PyObject_GenericGetDict(PyObject*, void*);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
int PyObject_IsTrue(PyObject*);
ptrdiff_t PyDict_Size(PyObject*);
ptrdiff_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, ptrdiff_t);
PyObject* PyBool_FromLong(long);
PyObject* PyUnicode_InternFromString(const char*);
PyObject* PyTuple_New(ptrdiff_t);
int PyTuple_SetItem(PyObject*, ptrdiff_t, PyObject*);
PyObject* PyTuple_GetItem(PyObject*, ptrdiff_t);
ptrdiff_t PyTuple_Size(PyObject*);
double PyFloat_AsDouble(PyObject*);
long long PyLong_AsLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_SetString(PyObject*, const char*);
extern PyObject *PyExc_TypeError, *PyExc_RuntimeError;
void* PyCapsule_GetPointer(PyObject*, const char*);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);

typedef PyObject* (*PyFastFunction)(PyObject*, PyObject* const*, ptrdiff_t);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* doc;
};
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
}

const int METH_FASTCALL = 0x80;

enum { DL_CPU = 1, DL_CUDA = 2 };
enum { DL_FLOAT = 2, DL_BFLOAT = 4 };

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major, minor;
  void* older;
  void *allocate, *managed_from_python, *managed_to_python;
  int (*tensor_from_python)(void*, DLTensor*);
  int (*current_stream)(int32_t, int32_t, void**);
};
