// What kernels of attention share: scores and averages of some rows, and keys of all heads dealt out
// evenly to threads, whose parts of a head are merged.
// Flash-decoding: Dao et al. 2023, pytorch.org/blog/flash-decoding. Follows `vectors.cpp`.

namespace ipex {
namespace {

constexpr int64_t FIT = 64;      // keys, or values, that stay in the first cache
constexpr int64_t LOT = FIT;      // keys that one thread attends at least
constexpr int64_t AHEAD = 4 * LOT;  // keys whose scores are computed before their values are read
constexpr float NONE = -std::numeric_limits<float>::infinity();  // added to hidden scores
// Products that a thread is woken for: some microseconds of one.
constexpr int64_t WORTH = 1 << 17;

// Keys or values of a head, by their numbers: a row each, the next one behind it in memory.
template <typename T>
struct Rows {
  const T* first;
  int64_t line;

  SHORT const T* operator()(int64_t j) const { return first + j * line; }
};

// Columns up to whole vectors and panels.
template <int64_t WHOLE = 16>
int64_t padded(int64_t count) {
  return (count + WHOLE - 1) / WHOLE * WHOLE;
}

// Scores of ROWS queries and `count` keys, of whole vectors of keys.
template <int64_t ROWS, typename Query, typename Keys>
void score(const Query* queries, int64_t of_queries, Keys keys, int64_t count, int64_t width,
           float* scores, int64_t line) {
  constexpr int64_t AT_ONCE = WIDE / ROWS;  // keys, so that their sums are added up together
  for (int64_t j = 0; j < count; j += AT_ONCE) {
    decltype(keys(0)) rows[AT_ONCE];
    for (int64_t i = 0; i < AT_ONCE; ++i) rows[i] = keys(std::min(j + i, count - 1));
    Vector sums[WIDE];
#pragma GCC unroll 16
    for (int64_t i = 0; i < WIDE; ++i) sums[i] = Vector{};
    for (int64_t d = 0; d < width; d += WIDE)
#pragma GCC unroll 16
      for (int64_t i = 0; i < WIDE; ++i)
        sums[i] = fused(read(queries + i / AT_ONCE * of_queries + d), read(rows[i % AT_ONCE] + d),
                        sums[i]);
    const Vector all_rows = totals(sums);
#pragma GCC unroll 4
    for (int64_t i = 0; i < ROWS; ++i)
      std::memcpy(scores + i * line + j, (const float*)&all_rows + i * AT_ONCE,
                  AT_ONCE * sizeof(float));
  }
}

// PARTS vectors of ROWS rows of `sums`, and shares @ values [count, ...], from the column `from` on.
template <int64_t ROWS, int64_t PARTS, typename Values>
void average(const float* shares, int64_t line, Values values, int64_t from, int64_t count,
             float* to, int64_t of_to) {
  Vector sums[ROWS][PARTS];
#pragma GCC unroll 4
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t n = 0; n < PARTS; ++n) sums[i][n] = read(to + i * of_to + n * WIDE);
  for (int64_t j = 0; j < count; ++j) {
    const auto* value = values(j) + from;
#pragma GCC unroll 4
    for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int64_t n = 0; n < PARTS; ++n)
        sums[i][n] = fused(all(shares[i * line + j]), read(value + n * WIDE), sums[i][n]);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t n = 0; n < PARTS; ++n) write(to + i * of_to + n * WIDE, sums[i][n]);
}

// One, two or four rows.
template <int64_t ROWS, typename Values>
void average(const float* shares, int64_t line, Values values, int64_t count, int64_t width,
             float* sums) {
  constexpr int64_t MOST = 8 / ROWS;  // so that all sums stay in registers
  int64_t d = 0;
  for (; d + MOST * WIDE <= width; d += MOST * WIDE)
    average<ROWS, MOST>(shares, line, values, d, count, sums + d, width);
  for (; d < width; d += WIDE)
    average<ROWS, 1>(shares, line, values, d, count, sums + d, width);
}

struct Range {
  int64_t first, last;  // the last is not of it
};

// Attention over some keys of a head: what to divide by and the sums, for scores less `peaks`.
struct Part {
  float *peaks, *totals, *sums;
};

// `call` with the largest of 4, 2 and 1 that is left, and the query, until all of them had their turn.
template <typename Call>
SHORT void in_groups(int64_t queries, Call call) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) call(std::integral_constant<int64_t, 4>{}, i);
  for (; i + 2 <= queries; i += 2) call(std::integral_constant<int64_t, 2>{}, i);
  if (i < queries) call(std::integral_constant<int64_t, 1>{}, i);
}

