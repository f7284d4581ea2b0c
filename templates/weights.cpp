// Whether weights are what they were, read of all of them in one call.
//
// As in look.cpp, what is asked of torch and of Python is declared here, and no library is linked.
#include <cstdint>

extern "C" {
struct _object;
using PyObject = _object;
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);
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

// What is asked of torch, and where a Python tensor has its TensorImpl.
struct Torch {
  Version version;
  Address address;
  int64_t place;

  void** impl(PyObject* weight) const {
    return reinterpret_cast<void**>(reinterpret_cast<char*>(weight) + place);
  }
};

// One weight; false where it has no address.
struct Facts {
  int64_t identity, version, address;

  bool read(const Torch& torch, PyObject* weight) {
    void** impl = torch.impl(weight);
    void* data;
    if (!*impl || torch.address(impl, &data)) return false;
    identity = reinterpret_cast<int64_t>(weight);
    version = torch.version(impl);
    address = reinterpret_cast<int64_t>(data);
    return true;
  }
};

// Those of `count` weights, in three blocks.
struct Told {
  int64_t count;
  int64_t* numbers;

  int64_t& identity(int64_t n) const { return numbers[n]; }
  int64_t& version(int64_t n) const { return numbers[count + n]; }
  int64_t& address(int64_t n) const { return numbers[2 * count + n]; }
};

int64_t* words(PyObject* bytes) { return reinterpret_cast<int64_t*>(PyBytes_AsString(bytes)); }

}  // namespace

extern "C" {

// Identities, versions and addresses of a tuple of tensors, one after another, as bytes; none of them
// where a tensor has no version (inference tensors) or no address.
PyObject* state(const Torch* torch, PyObject* weights) {
  const int64_t count = PyTuple_Size(weights);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 3 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  const Told told{count, words(bytes)};
  int64_t n = 0;
  try {
    for (Facts found; n < count && found.read(*torch, PyTuple_GetItem(weights, n)); ++n) {
      told.identity(n) = found.identity;
      told.version(n) = found.version;
      told.address(n) = found.address;
    }
  } catch (...) {  // torch's error for an inference tensor
  }
  if (n == count) return bytes;
  Py_DecRef(bytes);
  return PyBytes_FromStringAndSize(nullptr, 0);
}

// Whether those of the list's tensors with these numbers are what `state` said. Compared where they
// lie: to write them down first takes nearly twice as long.
int same(const Torch* torch, const int64_t* numbers, int64_t count, PyObject* inputs, PyObject* bytes) {
  const Told told{count, words(bytes)};
  const intptr_t size = PyList_Size(inputs);
  try {
    for (int64_t n = 0; n < count; ++n) {
      Facts found;
      if (numbers[n] >= size) return false;
      PyObject* weight = PyList_GetItem(inputs, numbers[n]);
      if (told.identity(n) != reinterpret_cast<int64_t>(weight)) return false;
      if (!found.read(*torch, weight)) return false;
      if (told.version(n) != found.version || told.address(n) != found.address) return false;
    }
  } catch (...) {
    return false;
  }
  return true;
}

}  // extern "C"
