// Attention of queries over a cache in pages: a table of each text names the blocks that hold its keys.
// Live keys alone are read, and entries of 8 bits are converted in registers. Follows
// `attention_parts.cpp`.

namespace ipex {
namespace {

constexpr int64_t MOST_ROWS = 16;  // of a unit, where one token has no more

// As `ipex_inductor.templates.cpu.paged_attention` numbers them.
enum Number : int64_t { FLOAT = 1, BFLOAT16, HALF, E5M2, E4M3, INT8 };

// As `ipex_inductor.templates.cpu.paged_attention` fills it in. Strides are of elements.
struct PagedSizes {
  int64_t texts, tokens, heads, key_heads, width;
  int64_t blocks, block_size, pages, longest;  // pages of a text, and keys of one, at most
  int64_t before, behind;  // keys that a query sees at most before and behind its own place
  int64_t query_number, entry_number;
  int64_t q[2], out[2];  // of tokens, heads
  int64_t k[3], v[3];    // of blocks, heads, rows of a block
  int64_t of_tables;     // of texts
  int64_t mask[4];       // of texts, heads, tokens, keys: 0 or 1
};

struct PagedFactors {
  float scale, softcap, values;  // of scores; the cap, none at 0; of values
};

// What is wrong with the numbers in a table, as `ops/attention/paged_checks.py` lists it.
enum Fault : int32_t { RIGHT, STARTS, LENGTH, BLOCK, HEAD };

struct PagedTensors {
  const void *q, *k, *v;
  const int32_t *tables, *lengths, *starts, *map;  // `starts` of queries of a text, `map` may be null
  const float* slopes;                             // may be null
  const void* mask;                                // of the query's dtype, may be null
  void* out;
};

struct Float8E5M2 {
  uint8_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Int8 {
  int8_t bits;
};

// A whole vector: widths are multiples of it.
#ifdef __AVX512F__
typedef __m256i ManyHalves;
SHORT __m128i bytes_at(const void* from) { return _mm_loadu_si128((const __m128i*)from); }
SHORT ManyHalves spread(const void* from) { return _mm256_cvtepu8_epi16(bytes_at(from)); }
SHORT Vector widened(ManyHalves halves) { return (Vector)_mm512_cvtph_ps(halves); }
SHORT Vector read(const Int8* from) {
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_at(from)));
}
#elif defined(__AVX2__)
typedef __m128i ManyHalves;
SHORT __m128i bytes_at(const void* from) { return _mm_loadl_epi64((const __m128i*)from); }
SHORT ManyHalves spread(const void* from) { return _mm_cvtepu8_epi16(bytes_at(from)); }
SHORT Vector widened(ManyHalves halves) { return (Vector)_mm256_cvtph_ps(halves); }
SHORT Vector read(const Int8* from) {
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_at(from)));
}
#endif

// E5M2 is the upper half of fp16.
SHORT Vector read(const Float8E5M2* from) { return widened((ManyHalves)((Halves)spread(from) << 8)); }

// E4M3 moved by 7 bits is the same number in fp16, times 2^-8, except that its NaN looks finite.
constexpr float E4M3_FACTOR = 256;
SHORT Vector read(const Float8E4M3* from) {
  const Halves bytes = (Halves)spread(from), size = bytes & 0x7f;
  const Halves nan = (Halves)(size == 0x7f) & 0x7fff;
  return widened((ManyHalves)((bytes << 8 & 0x8000) | size << 7 | nan));
}

template <typename T>
constexpr float ENTRY_FACTOR = 1;
template <>
constexpr float ENTRY_FACTOR<Float8E4M3> = E4M3_FACTOR;

SHORT Vector read_query(const void* from, int64_t number, int64_t at, int64_t count = WIDE) {
  if (number == FLOAT) return read(static_cast<const float*>(from) + at, count);
  if (number == BFLOAT16) return read(static_cast<const c10::BFloat16*>(from) + at, count);
  return read(static_cast<const Half*>(from) + at, count);
}

SHORT void write_result(void* to, int64_t number, int64_t at, Vector value) {
  if (number == FLOAT) return write(static_cast<float*>(to) + at, value);
  if (number == BFLOAT16) return write(static_cast<c10::BFloat16*>(to) + at, value);
  write(static_cast<Half*>(to) + at, value);
}

