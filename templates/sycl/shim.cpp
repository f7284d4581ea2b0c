// SYCL's C++ as a few functions of C, for ctypes: devices, queues, compiling, loading, launching.
//
// Host code alone, which g++ compiles against the headers of Intel's wheels. A function that fails
// returns null or -1 and says why in `ipex_sycl_said`. What it returns in `Text` is the caller's to
// free. OpenCL and Level Zero are looked up in what SYCL has loaded for the device.

#include <sycl/sycl.hpp>

#include <CL/cl.h>
#include <sycl/ext/oneapi/backend/level_zero.hpp>

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sx = sycl::ext::oneapi::experimental;
namespace info = sycl::info::device;
constexpr auto CL = sycl::backend::opencl;
constexpr auto ZE = sycl::backend::ext_oneapi_level_zero;

extern "C" struct Text {
  char* data;
  uint64_t size;
};

// Of a launch: a pointer (size 0), or so many bytes.
extern "C" struct Argument {
  uint64_t size;
  union {
    void* pointer;
    unsigned char bytes[8];
  };
};

namespace {

thread_local std::string said;

template <class F>
auto guarded(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    said = e.what();
  } catch (...) {
    said = "an unknown exception";
  }
  if constexpr (std::is_pointer_v<decltype(f())>) return nullptr;
  else return -1;
}

void give(Text* text, const void* data, size_t size) {
  text->data = static_cast<char*>(std::malloc(size + 1));
  text->size = size;
  if (size) std::memcpy(text->data, data, size);
  text->data[size] = 0;
}
void give(Text* text, const std::string& value) { give(text, value.data(), value.size()); }

[[noreturn]] void fail(const std::string& what, int64_t code, const std::string& log = "") {
  std::ostringstream o;
  o << what << ": error " << code << (code < 0 ? "" : " (0x") << std::hex;
  if (code >= 0) o << code << ")";
  throw std::runtime_error(o.str() + (log.empty() ? "" : "\n" + log));
}

const std::vector<sycl::device>& devices() {
  static std::vector<sycl::device> all = sycl::device::get_devices();
  return all;
}

template <class F>
F found(void* library, const char* name) {
  void* symbol = library ? dlsym(library, name) : nullptr;
  if (!symbol) throw std::runtime_error(std::string("there is no function ") + name);
  return reinterpret_cast<F>(symbol);
}

// OpenCL.

#define OPENCL(name) \
  auto name = found<decltype(&::name)>(dlopen("libOpenCL.so.1", RTLD_NOW), #name)

std::string log_of(cl_program program, cl_device_id device) {
  OPENCL(clGetProgramBuildInfo);
  size_t size = 0;
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &size);
  std::string log(size, 0);
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, size, log.data(), nullptr);
  while (!log.empty() && (log.back() == 0 || log.back() == '\n')) log.pop_back();
  return log;
}

cl_program opencl_program(const sycl::queue& q, const unsigned char* data, size_t size, bool native,
                          const char* options, std::string& log) {
  OPENCL(clCreateProgramWithIL);
  OPENCL(clCreateProgramWithBinary);
  OPENCL(clBuildProgram);
  cl_context context = sycl::get_native<CL>(q.get_context());
  cl_device_id device = sycl::get_native<CL>(q.get_device());
  cl_int error = 0, status = 0;
  cl_program made =
      native ? clCreateProgramWithBinary(context, 1, &device, &size, &data, &status, &error)
             : clCreateProgramWithIL(context, data, size, &error);
  if (error || status) fail("OpenCL takes no such program", error ? error : status);
  error = clBuildProgram(made, 1, &device, options, nullptr, nullptr);
  if (error) fail("OpenCL does not build the program", error, log_of(made, device));
  if (!native) log = log_of(made, device);  // of native code, only that it was loaded
  return made;
}

