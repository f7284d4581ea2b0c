// What the plan of a step follows from, read of all tensors of its groups in one call.
//
// Tensors are asked through torch's stable C interface, Python's objects through functions of its
// stable ABI. Both are declared here, so no header of either is needed, and no library is linked.
// After a backward pass all of it lies far from the CPU, so each of these passes only asks for the
// memory that the next one reads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

extern "C" {
struct _object;
using PyObject = _object;
extern PyObject PyDict_Type, PyUnicode_Type;
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
intptr_t PyDict_Size(PyObject*);
int PyUnicode_Compare(PyObject*, PyObject*);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
char* PyBytes_AsString(PyObject*);
intptr_t PyBytes_Size(PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Clear();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr int64_t VECTOR = 16;  // bytes, as templates/optimizer/step_cuda.py has it
constexpr int64_t ABSENT = -1;  // a gradient that is not there
constexpr int64_t ALIKE = -2;   // the form of its parameter
constexpr int64_t INLINE = 5;   // dimensions whose sizes and strides lie in a TensorImpl itself
constexpr int64_t DTYPE = 0xffff;
constexpr int TYPE = 1;         // in words, where an object has its type: so says the stable ABI

// In words, where a TensorImpl has the addresses of its storage, its gradient and its version, a dict
// that of its table. Only fetched ahead: where one lies elsewhere that is in vain, and no more.
constexpr int STORAGE = 2, AUTOGRAD = 3, VERSION = 5, TABLE = 4;
constexpr int LINE = 64;                 // bytes
constexpr int IMPL_LINES = 4, NEAR = 2;  // of a TensorImpl; of what is smaller and may lie across two

// torch's `aoti_torch_get_*`: each takes a pointer to where the address of a TensorImpl stands.
template <class T>
using Asked = int32_t (*)(void** tensor, T* answer);

struct Torch {
  Asked<void*> data_ptr;
  Asked<int32_t> layout;
  int32_t (*assign)(void** from, void** to);  // one tensor to another, which then holds it too
  void** (*grad)(void* impl);   // where the address of the gradient's TensorImpl stands
  void (*bump)(void** tensor);  // its version; raises C++'s exceptions
};

struct Words {
  PyObject *none, *tensor, *parameter, *grad;
  int64_t strided;
  int64_t place;           // in a tensor's object, of its TensorImpl's address
  int64_t keys, negative;  // in words, of the TensorImpl's dispatch keys, and the one that negates
  int64_t object;          // in words, of the address of its object, if Python has one
  void* undefined;         // the TensorImpl of a gradient that is not there
  int64_t dtype, dim;      // in words, of the one with its dtype, and of how many dimensions it has
};

void fetch(const void* address, int lines = 1) {
  for (int n = 0; n < lines; ++n)
    __builtin_prefetch(static_cast<const char*>(address) + LINE * n, 0, 3);
}

void* word(const void* object, int64_t place) {
  return static_cast<void* const*>(object)[place];
}

PyObject* type_of(PyObject* object) { return static_cast<PyObject*>(word(object, TYPE)); }

struct Param {
  PyObject* object;
  intptr_t group;
  void **impl, **grad;  // null, if that is not there
  PyObject* own;        // its states
  intptr_t count;       // of those that are wanted
};

// Sizes and strides lie with the tensor. Its keys say what layout it has.
struct Form {
  int64_t dtype, keys, dim;
  const int64_t *sizes, *strides;

  bool operator==(const Form& other) const {
    if (dtype != other.dtype || keys != other.keys || dim != other.dim) return false;
    for (int64_t n = 0; n < dim; ++n)  // few: to call `memcmp` takes longer
      if (sizes[n] != other.sizes[n] || strides[n] != other.strides[n]) return false;
    return true;
  }
};

// Words one after another; `room` comes before them, as it takes time to ask for it each time.
class Said {
 public:
  void clear() { end = words.data(); }
  const int64_t* begin() const { return words.data(); }
  intptr_t bytes() const { return sizeof(int64_t) * (end - begin()); }

  void room(int64_t count) {
    const int64_t used = end - begin();
    if (used + count > int64_t(words.size())) words.resize(2 * (used + count));
    end = words.data() + used;
  }

  void operator()(int64_t word) { *end++ = word; }

 private:
  std::vector<int64_t> words;
  int64_t* end = nullptr;
};

constexpr int64_t SHORT = 16;  // words of a tensor without its sizes and strides, at most

// What is asked at each step, in memory that stays.
struct Scratch {
  std::vector<Param> params;
  std::vector<PyObject*> states, names;
  Said said, addresses;

  void clear() { params.clear(), states.clear(), said.clear(), addresses.clear(); }
};

// Tensors, which stay as long as the object that Python has of this.
struct Held {
  int32_t (*assign)(void** from, void** to);
  void* undefined;
  std::vector<void*> tensors;  // as an at::Tensor is: the address of a TensorImpl

  ~Held() {
    for (void*& tensor : tensors) assign(&undefined, &tensor);
  }
};

constexpr char HELD[] = "gradients";

void let_go(PyObject* capsule) { delete static_cast<Held*>(PyCapsule_GetPointer(capsule, HELD)); }

PyObject* capsule(std::unique_ptr<Held> held) {
  PyObject* made = PyCapsule_New(held.get(), HELD, let_go);
  if (made) held.release();
  return made;
}

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

// A state by its name, mostly the next one. Nobody's `__eq__` is called, as it might change them.
PyObject* named(PyObject* own, PyObject* name, intptr_t& place) {
  PyObject *key, *value;
  if (PyDict_Next(own, &place, &key, &value) && key == name) return value;
  for (place = 0; PyDict_Next(own, &place, &key, &value);)
    if (key == name || (type_of(key) == &PyUnicode_Type && !PyUnicode_Compare(key, name)))
      return value;
  return nullptr;
}

struct Look {
  const Torch& torch;
  const Words& words;
  Scratch& of;

  void** impl(PyObject* object) const {
    return reinterpret_cast<void**>(reinterpret_cast<char*>(object) + words.place);
  }

  bool plain(PyObject* object) const {
    PyObject* type = type_of(object);
    return (type == words.tensor || type == words.parameter) && *impl(object);
  }

  // Sizes are asked for each time, as `use` may run Python, which may change the lists.
  template <class Use>
  static bool each(PyObject* groups, const Use& use) {
    for (intptr_t g = 0; g < PyList_Size(groups); ++g) {
      PyObject* group = PyList_GetItem(groups, g);
      for (intptr_t n = 0; n < PyList_Size(group); ++n)
        if (!use(g, PyList_GetItem(group, n))) return false;
    }
    return true;
  }

  // Whether what is no plain tensor has no gradient, which is for Python to say.
  bool plain_or_absent(PyObject* groups) const {
    return each(groups, [this](intptr_t, PyObject* param) {
      if (plain(param)) return true;
      Py_IncRef(param);
      PyObject* grad = PyObject_GetAttr(param, words.grad);
      Py_DecRef(param);
      if (grad) Py_DecRef(grad);
      return grad == words.none;
    });
  }

  // Notes who is there, anew; whether all are plain.
  bool params(PyObject* groups) {
    of.clear();
    of.said.room(PyList_Size(groups));
    for (intptr_t g = 0; g < PyList_Size(groups); ++g)  // or one that changes its group hides
      of.said(PyList_Size(PyList_GetItem(groups, g)));
    each(groups, [this](intptr_t group, PyObject* param) {
      of.params.push_back({param, group, nullptr, nullptr, nullptr, 0});
      return fetch(param), true;
    });
    bool all = true;
    for (Param& param : of.params)
      if (plain(param.object)) {
        param.impl = impl(param.object);
        fetch(*param.impl, IMPL_LINES);
      } else {
        all = false;
      }
    for (const Param& param : of.params)
      if (param.impl)
        fetch(word(*param.impl, STORAGE), NEAR), fetch(word(*param.impl, AUTOGRAD), NEAR);
    return all;
  }

  void gradients() {
    for (Param& param : of.params) {
      void** grad = param.impl ? torch.grad(*param.impl) : nullptr;
      if (!grad || *grad == words.undefined) continue;
      fetch(*grad, IMPL_LINES);
      param.grad = grad;
    }
  }

  void names_of(PyObject* tuple) {
    of.names.clear();
    for (intptr_t n = 0; n < PyTuple_Size(tuple); ++n)
      of.names.push_back(PyTuple_GetItem(tuple, n));
  }

  bool states(PyObject* names, PyObject* state) {
    States all;
    intptr_t group = -1;
    for (Param& param : of.params) {
      if (param.group != group) group = param.group, names_of(PyList_GetItem(names, group));
      param.count = param.grad ? of.names.size() : 0;
      if (!param.count) continue;
      param.own = all.of(param.object, state);
      if (!param.own) return false;
      fetch(param.own);
    }
    for (const Param& param : of.params)
      if (param.own && type_of(param.own) == &PyDict_Type) fetch(word(param.own, TABLE), NEAR);
    for (const Param& param : of.params) {
      if (param.group != group) group = param.group, names_of(PyList_GetItem(names, group));
      intptr_t place = 0;
      for (intptr_t m = 0; m < param.count; ++m) {
        PyObject* value = named(param.own, of.names[m], place);
        if (!value) return false;
        fetch(value);
        of.states.push_back(value);
      }
    }
    return true;
  }

  bool storages() {
    for (PyObject* value : of.states) {
      if (!plain(value)) return false;
      fetch(*impl(value), IMPL_LINES);
    }
    for (const Param& param : of.params)
      if (param.grad) {
        fetch(word(*param.grad, STORAGE), NEAR);
        fetch(word(*param.grad, words.object));
      }
    for (PyObject* value : of.states) fetch(word(*impl(value), STORAGE), NEAR);
    return true;
  }

  // Gradients, which Python may not know.
  bool hold(Held& held) {
    held.tensors.assign(of.params.size(), words.undefined);
    void** slot = held.tensors.data();
    for (Param& param : of.params) {
      if (!param.grad) continue;
      if (torch.assign(param.grad, slot)) return false;
      param.grad = slot++;
    }
    return true;
  }

  Form form(void** impl) const {
    const auto* words_of = static_cast<const int64_t*>(*impl);
    const int64_t* place = words_of + words.dim;
    const int64_t dim = *place++;
    const bool here = dim <= INLINE;
    const int64_t* sizes = here ? place : *reinterpret_cast<const int64_t* const*>(place);
    return {words_of[words.dtype] & DTYPE, words_of[words.keys], dim, sizes,
            sizes + (here ? INLINE : dim)};
  }

  // Where a tensor lies; false for one without memory.
  bool ask(void** impl, const Form& form, int64_t& address) const {
    void* data;
    if (torch.data_ptr(impl, &data)) return false;
    address = reinterpret_cast<int64_t>(data);
    const int64_t* end = form.sizes + form.dim;
    return data || std::find(form.sizes, end, 0) != end;
  }

  void say(const Form& form) {
    of.said.room(2 * form.dim + SHORT);
    of.said(form.dtype), of.said(form.keys), of.said(form.dim);
    for (int64_t n = 0; n < form.dim; ++n) of.said(form.sizes[n]), of.said(form.strides[n]);
  }

  void say(const Form& form, const Form& params) {
    form == params ? of.said(ALIKE) : say(form);
  }

  void say_type(PyObject* object) {
    of.said.room(SHORT), of.said(reinterpret_cast<int64_t>(type_of(object)));
  }

  // Whether that is a plain tensor which is not to be negated when it is read.
  bool readable(void* grad) const {
    auto* object = static_cast<PyObject*>(word(grad, words.object));
    const auto* keys = static_cast<const int64_t*>(grad) + words.keys;
    return !(*keys & words.negative) && (!object || plain(object));
  }

  bool facts() {
    of.addresses.room(of.params.size());
    auto value = of.states.begin();
    for (const Param& param : of.params) {
      if (!param.grad) {
        of.said.room(SHORT), of.said(ABSENT);
        continue;
      }
      int64_t address;
      const Form own = form(param.impl), grads = form(param.grad);
      if (!ask(param.impl, own, address)) return false;
      say_type(param.object), say(own), of.said(address);
      if (!readable(*param.grad) || !ask(param.grad, grads, address)) return false;
      say(grads, own), of.said(address % VECTOR);
      of.addresses(address);
      for (auto last = value + param.count; value != last; ++value) {
        const Form its = form(impl(*value));
        if (!ask(impl(*value), its, address)) return false;
        say_type(*value), say(its, own), of.said(address);
      }
    }
    return true;
  }

  bool is_strided(void** impl) const {
    int32_t layout;
    return !torch.layout(impl, &layout) && layout == words.strided;
  }

  // Of a list of tensors; a gradient by all but its address, of which a vector counts.
  bool tell(PyObject* tensors, bool grads) {
    const intptr_t count = PyList_Size(tensors);
    for (intptr_t n = 0; n < count; ++n) fetch(PyList_GetItem(tensors, n));
    for (intptr_t n = 0; n < count; ++n) {
      PyObject* object = PyList_GetItem(tensors, n);
      if (!plain(object)) return false;
      fetch(*impl(object), IMPL_LINES);
    }
    for (intptr_t n = 0; n < count; ++n)
      fetch(word(*impl(PyList_GetItem(tensors, n)), STORAGE), NEAR);
    for (intptr_t n = 0; n < count; ++n) {
      PyObject* object = PyList_GetItem(tensors, n);
      const Form its = form(impl(object));
      int64_t address;
      if (!ask(impl(object), its, address) || !is_strided(impl(object))) return false;
      if (grads && its.keys & words.negative) return false;
      say_type(object), say(its), of.said(grads ? address % VECTOR : address);
      if (grads) of.addresses(address);
    }
    return true;
  }

  // Of what was never looked at: whether all of it is strided, which tensors of the same keys are.
  bool strided() const {
    for (const Param& param : of.params)
      if (param.grad && !(is_strided(param.impl) && is_strided(param.grad))) return false;
    return std::all_of(of.states.begin(), of.states.end(),
                       [this](PyObject* value) { return is_strided(impl(value)); });
  }

  bool list(PyObject* written) const {
    for (const Param& param : of.params)
      if (param.grad && PyList_Append(written, param.object)) return false;
    for (PyObject* value : of.states)
      if (PyList_Append(written, value)) return false;
    return true;
  }

  bool read(PyObject* groups, PyObject* names, PyObject* state, Held& held) {
    if (!params(groups)) {
      if (!plain_or_absent(groups)) return false;
      params(groups);  // what was asked may have run Python, and another thread's look
    }
    gradients();
    return states(names, state) && storages() && hold(held) && facts();
  }

  // Counts one more version of all that a step writes.
  void count() const {
    for (const Param& param : of.params)
      if (param.grad) fetch(word(*param.impl, VERSION));
    for (PyObject* value : of.states) fetch(word(*impl(value), VERSION));
    for (const Param& param : of.params)
      if (param.grad) bumped(param.impl);
    for (PyObject* value : of.states) bumped(impl(value));
  }

  // Whether that was done: inference tensors have no version.
  bool bumped(void** tensor) const {
    try {
      return torch.bump(tensor), true;
    } catch (...) {
      return false;
    }
  }
};

bool append(PyObject* list, PyObject* made) {
  const bool done = made && !PyList_Append(list, made);
  if (made) Py_DecRef(made);  // the list holds it
  return done;
}

PyObject* again(PyObject* object) {
  Py_IncRef(object);
  return object;
}

PyObject* bytes(const Said& said) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(said.begin()), said.bytes());
}