// Keys or values of a head of a text.
template <typename T>
struct Pages {
  const T* first;
  const int32_t* table;
  int64_t block, line, size;
  int shift;  // of sizes that are powers of two; -1 for others

  SHORT const T* operator()(int64_t j) const {
    const int64_t page = shift >= 0 ? j >> shift : j / size;
    return first + table[page] * block + (j - page * size) * line;
  }
};

// One head of keys, the heads of queries that read it, and some tokens of a text.
struct Unit {
  int64_t text, head, first, tokens;  // `first` and `tokens` are of all queries
  int64_t place;                      // of the first token among the text's keys
};

template <typename T>
class PagedJob {
 public:
  PagedJob(const PagedSizes& s, const PagedFactors& f, const PagedTensors& t) : s(s), f(f), t(t) {
    groups = t.map ? 1 : s.heads / s.key_heads;
    const int64_t most = std::max<int64_t>(1, MOST_ROWS / groups);  // tokens of a unit
    for (int64_t n = 0; n < s.texts; ++n) {
      const int64_t begin = t.starts ? t.starts[n] : n, end = t.starts ? t.starts[n + 1] : n + 1;
      for (int64_t h = 0; h < s.heads / groups; ++h)
        for (int64_t i = begin; i < end; i += most)
          units.push_back({n, h, i, std::min(most, end - i), t.lengths[n] - (end - i)});
    }
  }

  int64_t heads() const { return units.size(); }
  int64_t width() const { return s.width; }
  int64_t rows(int64_t which) const { return units[which].tokens * groups; }
  int64_t most_rows() const {
    int64_t most = 0;
    for (const Unit& unit : units) most = std::max(most, unit.tokens * groups);
    return most;
  }

  Range range(int64_t which) const {
    const Unit& u = units[which];
    const int64_t first = std::max<int64_t>(0, u.place - s.before);
    const int64_t last = std::min<int64_t>(t.lengths[u.text], u.place + u.tokens + s.behind);
    return first < last ? Range{first, last} : Range{0, 0};
  }

  void attend(int64_t which, Range range, float* queries, float* scores, const Part& part) const {
    const Unit& u = units[which];
    const float scale = f.scale * ENTRY_FACTOR<T>;
    for (int64_t i = 0; i < rows(which); ++i)
      for (int64_t d = 0; d < s.width; d += WIDE)
        write(queries + i * s.width + d,
              read_query(t.q, s.query_number, offset(u, i, s.q) + d) * scale);
    const auto changes = [&](int64_t i, int64_t first) { return change(u, i, first); };
    attend_keys(rows(which), s.width, queries, pages(t.k, s.k, u), pages(t.v, s.v, u), changes,
                range, scores, part);
  }

  // The result of a unit; zeros where no key is visible.
  void finish(int64_t which, const Part& part) const {
    for (int64_t i = 0; i < rows(which); ++i) {
      const float by = part.totals[i] == 0 ? 0 : f.values * ENTRY_FACTOR<T> / part.totals[i];
      const int64_t at = offset(units[which], i, s.out);
      for (int64_t d = 0; d < s.width; d += WIDE)
        write_result(t.out, s.query_number, at + d, read(part.sums + i * s.width + d) * by);
    }
  }

 private:
  const PagedSizes& s;
  const PagedFactors& f;
  const PagedTensors& t;
  int64_t groups;
  std::vector<Unit> units;

  int64_t offset(const Unit& u, int64_t row, const int64_t (&strides)[2]) const {
    return (u.first + row / groups) * strides[0] + (u.head * groups + row % groups) * strides[1];
  }

  Pages<T> pages(const void* cache, const int64_t (&strides)[3], const Unit& u) const {
    const int64_t head = t.map ? t.map[u.head] : u.head, size = s.block_size;
    const bool power = (size & (size - 1)) == 0;
    return {static_cast<const T*>(cache) + head * strides[1], t.tables + u.text * s.of_tables,
            strides[0], strides[2], size, power ? __builtin_ctzll(size) : -1};
  }

