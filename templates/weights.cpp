// Whether weights are what they were, read of all of them in one call.
//
// As in look.cpp, what is asked of torch and of Python is declared here, and no library is linked.
#include <cstdint>

extern "C" {
struct _object;
using PyObject = _object;
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
char* PyBytes_AsString(PyObject*);
void Py_DecRef(PyObject*);
}

namespace {

// Each takes a pointer to where the address of a TensorImpl stands, as a C++ tensor is one.
using Version = int64_t (*)(void** tensor);
using Address = int32_t (*)(void** tensor, void** answer);

bool read(Version version, Address address, int64_t place, PyObject* weights, int64_t count,
          int64_t* told) {
  for (int64_t n = 0; n < count; ++n) {
    PyObject* weight = PyTuple_GetItem(weights, n);
    auto** impl = reinterpret_cast<void**>(reinterpret_cast<char*>(weight) + place);
    void* data;
    if (!*impl || address(impl, &data)) return false;
    told[n] = reinterpret_cast<int64_t>(weight);
    told[count + n] = version(impl);
    told[2 * count + n] = reinterpret_cast<int64_t>(data);
  }
  return true;
}

}  // namespace

// Identities, versions and addresses of a tuple of tensors, one after another, as bytes; none of them
// where a tensor has no version (inference tensors) or no address.
extern "C" PyObject* state(Version version, Address address, int64_t place, PyObject* weights) {
  const int64_t count = PyTuple_Size(weights);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 3 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  try {
    auto* told = reinterpret_cast<int64_t*>(PyBytes_AsString(bytes));
    if (read(version, address, place, weights, count, told)) return bytes;
  } catch (...) {  // torch's error for an inference tensor
  }
  Py_DecRef(bytes);
  return PyBytes_FromStringAndSize(nullptr, 0);
}