bool same(PyObject* known, const Said& said) {
  return PyBytes_Size(known) == said.bytes() &&
         !std::memcmp(PyBytes_AsString(known), said.begin(), said.bytes());
}

Scratch scratch;  // of whoever holds Python's lock

}  // namespace

// What there is of groups, which are lists of parameters and the names of their states. To `told` go
// facts, as bytes, or `known` if that is the same; the addresses of gradients, and what holds them.
// To `held` goes what a step writes. Returns whether all are plain.
extern "C" int32_t look(const Torch* torch, const Words* words, PyObject* groups, PyObject* names,
                        PyObject* state, PyObject* known, PyObject* held, PyObject* told) {
  Scratch& of = scratch;
  std::unique_ptr<Held> kept(new Held{torch->assign, words->undefined, {}});
  Look look{*torch, *words, of};
  bool plain = look.read(groups, names, state, *kept) && look.list(held);
  const bool known_still = plain && same(known, of.said);
  plain = plain && (known_still || look.strided());
  const bool done = plain && append(told, known_still ? again(known) : bytes(of.said)) &&
                    append(told, bytes(of.addresses)) && append(told, capsule(std::move(kept)));
  if (!done) PyErr_Clear();
  return done;
}

// Facts of tensors of two lists, of which the second are gradients: as bytes to `told`, and then the
// addresses of the latter. Returns whether all are plain.
extern "C" int32_t tell(const Torch* torch, const Words* words, PyObject* held, PyObject* grads,
                        PyObject* told) {
  Scratch& of = scratch;
  Look look{*torch, *words, of};
  of.clear();
  of.addresses.room(PyList_Size(grads));
  const bool done = look.tell(held, false) && look.tell(grads, true) &&
                    append(told, bytes(of.said)) && append(told, bytes(of.addresses));
  if (!done) PyErr_Clear();
  return done;
}

