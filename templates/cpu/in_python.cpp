// For C++ that Inductor makes: functions and primitives of ours that this process's Python has.
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace at {
int get_num_threads();
}

// The address that `function` of a module of ours gives for `words`. Python's error is raised.
inline void* ipex_asked(const char* module, const char* function, const char* words) {
  py::gil_scoped_acquire_simple acquire;
  RAIIPyObject imported(PyImport_ImportModule(module));
  RAIIPyObject given(imported ? PyObject_CallMethod(imported, function, "s", words) : nullptr);
  void* found = given ? PyLong_AsVoidPtr(given) : nullptr;
  if (found) return found;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  RAIIPyObject owned[] = {type, value, trace};
  RAIIPyObject text(value ? PyObject_Str(value) : nullptr);
  const char* said = text ? PyUnicode_AsUTF8(text) : nullptr;
  throw std::runtime_error(std::string(module) + ": " + (said ? said : "no address"));
}

// A function of a library, which is asked for at the first call.
template <class Function>
struct IpexFunction {
  const char* module;
  const char* name;
  std::atomic<void*> found{nullptr};

  template <class... Arguments>
  auto operator()(Arguments... arguments) {
    void* here = found.load(std::memory_order_acquire);
    if (!here) found.store(here = ipex_asked(module, "address", name), std::memory_order_release);
    return reinterpret_cast<Function*>(here)(arguments...);
  }
};

// A kept primitive, which is another one for another number of threads.
struct IpexKept {
  struct Made {
    int threads;
    void* primitive;
    Made* next;
  };

  const char* words;  // what it computes
  std::atomic<Made*> made{nullptr};  // no lock that a fork may copy

  void* primitive() {
    int threads = at::get_num_threads();
    Made* first = made.load(std::memory_order_acquire);
    for (Made* each = first; each; each = each->next)
      if (each->threads == threads) return each->primitive;
    auto* own = new Made{threads, ipex_asked(KEPT, "primitive", words), first};
    while (!made.compare_exchange_weak(own->next, own)) {
    }
    return own->primitive;
  }

  void operator()(void* x, void* weight, void* bias, void* other, void* out) {
    static IpexFunction<int(void*, void*, void*, void*, void*, void*)> run{KEPT, "kept_run"};
    if (int code = run(primitive(), x, weight, bias, other, out))
      throw std::runtime_error(std::string(KEPT) + ": oneDNN's error " + std::to_string(code));
  }

  static constexpr const char* KEPT = "ipex_inductor.templates.cpu.cached_primitives";
};

#define IPEX_KERNEL(name, takes) \
  static IpexFunction<void takes> name{"ipex_inductor.templates.cpu.cpu_library", #name};
