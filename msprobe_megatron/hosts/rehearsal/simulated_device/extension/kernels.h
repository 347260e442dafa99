// Every operator without a kernel of its own runs the host's kernel on host tensors that alias the shadow memory.
//
// That holds for operators of other libraries too: one with a host kernel is one launch here.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <torch/library.h>

#include <unordered_set>

#include "runtime.h"

namespace simulated {

inline at::Tensor on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// The bytes between a tensor's first and last element, within its storage.
inline std::pair<size_t, size_t> extent(const at::Tensor& t) {
  if (!t.numel()) return {0, 0};
  size_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += size_t(t.size(d) - 1) * size_t(t.stride(d));
  const size_t low = size_t(t.storage_offset()) * t.itemsize();
  return {low, low + (last + 1) * t.itemsize()};
}

inline Ranges touch(const at::Tensor& t, bool write, int64_t stream, const std::string& what) {
  const auto bytes = extent(t);
  return order.touch(block_of(t.storage().unsafeGetStorageImpl()), bytes.first, bytes.second, write, stream, what);
}

inline void poison(const at::Tensor& t, const Ranges& ranges, char* base = nullptr) {
  if (!base) base = shadow(t.storage().data());
  for (auto& range : ranges) memset(base + range.first, kPoison, range.second - range.first);
}

inline at::Tensor host_tensor(c10::Storage storage, const at::Tensor& t) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                      c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

// Host tensors over the shadow memory of device tensors; storages that are shared stay shared.
struct Aliases {
  std::vector<std::pair<c10::Storage, c10::Storage>> known;  // of the device, of the host

  at::Tensor of(const at::Tensor& t) {
    auto* storage = t.storage().unsafeGetStorageImpl();
    for (auto& pair : known)
      if (pair.first.unsafeGetStorageImpl() == storage) return host_tensor(pair.second, t);
    c10::Storage host(c10::Storage::use_byte_size_t(), storage->nbytes(),
                      c10::DataPtr(shadow(storage->data()), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
    known.emplace_back(t.storage(), host);
    return host_tensor(host, t);
  }
};

inline at::Tensor host_alias(const at::Tensor& t) {
  Aliases aliases;
  return aliases.of(t);
}

// What a reader sees: the alias, or a copy in which the bytes that it has not waited for are poison.
inline at::Tensor readable(const at::Tensor& t, const Ranges& stale, Aliases& aliases) {
  if (stale.empty()) return aliases.of(t);
  const size_t n = t.storage().nbytes();
  c10::Storage copy(c10::Storage::use_byte_size_t(), n, c10::GetAllocator(c10::kCPU)->allocate(n),
                    c10::GetAllocator(c10::kCPU), false);
  memcpy(copy.mutable_data(), shadow(t.storage().data()), n);
  poison(t, stale, static_cast<char*>(copy.mutable_data()));
  return host_tensor(copy, t);
}

inline at::Tensor copied_to_device(const at::Tensor& host) {
  auto dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  auto out = on_device(dense.sizes(), dense.strides(), dense.scalar_type());
  if (dense.numel()) memcpy(shadow(out.data_ptr()), dense.const_data_ptr(), dense.nbytes());
  return out;
}

inline bool is_view(const c10::FunctionSchema& schema) {
  for (auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

// Operators whose result the host needs before it can go on: their size depends on the data.
inline bool waits_for_host(const c10::FunctionSchema& schema) {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero",     "aten::masked_select", "aten::_unique2",  "aten::unique_dim",
      "aten::equal",       "aten::is_nonzero",    "aten::bincount",  "aten::unique_consecutive",
      "aten::linalg_eigh", "aten::repeat_interleave"};
  return names.count(schema.name()) != 0;
}

inline void refuse_gaps(const c10::FunctionSchema& schema, const std::vector<at::Tensor>& tensors,
                        const torch::jit::Stack& stack) {
  static const auto& reductions = *new std::unordered_set<std::string>{
      "sum", "mean", "prod", "norm", "linalg_vector_norm", "amax", "amin", "aminmax", "max", "min", "var", "std",
      "var_mean", "cumsum", "nansum", "all", "any", "count_nonzero", "dot", "index_add", "index_add_", "scatter_add_"};
  static const auto& products = *new std::unordered_set<std::string>{
      "mm", "bmm", "addmm", "baddbmm", "matmul", "addmv", "mv", "dot", "_softmax", "native_layer_norm", "gelu",
      "_log_softmax"};
  const std::string full = schema.name(), name = full.substr(full.find(':') + 2);
  // A count of flags has an int64 result as well, which is not what is missing: the input decides.
  const bool is_long = !tensors.empty() && tensors.front().scalar_type() == at::kLong;
  bool is_double = false, is_complex = false;
  for (auto& t : tensors) {
    is_double = is_double || t.scalar_type() == at::kDouble;
    is_complex = is_complex || t.is_complex();
  }
  for (auto& value : stack)
    if (value.isInt() && value.toInt() == int64_t(at::kDouble)) is_double = is_double || name == "sum";
  auto missing = [&](const char* type) {
    TORCH_CHECK(false, "simulated device: ", full, " is not implemented for ", type, " (gap)");
  };
  if (gap_frexp && name == "frexp") missing("any type");
  if (gap_complex && is_complex) missing("DT_COMPLEX64");
  if (gap_float64_matmul && is_double && products.count(name)) missing("DT_DOUBLE");
  if (gap_float64_reductions && is_double && reductions.count(name)) missing("DT_DOUBLE");
  if (gap_int64_sums && is_long && (name == "sum" || name == "cumsum")) missing("DT_INT64");
}

// One call of an operator: its arguments on the way to the host's kernel and its results on the way back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), view_(is_view(op.schema())) {}

  void run() {
    const size_t count = schema_.arguments().size(), begin = stack_->size() - count;
    for (size_t i = 0; i < count; i++) {
      const auto* info = schema_.arguments()[i].alias_info();
      argument((*stack_)[begin + i], info && info->isWrite());
    }
    if (!view_) {
      counters.launches++;
      if (tracing.load(std::memory_order_relaxed)) report("launch", full_name(), first_);
    }
    if (gaps.any) refuse_gaps(schema_, seen_, *stack_);
    if (bool_index_ || waits_for_host(schema_)) {
      host_waits(schema_.name(), first_);
      order.host_waits_for_stream(current_stream);
    }
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      Drawing drawing(generator_ ? *generator_ : default_generator(current_device));
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    } else {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (size_t i = 0; i < written_.size(); i++) take_back(written_[i], written_host_[i]);
    const size_t results = schema_.returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); i++) result((*stack_)[i]);
  }

