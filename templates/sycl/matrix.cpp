// Sums in a matrix engine (XMX, AMX): MT x NT tiles of TM x TN, TK terms a step.
#include <sycl/ext/oneapi/matrix/matrix.hpp>

namespace matrix_ = sycl::ext::oneapi::experimental::matrix;
using Staged = In;
static inline Staged staged(In x) { return x; }

template <class T>
struct Element {
  using type = T;
};
template <>
struct Element<bf16> {
  using type = sycl::ext::oneapi::bfloat16;
};
template <>
struct Element<fp16> {
  using type = sycl::half;
};
using Term = Element<In>::type;
static_assert(sizeof(Term) == sizeof(In));

using Sums = matrix_::joint_matrix<sycl::sub_group, Sum, matrix_::use::accumulator, TM, TN>[MT][NT];

static inline void clear(sycl::sub_group lanes, Sums &sums) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) matrix_::joint_matrix_fill(lanes, sums[i][j], Sum{});
  }
}

template <sycl::access::address_space Space>
static inline auto terms_at(const In *at) {
  return sycl::address_space_cast<Space, sycl::access::decorated::no>(
      reinterpret_cast<Term *>(const_cast<In *>(at)));
}

static inline void step(sycl::sub_group lanes, Sums &sums, const Staged *a, const In *weight) {
  using sycl::access::address_space;
  matrix_::joint_matrix<sycl::sub_group, Term, matrix_::use::a, TM, TK, matrix_::layout::row_major> rows[MT];
  matrix_::joint_matrix<sycl::sub_group, Term, matrix_::use::b, TK, TN, matrix_::layout::ext_intel_packed> columns[NT];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    matrix_::joint_matrix_load(lanes, rows[i], terms_at<address_space::local_space>(a + i * TM * LINE), LINE);
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const In *column = weight + j * TN * PACKED;
    matrix_::joint_matrix_load(lanes, columns[j], terms_at<address_space::global_space>(column), PANEL * PACKED);
  }
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      matrix_::joint_matrix_mad(lanes, sums[i][j], rows[i], columns[j], sums[i][j]);
    }
  }
}

template <class Fn>
static inline void each(sycl::sub_group lanes, Sums &sums, Fn fn) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      sycl::ext::intel::experimental::matrix::joint_matrix_apply(
          lanes, sums[i][j], [&](Sum &sum, int row, int column) { fn(sum, i * TM + row, j * TN + column); });
    }
  }
}

static inline void multiply(sycl::sub_group lanes, Sums &first, Sums &second) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      matrix_::joint_matrix_apply(lanes, first[i][j], second[i][j], [](Sum &a, Sum &b) { a *= b; });
    }
  }
}
