// Convolutions of a oneDNN beside torch's own, whose primitives are made once and kept.
//
// Declared here is what is called of its C interface, version 3.2. All functions return 0, or the
// number of oneDNN's error.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

namespace {

using Handle = void*;
using Dims = const int64_t*;

struct Argument {
  int place;
  Handle memory;
};

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

struct Library {
  const Version* (*version)();
  int (*engine_create)(Handle*, int, size_t);
  int (*stream_create)(Handle*, Handle, unsigned);
  int (*stream_destroy)(Handle);
  int (*memory_desc_create_with_tag)(Handle*, int, Dims, int, int);
  int (*memory_desc_destroy)(Handle);
  int (*memory_desc_equal)(Handle, Handle);
  size_t (*memory_desc_get_size)(Handle);
  int (*memory_create)(Handle*, Handle, Handle, void*);
  int (*memory_set_data_handle)(Handle, void*);
  int (*memory_destroy)(Handle);
  int (*post_ops_create)(Handle*);
  int (*post_ops_destroy)(Handle);
  int (*post_ops_append_binary)(Handle, int, Handle);
  int (*post_ops_append_eltwise)(Handle, int, float, float);
  int (*primitive_attr_create)(Handle*);
  int (*primitive_attr_destroy)(Handle);
  int (*primitive_attr_set_post_ops)(Handle, Handle);
  int (*primitive_attr_set_scratchpad_mode)(Handle, int);
  int (*convolution_forward_primitive_desc_create)(Handle*, Handle, int, int, Handle, Handle,
                                                   Handle, Handle, Dims, Dims, Dims, Dims, Handle);
  int (*reorder_primitive_desc_create)(Handle*, Handle, Handle, Handle, Handle, Handle);
  Handle (*primitive_desc_query_md)(Handle, int, int);
  int (*primitive_desc_query)(Handle, int, int, void*);
  int (*primitive_desc_destroy)(Handle);
  int (*primitive_create)(Handle*, Handle);
  int (*primitive_destroy)(Handle);
  int (*primitive_execute)(Handle, Handle, int, const Argument*);
};

Library dnnl;
Handle engine;

enum { CPU = 1, OPENMP = 2, INFERENCE = 96, DIRECT = 1, IN_ORDER = 1, ADD = 131056 };
enum { ANY = 1, VECTOR = 2, OIHW = 5, GOIHW = 6, NHWC = 22, TAGS = 762 };
enum { IMPLEMENTATION = 8, WEIGHTS_DESC = 131, SCRATCH_DESC = 136 };
enum { SOURCE = 1, ADDEND = 32768 | 2, RESULT = 17, WEIGHTS = 33, BIAS = 41, SCRATCH = 80 };
enum { OUT_OF_MEMORY = 1, NO_KERNEL = 3, NO_LIBRARY = -1, NO_TAG = -2, OTHER_VERSION = -3 };
enum { ANOTHER_SEEN = -4 };

// What a convolution is, as the Python side writes it.
struct Geometry {
  int64_t type, batch, channels, in[2], made, window[2], out[2], stride[2], padding[2], dilation[2];
  int64_t groups, biased, added;
};

// What comes last: one of oneDNN's eltwise algorithms, or none (0).
struct Unary {
  int algorithm;
  float alpha, beta;
};

// A weight [O, C / groups, h, w].
struct Weight {
  int64_t type, groups, shape[4];

  explicit Weight(const Geometry& g)
      : type(g.type), groups(g.groups),
        shape{g.made, g.channels / g.groups, g.window[0], g.window[1]} {}

  int as(int64_t tag, Handle* found) const {
    int64_t grouped[] = {groups, shape[0] / groups, shape[1], shape[2], shape[3]};
    bool one = groups == 1;
    return dnnl.memory_desc_create_with_tag(found, one ? 4 : 5, one ? grouped + 1 : grouped, type,
                                            tag);
  }
};

// Descriptors of a convolution's tensors, and of itself.
struct Described {
  Handle source = nullptr, weights = nullptr, bias = nullptr, result = nullptr;
  Handle post_ops = nullptr, attributes = nullptr, convolution = nullptr;

