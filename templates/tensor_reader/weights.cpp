// Check in one call that no weight changed: identities, versions, addresses and samples of contents.
//
// As in look.cpp, functions of torch and Python are declared here, and no library is linked.
#include <cstdint>
#include <cstring>

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
int ioctl(int, unsigned long, ...);
}

namespace {

constexpr int64_t BLOCK = 128;      // bytes that share one hash
constexpr int64_t ASK = 1 << 22;    // bytes about which the kernel is asked at once
constexpr int64_t AHEAD = 8;        // weights whose samples are prefetched
constexpr int64_t NO_VERSION = -1;  // of an inference tensor

// Offsets that `templates/tensor_reader/fields.py` found: bytes from the begin of a Python tensor to its
// TensorImpl, of that to its version counter, storage, offset and dtype, of those to their values, and
// of a storage to the function that frees its memory.
struct Places {
  int64_t impl, version, storage, offset, dtype, number, data, deleter;
  int8_t sizes[256];  // bytes of an element by dtype; 0 if unknown
};

template <class T>
T at(const void* object, int64_t place) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(object) + place);
}

// One weight. `read` is false where it has no plain storage. Torch's own functions read the same
// fields, with calls and checks through twice as much memory; of a view without elements they
// return address 0, which is returned here only for a storage without memory.
struct Facts {
  int64_t identity, version, address;

  bool read(const Places& places, PyObject* weight) {
    const void* impl = at<const void*>(weight, places.impl);
    if (!impl) return false;
    const void* counter = at<const void*>(impl, places.version);
    const void* storage = at<const void*>(impl, places.storage);
    if (!storage) return false;
    identity = reinterpret_cast<int64_t>(weight);
    version = counter ? at<uint32_t>(counter, places.number) : NO_VERSION;
    address = at<int64_t>(storage, places.data);
    const int64_t offset = at<int64_t>(impl, places.offset);
    if (!offset) return true;
    const int size = places.sizes[at<uint8_t>(impl, places.dtype)];
    address += offset * size;
    return size != 0;
  }
};

// The facts of `count` weights, in three blocks.
struct Recorded {
  int64_t count;
  int64_t* numbers;

  int64_t& identity(int64_t n) const { return numbers[n]; }
  int64_t& version(int64_t n) const { return numbers[count + n]; }
  int64_t& address(int64_t n) const { return numbers[2 * count + n]; }
};

// The contents of one weight as they were: a hash for each block of its memory.
struct Content {
  const char* data;
  int64_t bytes;  // 0: not compared
  const uint32_t* hashes;
  const char *begin, *end;  // the pages of which the kernel notes writes; null: none
  int64_t in_turn;          // 1: those are compared in turn, too

  int64_t blocks() const { return (bytes + BLOCK - 1) / BLOCK; }
  int64_t first_watched() const { return (begin - data + BLOCK - 1) / BLOCK; }
  int64_t end_watched() const { return (end - data) / BLOCK; }
};

// The contents of a graph's weights. `limit` bytes are compared in turn at a call, `limit_if_forked`
// where `pagemap`, the file descriptor of `write_watch.py`, is 0. `seed` draws the samples. `weight`
// and `block` are where the comparison goes on, `asked` and `asked_bytes` where asking the kernel
// about `asks` pieces goes on.
struct Contents {
  int64_t count, total, limit, limit_if_forked, asks;
  const int64_t* pagemap;
  int64_t seed, weight, block, asked, asked_bytes;
  Content of[1];
};

// The kernel's `pm_scan_arg` and `page_region` (linux/fs.h).
struct PagemapScan {
  uint64_t size, flags, begin, end, walked_to, regions, count, most_pages;
  uint64_t inverted, all_of, any_of, returned;
};

struct PageRegion {
  uint64_t begin, end, categories;
};

constexpr unsigned long PAGEMAP_SCAN = 3UL << 30 | sizeof(PagemapScan) << 16 | 'f' << 8 | 16;
constexpr uint64_t PAGE_IS_WRITTEN = 2;

bool is_written(const char* begin, const char* end, int64_t pagemap) {
  PageRegion region;
  const auto number = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  PagemapScan scan{sizeof(PagemapScan), 0, number(begin), number(end), 0, number(&region), 1, 1,
                   0, PAGE_IS_WRITTEN, 0, PAGE_IS_WRITTEN};
  return ioctl(static_cast<int>(pagemap), PAGEMAP_SCAN, &scan) != 0;  // or an error
}

constexpr int LANES = 8;  // hide the latency of a multiplication
constexpr uint64_t ODD[LANES] = {0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
                                 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3};