std::string opencl_native(cl_program program) {
  OPENCL(clGetProgramInfo);
  size_t size = 0;  // of the one device the program was built for
  cl_int error = clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, nullptr);
  std::string data(size, 0);
  char* at = data.data();
  if (!error) error = clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof at, &at, nullptr);
  if (error) fail("OpenCL does not give the binary", error);
  return data;
}

// Level Zero; the wheels have no header of it.

struct ModuleDesc {
  uint32_t type = 0x1b;
  const void* next = nullptr;
  uint32_t format;
  size_t size;
  const uint8_t* data;
  const char* options;
  const void* constants = nullptr;
};
struct KernelDesc {
  uint32_t type = 0x1d;
  const void* next = nullptr;
  uint32_t flags = 1;  // all of a kernel's memory is resident, as pointers lie in tables
  const char* name;
};

template <class... A>
uint32_t zero(const char* name, A... arguments) {
  static void* library = dlopen("libze_loader.so.1", RTLD_NOW);
  return found<uint32_t (*)(A...)>(library, name)(arguments...);
}

ze_module_handle_t level_zero_module(const sycl::queue& q, const unsigned char* data, size_t size,
                                     bool native, const char* options, std::string& log) {
  ModuleDesc wanted;
  wanted.format = native;
  wanted.size = size;
  wanted.data = data;
  wanted.options = options;
  ze_module_handle_t made{};
  void* written = nullptr;
  uint32_t error = zero("zeModuleCreate", sycl::get_native<ZE>(q.get_context()),
                        sycl::get_native<ZE>(q.get_device()), &wanted, &made, &written);
  if (written) {
    size_t length = 0;
    zero("zeModuleBuildLogGetString", written, &length, static_cast<char*>(nullptr));
    log.resize(length);
    if (length) zero("zeModuleBuildLogGetString", written, &length, log.data());
    zero("zeModuleBuildLogDestroy", written);
    while (!log.empty() && (log.back() == 0 || log.back() == '\n')) log.pop_back();
  }
  if (error) fail("Level Zero does not build the module", error, log);
  return made;
}

std::string level_zero_native(ze_module_handle_t module) {
  size_t size = 0;
  uint32_t error = zero("zeModuleGetNativeBinary", module, &size, static_cast<uint8_t*>(nullptr));
  std::string data(size, 0);
  auto* at = reinterpret_cast<uint8_t*>(data.data());
  if (!error) error = zero("zeModuleGetNativeBinary", module, &size, at);
  if (error) fail("Level Zero does not give the binary", error);
  return data;
}

// What was loaded; a program of OpenCL, or a module of Level Zero with what SYCL makes of it.
struct Module {
  cl_program program = nullptr;
  ze_module_handle_t module{};
  std::unique_ptr<sycl::kernel_bundle<sycl::bundle_state::executable>> bundle;
};

// The SPIR-V of an image, which SYCL itself gives for what a device has built only: for a device
// that is not here nothing is built.
struct Image : sycl::detail::device_image_plain {
  static auto content() { return &Image::ext_oneapi_get_backend_content_view_impl; }
};

// Devices as JSON.

struct Json {
  std::ostringstream out;
  const char* comma = "";

  void name(const char* key) {
    out << comma << '"' << key << "\":";
    comma = ",";
  }
  void text(const char* key, const std::string& value) {
    name(key);
    out << '"';
    for (unsigned char c : value) {
      if (c < ' ') continue;
      if (c == '"' || c == '\\') out << '\\';
      out << c;
    }
    out << '"';
  }
  void flag(const char* key, bool value) {
    name(key);
    out << (value ? "true" : "false");
  }
  template <class N>
  void number(const char* key, N value) {
    name(key);
    out << +value;
  }
  template <class List>
  void numbers(const char* key, const List& list) {
    name(key);
    out << '[';
    const char* between = "";
    for (auto each : list) out << std::exchange(between, ",") << each;
    out << ']';
  }
};

uint64_t architecture(const sycl::device& d) {
  try {
    return static_cast<uint64_t>(d.get_info<sx::info::device::architecture>());
  } catch (const std::exception&) {  // of a device that this SYCL does not know
    return 0;
  }
}