 private:
  std::string full_name() const {
    return schema_.overload_name().empty() ? schema_.name() : schema_.name() + "." + schema_.overload_name();
  }

  at::Tensor to_host(const at::Tensor& t, bool write) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    if (!first_.defined()) first_ = t;
    if (gaps.any) seen_.push_back(t);
    if (view_) return aliases_.of(t);
    counters.bytes += t.nbytes();
    const auto stale = touch(t, write, current_stream, schema_.name());
    if (!write) return readable(t, stale, aliases_);
    poison(t, stale);
    auto host = aliases_.of(t);
    written_.push_back(t);
    written_host_.push_back(host);
    return host;
  }

  void argument(c10::IValue& value, bool write) {
    if (value.isTensor()) {
      value = to_host(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(to_host(t, write));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) bool_index_ = true;
        list.push_back(t ? std::optional<at::Tensor>(to_host(*t, write)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kDevice) {
      generator_ = value.toGenerator();
      value = c10::IValue();
    }
  }

  // An output that the kernel has resized.
  void take_back(const at::Tensor& t, const at::Tensor& host) {
    if (host.storage().data() != static_cast<const void*>(shadow(t.storage().data()))) {
      resize_storage(t.storage().unsafeGetStorageImpl(), host.storage().nbytes());
      memcpy(shadow(t.storage().mutable_data()), host.storage().data(), host.storage().nbytes());
    }
    if (host.sizes() != t.sizes() || host.strides() != t.strides())
      t.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined() || !host.is_cpu()) return host;
    for (size_t i = 0; i < written_host_.size(); i++)
      if (written_host_[i].is_same(host)) return written_[i];
    for (auto& pair : aliases_.known) {
      if (pair.second.unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(pair.first),
                                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                           host.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      if (host.is_conj()) view._set_conj(true);
      return view;
    }
    auto made = copied_to_device(host);
    counters.bytes += made.nbytes();
    touch(made, true, current_stream, schema_.name());
    return made;
  }

  void result(c10::IValue& value) {
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(to_device(t));
      value = list;
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const bool view_;
  bool bool_index_ = false;
  at::Tensor first_;
  Aliases aliases_;
  std::vector<at::Tensor> written_, written_host_, seen_;
  std::optional<at::Generator> generator_;
};

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace simulated