// Counts one more version of each; returns of how many, as it stops at what has none.
extern "C" int64_t bump(const Torch* torch, const Words* words, PyObject* tensors) {
  const Look look{*torch, *words, scratch};
  const intptr_t count = PyList_Size(tensors);
  intptr_t plain = 0;
  for (; plain < count && look.plain(PyList_GetItem(tensors, plain)); ++plain)
    fetch(word(*look.impl(PyList_GetItem(tensors, plain)), VERSION));
  for (intptr_t n = 0; n < plain; ++n)
    if (!look.bumped(look.impl(PyList_GetItem(tensors, n)))) return n;
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

// Cells that are all to be as `far`, and a launch by the GPU's driver, of which some arguments are
// numbers that are known ahead: of `left` steps, the first of which is the one after `at`. What else
// it takes is there as long as `kept`, an object.
struct Turn {
  const int64_t* cells;
  int64_t count, wide;  // fp64, else fp32
  double far;
  int32_t (*driver)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    unsigned shared, void* stream, void** arguments, void** more);
  void *function, *stream;
  void** arguments;
  int64_t blocks, threads, shared;
  void* numbers;
  int64_t each, doubles;
  const double* ahead;
  int64_t left;
  double at;
  PyObject* kept;
  int64_t busy;  // being launched, by whoever else takes a step

  bool stands() const { return are(cells, count, wide, far); }

  bool ready() const { return left > 0 && at == far && !busy; }

  void begin() {
    if (doubles) std::copy_n(ahead, each, static_cast<double*>(numbers));
    else std::copy_n(ahead, each, static_cast<float*>(numbers));
    ahead += each, --left, busy = 1;
    at = far = count ? far + 1 : 0;
    become(cells, count, wide, far);
    Py_IncRef(kept);
  }

  int32_t launch() const {
    return driver(function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, nullptr);
  }

  void end(bool launched, PyObject* held) {
    Py_DecRef(held);
    busy = 0;
    if (launched || !count) return;
    become(cells, count, wide, --far);  // not `at`: numbers are made anew
  }
};

