// In the place of SYCL's matrix extension, for devices without a matrix engine: the same functions
// on the lanes of a sub-group, of which each has a column of sums and of the second factor.
#include <sycl/ext/oneapi/bfloat16.hpp>
#include <sycl/multi_ptr.hpp>

namespace sycl {
inline namespace _V1 {
namespace ext::oneapi::experimental::matrix {
enum class use { a, b, accumulator };
enum class layout { dynamic, row_major, ext_intel_packed };

template <class Group, class T, use, size_t Rows, size_t Columns, layout = layout::dynamic>
struct joint_matrix {
  T of[Rows][Columns];
};
template <class Group, class T, size_t Rows, size_t Columns, layout Layout>
struct joint_matrix<Group, T, use::b, Rows, Columns, Layout> {
  T of[Rows];
};
template <class Group, class T, size_t Rows, size_t Columns, layout Layout>
struct joint_matrix<Group, T, use::accumulator, Rows, Columns, Layout> {
  T of[Rows];
};

template <class Matrix, class T>
void joint_matrix_fill(sycl::sub_group, Matrix &m, T value) {
  for (auto &each : m.of) each = value;
}

template <class T, size_t R, size_t C, layout L, class P>
void joint_matrix_load(sycl::sub_group, joint_matrix<sycl::sub_group, T, use::a, R, C, L> &m, P from, size_t stride) {
  for (size_t i = 0; i < R; ++i)
    for (size_t k = 0; k < C; ++k) m.of[i][k] = from[i * stride + k];
}
template <class T, size_t R, size_t C, layout L, class P>
void joint_matrix_load(sycl::sub_group lanes, joint_matrix<sycl::sub_group, T, use::b, R, C, L> &m, P from, size_t stride) {
  constexpr size_t side_by_side = 4 / sizeof(T);
  const size_t column = lanes.get_local_linear_id();
  for (size_t k = 0; k < R; ++k)
    m.of[k] = from[k / side_by_side * stride + column * side_by_side + k % side_by_side];
}

template <class Sum, class T, size_t M, size_t N, size_t K, layout LA, layout LB>
void joint_matrix_mad(sycl::sub_group, joint_matrix<sycl::sub_group, Sum, use::accumulator, M, N> &d,
                      joint_matrix<sycl::sub_group, T, use::a, M, K, LA> &a,
                      joint_matrix<sycl::sub_group, T, use::b, K, N, LB> &b,
                      joint_matrix<sycl::sub_group, Sum, use::accumulator, M, N> &c) {
  const auto known = [](T x) { return number(sycl::bit_cast<In>(x)); };
  for (size_t i = 0; i < M; ++i) {
    Sum sum = c.of[i];
    for (size_t k = 0; k < K; ++k) sum += known(a.of[i][k]) * known(b.of[k]);
    d.of[i] = sum;
  }
}

template <class Matrix, class Fn>
void joint_matrix_apply(sycl::sub_group, Matrix &first, Matrix &second, Fn fn) {
  for (size_t i = 0; i < sizeof(first.of) / sizeof(first.of[0]); ++i) fn(first.of[i], second.of[i]);
}
}  // namespace ext::oneapi::experimental::matrix

namespace ext::intel::experimental::matrix {
template <class Matrix, class Fn>
void joint_matrix_apply(sycl::sub_group lanes, Matrix &m, Fn fn) {
  const int column = lanes.get_local_linear_id();
  for (size_t i = 0; i < sizeof(m.of) / sizeof(m.of[0]); ++i) fn(m.of[i], static_cast<int>(i), column);
}
}  // namespace ext::intel::experimental::matrix
}  // namespace _V1
}  // namespace sycl
