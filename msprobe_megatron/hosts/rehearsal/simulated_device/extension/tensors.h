// The operators that a device has to write itself: allocation, copies, reading a number, views and storages.
#pragma once

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include "kernels.h"

namespace simulated {

inline at::Tensor fresh(at::Tensor t) {
  if (t.numel()) memset(shadow(t.data_ptr()), kPoison, t.storage().nbytes());  // nobody has written it yet
  return t;
}

inline at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                                      std::optional<c10::Layout>, std::optional<c10::Device> device,
                                      std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return fresh(at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                         c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return fresh(on_device(size, stride, c10::dtype_or_default(dtype)));
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous() && a.sizes() == b.sizes() &&
         !a.is_conj() && !b.is_conj() && !a.is_neg() && !b.is_neg();
}

inline void copy_to_device(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  counters.device_copies++;
  launched("copy:h2d", dst);
  counters.bytes += dst.nbytes();
  poison(dst, touch(dst, true, current_stream, "copy"));
  if (non_blocking && self.is_contiguous() && is_pinned(self.const_data_ptr())) {
    if (self.numel())
      order.copy_from_host(static_cast<const char*>(self.const_data_ptr()), self.nbytes(), current_stream,
                           std::make_shared<at::Tensor>(self));
  } else {
    host_waits(non_blocking ? "copy:h2d pageable" : "copy:h2d blocking", dst);
    if (!non_blocking) order.host_waits_for_stream(current_stream);
  }
  host_alias(dst).copy_(self);
}

inline void copy_to_host(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  counters.host_copies++;
  launched("copy:d2h", self);
  counters.bytes += self.nbytes();
  Aliases aliases;
  auto source = readable(self, touch(self, false, current_stream, "copy"), aliases);
  const bool pinned = is_pinned(dst.const_data_ptr());
  if (non_blocking && pinned && same_layout(self, dst)) {
    if (dst.numel())
      order.copy_to_host(static_cast<char*>(dst.mutable_data_ptr()), static_cast<const char*>(source.const_data_ptr()),
                         dst.nbytes(), current_stream);
    return;
  }
  host_waits(!non_blocking ? "copy:d2h blocking" : pinned ? "copy:d2h with a conversion" : "copy:d2h pageable", self);
  order.host_waits_for_stream(current_stream);
  dst.copy_(source);
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_view_tracking(
      c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  if (!self.is_privateuseone()) {
    copy_to_device(self, dst, non_blocking);
  } else if (!dst.is_privateuseone()) {
    copy_to_host(self, dst, non_blocking);
  } else {
    launched("copy:d2d", dst);
    counters.bytes += self.nbytes() + dst.nbytes();
    Aliases aliases;
    auto source = readable(self, touch(self, false, current_stream, "copy"), aliases);
    poison(dst, touch(dst, true, current_stream, "copy"));
    aliases.of(dst).copy_(source);
  }
  return dst;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

inline at::Scalar local_scalar(const at::Tensor& self) {
  host_waits("item", self);
  Aliases aliases;
  auto source = readable(self, touch(self, false, current_stream, "item"), aliases);
  order.host_waits_for_stream(current_stream);
  return source.item();
}

inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

inline at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                                      c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t n = int64_t(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {n}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_storage_offset(self, std::move(none), 0, {0}, {1});
}

inline void record_stream(at::Tensor& self, c10::Stream s) { allocator.recordStream(self.storage().data_ptr(), s); }
// As torch_npu has it: .data = and .cuda() then keep a Parameter, with the attributes that Megatron has put on it.
inline bool compatible_shallow_copy(const at::Tensor&, const at::Tensor&) { return true; }

inline void register_operators(torch::Library& m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
}

}  // namespace simulated