namespace {

// The addresses of some.
struct Turns {
  Turn* const* first;
  intptr_t count;

  explicit Turns(PyObject* bytes)
      : first(reinterpret_cast<Turn* const*>(PyBytes_AsString(bytes))),
        count(PyBytes_Size(bytes) / sizeof(Turn*)) {}

  bool all(bool (Turn::*are)() const) const {
    return std::all_of(first, first + count, [are](const Turn* each) { return (each->*are)(); });
  }

  // Others may hold Python's lock while the driver is asked, as that may wait, and then have another
  // launch in a turn.
  int32_t take() const {
    std::vector<Turn> these;
    these.reserve(count);
    for (intptr_t n = 0; n < count; ++n) first[n]->begin(), these.push_back(*first[n]);
    void* thread = PyEval_SaveThread();
    int32_t said = 0;
    intptr_t done = 0;
    while (done < count && !(said = these[done].launch())) ++done;
    PyEval_RestoreThread(thread);
    for (intptr_t n = 0; n < count; ++n) first[n]->end(n < done, these[n].kept);
    return said;
  }
};

// Whether these dicts hold the very objects that the others hold.
bool alike(PyObject* dicts, PyObject* others) {
  const intptr_t count = PyList_Size(dicts);
  if (count != PyList_Size(others)) return false;
  for (intptr_t n = 0; n < count; ++n) {
    PyObject *mine = PyList_GetItem(dicts, n), *theirs = PyList_GetItem(others, n);
    PyObject *key, *value, *known, *held;
    intptr_t here = 0, there = 0;
    if (PyDict_Size(mine) != PyDict_Size(theirs)) return false;
    while (PyDict_Next(mine, &here, &key, &value))
      if (!PyDict_Next(theirs, &there, &known, &held) || key != known || value != held)
        return false;
  }
  return true;
}

}  // namespace

