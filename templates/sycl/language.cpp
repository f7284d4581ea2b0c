// How a kernel is declared, memory of a group, number formats of our own.

// (2025.3 knows the properties `sub_group_size` and `work_group_size` too, and drops them.)
#define KERNEL(DIMENSIONS, SUB_GROUP, ...)                                          \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((exp_::nd_range_kernel<DIMENSIONS>)) \
  [[sycl::reqd_sub_group_size(SUB_GROUP), sycl::reqd_work_group_size(__VA_ARGS__)]]

// As `work_group_static`, whose header costs a quarter of a second: one for all of a group.
template <class T>
struct [[__sycl_detail__::wg_scope]] Shared {
  T data;
};

// SYCL's own bfloat16 rounds by a function of the device library, which a kernel compiled ahead
// cannot find: it then spills by the kilobyte. So these bits are ours.
struct bf16 {
  unsigned short bits;
};
using fp16 = _Float16;
using fp32 = float;
using int8 = signed char;

static inline float number(fp32 x) { return x; }
static inline float number(fp16 x) { return static_cast<float>(x); }
static inline int number(int8 x) { return x; }
static inline float number(bf16 x) {
  return sycl::bit_cast<float>(static_cast<unsigned>(x.bits) << 16);
}

#ifdef NATIVE_BF16  // of Intel's GPUs, an instruction
extern SYCL_EXTERNAL unsigned short __spirv_ConvertFToBF16INTEL(float);
#endif

template <class T>
static inline T rounded(float x) {
  return static_cast<T>(x);
}
template <>
inline bf16 rounded<bf16>(float x) {
#ifdef NATIVE_BF16
  return {__spirv_ConvertFToBF16INTEL(x)};
#else
  const unsigned bits = sycl::bit_cast<unsigned>(x);
  const unsigned even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<unsigned short>(nan ? (bits >> 16) | 0x40u : even)};
#endif
}

// NaN stays NaN, as in torch and unlike in fmin and fmax.
static inline float between(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}
static inline float sigmoid(float x) { return 1.f / (1.f + math_::exp(-x)); }
