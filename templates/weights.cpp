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

// Where what is asked lies, as `templates/fields.py` found it: bytes from the begin of a Python tensor
// to its TensorImpl, of that to what it points to and tells, and of those to what they tell.
struct Places {
  int64_t impl, version, storage, offset, dtype, number, data;
  int8_t sizes[256];  // of elements, by dtype; 0 of one that is not known
};

template <class T>
T at(const void* object, int64_t place) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(object) + place);
}

// One weight; false where it has no version (inference tensors) or no plain storage. Torch's own
// functions go the same way, and with calls and checks through twice as much memory; of a view without
// elements they say 0, which is said here of no storage's.
struct Facts {
  int64_t identity, version, address;

  bool read(const Places& places, PyObject* weight) {
    const void* impl = at<const void*>(weight, places.impl);
    if (!impl) return false;
    const void* counter = at<const void*>(impl, places.version);
    const void* storage = at<const void*>(impl, places.storage);
    if (!counter || !storage) return false;
    identity = reinterpret_cast<int64_t>(weight);
    version = at<uint32_t>(counter, places.number);
    address = at<int64_t>(storage, places.data);
    const int64_t offset = at<int64_t>(impl, places.offset);
    if (!offset) return true;
    const int size = places.sizes[at<uint8_t>(impl, places.dtype)];
    address += offset * size;
    return size != 0;
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
// where a tensor has no version or no address.
PyObject* state(const Places* places, PyObject* weights) {
  const int64_t count = PyTuple_Size(weights);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 3 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  const Told told{count, words(bytes)};
  int64_t n = 0;
  for (Facts found; n < count && found.read(*places, PyTuple_GetItem(weights, n)); ++n) {
    told.identity(n) = found.identity;
    told.version(n) = found.version;
    told.address(n) = found.address;
  }
  if (n == count) return bytes;
  Py_DecRef(bytes);
  return PyBytes_FromStringAndSize(nullptr, 0);
}

// Whether those of the list's tensors with these numbers are what `state` said. Compared where they
// lie: to write them down first takes nearly twice as long.
int same(const Places* places, const int64_t* numbers, int64_t count, PyObject* inputs,
         PyObject* bytes) {
  const Told told{count, words(bytes)};
  const intptr_t size = PyList_Size(inputs);
  for (int64_t n = 0; n < count; ++n) {
    Facts found;
    if (numbers[n] >= size) return false;
    PyObject* weight = PyList_GetItem(inputs, numbers[n]);
    if (told.identity(n) != reinterpret_cast<int64_t>(weight)) return false;
    if (!found.read(*places, weight)) return false;
    if (told.version(n) != found.version || told.address(n) != found.address) return false;
  }
  return true;
}

}  // extern "C"
