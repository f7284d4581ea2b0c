// Sums in a matrix engine: MT x NT of its tiles, TM x TN each, TK terms a step.
using Staged = In;
static inline Staged staged(In x) { return x; }

using Sums = engine_::Tile[MT][NT];

static inline void clear(sycl::sub_group, Sums &sums) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) engine_::clear(sums[i][j]);
  }
}

static inline void step(sycl::sub_group, Sums &sums, const Staged *a, const In *weight) {
  engine_::Rows rows[MT];
  engine_::Columns columns[NT];
#pragma unroll
  for (int i = 0; i < MT; ++i) engine_::load(rows[i], a + i * TM * LINE);
#pragma unroll
  for (int j = 0; j < NT; ++j) engine_::load(columns[j], weight + j * TN * PACKED);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) engine_::multiply(sums[i][j], rows[i], columns[j]);
  }
}

template <class Fn>
static inline void each(sycl::sub_group, Sums &sums, Fn fn) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      engine_::each(sums[i][j], [&](Sum &sum, int row, int column) { fn(sum, i * TM + row, j * TN + column); });
    }
  }
}

static inline void multiply(sycl::sub_group, Sums &first, Sums &second) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) engine_::multiply(first[i][j], second[i][j]);
  }
}
