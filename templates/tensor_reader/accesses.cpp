// Note calls of torch's accessors of memory. The functions in their definitions (`PyMethodDef`,
// `PyGetSetDef`) are replaced, so every object of Python stays what it is.
//
// As in look.cpp, functions of Python are declared here, and no library is linked.
#include <cstdint>

extern "C" {
struct _object;
using PyObject = _object;
intptr_t PyDict_Size(PyObject*);
PyObject* PyDict_GetItemString(PyObject*, const char*);
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
}

namespace {

constexpr int MOST = 4;  // functions of one kind

using Plain = PyObject* (*)(PyObject*, PyObject*);  // no arguments, or a tuple of them
using Keyed = PyObject* (*)(PyObject*, PyObject*, PyObject*);
using Getter = PyObject* (*)(PyObject*, void*);
using Setter = int (*)(PyObject*, PyObject*, void*);

PyObject* watched;  // the dictionary of storages that are noted

// A function of torch, and Python's function that notes a tensor and a result.
template <class Function>
struct Noted {
  Function function;
  PyObject* note;

  bool add(PyObject* tensor, PyObject* result) const {
    if (PyDict_Size(watched) <= 0) return true;
    PyObject* none = PyObject_CallFunctionObjArgs(note, tensor, result, nullptr);
    if (none) Py_DecRef(none);
    return none;
  }

  PyObject* add_result(PyObject* tensor, PyObject* result) const {
    if (!result || !tensor || add(tensor, result)) return result;
    Py_DecRef(result);
    return nullptr;
  }
};

Noted<Plain> plain[MOST];
Noted<Keyed> keyed[MOST], functions[MOST];
Noted<Getter> getter;
Noted<Setter> setter;

template <int N>
PyObject* call_plain(PyObject* tensor, PyObject* arguments) {
  return plain[N].add_result(tensor, plain[N].function(tensor, arguments));
}

template <int N>
PyObject* call_keyed(PyObject* tensor, PyObject* arguments, PyObject* named) {
  return keyed[N].add_result(tensor, keyed[N].function(tensor, arguments, named));
}

// A function of a module, whose first argument is the tensor.
template <int N>
PyObject* call_function(PyObject* module, PyObject* arguments, PyObject* named) {
  PyObject* result = functions[N].function(module, arguments, named);
  PyObject* tensor = nullptr;
  if (result && PyTuple_Size(arguments) > 0)
    tensor = PyTuple_GetItem(arguments, 0);
  else if (result && named)
    tensor = PyDict_GetItemString(named, "data");
  return functions[N].add_result(tensor, result);
}

PyObject* get(PyObject* tensor, void* closure) {
  return getter.add_result(tensor, getter.function(tensor, closure));
}

int set(PyObject* tensor, PyObject* value, void* closure) {
  const int failed = setter.function(tensor, value, closure);
  if (failed || !value) return failed;
  return setter.add(tensor, value) ? 0 : -1;
}

constexpr Plain PLAIN[MOST] = {call_plain<0>, call_plain<1>, call_plain<2>, call_plain<3>};
constexpr Keyed KEYED[MOST] = {call_keyed<0>, call_keyed<1>, call_keyed<2>, call_keyed<3>};
constexpr Keyed FUNCTIONS[MOST] = {call_function<0>, call_function<1>, call_function<2>,
                                   call_function<3>};
int plains, keyeds, called;  // how many are replaced

template <class Function>
void replace(void** place, Noted<Function>& noted, PyObject* note, Function function) {
  Py_IncRef(note);
  noted = {reinterpret_cast<Function>(*place), note};
  *place = reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

// The dictionary that is empty while nothing is noted.
void watch(PyObject* storages) {
  Py_IncRef(storages);
  watched = storages;
}

// Replace the function at `place` in the definition of a method or, with its first argument as the
// tensor, of a module's function.
void replace_plain(void** place, PyObject* note) {
  replace(place, plain[plains], note, PLAIN[plains]);
  ++plains;
}

void replace_keyed(void** place, PyObject* note) {
  replace(place, keyed[keyeds], note, KEYED[keyeds]);
  ++keyeds;
}

void replace_function(void** place, PyObject* note) {
  replace(place, functions[called], note, FUNCTIONS[called]);
  ++called;
}

// Replace the functions at `place` that get and set an attribute.
void replace_attribute(void** place, PyObject* note, PyObject* note_set) {
  replace(place, getter, note, get);
  replace(place + 1, setter, note_set, set);
}

}  // extern "C"
