// What every source begins with. Headers are nearly all that compiling takes: these two 0.25 s of
// 0.35, those of functions or of group algorithms 0.6 s more. So functions, barriers and
// sums of groups are the compiler's own words, which those headers wrap.
#include <sycl/bit_cast.hpp>
#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>

namespace exp_ = sycl::ext::oneapi::experimental;
namespace item_ = sycl::ext::oneapi::this_work_item;

namespace math_ {

#define OF_ONE(name)                  \
  template <class T>                  \
  static inline T name(T x) {         \
    return __spirv_ocl_##name(x);     \
  }
OF_ONE(erf)
OF_ONE(exp)
OF_ONE(expm1)
OF_ONE(fabs)
OF_ONE(log)
OF_ONE(log1p)
OF_ONE(rint)
OF_ONE(sqrt)
OF_ONE(tanh)
#undef OF_ONE

template <class T>
static inline T pow(T x, T y) {
  return __spirv_ocl_pow(x, y);
}
static inline int min(int a, int b) { return b < a ? b : a; }

}  // namespace math_

namespace group_ {

constexpr auto ALL = __spv::Scope::Workgroup, SUB_GROUP = __spv::Scope::Subgroup;

// Who of a group comes to it waits for the others, and sees what they wrote.
static inline void barrier(__spv::Scope::Flag of) {
  using __spv::MemorySemanticsMask;
  __spirv_ControlBarrier(
      of, of,
      MemorySemanticsMask::SequentiallyConsistent | MemorySemanticsMask::SubgroupMemory |
          MemorySemanticsMask::WorkgroupMemory | MemorySemanticsMask::CrossWorkgroupMemory);
}

template <class T>
static inline T sum(__spv::Scope::Flag of, T x) {
  return __spirv_GroupFAdd(of, static_cast<int>(__spv::GroupOperation::Reduce), x);
}

}  // namespace group_