// Of `again`; what the driver said of a launch that it refused, negated.
constexpr int32_t OTHER = 0, SAME = 1, TAKEN = 2;

// Whether groups hold what was `held`, if anything, and all is as `known` and as `turns` have it. If
// so, versions are counted, and turns are taken if groups were held, gradients lie where they did
// `last`, and all are ready; else to `told` goes what holds the gradients, and their addresses if
// those are others.
extern "C" int32_t again(const Torch* torch, const Words* words, PyObject* dicts, PyObject* held,
                         PyObject* groups, PyObject* names, PyObject* state, PyObject* known,
                         PyObject* turns, PyObject* last, PyObject* told) {
  Scratch& of = scratch;
  std::unique_ptr<Held> kept(new Held{torch->assign, words->undefined, {}});
  Look look{*torch, *words, of};
  const Turns each(turns);
  const bool asked = held != words->none;
  const bool found = (!asked || alike(dicts, held)) && look.read(groups, names, state, *kept) &&
                     same(known, of.said) && each.all(&Turn::stands);
  const bool there = found && same(last, of.addresses);
  const bool take = asked && there && each.all(&Turn::ready);
  if (!found || !(take || append(told, capsule(std::move(kept)))) ||
      !(there || append(told, bytes(of.addresses))))
    return PyErr_Clear(), OTHER;
  look.count();
  if (!take) return SAME;
  const int32_t said = each.take();
  return said ? -said : TAKEN;
}
