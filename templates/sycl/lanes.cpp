// Sums without a matrix engine: a lane has one column of each tile, all rows of it in registers.
// What a row is multiplied by is the same for all lanes, and read from local memory as a sum's type.
using Staged = Sum;
static inline Staged staged(In x) { return number(x); }

using Sums = Sum[TM * MT][NT];

static inline void clear(sycl::sub_group, Sums &sums) {
#pragma unroll
  for (int i = 0; i < TM * MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) sums[i][j] = 0;
  }
}

// The number at a place of a word of the weight.
template <class T>
static inline Sum part(unsigned word, int at) {
  if constexpr (sizeof(T) == 4) {
    return sycl::bit_cast<T>(word);
  } else if constexpr (sizeof(T) == 2) {
    return number(sycl::bit_cast<T>(static_cast<unsigned short>(word >> 16 * at)));
  } else {
    return static_cast<T>(word >> 8 * at);
  }
}

static inline void step(sycl::sub_group lanes, Sums &sums, const Staged *a, const In *weight) {
  const auto *words = reinterpret_cast<const unsigned *>(weight) + lanes.get_local_linear_id();
#pragma unroll
  for (int k = 0; k < TK; k += PACKED) {
    Sum factors[PACKED][NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const unsigned word = words[k / PACKED * PANEL + j * TN];
#pragma unroll
      for (int u = 0; u < PACKED; ++u) factors[u][j] = part<In>(word, u);
    }
#pragma unroll
    for (int i = 0; i < TM * MT; ++i) {
#pragma unroll
      for (int u = 0; u < PACKED; ++u) {
        const Sum factor = a[i * LINE + k + u];
#pragma unroll
        for (int j = 0; j < NT; ++j) sums[i][j] += factor * factors[u][j];
      }
    }
  }
}

// On the CPU one after the other, of a copy that lies in memory: its driver takes long to compile an
// epilogue, and would do it for each sum. Elsewhere the copy dissolves.
template <class Fn>
static inline void each(sycl::sub_group lanes, Sums &sums, Fn fn) {
  constexpr int WRITTEN_OUT = CPU_LANES ? 1 : TM * MT * NT;
  Sums known;
#pragma unroll
  for (int i = 0; i < TM * MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) known[i][j] = sums[i][j];
  }
#pragma unroll WRITTEN_OUT
  for (int i = 0; i < TM * MT; ++i) {
#pragma unroll WRITTEN_OUT
    for (int j = 0; j < NT; ++j) {
      fn(known[i][j], i, j * TN + static_cast<int>(lanes.get_local_linear_id()));
    }
  }
#pragma unroll
  for (int i = 0; i < TM * MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) sums[i][j] = known[i][j];
  }
}

static inline void multiply(sycl::sub_group, Sums &first, Sums &second) {
#pragma unroll
  for (int i = 0; i < TM * MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) first[i][j] *= second[i][j];
  }
}