std::vector<std::string> matrices(const sycl::device& d) {
  std::vector<std::string> all;
  try {
    for (auto& c : d.get_info<sx::info::device::matrix_combinations>()) {
      std::ostringstream one;
      one << '[' << c.max_msize << ',' << c.max_nsize << ',' << c.max_ksize << ',' << c.msize << ','
          << c.nsize << ',' << c.ksize << ',' << int(c.atype) << ',' << int(c.btype) << ','
          << int(c.ctype) << ',' << int(c.dtype) << ']';
      all.push_back(one.str());
    }
  } catch (const std::exception&) {  // a device without
  }
  return all;
}

// Products of pairs of bf16, with whole vectors of AVX-512; the driver may be told to know less.
bool has_dots(const sycl::device& d) {
#if defined(__x86_64__) && (__GNUC__ >= 11 || defined(__clang__))  // older ones know no such CPU
  const bool vectors = d.get_info<info::native_vector_width_float>() >= 16;
  return d.is_cpu() && vectors && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

std::string described(const sycl::device& d) {
  // Only then does the CPU's driver know what it was told to compile for, and what that can do.
  if (d.is_cpu()) sycl::context{d};
  Json j;
  std::ostringstream backend;
  backend << d.get_backend();
  j.text("name", d.get_info<info::name>());
  j.text("backend", backend.str());
  j.text("driver", d.get_info<info::driver_version>());
  j.text("type", d.is_gpu() ? "gpu" : d.is_cpu() ? "cpu" : "other");
  j.number("architecture", architecture(d));
  j.number("units", d.get_info<info::max_compute_units>());
  j.number("group", d.get_info<info::max_work_group_size>());
  j.number("vector", d.get_info<info::native_vector_width_float>());
  j.number("local_memory", d.get_info<info::local_mem_size>());
  j.numbers("sub_groups", d.get_info<info::sub_group_sizes>());
  j.flag("fp16", d.has(sycl::aspect::fp16));
  j.flag("fp64", d.has(sycl::aspect::fp64));
  j.flag("system_memory", d.has(sycl::aspect::usm_system_allocations));
  j.flag("dots", has_dots(d));
  j.flag("matrix", d.has(sycl::aspect::ext_intel_matrix));
  j.numbers("matrices", matrices(d));
  return "{" + j.out.str() + "}";
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API const char* ipex_sycl_said() { return said.c_str(); }

API void ipex_sycl_free(void* data) { std::free(data); }

// All there are, as a JSON list.
API int ipex_sycl_devices(Text* json) {
  return guarded([&] {
    std::string all;
    for (auto& d : devices()) all += (all.empty() ? "" : ",") + described(d);
    give(json, "[" + all + "]");
    return 0;
  });
}

// One of our own, in order, on the device of that number.
API sycl::queue* ipex_sycl_queue(int number) {
  return guarded([&] {
    return new sycl::queue(devices().at(number), sycl::property::queue::in_order{});
  });
}

// A copy of a queue of others, which is the same queue.
API sycl::queue* ipex_sycl_queue_of(const sycl::queue* theirs) {
  return guarded([&] { return new sycl::queue(*theirs); });
}

// The number of that queue's device.
API int ipex_sycl_device_of(const sycl::queue* q) {
  return guarded([&] {
    for (size_t n = 0; n < devices().size(); ++n)
      if (devices()[n] == q->get_device()) return int(n);
    throw std::runtime_error("a queue of a device that SYCL does not list");
  });
}

API void ipex_sycl_queue_free(sycl::queue* q) { delete q; }

API int ipex_sycl_wait(sycl::queue* q) {
  return guarded([&] {
    q->wait_and_throw();
    return 0;
  });
}

// SYCL to SPIR-V: maps Intel's compiler, for good.
API int ipex_sycl_compile(const sycl::queue* q, const char* source, const char** options, int count,
                          Text* spirv, Text* log) {
  std::string warnings;
  int done = guarded([&] {
    auto context = q->get_context();
    std::vector<sycl::device> one{q->get_device()};
    auto bundle = sx::create_kernel_bundle_from_source(context, sx::source_language::sycl,
                                                       std::string(source));
    std::vector<std::string> given(options, options + count);
    auto made = sx::compile(
        bundle, one, sx::properties{sx::build_options{given}, sx::save_log{&warnings}});
    size_t images = made.end() - made.begin();
    if (images != 1) fail("a source must become one image, and became several or none", images);
    auto content = ((*made.begin()).*Image::content())();
    give(spirv, content.first, content.second - content.first);
    return 0;
  });
  give(log, warnings);
  return done;
}

// SPIR-V, or native code, onto the queue's device.
API Module* ipex_sycl_load(const sycl::queue* q, const unsigned char* data, uint64_t size,
                           int native, const char* options, Text* log) {
  std::string warnings;
  Module* made = guarded([&] {
    auto loaded = std::make_unique<Module>();
    if (q->get_backend() == CL) {
      loaded->program = opencl_program(*q, data, size, native, options, warnings);
    } else {
      loaded->module = level_zero_module(*q, data, size, native, options, warnings);
      loaded->bundle = std::make_unique<sycl::kernel_bundle<sycl::bundle_state::executable>>(
          sycl::make_kernel_bundle<ZE, sycl::bundle_state::executable>(
              {loaded->module, sycl::ext::oneapi::level_zero::ownership::transfer},
              q->get_context()));
    }
    return loaded.release();
  });
  give(log, warnings);
  return made;
}

// What the device runs of it.
API int ipex_sycl_native(const Module* m, Text* binary) {
  return guarded([&] {
    give(binary, m->program ? opencl_native(m->program) : level_zero_native(m->module));
    return 0;
  });
}

API sycl::kernel* ipex_sycl_kernel(const sycl::queue* q, const Module* m, const char* name) {
  return guarded([&]() -> sycl::kernel* {
    if (m->program) {
      OPENCL(clCreateKernel);
      cl_int error = 0;
      cl_kernel made = clCreateKernel(m->program, name, &error);
      if (error) fail(std::string("OpenCL finds no kernel ") + name, error);
      return new sycl::kernel(sycl::make_kernel<CL>(made, q->get_context()));
    }
    KernelDesc wanted;
    wanted.name = name;
    ze_kernel_handle_t made{};
    uint32_t error = zero("zeKernelCreate", m->module, &wanted, &made);
    if (error) fail(std::string("Level Zero finds no kernel ") + name, error);
    auto owned = sycl::ext::oneapi::level_zero::ownership::transfer;
    return new sycl::kernel(sycl::make_kernel<ZE>({*m->bundle, made, owned}, q->get_context()));
  });
}

// On a queue, in order; sizes are in work-items.
API int ipex_sycl_launch(sycl::queue* q, const sycl::kernel* kernel, int dims,
                         const uint64_t* global, const uint64_t* local, const Argument* arguments,
                         int count, int wait) {
  return guarded([&] {
    q->submit([&](sycl::handler& h) {
      for (int n = 0; n < count; ++n) {
        const Argument& a = arguments[n];
        if (a.size) h.set_arg(n, sx::raw_kernel_arg(a.bytes, a.size));
        else h.set_arg(n, a.pointer);
      }
      if (dims == 1)
        h.parallel_for(sycl::nd_range<1>({global[0]}, {local[0]}), *kernel);
      else if (dims == 2)
        h.parallel_for(sycl::nd_range<2>({global[0], global[1]}, {local[0], local[1]}), *kernel);
      else
        h.parallel_for(sycl::nd_range<3>({global[0], global[1], global[2]},
                                         {local[0], local[1], local[2]}),
                       *kernel);
    });
    if (wait) q->wait_and_throw();
    return 0;
  });
}
