// Attention of few queries over a cache: keys before the first and behind the last that some query sees
// are not read. Follows `short_attention.cpp`.

namespace ipex {
namespace {

// Keys or values of beams: a table names, for each position, the text in whose cache it was written.
template <typename T>
struct BeamRows {
  const T* first;
  int64_t line, text;
  const int64_t* table;

  SHORT const T* operator()(int64_t j) const { return first + table[j] * text + j * line; }
};

// Whether a row of a mask hides all of `count` keys.
template <typename T>
SHORT bool hides(const T* mask, int64_t count) {
  Ints seen{};
  for (int64_t j = 0; j < count; j += WIDE) {
    const Vector value = read(mask + j, count - j);
    const Ints here = value != NONE;
    seen |= count - j < WIDE ? here & (lanes() < static_cast<int32_t>(count - j)) : here;
  }
  return total((Vector)(seen & (Ints)all(1))) == 0;
}

// Extends `range` to the keys that a row of a mask does not hide.
template <typename T>
void extend(const T* mask, int64_t keys, Range& range) {
  const bool empty = range.first == range.last;
  int64_t last = keys, first = 0;
  const int64_t least = empty ? 0 : range.last;
  while (last - FIT >= least && hides(mask + last - FIT, FIT)) last -= FIT;
  while (last > least && hides(mask + last - 1, 1)) --last;
  const int64_t most = empty ? last : range.first;
  while (first + FIT <= most && hides(mask + first, FIT)) first += FIT;
  while (first < most && hides(mask + first, 1)) ++first;
  range = {first, last};
}

// Keys that some query of a head sees: those between the first and the last one.
template <typename T>
Range visible(const Sizes& s, const T* mask) {
  if (!mask || !s.mask[3]) return {0, s.keys};
  Range range{0, 0};
  const int64_t rows = s.mask[2] ? s.queries : 1;
  for (int64_t i = 0; i < rows; ++i) extend(mask + i * s.mask[2], s.keys, range);
  return range;
}

// Attention over a cache whose live keys a mask says.
template <typename T>
class Decoding {
 public:
  Decoding(const Sizes& s, float scale, const Head<T>& all, const int64_t* table)
      : s(s), scale(scale), all_heads(all), table(table), ranges(s.batch * s.heads) {
    for (int64_t h = 0; h < heads(); ++h) {
      const int64_t text = h / s.heads, head = h % s.heads;
      if (head && !s.mask[1]) ranges[h] = ranges[h - 1];
      else if (text && !s.mask[0]) ranges[h] = ranges[h - s.heads];
      else ranges[h] = visible(s, head_of(h).mask);
    }
  }

  int64_t heads() const { return s.batch * s.heads; }
  int64_t most_rows() const { return s.queries; }
  int64_t rows(int64_t) const { return s.queries; }
  int64_t width() const { return s.width; }
  Range range(int64_t which) const { return ranges[which]; }

  void attend(int64_t which, Range range, float* queries, float* scores, const Part& part) const {
    const Head<T> head = head_of(which);
    for (int64_t i = 0; i < s.queries; ++i)
      for (int64_t d = 0; d < s.width; d += WIDE)
        write(queries + i * s.width + d, read(head.q + i * s.q[2] + d) * scale);
    if (!table)
      return attend_lines(head, queries, Rows<T>{head.k, s.k[2]}, Rows<T>{head.v, s.v[2]}, range,
                          scores, part);
    const int64_t* texts = table + which / s.heads * s.keys;
    attend_lines(head, queries, BeamRows<T>{head.k, s.k[2], s.k[0], texts},
                 BeamRows<T>{head.v, s.v[2], s.v[0], texts}, range, scores, part);
  }

  // The result of a head; zeros where every key is hidden.
  void finish(int64_t which, const Part& part) const {
    T* out = head_of(which).out;
    for (int64_t i = 0; i < s.queries; ++i) {
      const float by = part.totals[i] == 0 ? 0 : 1 / part.totals[i];
      for (int64_t d = 0; d < s.width; d += WIDE)
        write(out + i * s.out[2] + d, read(part.sums + i * s.width + d) * by);
    }
  }

 private:
  const Sizes& s;
  float scale;
  const Head<T>& all_heads;
  const int64_t* table;
  std::vector<Range> ranges;

  Head<T> head_of(int64_t which) const {
    const int64_t b = which / s.heads, h = which % s.heads, text = table ? 0 : b;
    const Head<T>& of = all_heads;
    return {of.q + b * s.q[0] + h * s.q[1], of.k + text * s.k[0] + h * s.k[1],
            of.v + text * s.v[0] + h * s.v[1],
            of.mask ? of.mask + b * s.mask[0] + h * s.mask[1] : nullptr,
            of.out + b * s.out[0] + h * s.out[1]};
  }

  template <typename Lines>
  void attend_lines(const Head<T>& head, const float* queries, Lines keys, Lines values, Range range,
                    float* scores, const Part& part) const {
    const Sizes& sizes = s;
    const auto changes = [&](int64_t i, int64_t first) {
      const T* mask = head.mask ? head.mask + i * sizes.mask[2] + first * sizes.mask[3] : nullptr;
      const bool same = !sizes.mask[3];
      return [=](int64_t j, int64_t left, Vector score) __attribute__((always_inline)) {
        if (mask) score += same ? all(read(mask, 1)[0]) : read(mask + j, left);
        return score;
      };
    };
    attend_keys(s.queries, s.width, queries, keys, values, changes, range, scores, part);
  }
};

}  // namespace
}  // namespace ipex

#define DECODE(name, T)                                                                       \
  extern "C" void name(const int64_t* sizes, float scale, const void* q, const void* k,       \
                       const void* v, const void* mask, const void* table, void* out) {       \
    thread_local std::vector<float> memory; /* grows to the largest that came */              \
    const auto& s = *reinterpret_cast<const ipex::Sizes*>(sizes);                             \
    const ipex::Head<T> all{(const T*)q, (const T*)k, (const T*)v, (const T*)mask, (T*)out};  \
    const ipex::Decoding<T> job(s, scale, all, (const int64_t*)table);                        \
    ipex::Dealer<ipex::Decoding<T>>(job).run(memory);                                         \
  }

DECODE(decode_bfloat16, c10::BFloat16)
DECODE(decode_float32, float)
#ifdef __F16C__
DECODE(decode_float16, ipex::Half)
#endif
