// Weights whose data is freed for good: who asks for it gets an error of the words given.
#include <c10/core/TensorImpl.h>

namespace {

const c10::Storage& storage_of(const char* weight, int64_t place) {
  return (*reinterpret_cast<c10::TensorImpl* const*>(weight + place))->storage();
}

}  // namespace

extern "C" {

// How many hold the storage of a tensor, Python's own object among them if there is one.
int64_t holders(const char* weight, int64_t place) { return storage_of(weight, place).use_count(); }

void free_data(const char* weight, int64_t place, const char* words) {
  c10::StorageImpl* storage = storage_of(weight, place).unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(words));
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
}

}  // extern "C"