  // Caps scores, adds the slope of a head for each key of distance and a mask, and hides keys of other
  // places.
  auto change(const Unit& u, int64_t row, int64_t first) const {
    const int32_t place = static_cast<int32_t>(u.place + row / groups - first);
    const float cap = f.softcap;
    const float slope = t.slopes ? t.slopes[u.head * groups + row % groups] : 0;
    const auto bound = [](int64_t keys) { return (int32_t)std::min<int64_t>(keys, 1 << 30); };
    const int32_t before = -bound(s.before), behind = bound(s.behind);
    const void* mask = t.mask;
    const int64_t number = s.query_number, step = s.mask[3];
    const int64_t token = u.first - (t.starts ? t.starts[u.text] : u.text) + row / groups;
    const int64_t at = u.text * s.mask[0] + (u.head * groups + row % groups) * s.mask[1] +
                       token * s.mask[2] + first * step;
    return [=](int64_t j, int64_t left, Vector score) __attribute__((always_inline)) {
      const Ints distance = lanes() + (static_cast<int32_t>(j) - place);
      if (cap > 0) score = cap * tanh(score / cap);
      if (slope != 0)
        score += slope * __builtin_convertvector(distance < 0 ? distance : -distance, Vector);
      if (mask)
        score += step ? read_query(mask, number, at + j, left) : all(read_query(mask, number, at, 1)[0]);
      return (distance >= before) & (distance <= behind) ? score : all(NONE);
    };
  }
};

inline Fault find_fault(const PagedSizes& s, const PagedTensors& t) {
  if (t.starts && (t.starts[0] != 0 || t.starts[s.texts] != s.tokens)) return STARTS;
  for (int64_t h = 0; t.map && h < s.heads; ++h)
    if (t.map[h] < 0 || t.map[h] >= s.key_heads) return HEAD;
  for (int64_t n = 0; n < s.texts; ++n) {
    if (t.starts && t.starts[n + 1] < t.starts[n]) return STARTS;
    const int64_t length = t.lengths[n], pages = (length + s.block_size - 1) / s.block_size;
    if (length < 0 || length > s.longest || pages > s.pages) return LENGTH;
    for (int64_t p = 0; p < pages; ++p) {
      const int32_t block = t.tables[n * s.of_tables + p];
      if (block < 0 || block >= s.blocks) return BLOCK;
    }
  }
  return RIGHT;
}

template <typename T>
void attend_pages(const PagedSizes& s, const PagedFactors& f, const PagedTensors& t) {
  thread_local std::vector<float> memory;  // grows to the largest that came
  const PagedJob<T> job(s, f, t);
  if (job.heads()) Dealer<PagedJob<T>>(job).run(memory);
}

}  // namespace
}  // namespace ipex

extern "C" int32_t paged_attention(const int64_t* sizes, const float* factors, const void* q,
                                   const void* k, const void* v, const int32_t* tables,
                                   const int32_t* lengths, const int32_t* starts,
                                   const int32_t* map, const float* slopes, const void* mask,
                                   void* out) {
  using namespace ipex;
  const auto& s = *reinterpret_cast<const PagedSizes*>(sizes);
  const auto& f = *reinterpret_cast<const PagedFactors*>(factors);
  const PagedTensors t{q, k, v, tables, lengths, starts, map, slopes, mask, out};
  if (const Fault fault = find_fault(s, t)) return fault;
  switch (s.entry_number) {
    case FLOAT: attend_pages<float>(s, f, t); break;
    case BFLOAT16: attend_pages<c10::BFloat16>(s, f, t); break;
    case HALF: attend_pages<Half>(s, f, t); break;
    case E5M2: attend_pages<Float8E5M2>(s, f, t); break;
    case E4M3: attend_pages<Float8E4M3>(s, f, t); break;
    case INT8: attend_pages<Int8>(s, f, t); break;
  }
  return RIGHT;
}

// Where each key of each beam was written: blocks [beams, length], j * beams + row for key j. A beam
// wrote the last `tokens` keys in its own row; key j of row r follows key j - 1 of row
// parents[j - 1, r]. Returns whether all parents are rows.
extern "C" int32_t trace_beams(const int64_t* parents, int64_t beams, int64_t length, int64_t tokens,
                               int32_t* blocks) {
  for (int64_t b = 0; b < beams; ++b) {
    int64_t row = b;
    for (int64_t j = length - 1; j >= 0; --j) {
      if (j < length - tokens) row = parents[j * beams + row];
      if (row < 0 || row >= beams) return false;
      blocks[b * length + j] = static_cast<int32_t>(j * beams + row);
    }
  }
  return true;
}