// Turns scores of `count` keys into shares exp(score - peak), and what was summed up before is scaled
// to the new peak. `change` is given a number of a key, how many are left, and scores, and returns them
// with what a mask adds.
template <typename Change>
SHORT void weigh(int64_t width, Change change, int64_t count, float* scores, float& peak,
                 float& whole, float* sums) {
  Vector peaks = all(peak);
  for (int64_t j = 0; j < count; j += WIDE) {
    const int64_t left = count - j;
    Vector score = change(j, left, read(scores + j));
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
    for (int64_t d = 0; d < width; d += WIDE) write(sums + d, read(sums + d) * scaled);
  peak = highest;
}

// Adds keys of a head to `part`. `queries` [rows, width] are scaled; `scores` [rows, AHEAD].
// `changes(i, j)` returns what `weigh` applies to scores of row i and keys from j on.
template <typename Lines, typename Changes>
void attend_keys(int64_t rows, int64_t width, const float* queries, Lines keys, Lines values,
                 Changes changes, Range range, float* scores, const Part& part) {
  const int64_t block = rows > 2 ? FIT : AHEAD;  // what several read stays in the first cache
  for (int64_t j = range.first; j < range.last; j += AHEAD) {
    const int64_t count = std::min(AHEAD, range.last - j);
    for (int64_t n = 0; n < count; n += block) {
      const auto key = [=](int64_t i) __attribute__((always_inline)) { return keys(j + n + i); };
      in_groups(rows, [&](auto some, int64_t i) {
        score<some()>(queries + i * width, width, key, std::min(block, count - n), width,
                      scores + i * AHEAD + n, AHEAD);
      });
    }
    for (int64_t i = 0; i < rows; ++i)
      weigh(width, changes(i, j), count, scores + i * AHEAD, part.peaks[i], part.totals[i],
            part.sums + i * width);
    for (int64_t n = 0; n < count; n += block) {
      const auto value = [=](int64_t i) __attribute__((always_inline)) { return values(j + n + i); };
      in_groups(rows, [&](auto some, int64_t i) {
        average<some()>(scores + i * AHEAD + n, AHEAD, value, std::min(block, count - n), width,
                        part.sums + i * width);
      });
    }
  }
}

// Attention over the keys of both parts.
inline void merge(int64_t rows, int64_t width, const Part& to, const Part& from) {
  for (int64_t i = 0; i < rows; ++i) {
    const float peak = std::max(to.peaks[i], from.peaks[i]), base = peak == NONE ? 0 : peak;
    const float ours = std::exp(to.peaks[i] - base), theirs = std::exp(from.peaks[i] - base);
    to.totals[i] = to.totals[i] * ours + from.totals[i] * theirs;
    for (int64_t d = i * width; d < (i + 1) * width; d += WIDE)
      write(to.sums + d, read(to.sums + d) * ours + read(from.sums + d) * theirs);
    to.peaks[i] = peak;
  }
}

// Memory of one thread: two parts, scores and queries.
struct Space {
  int64_t rows, width;

  int64_t of_part() const { return 2 * padded(rows) + rows * width; }
  int64_t size() const { return 2 * of_part() + rows * (AHEAD + width); }

  Part part(float* memory, int64_t which) const {
    float* peaks = memory + which * of_part();
    return {peaks, peaks + padded(rows), peaks + 2 * padded(rows)};
  }
  float* queries(float* memory) const { return memory + 2 * of_part(); }
  float* scores(float* memory) const { return queries(memory) + rows * width; }
  void clear(const Part& part) const {
    std::fill_n(part.peaks, rows, NONE);
    std::fill_n(part.totals, padded(rows) + rows * width, 0.f);
  }
};

// Deals the keys of all heads out to threads. Lots of keys have numbers from 0 on: head by head, those
// of head `h` from starts[h] on.
//
// A job has heads(), the number of heads, most_rows() of one, width() and, of a head, rows(h),
// range(h), which are its live keys, attend(h, range, queries, scores, part), which adds keys to a
// part, and finish(h, part), which writes the result.
template <typename Job>
class Dealer {
 public:
  explicit Dealer(const Job& job) : job(job), space{job.most_rows(), job.width()} {
    starts.assign(job.heads() + 1, 0);
    for (int64_t h = 0; h < job.heads(); ++h) {
      const Range range = job.range(h);
      const int64_t lots = (range.last - range.first + LOT - 1) / LOT;
      starts[h + 1] = starts[h] + std::max<int64_t>(lots, 1);
    }
  }

  void run(std::vector<float>& memory) {
    const int64_t lots = starts.back(), work = lots * LOT * space.rows * space.width * 2;
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
  const Job& job;
  Space space;
  std::vector<int64_t> starts;

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
      if (from == starts[h] && starts[h + 1] <= end) job.finish(h, part);
    }
  }

  // Lots from `begin` to before `end` of a head.
  void attend_head(int64_t which, int64_t begin, int64_t end, float* memory,
                   const Part& part) const {
    const Range seen = job.range(which);
    const Range range{seen.first + begin * LOT, std::min(seen.last, seen.first + end * LOT)};
    space.clear(part);
    job.attend(which, range, space.queries(memory), space.scores(memory), part);
  }

  // Finishes the head that this thread begins and leaves to others.
  void merge_parts(float* all, int64_t thread, int64_t workers) const {
    const int64_t lots = starts.back();
    const int64_t begin = thread * lots / workers, end = (thread + 1) * lots / workers;
    const int64_t h = std::upper_bound(starts.begin(), starts.end(), end - 1) - starts.begin() - 1;
    if (starts[h] < begin || starts[h + 1] <= end) return;
    const Part part = space.part(all + thread * space.size(), 1);
    for (int64_t w = thread + 1; w * lots / workers < starts[h + 1]; ++w)
      merge(job.rows(h), space.width, part, space.part(all + w * space.size(), 0));
    job.finish(h, part);
  }
};

}  // namespace
}  // namespace ipex