  int begin(const Geometry& g, const Unary& last, int64_t tag) {
    int64_t x[] = {g.batch, g.channels, g.in[0], g.in[1]};
    int64_t y[] = {g.batch, g.made, g.out[0], g.out[1]};
    int64_t after[2], between[2];
    for (int i = 0; i < 2; ++i) {
      between[i] = g.dilation[i] - 1;
      int64_t reach = (g.out[i] - 1) * g.stride[i] + (g.window[i] - 1) * g.dilation[i] + 1;
      after[i] = reach - g.in[i] - g.padding[i];
    }
    int failed = dnnl.memory_desc_create_with_tag(&source, 4, x, g.type, NHWC);
    failed = failed ? failed : dnnl.memory_desc_create_with_tag(&result, 4, y, g.type, NHWC);
    failed = failed ? failed : Weight(g).as(tag, &weights);
    if (!failed && g.biased)
      failed = dnnl.memory_desc_create_with_tag(&bias, 1, &g.made, g.type, VECTOR);
    failed = failed ? failed : dnnl.post_ops_create(&post_ops);
    if (!failed && g.added) failed = dnnl.post_ops_append_binary(post_ops, ADD, result);
    if (!failed && last.algorithm)
      failed = dnnl.post_ops_append_eltwise(post_ops, last.algorithm, last.alpha, last.beta);
    failed = failed ? failed : dnnl.primitive_attr_create(&attributes);
    failed = failed ? failed : dnnl.primitive_attr_set_post_ops(attributes, post_ops);
    // Else a primitive works in memory of the thread that made it.
    failed = failed ? failed : dnnl.primitive_attr_set_scratchpad_mode(attributes, 1);
    return failed ? failed
                  : dnnl.convolution_forward_primitive_desc_create(
                        &convolution, engine, INFERENCE, DIRECT, source, weights, bias, result,
                        g.stride, between, g.padding, after, attributes);
  }

  const char* implementation() const {
    const char* name = "";
    dnnl.primitive_desc_query(convolution, IMPLEMENTATION, 0, &name);
    return name;
  }

  ~Described() {
    if (convolution) dnnl.primitive_desc_destroy(convolution);
    if (attributes) dnnl.primitive_attr_destroy(attributes);
    if (post_ops) dnnl.post_ops_destroy(post_ops);
    for (Handle each : {source, weights, bias, result})
      if (each) dnnl.memory_desc_destroy(each);
  }
};

// What binds a primitive to the tensors of one call.
struct Bound {
  Argument arguments[6];
  int count = 0;
  Handle stream = nullptr;

  ~Bound() {
    for (int i = 0; i < count; ++i) dnnl.memory_destroy(arguments[i].memory);
    if (stream) dnnl.stream_destroy(stream);
  }
};

// What primitives work in, one after the other in a thread.
struct Scratch {
  void* memory = nullptr;
  size_t size = 0;

  void* of(size_t wanted) {
    if (wanted > size) {
      std::free(memory);
      memory = std::aligned_alloc(64, (wanted + 63) / 64 * 64);
      size = memory ? wanted : 0;
    }
    return memory;
  }

  ~Scratch() { std::free(memory); }
};

struct Kept {
  Geometry geometry;
  Described described;
  Handle primitive = nullptr;
  Handle scratch = nullptr;  // its descriptor, of the primitive's
  size_t scratch_size = 0;
  std::atomic<Bound*> idle{nullptr};  // of the last call, for the next: no lock that a fork may copy

  explicit Kept(const Geometry& g) : geometry(g) {}

  int bind(Bound& found) {
    const Described& d = described;
    const Argument all[] = {{SOURCE, d.source}, {WEIGHTS, d.weights}, {RESULT, d.result},
                            {BIAS, d.bias}, {ADDEND, geometry.added ? d.result : nullptr},
                            {SCRATCH, scratch_size ? scratch : nullptr}};
    for (const Argument& each : all) {
      if (!each.memory) continue;
      Argument& next = found.arguments[found.count];
      next.place = each.place;
      if (int failed = dnnl.memory_create(&next.memory, each.memory, engine, nullptr))
        return failed;
      ++found.count;
    }
    return dnnl.stream_create(&found.stream, engine, IN_ORDER);
  }
};

thread_local Scratch scratch;

}  // namespace

