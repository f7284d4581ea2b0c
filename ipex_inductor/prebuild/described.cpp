// What torch's C++ asks of a GPU, answered for one that is not there.
//
// Fake tensors need a device guard, autograd on them hooks that say there is a device, and attention
// a choice of its kernel. `ipex_describe` puts these in the place of what is there, `ipex_forget`
// puts that back.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <cstring>

namespace {

using at::Tensor;
using Hooks = at::CUDAHooksInterface;

// The device.

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t ABOVE = 2;    // what lies above an object's first virtual function: offset, type
constexpr size_t ENTRIES = 96; // more than the interface has

bool yes(const void*) { return true; }
bool yes_for(const void*, c10::DeviceIndex) { return true; }

template <class Member>
size_t slot(Member member) { // of a virtual function, as the Itanium ABI numbers them
  ptrdiff_t offset;
  std::memcpy(&offset, &member, sizeof offset);
  return (offset - 1) / sizeof(void*);
}

// The kernel of attention. Each rule is what the kernel can compute; the order is torch's.

int64_t major = 0;
bool prefers_cudnn = false;

bool is_half(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

bool one(const c10::SymInt& size) { return TORCH_GUARD_OR_FALSE(size.sym_eq(1)); }

bool same(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_eq(b)); }

struct Attention {
  const Tensor &q, &k, &v;
  const std::optional<Tensor>& mask;
  double dropout;
  bool causal, grouped;

  // Of two or four dimensions that broadcast, and not expanded in the last, as BERT's may be.
  bool mask_fits() const {
    if (!mask.has_value()) return true;
    const Tensor& m = *mask;
    bool dense = m.layout() == at::kStrided && (m.dim() == 2 || m.dim() == 4);
    if (!dense || m.requires_grad() || !one(m.sym_stride(-1))) return false;
    auto fits = [&](int64_t dim, const c10::SymInt& size) {
      return one(m.sym_size(dim)) || same(m.sym_size(dim), size);
    };
    bool heads = m.dim() == 2 || (fits(0, q.sym_size(0)) && fits(1, q.sym_size(1)));
    return heads && fits(-2, q.sym_size(2)) && fits(-1, k.sym_size(2));
  }

  bool is_plain() const { // batch, heads, rows, numbers, the last next to one another
    for (const Tensor* t : {&q, &k, &v}) {
      bool dense = !t->is_nested() && t->layout() == at::kStrided && t->dim() == 4;
      if (!dense || t->scalar_type() != q.scalar_type() || !one(t->sym_stride(3)) ||
          TORCH_GUARD_OR_TRUE(t->sym_numel().sym_eq(0)) || !same(t->sym_size(0), q.sym_size(0)))
        return false;
    }
    bool heads = same(k.sym_size(1), v.sym_size(1)) &&
        (grouped ? same(q.sym_size(1) % k.sym_size(1), 0) : same(q.sym_size(1), k.sym_size(1)));
    return heads && same(q.sym_size(3), k.sym_size(3)) && same(k.sym_size(2), v.sym_size(2));
  }

  bool width(int64_t most, int64_t multiple) const {
    for (const auto& size : {q.sym_size(3), v.sym_size(3)})
      if (!TORCH_GUARD_OR_FALSE(size.sym_le(most)) || !same(size % multiple, 0)) return false;
    return true;
  }

  bool by_cudnn() const {
    double sixteenths = dropout * 16;
    return at::globalContext().userEnabledCuDNNSDP() && is_half(q) && width(128, 8) &&
        !at::globalContext().deterministicAlgorithms() &&
        sixteenths == static_cast<int64_t>(sixteenths) && !one(k.sym_size(2)) &&
        !one(q.sym_size(2)) && TORCH_GUARD_OR_FALSE(q.sym_size(0).sym_le(65535)) &&
        TORCH_GUARD_OR_FALSE(q.sym_size(1).sym_le(65535));
  }

  bool by_flash() const {
    bool square = !causal || same(q.sym_size(2), k.sym_size(2));
    return at::globalContext().userEnabledFlashSDP() && is_half(q) && !mask.has_value() && square &&
        same(q.sym_size(3), v.sym_size(3)) && width(256, 1);
  }

  bool by_efficient() const {
    bool known = is_half(q) || q.scalar_type() == at::kFloat;
    return at::globalContext().userEnabledMemEfficientSDP() && known && !grouped &&
        width(INT64_MAX, is_half(q) ? 8 : 4);
  }
};

int64_t choose(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double>,
    bool grouped) {
  Attention a{q, k, v, mask, dropout, causal, grouped};
  auto kernel = at::SDPBackend::math;
  if (major >= 8 && a.is_plain() && a.mask_fits()) {
    if (prefers_cudnn && a.by_cudnn()) kernel = at::SDPBackend::cudnn_attention;
    else if (a.by_flash()) kernel = at::SDPBackend::flash_attention;
    else if (a.by_efficient()) kernel = at::SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(kernel);
}

struct Before {
  const c10::impl::DeviceGuardImplInterface* guard;
  void* functions;
  void* choice;
} before;

auto& guard() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)]; }

void*& functions() {
  return *reinterpret_cast<void**>(const_cast<Hooks*>(&at::detail::getCUDAHooks()));
}

void*& choice() {
  auto& stub = at::native::_fused_sdp_choice_stub;
  static_assert(sizeof stub == sizeof(at::native::DispatchStubImpl));
  return reinterpret_cast<at::native::DispatchStubImpl&>(stub).cuda_dispatch_ptr;
}

} // namespace

extern "C" void ipex_describe(int64_t sm_major, int64_t cudnn_first) {
  static c10::impl::FakeGuardImpl<CUDA> none;
  static void* table[ENTRIES];
  major = sm_major;
  prefers_cudnn = cudnn_first != 0;
  before = {guard().load(), functions(), choice()};
  std::memcpy(table, static_cast<void**>(before.functions) - ABOVE, sizeof table);
  auto built = static_cast<bool (Hooks::*)() const>(&Hooks::isBuilt);
  auto primary = static_cast<bool (Hooks::*)(c10::DeviceIndex) const>(&Hooks::hasPrimaryContext);
  table[ABOVE + slot(primary)] = reinterpret_cast<void*>(yes_for);
  // The last two hold of every GPU since sm_80; asked for where cuDNN is there.
  for (size_t each :
       {slot(built),
        slot(&Hooks::hasCUDA),
        slot(&Hooks::supportsBFloat16ConvolutionWithCuDNNv8),
        slot(&Hooks::supportsDepthwiseConvolutionWithCuDNN)})
    table[ABOVE + each] = reinterpret_cast<void*>(yes);
  functions() = table + ABOVE;
  choice() = reinterpret_cast<void*>(choose);
  guard() = &none;
}

extern "C" void ipex_forget() {
  guard() = before.guard;
  choice() = before.choice;
  functions() = before.functions;
}
