// Attention of few queries over a cache: keys before the first and behind the last that some query sees
// are not read. Keys of all heads are dealt out evenly to threads, and parts of a head are merged.
// Flash-decoding: Dao et al. 2023, pytorch.org/blog/flash-decoding. Follows `short_attention.cpp`.

namespace ipex {
namespace {

constexpr int64_t LOT = FIT;      // keys that one thread attends at least
constexpr int64_t AHEAD = 4 * LOT;  // keys whose scores are computed before their values are read
constexpr float NONE = -std::numeric_limits<float>::infinity();  // added to hidden scores
// Products that a thread is woken for: some microseconds of one.
constexpr int64_t WORTH = 1 << 17;

// Keys or values of beams: a table names, for each position, the text in whose cache it was written.
template <typename T>
struct BeamRows {
  const T* first;
  int64_t line, text;
  const int64_t* table;

  SHORT const T* operator()(int64_t j) const { return first + table[j] * text + j * line; }
};

struct Range {
  int64_t first, last;  // the last is not of it
};

// Attention over some keys of a head: what to divide by and the sums, for scores less `peaks`.
struct Part {
  float *peaks, *totals, *sums;
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

// `call` with the largest of 4, 2 and 1 that is left, and the query, until all of them had their turn.
template <typename Call>
SHORT void in_groups(int64_t queries, Call call) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) call(std::integral_constant<int64_t, 4>{}, i);
  for (; i + 2 <= queries; i += 2) call(std::integral_constant<int64_t, 2>{}, i);
  if (i < queries) call(std::integral_constant<int64_t, 1>{}, i);
}

// Turns scores of `count` keys into shares exp(score - peak), and what was summed up before is scaled
// to the new peak.
template <typename T>
void weigh(const Sizes& s, const T* mask, int64_t count, float* scores, float& peak, float& whole,
           float* sums) {
  Vector peaks = all(peak);
  for (int64_t j = 0; j < count; j += WIDE) {
    const int64_t left = count - j;
    Vector score = read(scores + j);
    if (mask) score += s.mask[3] ? read(mask + j, left) : all(read(mask, 1)[0]);
    if (left < WIDE) score = lanes() < static_cast<int32_t>(left) ? score : all(NONE);
    write(scores + j, score);
    peaks = maximum(score, peaks);
  }
  const float highest = largest(peaks);  // a score that is no number spoils the sum below
  const float base = highest == NONE ? 0 : highest;
  const float scaled = highest == peak ? 1 : std::exp(peak - base);
  Vector sum{};
  for (int64_t j = 0; j < count; j += WIDE) {
    const Vector share = exp(read(scores + j) - base);
    sum += share;
    write(scores + j, share);
  }
  whole = whole * scaled + total(sum);
  if (scaled != 1)
    for (int64_t d = 0; d < s.width; d += WIDE) write(sums + d, read(sums + d) * scaled);
  peak = highest;
}

// Adds keys of a head to `part`. `queries` [queries, width] are scaled; `scores` [queries, AHEAD].
template <typename T, typename Lines>
void attend_keys(const Sizes& s, const float* queries, Lines keys, Lines values, const T* mask,
                 Range range, float* scores, const Part& part) {
  const int64_t block = s.queries > 2 ? FIT : AHEAD;  // what several read stays in the first cache
  for (int64_t j = range.first; j < range.last; j += AHEAD) {
    const int64_t count = std::min(AHEAD, range.last - j);
    for (int64_t n = 0; n < count; n += block) {
      const auto key = [=](int64_t i) __attribute__((always_inline)) { return keys(j + n + i); };
      in_groups(s.queries, [&](auto rows, int64_t i) {
        score<rows()>(queries + i * s.width, s.width, key, std::min(block, count - n), s.width,
                      scores + i * AHEAD + n, AHEAD);
      });
    }
    for (int64_t i = 0; i < s.queries; ++i)
      weigh(s, mask ? mask + i * s.mask[2] + j * s.mask[3] : nullptr, count, scores + i * AHEAD,
            part.peaks[i], part.totals[i], part.sums + i * s.width);
    for (int64_t n = 0; n < count; n += block) {
      const auto value = [=](int64_t i) __attribute__((always_inline)) { return values(j + n + i); };
      in_groups(s.queries, [&](auto rows, int64_t i) {
        average<rows()>(scores + i * AHEAD + n, AHEAD, value, std::min(block, count - n), s.width,
                        part.sums + i * s.width);
      });
    }
  }
}

// Attention over the keys of both parts.
inline void merge(const Sizes& s, const Part& to, const Part& from) {
  for (int64_t i = 0; i < s.queries; ++i) {
    const float peak = std::max(to.peaks[i], from.peaks[i]), base = peak == NONE ? 0 : peak;
    const float ours = std::exp(to.peaks[i] - base), theirs = std::exp(from.peaks[i] - base);
    to.totals[i] = to.totals[i] * ours + from.totals[i] * theirs;
    for (int64_t d = i * s.width; d < (i + 1) * s.width; d += WIDE)
      write(to.sums + d, read(to.sums + d) * ours + read(from.sums + d) * theirs);
    to.peaks[i] = peak;
  }
}

// The result of a head; zeros where every key is hidden.
template <typename T>
void divide(const Sizes& s, const Part& part, T* out) {
  for (int64_t i = 0; i < s.queries; ++i) {
    const float by = part.totals[i] == 0 ? 0 : 1 / part.totals[i];
    for (int64_t d = 0; d < s.width; d += WIDE)
      write(out + i * s.out[2] + d, read(part.sums + i * s.width + d) * by);
  }
}

// Memory of one thread: two parts, scores and queries.
struct Space {
  int64_t queries, width;