extern "C" {

// Take the functions of the library at `path`; once, before all others.
int kept_open(const char* path) {
  // Its own calls would go there. (RTLD_DEEPBIND would take it from a preloaded OpenMP as well.)
  if (dlsym(RTLD_DEFAULT, "dnnl_version")) return ANOTHER_SEEN;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return NO_LIBRARY;
#define TAKE(name)                                                                \
  *reinterpret_cast<void**>(&dnnl.name) = dlsym(library, "dnnl_" #name);          \
  if (!dnnl.name) return NO_LIBRARY;
  TAKE(version) TAKE(engine_create) TAKE(stream_create) TAKE(stream_destroy)
  TAKE(memory_desc_create_with_tag) TAKE(memory_desc_destroy) TAKE(memory_desc_equal) TAKE(memory_desc_get_size)
  TAKE(memory_create) TAKE(memory_set_data_handle) TAKE(memory_destroy) TAKE(post_ops_create)
  TAKE(post_ops_destroy) TAKE(post_ops_append_binary) TAKE(post_ops_append_eltwise)
  TAKE(primitive_attr_create) TAKE(primitive_attr_destroy) TAKE(primitive_attr_set_post_ops)
  TAKE(primitive_attr_set_scratchpad_mode)
  TAKE(convolution_forward_primitive_desc_create) TAKE(reorder_primitive_desc_create)
  TAKE(primitive_desc_query_md) TAKE(primitive_desc_query) TAKE(primitive_desc_destroy)
  TAKE(primitive_create) TAKE(primitive_destroy) TAKE(primitive_execute)
#undef TAKE
  const Version& found = *dnnl.version();
  if (found.major != 3 || found.minor != 2 || found.cpu_runtime != OPENMP) return OTHER_VERSION;
  return dnnl.engine_create(&engine, CPU, 0);
}

// The layout that oneDNN wants a weight in, as a format tag, and the bytes it takes there.
int kept_layout(const Geometry* geometry, const Unary* last, int64_t* tag, int64_t* bytes) {
  Described described;
  if (int failed = described.begin(*geometry, *last, ANY)) return failed;
  const char* name = described.implementation();
  if (!std::strncmp(name, "ref", 3) || std::strstr(name, "gemm")) return NO_KERNEL;
  Handle wanted = dnnl.primitive_desc_query_md(described.convolution, WEIGHTS_DESC, 0);
  *bytes = dnnl.memory_desc_get_size(wanted);
  for (*tag = ANY + 1; *tag < TAGS; ++*tag) {
    Handle like;
    if (Weight(*geometry).as(*tag, &like)) continue;  // of another rank
    bool same = dnnl.memory_desc_equal(like, wanted);
    dnnl.memory_desc_destroy(like);
    if (!same) continue;
    Described named;  // a size of one has many names, and a kernel knows one of them
    if (!named.begin(*geometry, *last, *tag) && !std::strcmp(named.implementation(), name)) return 0;
  }
  return NO_TAG;
}

// A weight without gaps, in that layout.
int kept_arrange(const Weight* given, int64_t tag, void* weight, void* arranged) {
  Handle from = nullptr, to = nullptr, described = nullptr, reorder = nullptr;
  Handle stream = nullptr;
  Argument arguments[] = {{SOURCE, nullptr}, {RESULT, nullptr}};
  int failed = given->as(given->groups == 1 ? OIHW : GOIHW, &from);
  failed = failed ? failed : given->as(tag, &to);
  failed = failed ? failed : dnnl.memory_create(&arguments[0].memory, from, engine, weight);
  failed = failed ? failed : dnnl.memory_create(&arguments[1].memory, to, engine, arranged);
  failed = failed ? failed
                  : dnnl.reorder_primitive_desc_create(&described, from, engine, to, engine, nullptr);
  failed = failed ? failed : dnnl.primitive_create(&reorder, described);
  failed = failed ? failed : dnnl.stream_create(&stream, engine, IN_ORDER);
  failed = failed ? failed : dnnl.primitive_execute(reorder, stream, 2, arguments);
  if (stream) dnnl.stream_destroy(stream);
  if (reorder) dnnl.primitive_destroy(reorder);
  if (described) dnnl.primitive_desc_destroy(described);
  for (const Argument& each : arguments)
    if (each.memory) dnnl.memory_destroy(each.memory);
  for (Handle each : {from, to})
    if (each) dnnl.memory_desc_destroy(each);
  return failed;
}

// The convolution on a weight in that layout, for as long as the process lives.
int kept_begin(const Geometry* geometry, const Unary* last, int64_t tag, Kept** found) {
  auto kept = std::make_unique<Kept>(*geometry);
  int failed = kept->described.begin(kept->geometry, *last, tag);
  failed = failed ? failed : dnnl.primitive_create(&kept->primitive, kept->described.convolution);
  if (failed) return failed;
  kept->scratch = dnnl.primitive_desc_query_md(kept->described.convolution, SCRATCH_DESC, 0);
  kept->scratch_size = kept->scratch ? dnnl.memory_desc_get_size(kept->scratch) : 0;
  *found = kept.release();
  return 0;
}

// By any number of threads at a time.
int kept_run(Kept* kept, void* x, void* weights, void* bias, void* other, void* out) {
  std::unique_ptr<Bound> here(kept->idle.exchange(nullptr));
  if (!here) {
    here = std::make_unique<Bound>();
    if (int failed = kept->bind(*here)) return failed;
  }
  void* work = kept->scratch_size ? scratch.of(kept->scratch_size) : nullptr;
  if (kept->scratch_size && !work) return OUT_OF_MEMORY;
  for (int i = 0; i < here->count; ++i) {
    const Argument& each = here->arguments[i];
    void* data = each.place == SOURCE    ? x
                 : each.place == WEIGHTS ? weights
                 : each.place == RESULT  ? out
                 : each.place == BIAS    ? bias
                 : each.place == SCRATCH ? work
                                         : other;
    dnnl.memory_set_data_handle(each.memory, data);
  }
  int failed = dnnl.primitive_execute(kept->primitive, here->stream, here->count, here->arguments);
  delete kept->idle.exchange(here.release());
  return failed;
}
}