uint64_t mixed(uint64_t lane, uint64_t word) {
  lane ^= word;
  return ((lane << 29) | (lane >> 35)) * ODD[0];
}

// A hash of up to BLOCK bytes. Each step is a bijection of its lane, so that a change of one word
// changes the lane; two different blocks have one hash in 2^32.
uint32_t hash(const char* data, int64_t bytes) {
  uint64_t lanes[LANES] = {1, 2, 3, 4, 5, 6, 7, static_cast<uint64_t>(bytes)};
  int64_t n = 0;
  for (; n + 8 * LANES <= bytes; n += 8 * LANES)
    for (int lane = 0; lane < LANES; ++lane) {
      uint64_t word;
      std::memcpy(&word, data + n + 8 * lane, 8);
      lanes[lane] = mixed(lanes[lane], word);
    }
  for (int lane = 0; n < bytes; n += 8, ++lane) {
    uint64_t word = 0;
    std::memcpy(&word, data + n, bytes - n < 8 ? bytes - n : 8);
    lanes[lane] = mixed(lanes[lane], word);
  }
  uint64_t all = 0;
  for (int lane = 0; lane < LANES; ++lane) all += (lanes[lane] ^ (lanes[lane] >> 31)) * ODD[lane];
  return static_cast<uint32_t>(all ^ (all >> 32));
}

bool is_same(const Content& content, int64_t block) {
  const int64_t begin = block * BLOCK, left = content.bytes - begin;
  return hash(content.data + begin, left < BLOCK ? left : BLOCK) == content.hashes[block];
}

uint64_t draw(int64_t& seed) {  // xorshift
  uint64_t x = static_cast<uint64_t>(seed);
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  seed = static_cast<int64_t>(x);
  return x;
}

int64_t drawn(const Content& content, int64_t& seed) {
  const uint64_t blocks = static_cast<uint64_t>(content.blocks());
  return static_cast<int64_t>((static_cast<unsigned __int128>(draw(seed)) * blocks) >> 64);
}

// The first weight found to differ in one block of each, drawn anew, or -1.
int64_t differing_sample(Contents& contents) {
  int64_t samples[AHEAD];
  for (int64_t n = 0; n < contents.count + AHEAD; ++n) {
    if (n >= AHEAD) {
      const Content& content = contents.of[n - AHEAD];
      if (content.bytes && !is_same(content, samples[n % AHEAD])) return n - AHEAD;
    }
    if (n >= contents.count || !contents.of[n].bytes) continue;
    const int64_t block = samples[n % AHEAD] = drawn(contents.of[n], contents.seed);
    const char* data = contents.of[n].data + block * BLOCK;
    for (int64_t line = 0; line < BLOCK; line += 64) __builtin_prefetch(data + line);
    __builtin_prefetch(contents.of[n].hashes + block);
  }
  return -1;
}

// The first weight of which the kernel noted a write in the next `asks` pieces of all, or -1.
int64_t written_next(Contents& contents, int64_t pagemap) {
  for (int64_t left = contents.asks, passed = 0; left > 0 && passed <= contents.count;) {
    if (contents.asked >= contents.count) contents.asked = contents.asked_bytes = 0;
    const Content& content = contents.of[contents.asked];
    const char* begin = content.begin ? content.begin + contents.asked_bytes : nullptr;
    if (begin >= content.end) {
      ++contents.asked, ++passed;
      contents.asked_bytes = 0;
      continue;
    }
    const char* end = content.end - begin < ASK ? content.end : begin + ASK;
    if (is_written(begin, end, pagemap)) return contents.asked;
    contents.asked_bytes += ASK;
    --left;
  }
  return -1;
}

// The first weight found to differ in the next `limit` bytes of all, or -1.
int64_t differing_next(Contents& contents, int64_t limit, bool watched) {
  int64_t passed = 0;
  for (int64_t left = (limit + BLOCK - 1) / BLOCK; left > 0 && passed <= contents.count;) {
    if (contents.weight >= contents.count) contents.weight = contents.block = 0;
    const Content& content = contents.of[contents.weight];
    const int64_t blocks = content.blocks();
    int64_t last = contents.block + left;
    if (last > blocks) last = blocks;
    if (watched && content.begin && !content.in_turn) {
      const int64_t first = content.first_watched(), end = content.end_watched();
      if (contents.block >= first && contents.block < end) {
        contents.block = end;
        continue;
      }
      if (contents.block < first && last > first) last = first;
    }
    for (int64_t block = contents.block; block < last; ++block)
      if (!is_same(content, block)) return contents.weight;
    left -= last - contents.block;
    contents.block = last;
    if (last == blocks) ++contents.weight, contents.block = 0, ++passed;
  }
  return -1;
}

}  // namespace

