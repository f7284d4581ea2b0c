// What the plan of a step follows from, read of all tensors of a group in one call.
//
// Tensors are asked through torch's stable C interface, Python's objects through functions of its
// stable ABI. Both are declared here, so no header of either is needed, and no library is linked.
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

extern "C" {
struct _object;
using PyObject = _object;
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
void Py_DecRef(PyObject*);
void PyErr_Clear();
}

namespace {

constexpr int64_t VECTOR = 16;  // bytes, as templates/step_cuda.py has it
constexpr int64_t ABSENT = -1;  // a gradient that is not there
constexpr int TYPE = 1;         // in words, where an object has its type: so says the stable ABI

// torch's `aoti_torch_get_*`: each takes a pointer to where the address of a TensorImpl stands.
template <class T>
using Asked = int32_t (*)(void** tensor, T* answer);

struct Torch {
  Asked<void*> data_ptr;
  Asked<int32_t> dtype, layout;
  Asked<int64_t> dim;
  Asked<int64_t*> sizes, strides;
};

struct Words {
  PyObject *none, *tensor, *parameter, *grad;
  int64_t strided;
  int64_t place;           // in a tensor's object, of its TensorImpl's address
  int64_t keys, negative;  // in words, of the TensorImpl's dispatch keys, and the one that negates
};

struct Facts {
  const Torch& torch;
  const Words& words;
  std::vector<int64_t>&said, &addresses;  // the latter of gradients

  bool type(PyObject* object) {
    PyObject* kind = reinterpret_cast<PyObject**>(object)[TYPE];
    said.push_back(reinterpret_cast<int64_t>(kind));
    return kind == words.tensor || kind == words.parameter;
  }

  void** impl(PyObject* object) const {
    return reinterpret_cast<void**>(reinterpret_cast<char*>(object) + words.place);
  }

  // Whether it is to be negated when it is read.
  bool negated(PyObject* object) const {
    return static_cast<const int64_t*>(*impl(object))[words.keys] & words.negative;
  }

  // All but the address; false for what is no plain tensor.
  bool form(PyObject* object, int64_t& address) {
    if (!type(object)) return false;
    void** impl = this->impl(object);
    int32_t layout, dtype;
    int64_t dim, *sizes, *strides;
    void* data;
    if (!*impl || torch.layout(impl, &layout) || layout != words.strided) return false;
    if (torch.data_ptr(impl, &data) || torch.dtype(impl, &dtype)) return false;
    if (torch.dim(impl, &dim) || torch.sizes(impl, &sizes)) return false;
    if (torch.strides(impl, &strides)) return false;
    if (!data && std::find(sizes, sizes + dim, 0) == sizes + dim) return false;  // no memory
    said.push_back(dtype);
    said.push_back(dim);
    said.insert(said.end(), sizes, sizes + dim);
    said.insert(said.end(), strides, strides + dim);
    address = reinterpret_cast<int64_t>(data);
    return true;
  }

  bool held(PyObject* object, PyObject* into) {
    int64_t address;
    if (!form(object, address)) return false;
    said.push_back(address);
    return !PyList_Append(into, object);
  }

  bool gradient(PyObject* object) {
    int64_t address;
    if (!form(object, address) || negated(object)) return false;
    said.push_back(address % VECTOR);
    addresses.push_back(address);
    return true;
  }
};

// The states of parameters, which mostly stand in their order. A tensor's hash is Python's to make,
// so what stands elsewhere is found by its address.
struct States {
  intptr_t place = 0;
  std::unordered_map<PyObject*, PyObject*> found;

  PyObject* of(PyObject* param, PyObject* all) {
    PyObject *key, *value;
    if (found.empty() && PyDict_Next(all, &place, &key, &value) && key == param) return value;
    if (found.empty())
      for (place = 0; PyDict_Next(all, &place, &key, &value);) found[key] = value;
    auto own = found.find(param);
    return own == found.end() ? nullptr : own->second;
  }
};

thread_local std::vector<int64_t> said, addresses;
thread_local States states;

bool read(Facts facts, PyObject* params, PyObject* state, PyObject* names, PyObject* held,
          PyObject* grads) {
  const intptr_t wanted = PyTuple_Size(names), count = PyList_Size(params);
  facts.said.push_back(count);  // or a parameter that changes its group would not show
  for (intptr_t n = 0; n < count; ++n) {
    PyObject* param = PyList_GetItem(params, n);
    PyObject* grad = PyObject_GetAttr(param, facts.words.grad);
    if (!grad) return false;
    const bool absent = grad == facts.words.none;
    const bool listed = absent || !PyList_Append(grads, grad);
    Py_DecRef(grad);  // the list holds it
    if (!listed) return false;
    if (absent) {
      facts.said.push_back(ABSENT);
      continue;
    }
    if (!facts.gradient(grad) || !facts.held(param, held)) return false;
    PyObject* own = wanted ? states.of(param, state) : nullptr;
    if (wanted && !own) return false;
    for (intptr_t m = 0; m < wanted; ++m) {
      PyObject* value = PyDict_GetItemWithError(own, PyTuple_GetItem(names, m));
      if (!value || !facts.held(value, held)) return false;
    }
  }
  return true;
}

}  // namespace

// Adds the tensors of groups, which are lists of parameters and the names of their states, to `held`
// and `grads`, and what was said of them and the addresses of gradients to `told`, as bytes; returns
// whether all of them are plain.
extern "C" int32_t look(const Torch* torch, const Words* words, PyObject* groups, PyObject* names,
                        PyObject* state, PyObject* held, PyObject* grads, PyObject* told) {
  said.clear(), addresses.clear(), states = {};
  const Facts facts{*torch, *words, said, addresses};
  bool plain = true;
  for (intptr_t n = 0; plain && n < PyList_Size(groups); ++n)
    plain = read(facts, PyList_GetItem(groups, n), state, PyList_GetItem(names, n), held, grads);
  for (const auto* each : {&said, &addresses}) {
    const auto* begin = reinterpret_cast<const char*>(each->data());
    PyObject* bytes = PyBytes_FromStringAndSize(begin, sizeof(int64_t) * each->size());
    plain = plain && bytes && !PyList_Append(told, bytes);
    if (bytes) Py_DecRef(bytes);  // the list holds it
  }
  if (!plain) PyErr_Clear();
  return plain;
}

namespace {

template <class T>
bool equal(const int64_t* cells, int64_t count, double value) {
  return std::all_of(cells, cells + count,
                     [=](int64_t cell) { return *reinterpret_cast<T*>(cell) == value; });
}

template <class T>
void write(const int64_t* cells, int64_t count, double value) {
  for (int64_t n = 0; n < count; ++n) *reinterpret_cast<T*>(cells[n]) = value;
}

}  // namespace

// Numbers that lie at these addresses, fp64 if they are wide, else fp32: whether all are `value`.
extern "C" int32_t are(const int64_t* cells, int64_t count, int32_t wide, double value) {
  return wide ? equal<double>(cells, count, value) : equal<float>(cells, count, value);
}

extern "C" void become(const int64_t* cells, int64_t count, int32_t wide, double value) {
  wide ? write<double>(cells, count, value) : write<float>(cells, count, value);
}
