// A matrix engine (XMX, AMX) in the compiler's own words. SYCL's joint_matrix wraps them, in a header
// that takes 0.8 s. A sub-group holds a matrix together, each lane some elements of it.
#if __has_include(<sycl/__spirv/spirv_ops_matrix.hpp>)  // 2026.2; before, all are in one header
#include <sycl/__spirv/spirv_ops_matrix.hpp>
#else
#include <sycl/__spirv/spirv_ops.hpp>
#endif

namespace engine_ {

using __spv::MatrixLayout;
using __spv::MatrixUse;

constexpr bool BF16 = __is_same(In, bf16), INT8 = __is_same(In, int8);
using Term = std::conditional_t<BF16, unsigned short, In>;  // bf16 is its bits, and said below
constexpr auto KIND = BF16 ? 0x40 : INT8 ? 0x3 : 0;  // as `MatrixOperands`: bf16, both signed

template <class T, int M, int N, MatrixUse USE>
using Matrix = __spv::__spirv_CooperativeMatrixKHR<T, __spv::Scope::Subgroup, M, N, USE> *;
using Rows = Matrix<Term, TM, TK, MatrixUse::MatrixA>;
using Columns = Matrix<Term, TK, TN, MatrixUse::MatrixB>;
struct Tile {
  Tile() {}  // or else loops hand sums on as copies, which spill by the kilobyte
  Matrix<Sum, TM, TN, MatrixUse::Accumulator> of;
};

static inline void clear(Tile &tile) {
  tile.of = __spirv_CompositeConstruct<Sum, Sum, TM, TN, MatrixUse::Accumulator, MatrixLayout::Dynamic>(0);
}

static inline void load(Rows &rows, const In *from) {
  using Local = __attribute__((opencl_local)) Term;
  constexpr auto LAYOUT = MatrixLayout::RowMajor;
  rows = __spirv_CooperativeMatrixLoadKHR<Local, Term, TM, TK, MatrixUse::MatrixA, LAYOUT>(
      (Local *)from, LAYOUT, LINE);
}

static inline void load(Columns &columns, const In *from) {
  using Global = __attribute__((opencl_global)) Term;
  constexpr auto LAYOUT = MatrixLayout::Packed;
  columns = __spirv_CooperativeMatrixLoadKHR<Global, Term, TK, TN, MatrixUse::MatrixB, LAYOUT>(
      (Global *)from, LAYOUT, PANEL * PACKED);
}

static inline void multiply(Tile &sums, Rows rows, Columns columns) {
  sums.of = __spirv_CooperativeMatrixMulAddKHR<Term, Term, Sum, Sum>(rows, columns, sums.of, KIND);
}

static inline Sum &element(Tile &tile, int n) {
  return *__spirv_AccessChain<Sum, Sum, TM, TN, MatrixUse::Accumulator>(&tile.of, n);
}

// `fn` of each sum that this lane has, its row and its column.
template <class Fn>
static inline void each(Tile &tile, Fn fn) {
  for (int n = 0; n < __spirv_CooperativeMatrixLengthKHR(tile.of); ++n) {
    Sum sum = element(tile, n);
    const auto place = __spirv_JointMatrixGetElementCoordINTEL(tile.of, n);
    fn(sum, place[0], place[1]);
    element(tile, n) = sum;
  }
}

static inline void multiply(Tile &first, Tile &second) {
  for (int n = 0; n < __spirv_CooperativeMatrixLengthKHR(first.of); ++n) {
    element(first, n) = element(first, n) * element(second, n);
  }
}

}  // namespace engine_