  int64_t of_part() const { return 2 * padded(queries) + queries * width; }
  int64_t size() const { return 2 * of_part() + queries * (AHEAD + width); }

  Part part(float* memory, int64_t which) const {
    float* peaks = memory + which * of_part();
    return {peaks, peaks + padded(queries), peaks + 2 * padded(queries)};
  }
  void clear(const Part& part) const {
    std::fill_n(part.peaks, queries, NONE);
    std::fill_n(part.totals, padded(queries) + queries * width, 0.f);
  }
};

// All heads. Lots of keys have numbers from 0 on: head by head, those of head `h` from starts[h] on.
template <typename T>
class Decoder {
 public:
  Decoder(const Sizes& s, float scale, const Head<T>& all, const int64_t* table)
      : s(s), scale(scale), heads(all), table(table), space{s.queries, s.width} {
    const int64_t count = s.batch * s.heads;
    ranges.resize(count);
    starts.assign(count + 1, 0);
    for (int64_t h = 0; h < count; ++h) {
      const int64_t text = h / s.heads, head = h % s.heads;
      if (head && !s.mask[1]) ranges[h] = ranges[h - 1];
      else if (text && !s.mask[0]) ranges[h] = ranges[h - s.heads];
      else ranges[h] = visible(s, head_of(h).mask);
      const int64_t lots = (ranges[h].last - ranges[h].first + LOT - 1) / LOT;
      starts[h + 1] = starts[h] + std::max<int64_t>(lots, 1);
    }
  }

  void run(std::vector<float>& memory) {
    const int64_t lots = starts.back(), work = lots * LOT * s.queries * s.width * 2;
    const int64_t most = std::min<int64_t>({lots, omp_get_max_threads(), work / WORTH + 1});
    if (static_cast<int64_t>(memory.size()) < most * space.size()) memory.resize(most * space.size());
    float* all = memory.data();
#pragma omp parallel if (most > 1)
    {
      const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
      const int64_t workers = std::min(most, threads);
      if (thread < workers) attend_lots(all, thread, workers);
#pragma omp barrier
      if (thread < workers) merge_parts(all, thread, workers);
    }
  }

 private:
  const Sizes& s;
  float scale;
  const Head<T>& heads;
  const int64_t* table;
  Space space;
  std::vector<Range> ranges;
  std::vector<int64_t> starts;

  Head<T> head_of(int64_t which) const {
    const int64_t b = which / s.heads, h = which % s.heads, text = table ? 0 : b;
    return {heads.q + b * s.q[0] + h * s.q[1], heads.k + text * s.k[0] + h * s.k[1],
            heads.v + text * s.v[0] + h * s.v[1],
            heads.mask ? heads.mask + b * s.mask[0] + h * s.mask[1] : nullptr,
            heads.out + b * s.out[0] + h * s.out[1]};
  }

  // A head whose lots go to several threads is in the second part of the first one of them, in the
  // first parts of the others.
  void attend_lots(float* all, int64_t thread, int64_t workers) const {
    const int64_t lots = starts.back();
    const int64_t begin = thread * lots / workers, end = (thread + 1) * lots / workers;
    float* memory = all + thread * space.size();
    int64_t h = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (int64_t from = begin; from < end; from = starts[++h]) {
      const Part part = space.part(memory, from == starts[h]);
      attend_head(h, from - starts[h], std::min(end, starts[h + 1]) - starts[h], memory, part);
      if (from == starts[h] && starts[h + 1] <= end) divide(s, part, head_of(h).out);
    }
  }

  // Lots from `begin` to before `end` of a head.
  void attend_head(int64_t which, int64_t begin, int64_t end, float* memory,
                   const Part& part) const {
    const Head<T> head = head_of(which);
    float *queries = memory + 2 * space.of_part(), *scores = queries + s.queries * s.width;
    for (int64_t i = 0; i < s.queries; ++i)
      for (int64_t d = 0; d < s.width; d += WIDE)
        write(queries + i * s.width + d, read(head.q + i * s.q[2] + d) * scale);
    space.clear(part);
    const Range& seen = ranges[which];
    const Range range{seen.first + begin * LOT, std::min(seen.last, seen.first + end * LOT)};
    if (!table)
      return attend_keys(s, queries, Rows<T>{head.k, s.k[2]}, Rows<T>{head.v, s.v[2]}, head.mask,
                         range, scores, part);
    const int64_t* texts = table + which / s.heads * s.keys;
    attend_keys(s, queries, BeamRows<T>{head.k, s.k[2], s.k[0], texts},
                BeamRows<T>{head.v, s.v[2], s.v[0], texts}, head.mask, range, scores, part);
  }

  // Finishes the head that this thread begins and leaves to others.
  void merge_parts(float* all, int64_t thread, int64_t workers) const {
    const int64_t lots = starts.back();
    const int64_t begin = thread * lots / workers, end = (thread + 1) * lots / workers;
    const int64_t h = std::upper_bound(starts.begin(), starts.end(), end - 1) - starts.begin() - 1;
    if (starts[h] < begin || starts[h + 1] <= end) return;
    const Part part = space.part(all + thread * space.size(), 1);
    for (int64_t w = thread + 1; w * lots / workers < starts[h + 1]; ++w)
      merge(s, part, space.part(all + w * space.size(), 0));
    divide(s, part, head_of(h).out);
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
    ipex::Decoder<T>(s, scale, all, (const int64_t*)table).run(memory);                       \
  }

DECODE(decode_bfloat16, c10::BFloat16)
DECODE(decode_float32, float)
#ifdef __F16C__
DECODE(decode_float16, ipex::Half)
#endif