extern "C" {

// Identities, versions and addresses of a tuple of tensors, one block after another; no bytes where a
// tensor has no address.
PyObject* state(const Places* places, PyObject* weights) {
  const int64_t count = PyTuple_Size(weights);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 3 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  const Recorded recorded{count, reinterpret_cast<int64_t*>(PyBytes_AsString(bytes))};
  for (int64_t n = 0; n < count; ++n) {
    Facts found;
    if (!found.read(*places, PyTuple_GetItem(weights, n))) {
      Py_DecRef(bytes);
      return PyBytes_FromStringAndSize(nullptr, 0);
    }
    recorded.identity(n) = found.identity;
    recorded.version(n) = found.version;
    recorded.address(n) = found.address;
  }
  return bytes;
}

// Of a tuple of tensors, one block after another: where version counters and storages lie, and which
// function frees their memory; 0 where a tensor has none.
PyObject* owners(const Places* places, PyObject* tensors) {
  const int64_t count = PyTuple_Size(tensors);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 3 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  int64_t* found = reinterpret_cast<int64_t*>(PyBytes_AsString(bytes));
  for (int64_t n = 0; n < count; ++n) {
    const void* impl = at<const void*>(PyTuple_GetItem(tensors, n), places->impl);
    const void* storage = impl ? at<const void*>(impl, places->storage) : nullptr;
    found[n] = impl ? at<int64_t>(impl, places->version) : 0;
    found[count + n] = reinterpret_cast<int64_t>(storage);
    found[2 * count + n] = storage ? at<int64_t>(storage, places->deleter) : 0;
  }
  return bytes;
}

// Where a tensor's storage lies, 0 if it has none.
int64_t storage_of(const Places* places, PyObject* tensor) {
  const void* impl = at<const void*>(tensor, places->impl);
  return impl ? at<int64_t>(impl, places->storage) : 0;
}

// Of a tuple of tensors with versions, one block after another: the version, and how many tensors
// share its counter.
PyObject* counters(const Places* places, PyObject* tensors) {
  const int64_t count = PyTuple_Size(tensors);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 2 * sizeof(int64_t) * count);
  if (!bytes) return nullptr;
  int64_t* found = reinterpret_cast<int64_t*>(PyBytes_AsString(bytes));
  for (int64_t n = 0; n < count; ++n) {
    const void* impl = at<const void*>(PyTuple_GetItem(tensors, n), places->impl);
    const void* counter = at<const void*>(impl, places->version);
    found[n] = counter ? at<uint32_t>(counter, places->number) : NO_VERSION;
    found[count + n] = counter ? at<uint32_t>(counter, sizeof(void*)) : 0;  // behind its functions
  }
  return bytes;
}

// A hash for each block of memory.
void hash_blocks(const char* data, int64_t bytes, uint32_t* hashes) {
  for (int64_t begin = 0; begin < bytes; begin += BLOCK)
    hashes[begin / BLOCK] = hash(data + begin, bytes - begin < BLOCK ? bytes - begin : BLOCK);
}

// -1 if the list's tensors with these numbers are as `state` recorded them and no compared part of
// their contents differs; -2 if a fact differs; else the number, among these, of a weight whose
// contents differ or were written. Facts are compared where they lie: to write them down first takes
// nearly twice as long.
int64_t changed(const Places* places, const int64_t* numbers, int64_t count, PyObject* inputs,
                PyObject* bytes, Contents* contents) {
  const Recorded recorded{count, reinterpret_cast<int64_t*>(PyBytes_AsString(bytes))};
  const intptr_t size = PyList_Size(inputs);
  for (int64_t n = 0; n < count; ++n) {
    Facts found;
    if (numbers[n] >= size) return -2;
    PyObject* weight = PyList_GetItem(inputs, numbers[n]);
    if (recorded.identity(n) != reinterpret_cast<int64_t>(weight)) return -2;
    if (!found.read(*places, weight)) return -2;
    if (recorded.version(n) != found.version || recorded.address(n) != found.address) return -2;
  }
  if (!contents) return -1;
  if (contents->total <= contents->limit) {
    contents->weight = contents->block = 0;
    return differing_next(*contents, contents->total, false);
  }
  const int64_t differing = differing_sample(*contents);
  if (differing >= 0) return differing;
  const int64_t pagemap = contents->pagemap ? *contents->pagemap : 0;
  const int64_t written = pagemap ? written_next(*contents, pagemap) : -1;
  if (written >= 0) return written;
  const int64_t limit = pagemap ? contents->limit : contents->limit_if_forked;
  return differing_next(*contents, limit, pagemap != 0);
}

}  // extern "C"
